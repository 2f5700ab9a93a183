// Test bodies that run once with the back ends of the host and, compiled with GDN_TEST_CUDA, once
// with the GPU's: which back ends these are, and calls whose host buffers go to a device and back.
#ifndef KERNELS_OP_CALL_TEST_UTIL_H_
#define KERNELS_OP_CALL_TEST_UTIL_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"
#ifdef GDN_TEST_CUDA
#include "kernels/cuda/cuda_test_util.h"
#endif

// GDN_BACKEND_SUITE(Name); declares the suite of GDN_BACKEND_TEST(Name, Case). On a GPU it has
// another name, and needs one.
#ifdef GDN_TEST_CUDA
#define GDN_BACKEND_SUITE(suite) \
  class suite##OnCuda : public CudaTest {}
#define GDN_BACKEND_TEST(suite, name) TEST_F(suite##OnCuda, name)
#else
#define GDN_BACKEND_SUITE(suite) \
  class suite : public ::testing::Test {}
#define GDN_BACKEND_TEST(suite, name) TEST_F(suite, name)
#endif

namespace gdn::kernels {

#ifdef GDN_TEST_CUDA
inline constexpr bool kOnCuda = true;
#else
inline constexpr bool kOnCuda = false;
#endif

// The back end of this binary; the GPU has no use for threads.
inline Backend Tested(int32_t threads = 0) {
  if (kOnCuda) return {"cuda", GDN_BACKEND_CUDA, 0};
  return {"cpu", GDN_BACKEND_CPU, threads};
}
inline std::vector<Backend> TestedBackends() {
  if (kOnCuda) return {Tested()};
  return BackendsUnderTest();
}
inline std::vector<Backend> TestedBackendsAndRef() {
  std::vector<Backend> all = TestedBackends();
  all.push_back(kRef);
  return all;
}
// Those whose argument checks this binary tests.
inline std::vector<gdn_backend> CheckingBackends() {
  if (kOnCuda) return {GDN_BACKEND_CUDA};
  return {GDN_BACKEND_REF, GDN_BACKEND_CPU};
}

// Host memory that a call reads or writes. It travels whole, guards included.
struct HostRange {
  void* data;
  size_t bytes;
  bool output;
};
inline HostRange In(const Tensor& tensor) {
  return {const_cast<void*>(tensor.data()), tensor.bytes().size(), false};
}
inline HostRange Out(Tensor& tensor) { return {tensor.data(), tensor.bytes().size(), true}; }
template <typename T>
HostRange In(const std::vector<T>& values) {
  return {const_cast<T*>(values.data()), values.size() * sizeof(T), false};
}
template <typename T>
HostRange Out(std::vector<T>& values) {
  return {values.data(), values.size() * sizeof(T), true};
}

// A pointer among the arguments of a call.
class PointerField {
 public:
  template <typename T>
  PointerField(T*& field) : field_(&field) {}  // NOLINT(google-explicit-constructor)
  char* Get() const {
    char* pointer = nullptr;
    std::memcpy(&pointer, field_, sizeof(pointer));
    return pointer;
  }
  void Set(char* pointer) const { std::memcpy(field_, &pointer, sizeof(pointer)); }

 private:
  void* field_;
};

#ifdef GDN_TEST_CUDA
// Device copies of host ranges; while alive, pointer fields point into them.
class DeviceCopies {
 public:
  DeviceCopies(const std::vector<HostRange>& ranges, const std::vector<PointerField>& fields)
      : ranges_(ranges), fields_(fields) {
    for (const HostRange& range : ranges_) buffers_.emplace_back(range.data, range.bytes);
    for (const PointerField& field : fields_) {
      host_.push_back(field.Get());
      if (host_.back() != nullptr) field.Set(DeviceAddress(host_.back()));
    }
  }
  ~DeviceCopies() {
    for (size_t i = 0; i < fields_.size(); ++i) fields_[i].Set(host_[i]);
  }
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // Outputs come back; inputs must be as they were.
  void Download() {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const std::vector<uint8_t> bytes = buffers_[i].Bytes();
      if (ranges_[i].output) {
        if (!bytes.empty()) std::memcpy(ranges_[i].data, bytes.data(), bytes.size());
      } else {
        EXPECT_TRUE(bytes.empty() || std::memcmp(ranges_[i].data, bytes.data(), bytes.size()) == 0)
            << "the call wrote to its input, range " << i;
      }
    }
  }

 private:
  char* DeviceAddress(const char* host) const {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const auto* const begin = static_cast<const char*>(ranges_[i].data);
      if (host >= begin && host < begin + ranges_[i].bytes) {
        return buffers_[i].get<char>() + (host - begin);
      }
    }
    ADD_FAILURE() << "a pointer lies in no range of the call";
    return nullptr;
  }

  const std::vector<HostRange>& ranges_;
  const std::vector<PointerField>& fields_;
  std::vector<DeviceBuffer> buffers_;
  std::vector<char*> host_;
};
#endif

// Calls op(exec, args), whose pointer fields lie in host ranges, on the back end of `execution`.
template <typename Op, typename Args>
gdn_status CallOp(const Execution& execution, const Op& op, Args& args,
                  const std::vector<HostRange>& ranges, const std::vector<PointerField>& fields) {
#ifdef GDN_TEST_CUDA
  if (execution.exec()->backend == GDN_BACKEND_CUDA) {
    constexpr size_t kGuard = 256;
    const size_t workspace_bytes = execution.exec()->workspace_bytes;
    const std::vector<uint8_t> poison(kGuard + workspace_bytes + kGuard, 0xff);
    const DeviceBuffer workspace(poison);
    const Stream stream;
    gdn_exec exec = stream.Exec();
    exec.workspace = workspace_bytes == 0 ? nullptr : workspace.get<char>() + kGuard;
    exec.workspace_bytes = workspace_bytes;
    DeviceCopies copies(ranges, fields);
    const gdn_status status = op(&exec, &args);
    stream.Synchronize();
    copies.Download();
    const std::vector<uint8_t> after = workspace.Bytes();
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(after[i], 0xff) << "written before the workspace";
      EXPECT_EQ(after[kGuard + workspace_bytes + i], 0xff) << "written behind the workspace";
    }
    return status;
  }
#endif
  static_cast<void>(ranges);
  static_cast<void>(fields);
  return op(execution.exec(), &args);
}

}  // namespace gdn::kernels

#endif  // KERNELS_OP_CALL_TEST_UTIL_H_
