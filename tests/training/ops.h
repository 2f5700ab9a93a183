// Calls of the C ABI on buffers that stay where the back end works: in host memory or, compiled
// with GDN_TEST_CUDA, on a device.
#ifndef TESTS_TRAINING_OPS_H_
#define TESTS_TRAINING_OPS_H_

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/op_call_test_util.h"

namespace gdn::kernels {

inline bool OnGpu(const Backend& backend) { return backend.backend == GDN_BACKEND_CUDA; }

// A tensor with canaries in front of it and behind it. One without contents is poisoned.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Backend& where, gdn_dtype dtype, int64_t size)
      : front_(kGuard), size_(size), host_(dtype, size + 2 * kGuard) {
    MoveTo(where);
  }
  Buffer(const Backend& where, const Tensor& contents)
      : front_(kGuard),
        size_(contents.size()),
        host_(contents.dtype(), contents.size() + 2 * kGuard) {
    std::memcpy(Host(), contents.data(), contents.bytes().size());
    MoveTo(where);
  }
  template <typename T>  // integers, which need no canaries
  Buffer(const Backend& where, const std::vector<T>& values)
      : host_(GDN_F32, static_cast<int64_t>((values.size() * sizeof(T) + 3) / 4)) {
    size_ = host_.size();
    if (!values.empty()) std::memcpy(host_.data(), values.data(), values.size() * sizeof(T));
    MoveTo(where);
  }

  template <typename T = void>
  T* at(int64_t element = 0) {
    char* base = static_cast<char*>(host_.data());
#ifdef GDN_TEST_CUDA
    if (device_ != nullptr) base = device_->get<char>();
#endif
    return reinterpret_cast<T*>(base + (front_ + element) * SizeOf(host_.dtype()));
  }
  // The contents now; complains where the canaries changed.
  Tensor Take() {
#ifdef GDN_TEST_CUDA
    if (device_ != nullptr) device_->Download(host_.data());
#endif
    for (int64_t i = 0; i < front_; ++i) {
      EXPECT_TRUE(std::isnan(host_.Get(i))) << "written before the begin of " << size_;
      EXPECT_TRUE(std::isnan(host_.Get(front_ + size_ + i)))
          << "written beyond the end of " << size_;
    }
    Tensor contents(host_.dtype(), size_);
    std::memcpy(contents.data(), Host(), contents.bytes().size());
    return contents;
  }

 private:
  static constexpr int64_t kGuard = 32;  // at least 64 bytes: the contents stay aligned

  char* Host() { return static_cast<char*>(host_.data()) + front_ * SizeOf(host_.dtype()); }
  void MoveTo(const Backend& where) {
#ifdef GDN_TEST_CUDA
    if (OnGpu(where)) device_ = std::make_shared<DeviceBuffer>(host_);
#else
    static_cast<void>(where);
#endif
  }

  int64_t front_ = 0;  // canaries on either side
  int64_t size_ = 0;
  Tensor host_;
#ifdef GDN_TEST_CUDA
  std::shared_ptr<DeviceBuffer> device_;
#endif
};

// What a call launched: its kernels by their (mangled) names, and how many other nodes.
struct Launches {
  std::string op;
  std::vector<std::string> kernels;
  int others = 0;
};

// Runs ops one after the other. With `from_graphs` each is captured, counted, and replayed.
class OpRunner {
 public:
  OpRunner(const Backend& backend, bool from_graphs)
      : backend_(backend), execution_(backend), from_graphs_(from_graphs) {}

  const Backend& backend() const { return backend_; }
  const std::vector<Launches>& launches() const { return launches_; }

  template <typename Args>
  void Run(const char* name, gdn_status (*op)(const gdn_exec*, const Args*), const Args& args) {
    Call(name, 0, [&](const gdn_exec* exec) { return op(exec, &args); });
  }
  template <typename Args>
  void Run(const char* name, gdn_status (*op)(const gdn_exec*, const Args*),
           gdn_status (*workspace)(const gdn_exec*, const Args*, size_t*), const Args& args) {
    size_t bytes = 0;
    ASSERT_EQ(workspace(execution_.exec(), &args, &bytes), GDN_OK) << gdn_last_error();
    Call(name, bytes, [&](const gdn_exec* exec) { return op(exec, &args); });
  }
  void Call(const char* name, size_t workspace_bytes,
            const std::function<gdn_status(const gdn_exec*)>& call) {
#ifdef GDN_TEST_CUDA
    if (OnGpu(backend_)) return CallOnGpu(name, workspace_bytes, call);
#endif
    execution_.SetWorkspace(workspace_bytes);
    ASSERT_EQ(call(execution_.exec()), GDN_OK) << name << ": " << gdn_last_error();
    launches_.push_back({name, {}, 0});
  }

 private:
#ifdef GDN_TEST_CUDA
  void CallOnGpu(const char* name, size_t workspace_bytes,
                 const std::function<gdn_status(const gdn_exec*)>& call) {
    constexpr size_t kCanaries = 256;
    const DeviceBuffer workspace(std::vector<uint8_t>(workspace_bytes + 2 * kCanaries, 0xff));
    const Stream stream;
    gdn_exec exec = stream.Exec();
    exec.workspace = workspace_bytes == 0 ? nullptr : workspace.get<char>() + kCanaries;
    exec.workspace_bytes = workspace_bytes;
    Launches launches{name, {}, 0};
    if (!from_graphs_) {
      ASSERT_EQ(call(&exec), GDN_OK) << name << ": " << gdn_last_error();
    } else {
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      Must(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
      EXPECT_EQ(call(&exec), GDN_OK) << name << ": " << gdn_last_error();
      Must(cudaStreamEndCapture(stream.get(), &graph));
      Count(graph, launches);
      Must(cudaGraphInstantiate(&executable, graph, 0));
      Must(cudaGraphLaunch(executable, stream.get()));
      stream.Synchronize();
      Must(cudaGraphExecDestroy(executable));
      Must(cudaGraphDestroy(graph));
    }
    stream.Synchronize();
    const std::vector<uint8_t> after = workspace.Bytes();
    for (size_t i = 0; i < kCanaries; ++i) {
      EXPECT_EQ(after[i], 0xff) << name << " wrote before its workspace";
      EXPECT_EQ(after[kCanaries + workspace_bytes + i], 0xff) << name << " wrote behind it";
    }
    launches_.push_back(launches);
  }

  static void Count(cudaGraph_t graph, Launches& launches) {
    for (const cudaGraphNode_t node : NodesOf(graph)) {
      cudaGraphNodeType type;
      Must(cudaGraphNodeGetType(node, &type));
      if (type != cudaGraphNodeTypeKernel) {
        ++launches.others;
        continue;
      }
      cudaKernelNodeParams params{};
      const char* name = "of another library";
      // Kernels that a library loads itself have no address here.
      if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess ||
          cudaFuncGetName(&name, params.func) != cudaSuccess) {
        (void)cudaGetLastError();
        name = "of another library";
      }
      launches.kernels.emplace_back(name);
    }
  }
#endif

  Backend backend_;
  Execution execution_;
  [[maybe_unused]] bool from_graphs_;
  std::vector<Launches> launches_;
};

// y[m, n] = sum_k x[m, k] w[n, k] by gdn_linear, on REF where the back end has no such product.
Tensor Product(OpRunner& run, const char* name, const Tensor& x, const Tensor& weight, int64_t k,
               gdn_dtype y_dtype);
// [columns, rows] of [rows, columns], with zeros up to `stride` in each row.
Tensor Transposed(const Tensor& matrix, int64_t rows, int64_t stride);
inline int64_t UpToMultipleOf8(int64_t size) { return (size + 7) / 8 * 8; }

}  // namespace gdn::kernels

#endif  // TESTS_TRAINING_OPS_H_
