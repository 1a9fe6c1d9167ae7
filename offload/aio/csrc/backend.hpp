// The contract of the ways to move bytes: io_uring, native AIO, threads, and the tests' script.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "transfer.hpp"

namespace aio {

struct Completion {
    Transfer* transfer;
    std::int64_t result;  // bytes, or -errno
};

// How long several completions are waited for together, at most: a file that answers late must not
// hold up the others. It lies behind the kernel's next tick, since a nearer one would make every
// wait set the processor's timer, which costs more in a virtual machine than it saves.
constexpr std::chrono::microseconds kBrief{5000};

// One queue of transfers. It belongs to the thread that made it; only wake() is for others.
class Backend {
  public:
    virtual ~Backend() = default;

    // Take up to `count` transfers, in order. Returns how many were taken, or -errno where the
    // first one was refused: -EAGAIN means "later", anything else is that transfer's own failure.
    // A transfer that was taken must stay where it is until reap() returns it.
    virtual int submit(Transfer* const* transfers, unsigned count) = 0;

    // Collect completions, at most `capacity`. Where `least` is 0, only those that are there; where
    // it is 1, wait for one of them or for wake(), so that 0 can be returned; where it is more,
    // wait for as many, but no longer than kBrief, and wake() need not end that wait.
    virtual unsigned reap(Completion* out, unsigned capacity, unsigned least) = 0;

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
