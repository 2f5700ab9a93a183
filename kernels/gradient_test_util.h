// What the tests of the gradients share: finite differences in FP64 on a forward written in the
// test, and random data that FP32 and FP64 hold alike.
#ifndef KERNELS_GRADIENT_TEST_UTIL_H_
#define KERNELS_GRADIENT_TEST_UTIL_H_

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/place_test_util.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

// Of FP32 precision, so that the op and the FP64 forward see the same numbers.
inline Doubles RandomDoubles(Random& random, int64_t size, float low, float high) {
  Doubles values(static_cast<size_t>(size));
  for (double& value : values) value = random.Uniform(low, high);
  return values;
}
inline Floats ToFloats(const Doubles& values) { return {values.begin(), values.end()}; }

// The gradient of `loss`, which reads `values`, by central differences.
template <typename Loss>
Doubles FiniteDifferences(Doubles& values, Loss&& loss, double step = 1e-5) {
  Doubles gradient;
  for (double& value : values) {
    const double centre = value;
    value = centre + step;
    const double above = loss();
    value = centre - step;
    const double below = loss();
    value = centre;
    gradient.push_back((above - below) / (2.0 * step));
  }
  return gradient;
}

// `got` has been rounded to FP32 once; the differences themselves err by some 1e-9.
inline void ExpectGradient(const std::string& name, const Floats& got, const Doubles& expected,
                           double bound = 2e-7) {
  ASSERT_GE(got.size(), expected.size()) << name;
  RelativeL2 error;
  double largest = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error.Add(got[i], expected[i]);
    largest = std::fmax(largest, std::fabs(expected[i]));
  }
  EXPECT_LE(error.value(), bound) << name;
  EXPECT_GT(largest, 0.0) << name << ": the test exercises nothing";
}

// A poisoned FP32 output with canaries in front of it and behind it.
class GuardedFloats {
 public:
  explicit GuardedFloats(int64_t size)
      : size_(static_cast<size_t>(size)), values_(kGuard + size_ + kGuard, NAN) {}
  float* data() { return values_.data() + kGuard; }
  float* Out(Place& place) { return place.Out(values_.data(), values_.size()) + kGuard; }
  // The values; complains where the canaries changed.
  Floats Take(const char* name) const {
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_TRUE(std::isnan(values_[i])) << name << " written before its begin";
      EXPECT_TRUE(std::isnan(values_[kGuard + size_ + i])) << name << " written beyond its end";
    }
    const auto begin = values_.begin() + kGuard;
    return {begin, begin + static_cast<std::ptrdiff_t>(size_)};
  }

  // With the canaries.
  Floats& values() { return values_; }

 private:
  static constexpr size_t kGuard = 16;  // 64 bytes: the output keeps the alignment of its memory.
  size_t size_;
  Floats values_;
};

inline double Error(const Floats& got, const Floats& expected) {
  RelativeL2 error;
  for (size_t i = 0; i < expected.size(); ++i) error.Add(got.at(i), expected[i]);
  return error.value();
}

}  // namespace gdn::kernels

#endif  // KERNELS_GRADIENT_TEST_UTIL_H_
