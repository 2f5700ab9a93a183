// What the tests of the recurrence family share: typed buffers, seeded inputs, error measures and
// the back ends that every test body runs.
#ifndef KERNELS_RECURRENCE_TEST_UTIL_H_
#define KERNELS_RECURRENCE_TEST_UTIL_H_

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/types.h"
#include "gtest/gtest.h"
#include "kernels/common/convert.h"

namespace gdn::kernels {

// A buffer of one element type; a new one is poisoned: every element is a NaN.
class Tensor {
 public:
  Tensor() = default;
  Tensor(gdn_dtype dtype, int64_t size)
      : dtype_(dtype), bytes_(static_cast<size_t>(size * SizeOf(dtype)), uint8_t{0xff}) {}

  gdn_dtype dtype() const { return dtype_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / SizeOf(dtype_); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  float Get(int64_t i) const { return Load(bytes_.data(), dtype_, i); }
  void Set(int64_t i, float value) { Store(bytes_.data(), dtype_, i, value); }
  // The bytes of elements [begin, end).
  std::vector<uint8_t> Slice(int64_t begin, int64_t end) const {
    return {bytes_.begin() + begin * SizeOf(dtype_), bytes_.begin() + end * SizeOf(dtype_)};
  }

 private:
  gdn_dtype dtype_ = GDN_F32;
  std::vector<uint8_t> bytes_;
};

// Seeded and portable: std::normal_distribution differs between libraries.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float Uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(engine_() >> 8) * 0x1p-24f;
  }
  float Normal() {
    float sum = 0.0f;
    for (int i = 0; i < 12; ++i) sum += Uniform(0.0f, 1.0f);
    return sum - 6.0f;
  }
  uint32_t Integer(uint32_t bound) { return static_cast<uint32_t>(engine_()) % bound; }

 private:
  std::mt19937 engine_;
};

// sqrt(sum (a-b)^2 / sum b^2); NaN where either holds a NaN, so that a comparison with <= fails.
class RelativeL2 {
 public:
  void Add(double got, double expected) {
    error_ += (got - expected) * (got - expected);
    norm_ += expected * expected;
  }
  double value() const {
    if (error_ == 0.0) return 0.0;
    return std::sqrt(error_ / (norm_ > 0.0 ? norm_ : 1.0));
  }

 private:
  double error_ = 0.0;
  double norm_ = 0.0;
};

struct PoolDeleter {
  void operator()(gdn_cpu_pool* pool) const { gdn_cpu_pool_destroy(pool); }
};
using Pool = std::unique_ptr<gdn_cpu_pool, PoolDeleter>;

// A back end under test. `threads` 0: no pool.
struct Backend {
  std::string name;
  gdn_backend backend;
  int32_t threads;
};

inline std::vector<Backend> BackendsUnderTest() {
  return {{"cpu", GDN_BACKEND_CPU, 0}, {"cpu with 3 threads", GDN_BACKEND_CPU, 3}};
}
inline const Backend kRef{"ref", GDN_BACKEND_REF, 0};

// Bytes before and behind a buffer under test that an op must leave alone; the buffer keeps its
// alignment. They are NaNs: what reads them shows.
inline constexpr size_t kGuardBytes = 64;
inline constexpr uint8_t kGuardByte = 0xff;

inline void ExpectGuard(const uint8_t* guard, size_t bytes, const char* where) {
  for (size_t i = 0; i < bytes; ++i) {
    if (guard[i] == kGuardByte) continue;
    ADD_FAILURE() << "written " << where << ", guard byte " << i;
    return;
  }
}

// An execution context with its own pool, and a workspace of exactly the size asked for between
// guards.
class Execution {
 public:
  explicit Execution(const Backend& backend) {
    exec_.backend = backend.backend;
    if (backend.threads > 0) pool_.reset(gdn_cpu_pool_create(backend.threads, /*spin_us=*/20));
    exec_.pool = pool_.get();
  }
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution() { ExpectGuards(); }
  const gdn_exec* exec() const { return &exec_; }
  gdn_exec* mutable_exec() { return &exec_; }
  // Poisoned, aligned to 64 bytes.
  void SetWorkspace(size_t bytes) {
    ExpectGuards();
    guarded_bytes_ = bytes == 0 ? 0 : (bytes + 2 * kGuardBytes + 63) / 64 * 64;
    memory_.reset(bytes == 0 ? nullptr : std::aligned_alloc(64, guarded_bytes_));
    if (bytes != 0) std::memset(memory_.get(), kGuardByte, guarded_bytes_);
    exec_.workspace = bytes == 0 ? nullptr : Memory() + kGuardBytes;
    workspace_bytes_ = exec_.workspace_bytes = bytes;
  }

 private:
  uint8_t* Memory() const { return static_cast<uint8_t*>(memory_.get()); }
  void ExpectGuards() const {
    if (memory_ == nullptr) return;
    ExpectGuard(Memory(), kGuardBytes, "before the workspace");
    const size_t end = kGuardBytes + workspace_bytes_;
    ExpectGuard(Memory() + end, guarded_bytes_ - end, "behind the workspace");
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  gdn_exec exec_{};
  Pool pool_;
  std::unique_ptr<void, Free> memory_;
  size_t guarded_bytes_ = 0;
  size_t workspace_bytes_ = 0;  // A test may tell the op of fewer.
};

// The bound on the relative L2 error of a result rounded once to `dtype`.
inline double RoundingBound(gdn_dtype dtype) {
  switch (dtype) {
    case GDN_F32:
      return 2e-6;
    case GDN_BF16:
      return 2.5e-3;
    case GDN_F16:
      return 3.5e-4;
  }
  return 0.0;
}

}  // namespace gdn::kernels

#endif  // KERNELS_RECURRENCE_TEST_UTIL_H_
