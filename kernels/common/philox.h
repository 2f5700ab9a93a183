// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC11): four 32-bit words from a 128-bit counter and a 64-bit key, with no state.
#ifndef KERNELS_COMMON_PHILOX_H_
#define KERNELS_COMMON_PHILOX_H_

#include <array>
#include <cstdint>

namespace gdn::kernels {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

constexpr PhiloxCounter Philox4x32(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMul0} * counter[0];
    const uint64_t product1 = uint64_t{kPhiloxMul1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key = {key[0] + kPhiloxWeyl0, key[1] + kPhiloxWeyl1};
  }
  return counter;
}

// The word that decides token `id` at `position`: counter (id, 0, position), key seed.
constexpr uint32_t SamplingWord(uint64_t seed, int64_t position, int32_t id) {
  const auto p = static_cast<uint64_t>(position);
  return Philox4x32(
      {static_cast<uint32_t>(id), 0u, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32)},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[0];
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_PHILOX_H_
