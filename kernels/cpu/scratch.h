// Memory of a thread that its calls use one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace quire {

// Aligned to a cache line. It grows, and is kept for the thread's next call.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Room for `count` elements with the contents of before, or anything. Throws std::bad_alloc.
  template <class T>
  T* room(int64_t count) {
    const int64_t size = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    if (size > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, static_cast<size_t>(size));
      size_ = data_ == nullptr ? 0 : size;
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace quire
