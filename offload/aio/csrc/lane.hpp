// The queue of one group of I/O threads: segments go in, transfers of one block come out.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "transfer.hpp"

namespace aio {

class Lane {
  public:
    explicit Lane(std::uint64_t block_bytes) : block_bytes_(block_bytes) {}

    // An I/O thread that waits for work; `wake` is called by another thread, at most once a park.
    struct Sleeper {
        std::function<void()> wake;
        bool parked = false;
        bool rung = false;
    };

    void add(Sleeper* sleeper);
    void remove(Sleeper* sleeper);

    void put(Segment segment);
    // Cut the next transfer; false where there is none. What belongs to failed or cancelled
    // requests is dropped on the way.
    bool take(Transfer& transfer);
    // True where there is nothing to do, and the sleeper will be woken when there is.
    bool park(Sleeper& sleeper);
    void unpark(Sleeper& sleeper);

    void close();
    bool closed() const;
    // Wake everyone: there is something else than a segment to look at.
    void ring();

  private:
    void wake_parked();

    const std::uint64_t block_bytes_;
    mutable std::mutex mutex_;
    std::deque<Segment> segments_;
    std::vector<Sleeper*> sleepers_;
    bool closed_ = false;
};

}  // namespace aio
