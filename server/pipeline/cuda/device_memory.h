// File: device_memory.h
//
// Owners of CUDA objects: device and pinned host memory, streams, events, graphs.
#ifndef SERVER_PIPELINE_CUDA_DEVICE_MEMORY_H_
#define SERVER_PIPELINE_CUDA_DEVICE_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/pipeline/cuda/cuda_status.h"
#include "server/pipeline/kernel_status.h"

namespace gdn::pipeline {

struct DeviceFree {
  void operator()(void* p) const { (void)cudaFree(p); }
};
struct PinnedFree {
  void operator()(void* p) const { (void)cudaFreeHost(p); }
};

// An array of `count` elements in device memory, or in page-locked host memory that the device
// reads and writes at the same address.
template <typename T, typename Free>
class CudaArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Contents are lost. RESOURCE_EXHAUSTED names what the memory was for.
  absl::Status Allocate(int64_t count, std::string_view what) {
    data_.reset();
    count_ = 0;
    void* p = nullptr;
    const size_t bytes = static_cast<size_t>(count > 0 ? count : 1) * sizeof(T);
    cudaError_t error = cudaSuccess;
    if constexpr (std::is_same_v<Free, DeviceFree>) {
      error = cudaMalloc(&p, bytes);
    } else {
      error = cudaHostAlloc(&p, bytes, cudaHostAllocDefault);
    }
    GDN_RETURN_IF_ERROR(CudaStatus(error, what));
    data_.reset(static_cast<T*>(p));
    count_ = count;
    return absl::OkStatus();
  }
  absl::Status Grow(int64_t count, std::string_view what) {
    return count <= count_ ? absl::OkStatus() : Allocate(count, what);
  }

  T* data() const { return data_.get(); }
  int64_t count() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

 private:
  std::unique_ptr<T, Free> data_;
  int64_t count_ = 0;
};

template <typename T>
using DeviceArray = CudaArray<T, DeviceFree>;
template <typename T>
using PinnedArray = CudaArray<T, PinnedFree>;

struct StreamDestroy {
  void operator()(cudaStream_t s) const { (void)cudaStreamDestroy(s); }
};
using CudaStream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, StreamDestroy>;
// Does not wait for the default stream.
absl::StatusOr<CudaStream> CreateStream();

struct EventDestroy {
  void operator()(cudaEvent_t e) const { (void)cudaEventDestroy(e); }
};
using CudaEvent = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventDestroy>;
// `flags` as for cudaEventCreateWithFlags.
absl::StatusOr<CudaEvent> CreateEvent(unsigned flags);

struct GraphExecDestroy {
  void operator()(cudaGraphExec_t g) const { (void)cudaGraphExecDestroy(g); }
};
using CudaGraphExec = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, GraphExecDestroy>;

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_DEVICE_MEMORY_H_
