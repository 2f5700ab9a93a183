// File: state_pool.h
//
// The memory of all sessions' states on the host: recurrent [layer][slot][HV][V][K] and convolution
// [layer][slot][W-1][C]. Reserved as address space; a page is taken when a slot first touches it,
// and nothing relies on its contents before that (sequences say when they are fresh).
#ifndef SERVER_PIPELINE_STATE_POOL_H_
#define SERVER_PIPELINE_STATE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "gdn/kernels/types.h"
#include "server/model/model_spec.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

class StatePool {
 public:
  // RESOURCE_EXHAUSTED, with the arithmetic, if the address space cannot be reserved.
  static absl::StatusOr<StatePool> Create(const model::GdnDims& dims, int64_t num_layers,
                                          int64_t num_slots, gdn_dtype recurrent_type);
  StatePool(StatePool&& other) noexcept;
  StatePool& operator=(StatePool&&) = delete;
  ~StatePool();

  // Slot 0 of a layer; slot s is s * *_slot_elements() further on.
  void* recurrent(int64_t layer) const;
  float* conv(int64_t layer) const;
  int64_t recurrent_slot_elements() const { return recurrent_elements_; }
  int64_t recurrent_slot_bytes() const { return recurrent_elements_ * recurrent_element_bytes(); }
  int64_t conv_slot_elements() const { return conv_elements_; }
  gdn_dtype recurrent_type() const { return recurrent_type_; }
  int64_t num_slots() const { return num_slots_; }
  int64_t bytes_per_slot() const;

  // Copies all layers of one slot. Both in [0, num_slots).
  void CopySlot(int64_t from, int64_t to) const;
  // All layers of one slot, widened to FP32.
  SlotState ReadSlot(int64_t slot) const;

 private:
  StatePool() = default;
  int64_t recurrent_element_bytes() const { return recurrent_type_ == GDN_F32 ? 4 : 2; }

  std::byte* base_ = nullptr;
  size_t mapped_bytes_ = 0;
  size_t conv_offset_ = 0;  // Bytes from base_ to the convolution states.
  int64_t num_layers_ = 0;
  int64_t num_slots_ = 0;
  int64_t recurrent_elements_ = 0;
  int64_t conv_elements_ = 0;
  gdn_dtype recurrent_type_ = GDN_F32;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_STATE_POOL_H_
