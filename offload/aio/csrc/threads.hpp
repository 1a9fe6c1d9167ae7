// Threads that call preadv and pwritev: works with every file system and every kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.hpp"

namespace aio {

class ThreadBackend final : public Backend {
  public:
    explicit ThreadBackend(unsigned threads);
    ~ThreadBackend() override;

    int submit(Transfer* const* transfers, unsigned count) override;
    unsigned reap(Completion* out, unsigned capacity, unsigned least) override;
    void wake() override;
    Counters counters() const override;

  private:
    void serve();

    std::mutex mutex_;
    std::condition_variable work_, progress_;
    std::deque<Transfer*> queue_;
    std::vector<Completion> finished_;
    bool closed_ = false;
    bool woken_ = false;
    std::size_t wanted_ = 1;  // how many completions end the wait
    std::atomic<std::uint64_t> calls_{0};
    std::vector<std::thread> threads_;
};

// One transfer by one system call; returns bytes, or -errno.
std::int64_t move_now(const Transfer& transfer);

}  // namespace aio
