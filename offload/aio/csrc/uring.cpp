#include "uring.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#ifndef SYS_io_uring_setup  // the same number on every architecture
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

namespace aio {
namespace {

// Part of the kernel's interface, but newer than the headers of some build machines.
constexpr unsigned kSetupCoopTaskrun = 1U << 8;
constexpr unsigned kSetupSingleIssuer = 1U << 12;
constexpr unsigned kSetupDeferTaskrun = 1U << 13;
constexpr unsigned kRegisterFilesUpdate = 6;
constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;
constexpr unsigned kRegisterSparse = 1U << 0;
constexpr unsigned kEnterExtendedArgument = 1U << 3;
constexpr unsigned kFeatureExtendedArgument = 1U << 8;
constexpr unsigned kOpRead = 22;
constexpr unsigned kOpWrite = 23;

struct RegisterResources {  // struct io_uring_rsrc_register
    std::uint32_t count;
    std::uint32_t flags;
    std::uint64_t reserved;
    std::uint64_t data;
    std::uint64_t tags;
};

struct UpdateResources {  // struct io_uring_rsrc_update2
    std::uint32_t offset;
    std::uint32_t reserved;
    std::uint64_t data;
    std::uint64_t tags;
    std::uint32_t count;
    std::uint32_t reserved2;
};

struct ExtendedArgument {  // struct io_uring_getevents_arg
    std::uint64_t signals;
    std::uint32_t signals_bytes;
    std::uint32_t reserved;
    std::uint64_t timeout;
};

struct KernelTime {  // struct __kernel_timespec
    std::int64_t seconds;
    std::int64_t nanoseconds;
};

constexpr unsigned kBufferSlots = 4096;
constexpr std::uint64_t kPieceBytes = 1ULL << 30;  // the most that one registration may hold
constexpr unsigned kFileSlots = 64;
constexpr std::uint64_t kWakeup = 0;  // user_data of the poll; a transfer's is its address

Fd set_up(unsigned entries, io_uring_params& params) {
    // Completions are handled when this thread asks for them, not by interrupting it; older
    // kernels know less of this, so ask for less and less.
    for (const unsigned flags : {kSetupDeferTaskrun | kSetupSingleIssuer, kSetupCoopTaskrun, 0U}) {
        params = io_uring_params{};
        params.flags = flags;
        const auto fd = static_cast<int>(::syscall(SYS_io_uring_setup, entries, &params));
        if (fd >= 0) return Fd(fd);
        if (errno != EINVAL) break;
    }
    throw std::system_error(errno, std::generic_category(), "io_uring_setup");
}

template <typename T>
T load(const T* shared) {
    return __atomic_load_n(shared, __ATOMIC_ACQUIRE);
}

template <typename T>
void store(T* shared, T value) {
    __atomic_store_n(shared, value, __ATOMIC_RELEASE);
}

}  // namespace

Ring::Ring(unsigned entries) {
    io_uring_params params;
    fd_ = set_up(entries, params);
    sq_ring_ = Mapped(params.sq_off.array + params.sq_entries * sizeof(unsigned), fd_.get(),
                      IORING_OFF_SQ_RING);
    cq_ring_ = Mapped(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), fd_.get(),
                      IORING_OFF_CQ_RING);
    sqes_ = Mapped(params.sq_entries * sizeof(io_uring_sqe), fd_.get(), IORING_OFF_SQES);
    sq_head_ = sq_ring_.at<unsigned>(params.sq_off.head);
    sq_tail_ = sq_ring_.at<unsigned>(params.sq_off.tail);
    sq_flags_ = sq_ring_.at<unsigned>(params.sq_off.flags);
    sq_array_ = sq_ring_.at<unsigned>(params.sq_off.array);
    sq_mask_ = *sq_ring_.at<unsigned>(params.sq_off.ring_mask);
    sq_entries_ = params.sq_entries;
    cq_head_ = cq_ring_.at<unsigned>(params.cq_off.head);
    cq_tail_ = cq_ring_.at<unsigned>(params.cq_off.tail);
    cq_mask_ = *cq_ring_.at<unsigned>(params.cq_off.ring_mask);
    cqes_ = cq_ring_.at<io_uring_cqe>(params.cq_off.cqes);
    waits_briefly_ = (params.features & kFeatureExtendedArgument) != 0;
}

io_uring_sqe* Ring::next_sqe() {
    if (tail_ - load(sq_head_) == sq_entries_) return nullptr;
    const unsigned slot = tail_ & sq_mask_;
    sq_array_[slot] = slot;
    ++tail_;
    io_uring_sqe* const sqe = sqes_.at<io_uring_sqe>() + slot;
    std::memset(sqe, 0, sizeof *sqe);
    return sqe;
}

int Ring::enter(unsigned least) {
    store(sq_tail_, tail_);
    const KernelTime time{0, std::chrono::nanoseconds(kBrief).count()};
    ExtendedArgument limit{};
    limit.timeout = reinterpret_cast<std::uintptr_t>(&time);
    const bool brief = least > 1 && waits_briefly_;
    if (!brief) least = std::min(least, 1U);
    for (;;) {
        const unsigned waiting = tail_ - submitted_;
        if (waiting == 0 && least == 0 && peek() != nullptr) return 0;
        const long result =
            brief ? ::syscall(SYS_io_uring_enter, fd_.get(), waiting, least,
                              IORING_ENTER_GETEVENTS | kEnterExtendedArgument, &limit, sizeof limit)
                  : ::syscall(SYS_io_uring_enter, fd_.get(), waiting, least, IORING_ENTER_GETEVENTS,
                              nullptr, 0);
        ++calls_;
        if (result >= 0) {
            submitted_ += static_cast<unsigned>(result);
            // Entries are consumed in order, up to one that is refused; that one's completion says
            // why, and the next call goes on behind it.
            if (tail_ == submitted_) return 0;
            if (peek() != nullptr) return 0;
            if (result == 0) return -EAGAIN;
            continue;
        }
        // Interrupted after it has submitted, the call reports the submission; so nothing is lost.
        if (errno == ETIME) return 0;
        if (errno != EINTR) return -errno;
    }
}

const io_uring_cqe* Ring::peek() const {
    const unsigned head = *cq_head_;
    return head == load(cq_tail_) ? nullptr : &cqes_[head & cq_mask_];
}

unsigned Ring::completed() const { return load(cq_tail_) - *cq_head_; }

void Ring::seen() { store(cq_head_, *cq_head_ + 1); }

int Ring::register_(unsigned opcode, const void* argument, unsigned count) const {
    const long result = ::syscall(SYS_io_uring_register, fd_.get(), opcode, argument, count);
    return result < 0 ? -errno : static_cast<int>(result);
}

int FixedBuffers::enable() {
    RegisterResources table{};
    table.count = kBufferSlots;
    table.flags = kRegisterSparse;
    error_ = -std::min(0, ring_.register_(kRegisterBuffers2, &table, sizeof table));
    if (error_ == 0) {
        free_.resize(kBufferSlots);
        for (unsigned i = 0; i < kBufferSlots; ++i) free_[i] = kBufferSlots - 1 - i;
    }
    return error_;
}

int FixedBuffers::index_of(const void* address, std::uint64_t bytes) {
    const auto region = Regions::table().find(address, bytes);
    if (!region) return -1;
    const std::uint64_t from = reinterpret_cast<std::uintptr_t>(address) - region->address;
    const std::uint64_t piece = from / kPieceBytes;
    if ((from + bytes - 1) / kPieceBytes != piece) return -1;  // no registration holds all of it
    const auto known = pieces_.find({region->serial, piece});
    return known != pieces_.end() ? known->second : register_piece(*region, piece);
}

int FixedBuffers::register_piece(const Region& region, std::uint64_t piece) {
    int index = -1;
    if (!free_.empty()) {
        const std::uint64_t from = piece * kPieceBytes;
        const int result =
            update(free_.back(), region.address + from, std::min(kPieceBytes, region.bytes - from));
        if (result >= 0) {
            index = static_cast<int>(free_.back());
            free_.pop_back();
        } else {
            error_ = -result;
        }
    }
    // A refusal is remembered too: asking again for every transfer would cost more than it gains.
    pieces_[{region.serial, piece}] = index;
    return index;
}

void FixedBuffers::drop(std::uint64_t serial) {
    auto entry = pieces_.lower_bound({serial, 0});
    while (entry != pieces_.end() && entry->first.first == serial) {
        if (entry->second >= 0) {
            const auto index = static_cast<unsigned>(entry->second);
            if (update(index, 0, 0) >= 0) free_.push_back(index);
        }
        entry = pieces_.erase(entry);
    }
}

int FixedBuffers::update(unsigned index, std::uintptr_t address, std::uint64_t bytes) const {
    const iovec range{reinterpret_cast<void*>(address), bytes};
    UpdateResources request{};
    request.offset = index;
    request.data = reinterpret_cast<std::uintptr_t>(&range);
    request.count = 1;
    return ring_.register_(kRegisterBuffersUpdate, &request, sizeof request);
}

void FixedFiles::enable() {
    const std::vector<int> none(kFileSlots, -1);
    if (ring_.register_(IORING_REGISTER_FILES, none.data(), kFileSlots) < 0) return;
    for (unsigned i = kFileSlots; i-- > 0;) free_.push_back(i);
}

int FixedFiles::index_of(const File& file, bool buffered) {
    const std::uint64_t key = file.serial * 2 + (buffered ? 1 : 0);
    const auto known = slots_.find(key);
    if (known != slots_.end()) return static_cast<int>(known->second);
    if (free_.empty()) return -1;
    const unsigned index = free_.back();
    if (update(index, buffered ? file.buffered : file.direct) < 0) return -1;
    free_.pop_back();
    slots_[key] = index;
    return static_cast<int>(index);
}

void FixedFiles::drop(std::uint64_t serial) {
    for (const std::uint64_t key : {serial * 2, serial * 2 + 1}) {
        const auto known = slots_.find(key);
        if (known == slots_.end()) continue;
        if (update(known->second, -1) >= 0) free_.push_back(known->second);
        slots_.erase(known);
    }
}

int FixedFiles::update(unsigned index, int fd) const {
    io_uring_files_update request{};
    request.offset = index;
    request.fds = reinterpret_cast<std::uintptr_t>(&fd);
    return ring_.register_(kRegisterFilesUpdate, &request, 1);
}

UringBackend::UringBackend(unsigned depth, bool fixed, bool single_submit)
    : ring_(depth + 1),
      buffers_(ring_),
      files_(ring_),
      fixed_(fixed),
      single_submit_(single_submit) {
    if (fixed) {
        if (const int error = buffers_.enable()) {
            throw std::system_error(error, std::generic_category(), "io_uring_register of buffers");
        }
    }
    files_.enable();
    watch_wakeup();
}

void UringBackend::watch_wakeup() {
    io_uring_sqe* const sqe = ring_.next_sqe();
    if (sqe == nullptr) return;  // the queue is full, so the next reap() will not block for long
    sqe->opcode = IORING_OP_POLL_ADD;
    sqe->fd = wakeup_.fd();
    sqe->poll_events = POLLIN;
    sqe->user_data = kWakeup;
    watching_ = true;
}

void UringBackend::prepare(io_uring_sqe& sqe, Transfer& transfer) {
    const bool write = transfer.write();
    sqe.opcode = static_cast<std::uint8_t>(write ? kOpWrite : kOpRead);
    sqe.fd = transfer.fd();
    sqe.off = transfer.io_offset();
    sqe.addr = reinterpret_cast<std::uint64_t>(transfer.io_address());
    sqe.len = static_cast<std::uint32_t>(transfer.io_bytes());
    sqe.user_data = reinterpret_cast<std::uint64_t>(&transfer);
    const int file = files_.index_of(transfer.request->file, transfer.path == Path::buffered);
    if (file >= 0) {
        sqe.fd = file;
        sqe.flags |= IOSQE_FIXED_FILE;
        ++counters_.fixed_files;
    }
    if (!fixed_) return;
    const int buffer = buffers_.index_of(transfer.io_address(), transfer.io_bytes());
    if (buffer >= 0) {
        sqe.opcode =
            static_cast<std::uint8_t>(write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED);
        sqe.buf_index = static_cast<std::uint16_t>(buffer);
        ++counters_.fixed_buffers;
    }
}

int UringBackend::submit(Transfer* const* transfers, unsigned count) {
    unsigned taken = 0;
    for (; taken < count; ++taken) {
        io_uring_sqe* const sqe = ring_.next_sqe();
        if (sqe == nullptr) break;
        prepare(*sqe, *transfers[taken]);
        // An error is not this transfer's: its entry stays queued, and reap() submits it again.
        if (single_submit_) ring_.enter(0);
    }
    // The others are told to the kernel by reap(), in the same system call that waits.
    return taken > 0 ? static_cast<int>(taken) : -EAGAIN;
}

unsigned UringBackend::reap(Completion* out, unsigned capacity, unsigned least) {
    if (!watching_) watch_wakeup();
    const int error = ring_.enter(ring_.completed() < least ? least : 0);
    if (error != 0 && ring_.peek() == nullptr) {
        // Short of memory or of completion space (EAGAIN, EBUSY): entries stay queued.
        ::usleep(1000);
        return 0;
    }
    unsigned count = 0;
    const io_uring_cqe* cqe;
    while (count < capacity && (cqe = ring_.peek()) != nullptr) {
        if (cqe->user_data == kWakeup) {
            wakeup_.clear();
            watching_ = false;
        } else {
            out[count++] = {reinterpret_cast<Transfer*>(cqe->user_data), cqe->res};
        }
        ring_.seen();
    }
    return count;
}

void UringBackend::abandon() {
    ring_.abandon();
    wakeup_.abandon();
}

Backend::Counters UringBackend::counters() const {
    Counters counters = counters_;
    counters.system_calls = ring_.calls();
    counters.register_error = buffers_.error();
    return counters;
}

}  // namespace aio
