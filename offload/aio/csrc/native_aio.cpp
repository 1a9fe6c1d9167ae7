#include "native_aio.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace aio {
namespace {

constexpr unsigned kPoll = 5;             // IOCB_CMD_POLL, since Linux 4.18
constexpr std::uint64_t kWakeup = ~0ULL;  // aio_data of the iocb that watches the eventfd

int io_setup(unsigned events, aio_context_t* context) {
    return static_cast<int>(::syscall(SYS_io_setup, events, context));
}
int io_destroy(aio_context_t context) {
    return static_cast<int>(::syscall(SYS_io_destroy, context));
}
int io_submit(aio_context_t context, long count, iocb** blocks) {
    return static_cast<int>(::syscall(SYS_io_submit, context, count, blocks));
}
int io_getevents(aio_context_t context, long least, long most, io_event* events, timespec* limit) {
    return static_cast<int>(::syscall(SYS_io_getevents, context, least, most, events, limit));
}

}  // namespace

NativeAioBackend::NativeAioBackend(unsigned depth)
    : blocks_(depth + 1), owners_(depth), events_(depth + 1) {
    for (unsigned i = depth; i-- > 0;) free_.push_back(i);
    if (io_setup(depth + 1, &context_) != 0) {
        throw std::system_error(errno, std::generic_category(), "io_setup");
    }
    watch_wakeup();
    if (!watching_) {
        const int error = errno;
        io_destroy(context_);
        throw std::system_error(error, std::generic_category(), "io_submit of a poll");
    }
}

NativeAioBackend::~NativeAioBackend() { io_destroy(context_); }

void NativeAioBackend::watch_wakeup() {
    iocb& block = blocks_.back();
    block = iocb{};
    block.aio_data = kWakeup;
    block.aio_lio_opcode = kPoll;
    block.aio_fildes = static_cast<std::uint32_t>(wakeup_.fd());
    block.aio_buf = POLLIN;
    iocb* one = &block;
    watching_ = io_submit(context_, 1, &one) == 1;
}

int NativeAioBackend::submit(Transfer* const* transfers, unsigned count) {
    iocb* batch[64];
    count = std::min<unsigned>({count, 64, static_cast<unsigned>(free_.size())});
    for (unsigned i = 0; i < count; ++i) {
        const Transfer& transfer = *transfers[i];
        const unsigned slot = free_[free_.size() - 1 - i];
        iocb& block = blocks_[slot];
        block = iocb{};
        block.aio_data = slot;
        block.aio_lio_opcode = transfer.write() ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = static_cast<std::uint32_t>(transfer.fd());
        block.aio_buf = reinterpret_cast<std::uint64_t>(transfer.io_address());
        block.aio_nbytes = transfer.io_bytes();
        block.aio_offset = static_cast<std::int64_t>(transfer.io_offset());
        owners_[slot] = transfers[i];
        batch[i] = &block;
    }
    int taken;
    do {
        taken = io_submit(context_, count, batch);
        ++counters_.system_calls;
    } while (taken < 0 && errno == EINTR);
    if (taken < 0) return -errno;
    // A batch may be taken in part; the caller submits the rest, and then learns what was wrong.
    free_.resize(free_.size() - static_cast<std::size_t>(taken));
    return taken;
}

unsigned NativeAioBackend::reap(Completion* out, unsigned capacity, unsigned least) {
    // One event more than the transfers: the wakeup's.
    const long most =
        std::min<long>(static_cast<long>(capacity) + 1, static_cast<long>(events_.size()));
    timespec limit{0, least > 1 ? std::chrono::nanoseconds(kBrief).count() : 0};
    int got;
    do {
        got = io_getevents(context_, least, most, events_.data(), least == 1 ? nullptr : &limit);
        ++counters_.system_calls;
    } while (got < 0 && errno == EINTR);
    unsigned count = 0;
    for (int i = 0; i < got; ++i) {
        const io_event& event = events_[static_cast<unsigned>(i)];
        if (event.data == kWakeup) {
            wakeup_.clear();
            watching_ = false;
            continue;
        }
        const auto slot = static_cast<unsigned>(event.data);
        free_.push_back(slot);
        out[count++] = {owners_[slot], event.res};
    }
    if (!watching_) watch_wakeup();
    return count;
}

}  // namespace aio
