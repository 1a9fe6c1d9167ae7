// One read or write: how it is cut into segments, and the account of its bytes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace aio {

// Direct and page-cache transfers of one file never share a page (see plan()).
constexpr std::uint64_t kPage = 4096;

// How the bytes of a transfer move.
enum class Path : std::uint8_t {
    direct,    // O_DIRECT between the drive and the caller's memory
    buffered,  // through the page cache
    bounce,    // O_DIRECT into a page of our own, then copied: the ragged ends of a read
};

// An open file; whoever submits a request keeps the descriptors open until it has ended.
struct File {
    std::uint64_t serial = 0;  // never used twice, unlike a descriptor's number
    int direct = -1;           // -1 where O_DIRECT is not in use
    int buffered = -1;
    std::uint64_t mem_align = 1;
    std::uint64_t offset_align = 1;
    bool strict = false;  // the caller promised alignment: no other way than O_DIRECT

    std::uint64_t grain() const { return offset_align > kPage ? offset_align : kPage; }
};

// What became of a request.
struct Outcome {
    enum class Kind : std::uint8_t { ok, error, ended_short, cancelled };
    Kind kind = Kind::ok;
    int error = 0;             // errno
    std::uint64_t offset = 0;  // in the file: where it failed
    std::uint64_t transferred = 0;
};

// Requests that have ended, for their owner to collect.
class Ended {
  public:
    void add(std::uint64_t token) {
        const std::lock_guard lock(mutex_);
        tokens_.push_back(token);
    }
    std::vector<std::uint64_t> collect() {
        const std::lock_guard lock(mutex_);
        return std::exchange(tokens_, {});
    }

  private:
    std::mutex mutex_;
    std::vector<std::uint64_t> tokens_;
};

class Request {
  public:
    // `ended`: where `token` is put at the end, if anywhere.
    Request(std::uint64_t token, bool write, const File& file, char* address, std::uint64_t offset,
            std::uint64_t bytes, std::shared_ptr<Ended> ended);

    const bool write;
    const File file;
    char* const address;
    const std::uint64_t offset;
    const std::uint64_t bytes;

    // Account for bytes that have moved, or never will; the last ones end the request.
    void settle(std::uint64_t count, bool moved);
    // Record the first failure; what is in flight still runs to its end.
    void fail(Outcome::Kind kind, int error, std::uint64_t at);
    // Whether what has not been submitted should be dropped.
    bool failed() const;
    // False where the request has ended already, or has failed by itself.
    bool cancel();

    bool done() const;
    bool wait_for(std::chrono::nanoseconds timeout) const;
    Outcome outcome() const;

  private:
    void end();

    const std::uint64_t token_;
    const std::shared_ptr<Ended> ended_list_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::uint64_t unsettled_;
    Outcome outcome_;
    bool ended_ = false;
};

// Bytes [at, stop) of a request that move the same way, not yet cut into transfers.
struct Segment {
    std::shared_ptr<Request> request;
    Path path;
    std::uint64_t at;
    std::uint64_t stop;
};

std::vector<Segment> plan(const std::shared_ptr<Request>& request);

}  // namespace aio
