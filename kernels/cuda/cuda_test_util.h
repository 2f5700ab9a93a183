// What the tests on a GPU share: the fixture that needs one, and device copies of host buffers.
#ifndef KERNELS_CUDA_CUDA_TEST_UTIL_H_
#define KERNELS_CUDA_CUDA_TEST_UTIL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/decode_tiling.h"
#include "kernels/fused_decode_test_util.h"

namespace gdn::kernels {

// Whether what a test needs of a GPU may not be missing: it then fails where it would be skipped.
inline bool GpuIsRequired() {
  const char* required = std::getenv("GDN_REQUIRE_GPU");
  return required != nullptr && std::strcmp(required, "1") == 0;
}

// Why no GPU can be used; empty where one can.
inline std::string WhyNoDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return "";
  (void)cudaGetLastError();
  return std::string("no CUDA device: ") +
         (error == cudaSuccess ? "the driver reports none" : cudaGetErrorString(error));
}

// Skips, with the reason, where no GPU can be used; fails instead with GDN_REQUIRE_GPU=1.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = WhyNoDevice();
    if (reason.empty()) return;
    if (GpuIsRequired()) {
      FAIL() << reason << ", and GDN_REQUIRE_GPU=1";
    }
    GTEST_SKIP() << reason;
  }
};

inline void Must(cudaError_t error) {
  if (error != cudaSuccess) {
    ADD_FAILURE() << cudaGetErrorName(error) << ": " << cudaGetErrorString(error);
    std::abort();  // Nothing after it could be trusted.
  }
}
// Why so many bytes of the device cannot be had; empty where they can.
inline std::string WhyNoMemory(size_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  Must(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes >= bytes) return "";
  return "needs " + std::to_string(bytes) + " bytes of device memory, " +
         std::to_string(free_bytes) + " are free";
}

// Device memory.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    void* pointer = nullptr;
    Must(cudaMalloc(&pointer, bytes == 0 ? 1 : bytes));
    pointer_.reset(pointer);
  }
  DeviceBuffer(const void* host, size_t bytes) : DeviceBuffer(bytes) { Upload(host); }
  explicit DeviceBuffer(const Tensor& tensor)
      : DeviceBuffer(tensor.data(), tensor.bytes().size()) {}
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& values)
      : DeviceBuffer(values.data(), values.size() * sizeof(T)) {}

  template <typename T = void>
  T* get() const {
    return static_cast<T*>(pointer_.get());
  }
  size_t bytes() const { return bytes_; }
  void Upload(const void* host) {
    Must(cudaMemcpy(pointer_.get(), host, bytes_, cudaMemcpyHostToDevice));
    Must(cudaDeviceSynchronize());  // From pageable memory the copy may return early.
  }
  void Download(void* host) const {
    Must(cudaMemcpy(host, pointer_.get(), bytes_, cudaMemcpyDeviceToHost));
  }
  std::vector<uint8_t> Bytes() const {
    std::vector<uint8_t> bytes(bytes_);
    Download(bytes.data());
    return bytes;
  }

 private:
  struct Free {
    void operator()(void* pointer) const { cudaFree(pointer); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> pointer_;
};

class Stream {
 public:
  Stream() { Must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  gdn_exec Exec() const {
    gdn_exec exec{};
    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = stream_;
    return exec;
  }
  void Synchronize() const { Must(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

inline std::vector<cudaGraphNode_t> NodesOf(cudaGraph_t graph) {
  size_t count = 0;
  Must(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  Must(cudaGraphGetNodes(graph, nodes.data(), &count));
  return nodes;
}

// What `enqueue` puts on a stream, to be launched there again and again.
class CapturedGraph {
 public:
  template <typename Enqueue>
  CapturedGraph(const Stream& stream, const Enqueue& enqueue) : stream_(stream) {
    Must(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    enqueue();
    Must(cudaStreamEndCapture(stream_.get(), &graph_));
    Must(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  void Launch() const { Must(cudaGraphLaunch(executable_, stream_.get())); }
  std::vector<cudaGraphNode_t> Nodes() const { return NodesOf(graph_); }

 private:
  const Stream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// A FusedCall on the device.
struct DeviceCall {
  explicit DeviceCall(FusedCall& host)
      : args(host.Args()),
        x(host.x),
        conv_weight(host.conv_weight),
        a_log(host.a_log),
        dt_bias(host.dt_bias),
        norm_weight(host.norm_weight),
        state(host.state),
        conv_state(host.conv_state),
        read(host.read),
        write(host.write),
        fresh(host.fresh),
        y(host.y) {
    args.x = x.get();
    args.conv_weight = conv_weight.get<float>();
    args.a_log = a_log.get<float>();
    args.dt_bias = dt_bias.get<float>();
    args.norm_weight = norm_weight.get<float>();
    args.state = state.get();
    args.conv_state = conv_state.get();
    args.read_index = read.get<int64_t>();
    args.write_index = write.get<int64_t>();
    args.fresh = fresh.get<uint8_t>();
    args.y = y.get();
  }
  // Replaces all contents by those of a call of the same shape.
  void Upload(const FusedCall& host) {
    x.Upload(host.x.data());
    conv_weight.Upload(host.conv_weight.data());
    a_log.Upload(host.a_log.data());
    dt_bias.Upload(host.dt_bias.data());
    norm_weight.Upload(host.norm_weight.data());
    state.Upload(host.state.data());
    conv_state.Upload(host.conv_state.data());
    read.Upload(host.read.data());
    write.Upload(host.write.data());
    fresh.Upload(host.fresh.data());
    y.Upload(host.y.data());
  }
  // Copies what the op writes back to the host.
  void Download(FusedCall& host) const {
    y.Download(host.y.data());
    state.Download(host.state.data());
    conv_state.Download(host.conv_state.data());
  }

  gdn_fused_decode_args args;
  DeviceBuffer x;
  DeviceBuffer conv_weight;
  DeviceBuffer a_log;
  DeviceBuffer dt_bias;
  DeviceBuffer norm_weight;
  DeviceBuffer state;
  DeviceBuffer conv_state;
  DeviceBuffer read;
  DeviceBuffer write;
  DeviceBuffer fresh;
  DeviceBuffer y;
};

// The tiling chosen by the library, or a fixed one.
constexpr int kAutoTiling = -2;
constexpr int kGenericTiling = -1;

inline gdn_status RunOnDevice(const DeviceCall& device, int tiling = kAutoTiling) {
  Stream stream;
  const gdn_exec exec = stream.Exec();
  const gdn_status status = tiling == kAutoTiling
                                ? gdn_fused_decode(&exec, &device.args)
                                : cuda::FusedDecodeWith(exec, device.args, tiling);
  stream.Synchronize();
  return status;
}

// The call after it ran on the device.
inline FusedCall CudaResult(const FusedCall& before, int tiling = kAutoTiling) {
  FusedCall host = before;
  const DeviceCall device(host);
  EXPECT_EQ(RunOnDevice(device, tiling), GDN_OK) << gdn_last_error();
  device.Download(host);
  return host;
}

inline FusedCall RefResult(const FusedCall& before) {
  FusedCall host = before;
  const gdn_fused_decode_args args = host.Args();
  const gdn_exec exec{};
  EXPECT_EQ(gdn_fused_decode(&exec, &args), GDN_OK) << gdn_last_error();
  return host;
}

inline void ExpectSameBits(const FusedCall& a, const FusedCall& b) {
  EXPECT_TRUE(a.y.bytes() == b.y.bytes());
  EXPECT_TRUE(a.state.bytes() == b.state.bytes());
  EXPECT_TRUE(a.conv_state.bytes() == b.conv_state.bytes());
}

// Makes a call's one sequence the last of so many, of which the others are empty and padding.
template <typename Call>
void MakeLastOf(int64_t sequences, Call& call) {
  const int32_t tokens = call.cu_seqlens.back();
  const int64_t read = call.read.back(), write = call.write.back();
  call.cu_seqlens.assign(static_cast<size_t>(sequences) + 1, 0);
  call.cu_seqlens.back() = tokens;
  call.read.assign(static_cast<size_t>(sequences), -1);
  call.write.assign(static_cast<size_t>(sequences), -1);
  call.fresh.assign(static_cast<size_t>(sequences), 0);
  call.read.back() = read;
  call.write.back() = write;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CUDA_CUDA_TEST_UTIL_H_
