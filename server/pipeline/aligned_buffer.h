// A 64-byte aligned array that only grows, for activations and workspaces.
#ifndef SERVER_PIPELINE_ALIGNED_BUFFER_H_
#define SERVER_PIPELINE_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace gdn::pipeline {

template <typename T>
class AlignedBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Makes room for `count` elements. Contents are lost on growth; pointers then dangle.
  void Reserve(int64_t count) {
    if (count <= capacity_) return;
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    capacity_ = count;
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  int64_t capacity() const { return capacity_; }
  int64_t bytes() const { return capacity_ * static_cast<int64_t>(sizeof(T)); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t capacity_ = 0;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_ALIGNED_BUFFER_H_
