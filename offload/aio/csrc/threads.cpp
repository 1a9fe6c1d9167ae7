#include "threads.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace aio {

std::int64_t move_now(const Transfer& transfer) {
    const iovec range{transfer.io_address(), transfer.io_bytes()};
    const auto offset = static_cast<off_t>(transfer.io_offset());
    const ssize_t result = transfer.write() ? ::pwritev(transfer.fd(), &range, 1, offset)
                                            : ::preadv(transfer.fd(), &range, 1, offset);
    return result < 0 ? -errno : result;
}

ThreadBackend::ThreadBackend(unsigned threads) {
    threads_.reserve(threads);
    for (unsigned i = 0; i < threads; ++i) {
        try {
            threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {  // the process may have no more of them
            if (threads_.empty()) throw;
            return;  // fewer are slower, and do the same
        }
    }
}

ThreadBackend::~ThreadBackend() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadBackend::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        Transfer* const transfer = queue_.front();
        queue_.pop_front();
        lock.unlock();
        const std::int64_t result = move_now(*transfer);
        calls_.fetch_add(1, std::memory_order_relaxed);
        lock.lock();
        finished_.push_back({transfer, result});
        if (finished_.size() >= wanted_) progress_.notify_one();
    }
}

int ThreadBackend::submit(Transfer* const* transfers, unsigned count) {
    {
        const std::lock_guard lock(mutex_);
        queue_.insert(queue_.end(), transfers, transfers + count);
    }
    for (unsigned i = 0; i < count; ++i) work_.notify_one();
    return static_cast<int>(count);
}

unsigned ThreadBackend::reap(Completion* out, unsigned capacity, unsigned least) {
    std::unique_lock lock(mutex_);
    wanted_ = std::max(least, 1U);
    const auto enough = [this] { return woken_ || finished_.size() >= wanted_; };
    if (least == 1) progress_.wait(lock, enough);
    if (least > 1) progress_.wait_for(lock, kBrief, enough);
    woken_ = false;
    const auto count = std::min<std::size_t>(capacity, finished_.size());
    std::copy_n(finished_.begin(), count, out);
    finished_.erase(finished_.begin(), finished_.begin() + static_cast<std::ptrdiff_t>(count));
    return static_cast<unsigned>(count);
}

void ThreadBackend::wake() {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    progress_.notify_one();
}

Backend::Counters ThreadBackend::counters() const {
    Counters counters;
    counters.system_calls = calls_.load(std::memory_order_relaxed);
    return counters;
}

}  // namespace aio
