// Memory from mmap that a forked child does not inherit.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <system_error>
#include <utility>

namespace aio {

class Mapped {
  public:
    Mapped() = default;

    // Pages of a device or ring (fd >= 0), or anonymous ones (fd < 0).
    Mapped(std::size_t bytes, int fd = -1, off_t offset = 0) : bytes_(bytes) {
        const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_POPULATE;
        data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, offset);
        if (data_ == MAP_FAILED) {
            data_ = nullptr;
            throw std::system_error(errno, std::generic_category(), "mmap");
        }
        // A child that moved the indices of its parent's ring would lose the parent's completions.
        ::madvise(data_, bytes, MADV_DONTFORK);
    }
    Mapped(Mapped&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
    Mapped& operator=(Mapped&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Mapped() {
        if (data_ != nullptr) ::munmap(data_, bytes_);
    }

    explicit operator bool() const { return data_ != nullptr; }
    template <typename T>
    T* at(std::size_t offset = 0) const {
        return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
    }

  private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace aio
