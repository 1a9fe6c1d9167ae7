// The contract of the ways to move bytes: io_uring, native AIO, threads, and the tests' script.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transfer.hpp"

namespace aio {

struct Completion {
    Transfer* transfer;
    std::int64_t result;  // bytes, or -errno
};

// One queue of transfers. It belongs to the thread that made it; only wake() is for others.
class Backend {
  public:
    virtual ~Backend() = default;

    // Take up to `count` transfers, in order. Returns how many were taken, or -errno where the
    // first one was refused: -EAGAIN means "later", anything else is that transfer's own failure.
    // A transfer that was taken must stay where it is until reap() returns it.
    virtual int submit(Transfer* const* transfers, unsigned count) = 0;

    // Collect completions, at most `capacity`. With `block`, wait for at least one of them or for
    // wake(), so that 0 can be returned.
    virtual unsigned reap(Completion* out, unsigned capacity, bool block) = 0;

    virtual void wake() = 0;

    // A file was closed, a region of memory is going: let the kernel's references go too.
    virtual void drop_file(std::uint64_t /*serial*/) {}
    virtual void drop_region(std::uint64_t /*serial*/) {}

    // In a forked child: close descriptors, touch nothing that the parent still uses.
    virtual void abandon() {}

    struct Counters {
        std::uint64_t system_calls = 0;
        std::uint64_t fixed_buffers = 0;  // transfers into registered memory
        std::uint64_t fixed_files = 0;    // transfers of registered files
        int register_error = 0;           // why memory could not be registered (errno)
    };
    virtual Counters counters() const { return {}; }
};

}  // namespace aio
