// An eventfd by which any thread ends the wait of an I/O thread.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "fd.hpp"

namespace aio {

class Wakeup {
  public:
    Wakeup() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
    }

    int fd() const { return fd_.get(); }
    void signal() {
        const std::uint64_t one = 1;
        // Can only fail where the counter is full, and then the wait ends all the same.
        [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);
    }
    void clear() {
        std::uint64_t count;
        [[maybe_unused]] const auto got = ::read(fd_.get(), &count, sizeof count);
    }
    void abandon() { fd_.reset(); }

  private:
    Fd fd_;
};

}  // namespace aio
