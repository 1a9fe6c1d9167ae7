// One I/O thread: keeps its backend's queue full from a lane, and settles what completes.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "lane.hpp"
#include "mapped.hpp"

namespace aio {

struct Shape {
    std::uint64_t block_bytes = 8 << 20;
    unsigned queue_depth = 16;  // of each worker
    unsigned workers = 1;
    bool single_submit = false;
    bool overlap_events = true;
};

class Worker {
  public:
    // `make` runs in the new thread, since io_uring serves best the thread that made the ring.
    // `reroute` takes what O_DIRECT refused. Throws what `make` throws.
    Worker(Lane& lane, const Shape& shape, std::function<std::unique_ptr<Backend>()> make,
           std::function<void(Segment)> reroute);
    ~Worker();  // when the lane is closed and empty

    void drop_file(std::uint64_t serial);
    void drop_region(std::uint64_t serial);
    void abandon();
    Backend::Counters counters() const;

  private:
    void run();
    void take_mail();
    void publish();
    void fill();
    void submit();
    void finish(const Completion& completion);
    // How many completions to sleep for.
    unsigned several() const;
    void give_page(Transfer& transfer, std::size_t slot);

    Lane& lane_;
    const Shape shape_;
    const std::function<void(Segment)> reroute_;
    Lane::Sleeper sleeper_;
    std::unique_ptr<Backend> backend_;

    std::vector<Transfer> slots_;     // never grows: transfers stay where they are
    std::vector<Transfer*> free_;     // slots without a transfer
    std::vector<Transfer*> ready_;    // to be submitted, in order
    std::vector<Transfer*> delayed_;  // to be submitted after a pause
    std::vector<Mapped> pages_;       // for bounces, by slot
    unsigned in_flight_ = 0;
    const unsigned several_;  // completions that are waited for together
    bool rare_ = false;       // that was in vain: they come one by one
    bool draining_ = false;   // without overlap: a batch was submitted, wait for all of it

    mutable std::mutex mail_mutex_;
    std::vector<std::uint64_t> dropped_files_, dropped_regions_;
    Backend::Counters published_;

    std::thread thread_;
};

}  // namespace aio
