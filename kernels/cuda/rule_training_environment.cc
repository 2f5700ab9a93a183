// Puts the tests of the rule's training ops and of GDN2, which are those of the CPU, on a GPU.
// Skips them, with the reason, where there is none; fails instead with GDN_REQUIRE_GPU=1.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "kernels/cuda/cuda_test_util.h"
#include "kernels/place_test_util.h"

namespace gdn::kernels {
namespace {

void* Allocate(size_t bytes) {
  void* device = nullptr;
  Must(cudaMalloc(&device, bytes == 0 ? 1 : bytes));
  return device;
}
void Free(void* device) { Must(cudaFree(device)); }
void Upload(void* device, const void* host, size_t bytes) {
  Must(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
  Must(cudaDeviceSynchronize());  // From pageable memory the copy may return early.
}
void Download(void* host, const void* device, size_t bytes) {
  Must(cudaDeviceSynchronize());
  Must(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}

constexpr DeviceMemory kMemory{Allocate, Free, Upload, Download};

class Environment : public ::testing::Environment {
 public:
  void SetUp() override {
    const std::string reason = WhyNoDevice();
    if (reason.empty()) {
      DeviceMemoryUnderTest() = &kMemory;
      return;
    }
    if (GpuIsRequired()) {
      FAIL() << reason << ", and GDN_REQUIRE_GPU=1";
    }
    std::printf("[  SKIPPED ] %s\n", reason.c_str());  // What ctest looks for, in every test.
    GTEST_SKIP() << reason;
  }
};

[[maybe_unused]] const auto* const kEnvironment =
    ::testing::AddGlobalTestEnvironment(new Environment);

}  // namespace
}  // namespace gdn::kernels
