#include "server/pipeline/cuda/weight_upload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "server/model/element_convert.h"

namespace gdn::pipeline {
namespace {

// Enough to fill a buffer as fast as the bus empties it; page faults of mapped files cost the most.
constexpr unsigned kMaxThreads = 8;
constexpr int64_t kLeastBytesPerThread = 1 << 20;

// Splits [0, count) among threads.
void InParallel(int64_t count, int64_t bytes_each,
                const std::function<void(int64_t begin, int64_t end)>& work) {
  const auto wanted =
      static_cast<int64_t>(std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads));
  const int64_t parts = std::clamp<int64_t>(count * bytes_each / kLeastBytesPerThread, 1, wanted);
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < parts; ++i) {
    threads.emplace_back(work, count * i / parts, count * (i + 1) / parts);
  }
  work(0, count / parts);
  for (std::thread& thread : threads) thread.join();
}

// F32ToBf16 takes finite values; a NaN must stay one.
uint16_t Rounded(float value) {
  return std::isnan(value) ? uint16_t{0x7fc0} : model::F32ToBf16(value);
}

void Convert(const std::byte* from, model::ElementType type, int64_t begin, int64_t end,
             uint16_t* to) {
  const size_t size = model::SizeOf(type);
  if (type == model::ElementType::kBF16) {
    std::memcpy(to + begin, from + static_cast<size_t>(begin) * size,
                static_cast<size_t>(end - begin) * size);
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    float value = 0;
    if (type == model::ElementType::kF32) {
      std::memcpy(&value, from + static_cast<size_t>(i) * size, size);
    } else {
      uint16_t half = 0;
      std::memcpy(&half, from + static_cast<size_t>(i) * size, size);
      value = model::F16ToF32(half);
    }
    to[i] = Rounded(value);
  }
}

}  // namespace

absl::Status WeightUpload::Create() {
  absl::StatusOr<CudaStream> stream = CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  for (Buffer& buffer : buffers_) {
    GDN_RETURN_IF_ERROR(
        buffer.memory.Allocate(kBufferBytes, "cannot allocate pinned memory for the weights"));
    absl::StatusOr<CudaEvent> event = CreateEvent(cudaEventDisableTiming);
    if (!event.ok()) return event.status();
    buffer.empty = *std::move(event);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> WeightUpload::NextBuffer() {
  current_ = (current_ + 1) % buffers_.size();
  // An event that was never recorded is done.
  GDN_RETURN_IF_ERROR(
      CudaStatus(cudaEventSynchronize(buffers_[current_].empty.get()), "cannot load the weights"));
  return buffers_[current_].memory.data();
}

absl::Status WeightUpload::Send(void* to, size_t bytes) {
  const Buffer& buffer = buffers_[current_];
  GDN_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(to, buffer.memory.data(), bytes, cudaMemcpyHostToDevice, stream_.get()),
      "cannot load the weights"));
  bytes_ += static_cast<int64_t>(bytes);
  return CudaStatus(cudaEventRecord(buffer.empty.get(), stream_.get()), "cannot load the weights");
}

absl::Status WeightUpload::Matrix(const model::MatrixView& matrix, uint16_t* to) {
  const int64_t total = matrix.rows * matrix.cols;
  const int64_t chunk = kBufferBytes / static_cast<int64_t>(sizeof(uint16_t));
  const size_t size = model::SizeOf(matrix.type);
  for (int64_t first = 0; first < total; first += chunk) {
    absl::StatusOr<std::byte*> buffer = NextBuffer();
    if (!buffer.ok()) return buffer.status();
    const int64_t count = std::min(chunk, total - first);
    const std::byte* from = matrix.data + static_cast<size_t>(first) * size;
    auto* rounded = reinterpret_cast<uint16_t*>(*buffer);
    InParallel(count, static_cast<int64_t>(size), [&](int64_t begin, int64_t end) {
      Convert(from, matrix.type, begin, end, rounded);
    });
    GDN_RETURN_IF_ERROR(Send(to + first, static_cast<size_t>(count) * sizeof(uint16_t)));
  }
  return absl::OkStatus();
}

absl::Status WeightUpload::Floats(std::span<const float> values, float* to) {
  const size_t chunk = kBufferBytes / sizeof(float);
  for (size_t first = 0; first < values.size(); first += chunk) {
    absl::StatusOr<std::byte*> buffer = NextBuffer();
    if (!buffer.ok()) return buffer.status();
    const size_t bytes = std::min(chunk, values.size() - first) * sizeof(float);
    std::memcpy(*buffer, values.data() + first, bytes);
    GDN_RETURN_IF_ERROR(Send(to + first, bytes));
  }
  return absl::OkStatus();
}

absl::Status WeightUpload::Finish() {
  return CudaStatus(cudaStreamSynchronize(stream_.get()), "cannot load the weights");
}

}  // namespace gdn::pipeline
