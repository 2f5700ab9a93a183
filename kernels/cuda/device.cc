#include <atomic>

#include "kernels/cuda/launch.h"

namespace gdn::cuda {
namespace {

constexpr int kMaxDevices = 64;

// Capability in the high half, multiprocessors in the low one; 0 until read.
std::atomic<uint32_t> known[kMaxDevices];

}  // namespace

gdn_status CurrentDevice(const char* op, Device* device) {
  int index = 0;
  const cudaError_t error = cudaGetDevice(&index);
  GDN_CHECK_ARG(error != cudaErrorNoDevice && error != cudaErrorInsufficientDriver,
                GDN_BACKEND_UNAVAILABLE, "%s: no usable CUDA device: %s", op,
                cudaGetErrorString(error));
  if (const gdn_status status = CheckCuda(op, error); status != GDN_OK) return status;
  GDN_CHECK_ARG(index < kMaxDevices, GDN_BACKEND_UNAVAILABLE,
                "%s: device index must be below %d, got %d", op, kMaxDevices, index);
  uint32_t value = known[index].load(std::memory_order_relaxed);
  if (value == 0) {
    const cudaDeviceAttr wanted[] = {cudaDevAttrComputeCapabilityMajor,
                                     cudaDevAttrComputeCapabilityMinor,
                                     cudaDevAttrMultiProcessorCount};
    int read[3];
    for (int i = 0; i < 3; ++i) {
      const gdn_status status = CheckCuda(op, cudaDeviceGetAttribute(&read[i], wanted[i], index));
      if (status != GDN_OK) return status;
    }
    value = static_cast<uint32_t>(10 * read[0] + read[1]) << 16 | static_cast<uint32_t>(read[2]);
    known[index].store(value, std::memory_order_relaxed);
  }
  *device = {static_cast<int>(value >> 16), static_cast<int>(value & 0xffffu)};
  return GDN_OK;
}

}  // namespace gdn::cuda
