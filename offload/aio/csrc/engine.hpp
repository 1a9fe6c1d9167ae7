// A backend at work: lanes, the I/O threads that serve them, and the requests that have ended.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lane.hpp"
#include "scripted.hpp"
#include "worker.hpp"

namespace aio {

class Engine {
  public:
    // `name`: uring-fixed, uring, libaio, threads or scripted. With `cache_threads`, transfers
    // through the page cache go to threads: native AIO would block in submitting them, and io_uring
    // would copy them all in one thread. Throws std::system_error where the backend cannot be.
    Engine(const std::string& name, const Shape& shape, bool cache_threads, Script script);
    ~Engine();

    std::shared_ptr<Request> submit(std::uint64_t token, bool write, const File& file,
                                    char* address, std::uint64_t offset, std::uint64_t bytes);
    // The same for a request whose end its owner sees by itself.
    void start(const std::shared_ptr<Request>& request);
    std::vector<std::uint64_t> collect_ended() { return ended_->collect(); }

    void drop_file(std::uint64_t serial);
    void drop_region(std::uint64_t serial);
    Backend::Counters counters() const;

    // Every request has ended, or is to end before this returns.
    void close();
    // In a forked child, where the threads are not.
    void abandon();

  private:
    void put(Segment segment);
    // False where the process may have no more threads.
    bool start_cache_threads();

    const std::string name_;
    const Shape shape_;
    const bool cache_threads_;
    const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();
    Lane lane_, cache_lane_;
    // The cache's lane is started by the first transfer that needs it.
    mutable std::mutex workers_mutex_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::unique_ptr<Worker> cache_worker_;
    bool abandoned_ = false;
};

}  // namespace aio
