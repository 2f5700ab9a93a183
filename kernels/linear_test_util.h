// What the tests of the dense ops share beyond recurrence_test_util.h.
#ifndef KERNELS_LINEAR_TEST_UTIL_H_
#define KERNELS_LINEAR_TEST_UTIL_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

inline constexpr gdn_dtype kDtypes[] = {GDN_F32, GDN_BF16, GDN_F16};

// While alive, Highway dispatches to the fallback that every processor can run.
class BaselineTargetScope {
 public:
  explicit BaselineTargetScope(bool baseline) {
    if (baseline) hwy::DisableTargets(HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL);
  }
  ~BaselineTargetScope() { hwy::DisableTargets(0); }
  BaselineTargetScope(const BaselineTargetScope&) = delete;
  BaselineTargetScope& operator=(const BaselineTargetScope&) = delete;
};

// How the CPU back end is run: instruction set and threads (0: no pool).
struct Variant {
  const char* name;
  bool baseline;
  int32_t threads;
};
inline constexpr Variant kVariants[] = {
    {"best target, no pool", false, 0},
    {"best target, 3 threads", false, 3},
    {"baseline target", true, 0},
};

inline Backend CpuBackend(int32_t threads) { return {"cpu", GDN_BACKEND_CPU, threads}; }

inline void FillNormal(Random& random, Tensor& tensor, float scale = 1.0f) {
  for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, scale * random.Normal());
}
inline Tensor Normal(uint32_t seed, gdn_dtype dtype, int64_t size, float scale = 1.0f) {
  Random random(seed);
  Tensor tensor(dtype, size);
  FillNormal(random, tensor, scale);
  return tensor;
}

// A poisoned element is a NaN of all ones; nothing an op computes from finite inputs equals it.
inline bool IsPoison(const Tensor& tensor, int64_t i) {
  for (const uint8_t byte : tensor.Slice(i, i + 1)) {
    if (byte != 0xff) return false;
  }
  return true;
}

inline bool IsUntouched(const Tensor& tensor) {
  for (const uint8_t byte : tensor.bytes()) {
    if (byte != 0xff) return false;
  }
  return true;
}

// The relative L2 error that no rounding to the type exceeds, however few elements there are.
inline double WorstRounding(gdn_dtype dtype) {
  switch (dtype) {
    case GDN_F32:
      return 2e-6;
    case GDN_BF16:
      return 0x1p-8;
    case GDN_F16:
      return 0x1p-11;
  }
  return 0.0;
}

// A value that the enumeration does not list, as a C caller can pass.
template <typename Enum>
Enum Unlisted(int value) {
  Enum result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

// A failed call names its cause, and leaves the output alone.
inline void ExpectRefused(gdn_status got, gdn_status expected, const Tensor& output,
                          const std::string& sentence) {
  EXPECT_EQ(got, expected) << sentence;
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
  EXPECT_TRUE(IsUntouched(output)) << sentence;
}

}  // namespace gdn::kernels

#endif  // KERNELS_LINEAR_TEST_UTIL_H_
