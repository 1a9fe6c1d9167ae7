// Ranges of a file, read in order through a buffer smaller than they are.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace aio {

// Where the pieces of a stream come from and go to.
struct Course {
    File file;
    char* buffer = nullptr;
    std::uint64_t chunk = 0;  // bytes of a slot; a multiple of the file's grain
    unsigned slots = 0;
    unsigned kept = 1;  // pieces that the caller may look at, at the same time
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;  // offset and bytes
};

// Cuts the ranges at multiples of a chunk and reads ahead into every slot that is free. A piece
// lies in its slot as its first byte does in its page, so that O_DIRECT can take it.
class Stream {
  public:
    Stream(Engine& engine, Course course);
    ~Stream() { close(); }

    // Give back the oldest piece, where the caller has as many as he may, read on into its slot,
    // and return the request that brings the next piece; null at the end. The same one until
    // take() says that it has been looked at.
    std::shared_ptr<Request> next();
    void take();
    // Where a request's bytes lie, from the buffer's start.
    std::uint64_t place(const Request& request) const;

    // Begin no more, and return when nothing is written into the buffer any more.
    void close();
    // In a forked child: what is in flight is the parent's.
    void abandon();

  private:
    void read_ahead();
    bool cut(std::uint64_t& offset, std::uint64_t& bytes);

    Engine& engine_;
    const Course course_;
    std::mutex mutex_;
    std::size_t range_ = 0;   // of the next piece
    std::uint64_t done_ = 0;  // bytes of that range that have been begun
    std::vector<unsigned> free_;
    std::deque<std::pair<unsigned, std::shared_ptr<Request>>> in_flight_;  // slot, request
    std::deque<unsigned> held_;
    bool waiting_ = false;  // next() has returned what take() has not been called for
    bool closed_ = false;
    bool abandoned_ = false;
};

}  // namespace aio
