#include "server/pipeline/state_pool.h"

#include <sys/mman.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gdn::pipeline {

absl::StatusOr<StatePool> StatePool::Create(const model::GdnDims& dims, int64_t num_layers,
                                            int64_t num_slots, gdn_dtype recurrent_type) {
  StatePool pool;
  pool.num_layers_ = num_layers;
  pool.num_slots_ = num_slots;
  pool.recurrent_type_ = recurrent_type;
  pool.recurrent_elements_ = dims.recurrent_elements();
  pool.conv_elements_ = dims.conv_elements();
  size_t recurrent_bytes = 0;
  size_t conv_bytes = 0;
  const bool overflow =
      __builtin_mul_overflow(pool.recurrent_elements_ * pool.recurrent_element_bytes(),
                             num_layers * num_slots, &recurrent_bytes) ||
      __builtin_mul_overflow(pool.conv_elements_ * 4, num_layers * num_slots, &conv_bytes) ||
      __builtin_add_overflow(recurrent_bytes, conv_bytes, &pool.mapped_bytes_);
  pool.conv_offset_ = recurrent_bytes;
  void* base = MAP_FAILED;
  if (!overflow && pool.mapped_bytes_ > 0) {
    base = mmap(nullptr, pool.mapped_bytes_, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (base == MAP_FAILED) {
    pool.mapped_bytes_ = 0;
    return absl::ResourceExhaustedError(
        absl::StrCat("state pool: cannot reserve ", num_slots, " slots x ", pool.bytes_per_slot(),
                     " bytes a slot (", num_layers, " layers): ", std::strerror(errno),
                     "; use fewer sessions (--max-sessions) or --state-type=bfloat16"));
  }
  pool.base_ = static_cast<std::byte*>(base);
  return pool;
}

StatePool::StatePool(StatePool&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      mapped_bytes_(std::exchange(other.mapped_bytes_, 0)),
      conv_offset_(other.conv_offset_),
      num_layers_(other.num_layers_),
      num_slots_(other.num_slots_),
      recurrent_elements_(other.recurrent_elements_),
      conv_elements_(other.conv_elements_),
      recurrent_type_(other.recurrent_type_) {}

StatePool::~StatePool() {
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
}

void* StatePool::recurrent(int64_t layer) const {
  return base_ + layer * num_slots_ * recurrent_elements_ * recurrent_element_bytes();
}

float* StatePool::conv(int64_t layer) const {
  return reinterpret_cast<float*>(base_ + conv_offset_) + layer * num_slots_ * conv_elements_;
}

int64_t StatePool::bytes_per_slot() const {
  return num_layers_ * (recurrent_elements_ * recurrent_element_bytes() + conv_elements_ * 4);
}

void StatePool::CopySlot(int64_t from, int64_t to) const {
  if (from == to) return;
  const int64_t recurrent_bytes = recurrent_elements_ * recurrent_element_bytes();
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    auto* states = static_cast<std::byte*>(recurrent(layer));
    std::memcpy(states + to * recurrent_bytes, states + from * recurrent_bytes,
                static_cast<size_t>(recurrent_bytes));
    float* windows = conv(layer);
    std::memcpy(windows + to * conv_elements_, windows + from * conv_elements_,
                static_cast<size_t>(conv_elements_) * sizeof(float));
  }
}

SlotState StatePool::ReadSlot(int64_t slot) const {
  SlotState state;
  state.recurrent.reserve(static_cast<size_t>(num_layers_ * recurrent_elements_));
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    const int64_t first = slot * recurrent_elements_;
    if (recurrent_type_ == GDN_F32) {
      const float* values = static_cast<const float*>(recurrent(layer)) + first;
      state.recurrent.insert(state.recurrent.end(), values, values + recurrent_elements_);
    } else {
      const uint16_t* values = static_cast<const uint16_t*>(recurrent(layer)) + first;
      for (int64_t i = 0; i < recurrent_elements_; ++i) {
        state.recurrent.push_back(std::bit_cast<float>(static_cast<uint32_t>(values[i]) << 16));
      }
    }
    const float* window = conv(layer) + slot * conv_elements_;
    state.conv.insert(state.conv.end(), window, window + conv_elements_);
  }
  return state;
}

}  // namespace gdn::pipeline
