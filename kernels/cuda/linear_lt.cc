#include "kernels/cuda/linear_lt.h"

#include <algorithm>

#include "kernels/common/convert.h"
#include "kernels/common/validate.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "linear";
constexpr uint64_t kMaxWorkspaceBytes = uint64_t{32} << 20;

gdn_status CheckLt(const char* what, cublasStatus_t status) {
  GDN_CHECK_ARG(status == CUBLAS_STATUS_SUCCESS, GDN_DEVICE_ERROR, "%s: %s failed: %s", kOp, what,
                cublasLtGetStatusString(status));
  return GDN_OK;
}

cudaDataType_t CudaType(gdn_dtype dtype) {
  if (dtype == GDN_F32) return CUDA_R_32F;
  return dtype == GDN_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

// cuBLASLt counts in columns: row-major [rows, n] is n by rows with the row stride as leading
// dimension.
struct Layouts {
  cublasLtMatrixLayoutOpaque_t weight;
  cublasLtMatrixLayoutOpaque_t x;
  cublasLtMatrixLayoutOpaque_t y;

  gdn_status Init(const LtShape& shape, int64_t rows, int64_t x_row_stride, int64_t y_row_stride) {
    const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
    GDN_RETURN_IF_ERROR(CheckLt(
        "cublasLtMatrixLayoutInit",
        cublasLtMatrixLayoutInit(&weight, CudaType(shape.dtype), u(shape.k), u(shape.n), shape.k)));
    GDN_RETURN_IF_ERROR(CheckLt(
        "cublasLtMatrixLayoutInit",
        cublasLtMatrixLayoutInit(&x, CudaType(shape.dtype), u(shape.k), u(rows), x_row_stride)));
    return CheckLt(
        "cublasLtMatrixLayoutInit",
        cublasLtMatrixLayoutInit(&y, CudaType(shape.y_dtype), u(shape.n), u(rows), y_row_stride));
  }
};

class Preference {
 public:
  ~Preference() {
    if (value_ != nullptr) (void)cublasLtMatmulPreferenceDestroy(value_);
  }
  gdn_status Init(uint32_t y_alignment) {
    GDN_RETURN_IF_ERROR(
        CheckLt("cublasLtMatmulPreferenceCreate", cublasLtMatmulPreferenceCreate(&value_)));
    const uint32_t wide = 16;
    GDN_RETURN_IF_ERROR(Set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspaceBytes));
    GDN_RETURN_IF_ERROR(Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, wide));
    GDN_RETURN_IF_ERROR(Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, wide));
    GDN_RETURN_IF_ERROR(Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, y_alignment));
    return Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, y_alignment);
  }
  cublasLtMatmulPreference_t get() const { return value_; }

 private:
  template <typename T>
  gdn_status Set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    return CheckLt("cublasLtMatmulPreferenceSetAttribute",
                   cublasLtMatmulPreferenceSetAttribute(value_, attribute, &value, sizeof(value)));
  }
  cublasLtMatmulPreference_t value_ = nullptr;
};

bool IsAligned(const void* y, int64_t y_row_stride, gdn_dtype dtype) {
  return reinterpret_cast<uintptr_t>(y) % 16 == 0 &&
         y_row_stride * kernels::SizeOf(dtype) % 16 == 0;
}

}  // namespace

LtProducts::~LtProducts() {
  if (operation_ != nullptr) (void)cublasLtMatmulDescDestroy(operation_);
  if (handle_ != nullptr) (void)cublasLtDestroy(handle_);
}

gdn_status LtProducts::Init(const LtShape& shape) {
  shape_ = shape;
  GDN_RETURN_IF_ERROR(CheckLt("cublasLtCreate", cublasLtCreate(&handle_)));
  GDN_RETURN_IF_ERROR(
      CheckLt("cublasLtMatmulDescCreate",
              cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F)));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  GDN_RETURN_IF_ERROR(
      CheckLt("cublasLtMatmulDescSetAttribute",
              cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                             sizeof(transposed))));
  int64_t rows = 1;
  while (rows < shape.min_rows) rows *= 2;
  for (bool last = false; !last; rows *= 2) {
    last = rows >= shape.max_rows;
    Bucket bucket = {};
    bucket.rows = std::min(rows, shape.max_rows);
    GDN_RETURN_IF_ERROR(Choose(bucket.rows, true, &bucket.aligned));
    GDN_RETURN_IF_ERROR(Choose(bucket.rows, false, &bucket.unaligned));
    buckets_.push_back(bucket);
  }
  return GDN_OK;
}

gdn_status LtProducts::Choose(int64_t rows, bool aligned, Algorithm* algorithm) const {
  const auto element = static_cast<int64_t>(kernels::SizeOf(shape_.y_dtype));
  // A stride with the alignment that calls will have: whole 16 bytes, or none.
  const int64_t vector = 16 / element;
  const int64_t y_row_stride = (shape_.n + vector - 1) / vector * vector + (aligned ? 0 : 1);
  Layouts layouts;
  GDN_RETURN_IF_ERROR(layouts.Init(shape_, rows, shape_.k, y_row_stride));
  Preference preference;
  GDN_RETURN_IF_ERROR(preference.Init(static_cast<uint32_t>(aligned ? 16 : element)));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, operation_, &layouts.weight, &layouts.x, &layouts.y,
                                     &layouts.y, preference.get(), 1, &found, &count);
  GDN_CHECK_ARG(status == CUBLAS_STATUS_SUCCESS && count == 1, GDN_DEVICE_ERROR,
                "%s: cuBLASLt has no algorithm for %lld rows of %lld x %lld: %s", kOp,
                static_cast<long long>(rows), static_cast<long long>(shape_.n),
                static_cast<long long>(shape_.k), cublasLtGetStatusString(status));
  *algorithm = {found.algo, found.workspaceSize};
  return GDN_OK;
}

const LtProducts::Bucket& LtProducts::BucketFor(int64_t rows) const {
  const auto at = std::find_if(buckets_.begin(), buckets_.end(),
                               [&](const Bucket& bucket) { return bucket.rows >= rows; });
  return at == buckets_.end() ? buckets_.back() : *at;
}

size_t LtProducts::Workspace(int64_t rows) const {
  size_t bytes = 0;
  for (const Bucket& bucket : buckets_) {
    bytes = std::max({bytes, bucket.aligned.workspace_bytes, bucket.unaligned.workspace_bytes});
    if (bucket.rows >= rows) break;
  }
  return bytes;
}

gdn_status LtProducts::Run(const LtProduct& product, void* workspace, size_t workspace_bytes,
                           cudaStream_t stream) const {
  const Bucket& bucket = BucketFor(product.rows);
  const Algorithm& algorithm = IsAligned(product.y, product.y_row_stride, shape_.y_dtype)
                                   ? bucket.aligned
                                   : bucket.unaligned;
  Layouts layouts;
  GDN_RETURN_IF_ERROR(
      layouts.Init(shape_, product.rows, product.x_row_stride, product.y_row_stride));
  const float alpha = 1.0f;
  const float beta = shape_.accumulate ? 1.0f : 0.0f;
  return CheckLt("cublasLtMatmul",
                 cublasLtMatmul(handle_, operation_, &alpha, product.weight, &layouts.weight,
                                product.x, &layouts.x, &beta, product.y, &layouts.y, product.y,
                                &layouts.y, &algorithm.value, workspace, workspace_bytes, stream));
}

}  // namespace gdn::cuda
