// X6: rows further apart than 2^32 elements, in address space that is reserved and hardly touched,
// give the bits of neighbouring rows: L2 norm and convolution, forward and backward.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/causal_conv_backward.h"
#include "gdn/kernels/l2_norm.h"
#include "gdn/kernels/l2_norm_backward.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

constexpr int64_t kStride = (int64_t{1} << 32) + 40;
constexpr int64_t kDim = 64;
constexpr int64_t kRows = 2;

// Two BF16 rows that far apart.
class FarRows {
 public:
  explicit FarRows(const Tensor& dense) : FarRows() {
    for (int64_t row = 0; row < kRows; ++row) {
      std::memcpy(At(row), dense.Slice(row * kDim, (row + 1) * kDim).data(), kDim * 2);
    }
  }
  FarRows()
      : memory_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (memory_ == MAP_FAILED) std::abort();  // Nothing after it could be trusted.
  }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;
  ~FarRows() { munmap(memory_, kBytes); }
  void* data() { return memory_; }
  Tensor Dense() {
    Tensor dense(GDN_BF16, kRows * kDim);
    for (int64_t row = 0; row < kRows; ++row) {
      std::memcpy(static_cast<char*>(dense.data()) + row * kDim * 2, At(row), kDim * 2);
    }
    return dense;
  }

 private:
  static constexpr size_t kBytes = (kStride + kDim) * 2;
  char* At(int64_t row) { return static_cast<char*>(memory_) + row * kStride * 2; }
  void* memory_;
};

TEST(FarRows, X6L2Norm) {
  const Tensor x = Normal(1, GDN_BF16, kRows * kDim), dy = Normal(2, GDN_BF16, kRows * kDim);
  for (const Backend& backend : {kRef, CpuBackend(0)}) {
    const Execution execution(backend);
    const auto run = [&](const void* from, const void* gradient, int64_t stride, void* y,
                         void* dx) {
      std::vector<float> rstd(kRows);
      const gdn_l2_norm_args forward = {kRows,    kDim,   from,        GDN_BF16, stride, y,
                                        GDN_BF16, stride, rstd.data(), 1e-6f,    1.0f};
      ASSERT_EQ(gdn_l2_norm(execution.exec(), &forward), GDN_OK) << gdn_last_error();
      const gdn_l2_norm_backward_args backward = {kRows,       kDim,     y,        GDN_BF16, stride,
                                                  rstd.data(), gradient, GDN_BF16, stride,   dx,
                                                  GDN_BF16,    stride,   1.0f};
      ASSERT_EQ(gdn_l2_norm_backward(execution.exec(), &backward), GDN_OK) << gdn_last_error();
    };
    Tensor y(GDN_BF16, kRows * kDim), dx = y;
    run(x.data(), dy.data(), kDim, y.data(), dx.data());
    FarRows far_x(x), far_dy(dy), far_y, far_dx;
    run(far_x.data(), far_dy.data(), kStride, far_y.data(), far_dx.data());
    EXPECT_EQ(far_y.Dense().bytes(), y.bytes()) << backend.name;
    EXPECT_EQ(far_dx.Dense().bytes(), dx.bytes()) << backend.name;
  }
}

TEST(FarRows, X6Convolution) {
  constexpr int64_t kSlot = 3 * kDim;
  const Tensor x = Normal(3, GDN_BF16, kRows * kDim), d_y = Normal(4, GDN_BF16, kRows * kDim);
  const Tensor weight = Normal(5, GDN_F32, kDim * 4), pool = Normal(6, GDN_BF16, 2 * kSlot);
  const int32_t cu[] = {0, kRows};
  const int64_t read = 0, write = 1;
  for (const Backend& backend : {kRef, CpuBackend(0)}) {
    const Execution execution(backend);
    // Returns the states and all gradients but d_x.
    const auto run = [&](const void* from, const void* gradient, int64_t stride, void* y,
                         void* d_x) {
      Tensor state = pool, d_weight(GDN_F32, kDim * 4), d_state(GDN_F32, kSlot);
      gdn_causal_conv_args forward{};
      forward.sequences = 1;
      forward.cu_seqlens = cu;
      forward.channels = kDim;
      forward.width = 4;
      forward.silu = 1;
      forward.x = from;
      forward.y = y;
      forward.x_dtype = forward.y_dtype = GDN_BF16;
      forward.x_token_stride = forward.y_token_stride = stride;
      forward.weight = static_cast<const float*>(weight.data());
      forward.state = state.data();
      forward.state_slot_stride = kSlot;
      forward.read_index = &read;
      forward.write_index = &write;
      EXPECT_EQ(gdn_causal_conv(execution.exec(), &forward), GDN_OK) << gdn_last_error();
      gdn_causal_conv_backward_args backward{};
      backward.sequences = 1;
      backward.cu_seqlens = cu;
      backward.channels = kDim;
      backward.width = 4;
      backward.silu = 1;
      backward.x = from;
      backward.x_dtype = backward.d_y_dtype = backward.d_x_dtype = GDN_BF16;
      backward.x_token_stride = backward.d_y_token_stride = backward.d_x_token_stride = stride;
      backward.weight = forward.weight;
      backward.initial_state = pool.data();
      backward.d_y = gradient;
      backward.d_x = d_x;
      backward.d_weight = static_cast<float*>(d_weight.data());
      backward.d_initial_state = static_cast<float*>(d_state.data());
      EXPECT_EQ(gdn_causal_conv_backward(execution.exec(), &backward), GDN_OK) << gdn_last_error();
      return std::vector{state.bytes(), d_weight.bytes(), d_state.bytes()};
    };
    Tensor y(GDN_BF16, kRows * kDim), d_x = y;
    const auto expected = run(x.data(), d_y.data(), kDim, y.data(), d_x.data());
    FarRows far_x(x), far_d_y(d_y), far_y, far_d_x;
    EXPECT_EQ(run(far_x.data(), far_d_y.data(), kStride, far_y.data(), far_d_x.data()), expected);
    EXPECT_EQ(far_y.Dense().bytes(), y.bytes()) << backend.name;
    EXPECT_EQ(far_d_x.Dense().bytes(), d_x.bytes()) << backend.name;
  }
}

}  // namespace
}  // namespace gdn::kernels
