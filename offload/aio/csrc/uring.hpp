// io_uring by raw system calls, with registered memory and files where the kernel grants them.
#pragma once

#include <linux/io_uring.h>

#include <map>
#include <utility>
#include <vector>

#include "backend.hpp"
#include "mapped.hpp"
#include "regions.hpp"
#include "wakeup.hpp"

namespace aio {

// The two rings shared with the kernel; knows nothing of transfers.
class Ring {
  public:
    explicit Ring(unsigned entries);

    io_uring_sqe* next_sqe();  // nullptr where the queue is full
    // Submit what was prepared and wait for `least` completions, for more than one of them only
    // briefly; returns 0 or -errno.
    int enter(unsigned least);
    const io_uring_cqe* peek() const;
    unsigned completed() const;
    void seen();

    int register_(unsigned opcode, const void* argument, unsigned count) const;
    void abandon() { fd_.reset(); }
    std::uint64_t calls() const { return calls_; }

  private:
    Fd fd_;
    Mapped sq_ring_, cq_ring_, sqes_;
    unsigned *sq_head_, *sq_tail_, *sq_flags_, *sq_array_, *cq_head_, *cq_tail_;
    unsigned sq_mask_ = 0, sq_entries_ = 0, cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
    unsigned tail_ = 0;       // of prepared entries, told to the kernel by enter()
    unsigned submitted_ = 0;  // of entries that the kernel has consumed
    std::uint64_t calls_ = 0;
    bool waits_briefly_ = false;  // the kernel takes a timeout
};

// Memory registered with one ring, piece by piece as transfers first touch it.
class FixedBuffers {
  public:
    explicit FixedBuffers(Ring& ring) : ring_(ring) {}

    int enable();  // 0 or errno
    // The index under which a range is registered, or -1.
    int index_of(const void* address, std::uint64_t bytes);
    void drop(std::uint64_t serial);
    int error() const { return error_; }

  private:
    int register_piece(const Region& region, std::uint64_t piece);
    int update(unsigned index, std::uintptr_t address, std::uint64_t bytes) const;

    Ring& ring_;
    std::map<std::pair<std::uint64_t, std::uint64_t>, int>
        pieces_;  // (serial, number): index or -1
    std::vector<unsigned> free_;
    int error_ = 0;
};

// Descriptors registered with one ring, so that a transfer need not look its file up.
class FixedFiles {
  public:
    explicit FixedFiles(Ring& ring) : ring_(ring) {}

    void enable();
    int index_of(const File& file, bool buffered);  // or -1
    void drop(std::uint64_t serial);

  private:
    int update(unsigned index, int fd) const;

    Ring& ring_;
    std::map<std::uint64_t, unsigned> slots_;  // serial * 2 + buffered
    std::vector<unsigned> free_;
};

class UringBackend final : public Backend {
  public:
    // With `fixed`, a kernel that grants no registered memory at all is an error.
    UringBackend(unsigned depth, bool fixed, bool single_submit);

    int submit(Transfer* const* transfers, unsigned count) override;
    unsigned reap(Completion* out, unsigned capacity, unsigned least) override;
    void wake() override { wakeup_.signal(); }
    void drop_file(std::uint64_t serial) override { files_.drop(serial); }
    void drop_region(std::uint64_t serial) override { buffers_.drop(serial); }
    void abandon() override;
    Counters counters() const override;

  private:
    void prepare(io_uring_sqe& sqe, Transfer& transfer);
    void watch_wakeup();

    Wakeup wakeup_;
    Ring ring_;
    FixedBuffers buffers_;
    FixedFiles files_;
    const bool fixed_;
    const bool single_submit_;
    bool watching_ = false;
    Counters counters_;
};

}  // namespace aio
