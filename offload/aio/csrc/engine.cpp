#include "engine.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "native_aio.hpp"
#include "threads.hpp"
#include "uring.hpp"

namespace aio {
namespace {

constexpr unsigned kMostThreads = 64;
constexpr unsigned kCacheThreads = 16;

std::unique_ptr<Backend> make_backend(const std::string& name, const Shape& shape, Script script) {
    const unsigned depth = shape.queue_depth;
    if (name == "uring-fixed")
        return std::make_unique<UringBackend>(depth, true, shape.single_submit);
    if (name == "uring") return std::make_unique<UringBackend>(depth, false, shape.single_submit);
    if (name == "libaio") return std::make_unique<NativeAioBackend>(depth);
    if (name == "threads") return std::make_unique<ThreadBackend>(std::min(depth, kMostThreads));
    if (name == "scripted") return std::make_unique<ScriptedBackend>(std::move(script));
    throw std::system_error(EINVAL, std::generic_category(), "no backend is called " + name);
}

}  // namespace

Engine::Engine(const std::string& name, const Shape& shape, bool cache_threads, Script script)
    : name_(name),
      shape_(shape),
      cache_threads_(cache_threads),
      lane_(shape.block_bytes),
      cache_lane_(shape.block_bytes) {
    try {
        for (unsigned i = 0; i < shape.workers; ++i) {
            workers_.push_back(std::make_unique<Worker>(
                lane_, shape, [this, script] { return make_backend(name_, shape_, script); },
                [this](Segment segment) { put(std::move(segment)); }));
        }
    } catch (...) {
        close();
        throw;
    }
}

Engine::~Engine() { close(); }

std::shared_ptr<Request> Engine::submit(std::uint64_t token, bool write, const File& file,
                                        char* address, std::uint64_t offset, std::uint64_t bytes) {
    auto request = std::make_shared<Request>(token, write, file, address, offset, bytes, ended_);
    start(request);
    return request;
}

void Engine::start(const std::shared_ptr<Request>& request) {
    for (Segment& segment : plan(request)) put(std::move(segment));
}

void Engine::put(Segment segment) {
    const bool for_threads = segment.path == Path::buffered && cache_threads_;
    // Without a thread the backend does it, more slowly.
    Lane& lane = for_threads && start_cache_threads() ? cache_lane_ : lane_;
    lane.put(std::move(segment));
}

bool Engine::start_cache_threads() {
    const std::lock_guard lock(workers_mutex_);
    if (cache_worker_) return true;
    Shape shape = shape_;
    shape.queue_depth = std::min(shape.queue_depth, kCacheThreads);
    shape.workers = 1;
    try {
        cache_worker_ = std::make_unique<Worker>(
            cache_lane_, shape,
            [shape] { return std::make_unique<ThreadBackend>(shape.queue_depth); },
            [this](Segment segment) { put(std::move(segment)); });
    } catch (const std::system_error&) {
        return false;
    }
    return true;
}

void Engine::drop_file(std::uint64_t serial) {
    const std::lock_guard lock(workers_mutex_);
    for (auto& worker : workers_) worker->drop_file(serial);
    lane_.ring();
}

void Engine::drop_region(std::uint64_t serial) {
    const std::lock_guard lock(workers_mutex_);
    for (auto& worker : workers_) worker->drop_region(serial);
    lane_.ring();
}

Backend::Counters Engine::counters() const {
    Backend::Counters sum;
    const auto add = [&sum](const Worker& worker) {
        const Backend::Counters one = worker.counters();
        sum.system_calls += one.system_calls;
        sum.fixed_buffers += one.fixed_buffers;
        sum.fixed_files += one.fixed_files;
        if (sum.register_error == 0) sum.register_error = one.register_error;
    };
    const std::lock_guard lock(workers_mutex_);
    for (const auto& worker : workers_) add(*worker);
    if (cache_worker_) add(*cache_worker_);
    return sum;
}

void Engine::close() {
    if (abandoned_) return;
    std::vector<std::unique_ptr<Worker>> workers;
    std::unique_ptr<Worker> cache_worker;
    lane_.close();
    {
        const std::lock_guard lock(workers_mutex_);
        workers.swap(workers_);
    }
    // Joined without the lock: these threads may still hand transfers to the cache's.
    workers.clear();
    cache_lane_.close();
    {
        const std::lock_guard lock(workers_mutex_);
        cache_worker.swap(cache_worker_);
    }
}

void Engine::abandon() {
    // Locks may be held by threads that the child does not have, and threads that do not exist
    // cannot be joined: close the descriptors, and leave the rest where it lies.
    abandoned_ = true;
    for (auto& worker : workers_) worker.release()->abandon();
    workers_.clear();
    [[maybe_unused]] const Worker* const left = cache_worker_.release();
}

}  // namespace aio
