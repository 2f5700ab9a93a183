// File: device_state_pool.h
//
// The memory of all sessions' states on the device: recurrent [layer][slot][HV][V][K] and
// convolution [layer][slot][W-1][C] in BF16, the activations' type. Nothing relies on what a slot
// holds before a sequence has written it.
#ifndef SERVER_PIPELINE_CUDA_DEVICE_STATE_POOL_H_
#define SERVER_PIPELINE_CUDA_DEVICE_STATE_POOL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gdn/kernels/types.h"
#include "server/model/model_spec.h"
#include "server/pipeline/cuda/device_memory.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

class DeviceStatePool {
 public:
  static int64_t BytesPerSlot(const model::GdnDims& dims, int64_t num_layers, gdn_dtype recurrent);

  // `num_slots` 0: as many as fit into `budget_bytes`, at most kMaxAutoSlots. RESOURCE_EXHAUSTED,
  // with the arithmetic, if they do not fit.
  absl::Status Create(const model::GdnDims& dims, int64_t num_layers, int64_t num_slots,
                      gdn_dtype recurrent_type, int64_t budget_bytes);

  static constexpr int64_t kMaxAutoSlots = 4096;

  // Slot 0 of a layer; slot s is s * *_slot_elements() further on.
  void* recurrent(int64_t layer) const {
    return recurrent_.data() + layer * num_slots_ * recurrent_slot_bytes();
  }
  uint16_t* conv(int64_t layer) const { return conv_.data() + layer * num_slots_ * conv_elements_; }
  int64_t recurrent_slot_elements() const { return recurrent_elements_; }
  int64_t recurrent_slot_bytes() const { return recurrent_elements_ * recurrent_element_bytes(); }
  int64_t conv_slot_elements() const { return conv_elements_; }
  gdn_dtype recurrent_type() const { return recurrent_type_; }
  int64_t num_slots() const { return num_slots_; }
  int64_t bytes_per_slot() const;

  // Copies all layers of one slot, in the order of the stream.
  absl::Status CopySlot(int64_t from, int64_t to, cudaStream_t stream) const;
  // All layers of one slot, widened to FP32. Waits for the stream.
  absl::StatusOr<SlotState> ReadSlot(int64_t slot, cudaStream_t stream) const;

 private:
  int64_t recurrent_element_bytes() const { return recurrent_type_ == GDN_F32 ? 4 : 2; }

  DeviceArray<std::byte> recurrent_;
  DeviceArray<uint16_t> conv_;
  int64_t num_layers_ = 0;
  int64_t num_slots_ = 0;
  int64_t recurrent_elements_ = 0;
  int64_t conv_elements_ = 0;
  gdn_dtype recurrent_type_ = GDN_F32;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_DEVICE_STATE_POOL_H_
