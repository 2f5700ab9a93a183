// Where the buffers of an op under test lie: in host memory, or mirrored in a device's, so that one
// test body runs every back end.
#ifndef KERNELS_PLACE_TEST_UTIL_H_
#define KERNELS_PLACE_TEST_UTIL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

// A device's memory. Uploads and downloads wait for the device.
struct DeviceMemory {
  void* (*allocate)(size_t bytes);
  void (*free)(void* device);
  void (*upload)(void* device, const void* host, size_t bytes);
  void (*download)(void* host, const void* device, size_t bytes);
};
// Set by the test program of a device, before its tests run; NULL in that of the CPU.
inline const DeviceMemory*& DeviceMemoryUnderTest() {
  static const DeviceMemory* memory = nullptr;
  return memory;
}

// The back ends that the tests of this program hold against REF.
inline std::vector<Backend> PlacesUnderTest() {
  if (DeviceMemoryUnderTest() != nullptr) return {{"cuda", GDN_BACKEND_CUDA, 0}};
  return BackendsUnderTest();
}
// Those whose results are the same bits as the first of the above: any number of threads, or again.
inline std::vector<Backend> RepeatsUnderTest() {
  if (DeviceMemoryUnderTest() != nullptr) return std::vector<Backend>(3, PlacesUnderTest()[0]);
  return {{"cpu", GDN_BACKEND_CPU, 1}, {"cpu", GDN_BACKEND_CPU, 2}, {"cpu", GDN_BACKEND_CPU, 5}};
}
// And those with REF.
inline std::vector<Backend> PlacesAndRef() {
  std::vector<Backend> all = PlacesUnderTest();
  all.push_back(kRef);
  return all;
}
// Those whose argument checks this program tests.
inline std::vector<gdn_backend> CheckingPlaces() {
  if (DeviceMemoryUnderTest() != nullptr) return {GDN_BACKEND_CUDA};
  return {GDN_BACKEND_REF, GDN_BACKEND_CPU};
}
inline bool OnDevice(const Backend& backend) { return backend.backend == GDN_BACKEND_CUDA; }

// One call's context: the op's addresses of host buffers, its exec and its workspace.
class Place {
 public:
  explicit Place(const Backend& backend) : execution_(backend) {
    if (OnDevice(backend)) memory_ = DeviceMemoryUnderTest();
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
    for (const Mirror& mirror : mirrors_) memory_->free(mirror.device);
  }

  // The address of a buffer that the op reads, and of one whose bytes come back in Call().
  template <typename T>
  const T* In(const T* host, size_t count) {
    return memory_ == nullptr ? host : static_cast<const T*>(Bring(host, count * Size<T>(), false));
  }
  template <typename T>
  T* Out(T* host, size_t count) {
    return memory_ == nullptr ? host : static_cast<T*>(Bring(host, count * Size<T>(), true));
  }
  template <typename T>
  const T* In(const std::vector<T>& host) {
    return In(host.data(), host.size());
  }
  const void* In(const Tensor& host) { return In(host.data(), host.bytes().size()); }
  void* Out(Tensor& host) { return Out(host.data(), host.bytes().size()); }

  const gdn_exec* exec() const { return execution_.exec(); }
  // Poisoned, of exactly this size, between guards that Call() looks at.
  void SetWorkspace(size_t bytes) {
    if (memory_ == nullptr) return execution_.SetWorkspace(bytes);
    workspace_.assign(bytes == 0 ? 0 : bytes + 2 * kGuardBytes, kGuardByte);
    execution_.mutable_exec()->workspace =
        bytes == 0 ? nullptr
                   : static_cast<uint8_t*>(Bring(workspace_.data(), workspace_.size(), true)) +
                         kGuardBytes;
    execution_.mutable_exec()->workspace_bytes = bytes;
  }
  template <typename Args>
  gdn_status Call(gdn_status (*op)(const gdn_exec*, const Args*), const Args& args) {
    const gdn_status status = op(exec(), &args);
    for (const Mirror& mirror : mirrors_) {
      if (mirror.out) memory_->download(mirror.host, mirror.device, mirror.bytes);
    }
    if (!workspace_.empty()) {
      ExpectGuard(workspace_.data(), kGuardBytes, "before the workspace");
      ExpectGuard(workspace_.data() + workspace_.size() - kGuardBytes, kGuardBytes,
                  "behind the workspace");
    }
    return status;
  }

 private:
  struct Mirror {
    void* host;
    void* device;
    size_t bytes;
    bool out;
  };
  template <typename T>
  static constexpr size_t Size() {
    if constexpr (std::is_void_v<T>) {
      return 1;
    } else {
      return sizeof(T);
    }
  }
  void* Bring(const void* host, size_t bytes, bool out) {
    void* const device = memory_->allocate(bytes);
    mirrors_.push_back({const_cast<void*>(host), device, bytes, out});
    memory_->upload(device, host, bytes);
    return device;
  }

  Execution execution_;
  const DeviceMemory* memory_ = nullptr;
  std::vector<Mirror> mirrors_;
  std::vector<uint8_t> workspace_;  // with its guards, as they come back
};

}  // namespace gdn::kernels

#endif  // KERNELS_PLACE_TEST_UTIL_H_
