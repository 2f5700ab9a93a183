#include "server/pipeline/cuda/device_state_pool.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "absl/strings/str_cat.h"

namespace gdn::pipeline {
namespace {

constexpr int64_t kConvElementBytes = 2;

float FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// The slot's part of every layer, gathered: `height` rows of `width` bytes, `pitch` apart.
absl::Status Gather(void* to, const void* from, int64_t width, int64_t pitch, int64_t height,
                    cudaStream_t stream) {
  return CudaStatus(cudaMemcpy2DAsync(to, static_cast<size_t>(width), from,
                                      static_cast<size_t>(pitch), static_cast<size_t>(width),
                                      static_cast<size_t>(height), cudaMemcpyDeviceToHost, stream),
                    "cannot read a state slot");
}

}  // namespace

int64_t DeviceStatePool::BytesPerSlot(const model::GdnDims& dims, int64_t num_layers,
                                      gdn_dtype recurrent) {
  return num_layers * (dims.recurrent_elements() * (recurrent == GDN_F32 ? 4 : 2) +
                       dims.conv_elements() * kConvElementBytes);
}

absl::Status DeviceStatePool::Create(const model::GdnDims& dims, int64_t num_layers,
                                     int64_t num_slots, gdn_dtype recurrent_type,
                                     int64_t budget_bytes) {
  num_layers_ = num_layers;
  recurrent_type_ = recurrent_type;
  recurrent_elements_ = dims.recurrent_elements();
  conv_elements_ = dims.conv_elements();
  const int64_t slot_bytes = BytesPerSlot(dims, num_layers, recurrent_type);
  const int64_t fitting = budget_bytes / slot_bytes;
  num_slots_ = num_slots > 0 ? num_slots : std::min(fitting, kMaxAutoSlots);
  if (num_slots_ > fitting || num_slots_ < 2) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "state pool: ", std::max<int64_t>(num_slots_, 2), " slots x ", slot_bytes,
        " bytes a slot (", num_layers, " layers) = ", std::max<int64_t>(num_slots_, 2) * slot_bytes,
        " bytes, but ", budget_bytes,
        " bytes of device memory are left beside the weights and "
        "buffers, enough for ",
        fitting, " slots; use fewer sessions (--max-sessions) or --state-type=bfloat16"));
  }
  GDN_RETURN_IF_ERROR(recurrent_.Allocate(num_layers * num_slots_ * recurrent_slot_bytes(),
                                          "cannot allocate the recurrent states"));
  return conv_.Allocate(num_layers * num_slots_ * conv_elements_,
                        "cannot allocate the convolution states");
}

int64_t DeviceStatePool::bytes_per_slot() const {
  return num_layers_ * (recurrent_slot_bytes() + conv_elements_ * kConvElementBytes);
}

absl::Status DeviceStatePool::CopySlot(int64_t from, int64_t to, cudaStream_t stream) const {
  if (from == to || num_layers_ == 0) return absl::OkStatus();
  const auto copy = [&](std::byte* base, int64_t slot_bytes) {
    const auto width = static_cast<size_t>(slot_bytes);
    const auto pitch = static_cast<size_t>(num_slots_ * slot_bytes);
    return CudaStatus(
        cudaMemcpy2DAsync(base + to * slot_bytes, pitch, base + from * slot_bytes, pitch, width,
                          static_cast<size_t>(num_layers_), cudaMemcpyDeviceToDevice, stream),
        "cannot copy a state slot");
  };
  GDN_RETURN_IF_ERROR(copy(recurrent_.data(), recurrent_slot_bytes()));
  return copy(reinterpret_cast<std::byte*>(conv_.data()), conv_elements_ * kConvElementBytes);
}

absl::StatusOr<SlotState> DeviceStatePool::ReadSlot(int64_t slot, cudaStream_t stream) const {
  std::vector<std::byte> recurrent(static_cast<size_t>(num_layers_ * recurrent_slot_bytes()));
  std::vector<uint16_t> conv(static_cast<size_t>(num_layers_ * conv_elements_));
  GDN_RETURN_IF_ERROR(Gather(recurrent.data(), recurrent_.data() + slot * recurrent_slot_bytes(),
                             recurrent_slot_bytes(), num_slots_ * recurrent_slot_bytes(),
                             num_layers_, stream));
  const int64_t conv_bytes = conv_elements_ * kConvElementBytes;
  GDN_RETURN_IF_ERROR(Gather(conv.data(), conv_.data() + slot * conv_elements_, conv_bytes,
                             num_slots_ * conv_bytes, num_layers_, stream));
  GDN_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "cannot read a state slot"));

  SlotState state;
  const auto elements = static_cast<size_t>(num_layers_ * recurrent_elements_);
  state.recurrent.reserve(elements);
  if (recurrent_type_ == GDN_F32) {
    const auto* values = reinterpret_cast<const float*>(recurrent.data());
    state.recurrent.assign(values, values + elements);
  } else {
    const auto* values = reinterpret_cast<const uint16_t*>(recurrent.data());
    for (size_t i = 0; i < elements; ++i) state.recurrent.push_back(FromBf16(values[i]));
  }
  state.conv.reserve(conv.size());
  for (const uint16_t bits : conv) state.conv.push_back(FromBf16(bits));
  return state;
}

}  // namespace gdn::pipeline
