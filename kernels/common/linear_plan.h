// What the back ends of the linear op share: the plan's base.
#ifndef KERNELS_COMMON_LINEAR_PLAN_H_
#define KERNELS_COMMON_LINEAR_PLAN_H_

#include <cstdint>
#include <memory>

#include "gdn/kernels/linear.h"

// A back end derives from this; only the one that made a plan may look inside.
struct gdn_linear_plan {
  virtual ~gdn_linear_plan() = default;

  gdn_backend backend = GDN_BACKEND_REF;
  gdn_linear_shape shape = {};
};

namespace gdn::kernels {

// CUDA keeps a row of x in shared memory.
inline constexpr int64_t kLinearMaxCudaK = 32768;

// Columns of y.
inline int64_t LinearOutputs(const gdn_linear_shape& shape) {
  return shape.kind == GDN_LINEAR_SILU_MUL ? shape.n / 2 : shape.n;
}

}  // namespace gdn::kernels

namespace gdn::cuda {
// For a checked shape and the current device. Throws std::bad_alloc.
gdn_status MakeLinearPlan(const gdn_linear_shape& shape, std::unique_ptr<gdn_linear_plan>* plan);
}  // namespace gdn::cuda

#endif  // KERNELS_COMMON_LINEAR_PLAN_H_
