#include "request.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace aio {

Request::Request(std::uint64_t token, bool write, const File& file, char* address,
                 std::uint64_t offset, std::uint64_t bytes, std::shared_ptr<Ended> ended)
    : write(write),
      file(file),
      address(address),
      offset(offset),
      bytes(bytes),
      token_(token),
      ended_list_(std::move(ended)),
      unsettled_(bytes) {
    outcome_.offset = offset;
    if (bytes == 0) end();
}

void Request::settle(std::uint64_t count, bool moved) {
    bool last;
    {
        const std::lock_guard lock(mutex_);
        unsettled_ -= count;
        if (moved) outcome_.transferred += count;
        last = unsettled_ == 0;
    }
    if (last) end();
}

void Request::end() {
    // The owner's list first: who waits for the request finds its token there.
    if (ended_list_) ended_list_->add(token_);
    const std::lock_guard lock(mutex_);
    ended_ = true;
    // Under the lock: once a waiter sees `ended_`, this object may be gone.
    changed_.notify_all();
}

void Request::fail(Outcome::Kind kind, int error, std::uint64_t at) {
    const std::lock_guard lock(mutex_);
    if (outcome_.kind != Outcome::Kind::ok || unsettled_ == 0) return;
    outcome_.kind = kind;
    outcome_.error = error;
    outcome_.offset = at;
}

bool Request::failed() const {
    const std::lock_guard lock(mutex_);
    return outcome_.kind != Outcome::Kind::ok;
}

bool Request::cancel() {
    const std::lock_guard lock(mutex_);
    if (unsettled_ == 0) return false;
    if (outcome_.kind == Outcome::Kind::ok) {
        outcome_.kind = Outcome::Kind::cancelled;
        outcome_.error = ECANCELED;
    }
    return outcome_.kind == Outcome::Kind::cancelled;
}

bool Request::done() const {
    const std::lock_guard lock(mutex_);
    return ended_;
}

bool Request::wait_for(std::chrono::nanoseconds timeout) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return ended_; });
}

Outcome Request::outcome() const {
    const std::lock_guard lock(mutex_);
    return outcome_;
}

// Direct and buffered transfers never share a page: the kernel would read the page into its
// cache, and write the stale copy back over what went past it.
std::vector<Segment> plan(const std::shared_ptr<Request>& request) {
    const File& file = request->file;
    const std::uint64_t stop = request->bytes;
    if (stop == 0) return {};
    if (file.strict) return {{request, Path::direct, 0, stop}};

    const std::uint64_t grain = file.grain();
    const std::uint64_t first = (grain - request->offset % grain) % grain;
    const std::uint64_t end = (request->offset + stop) / grain * grain;
    const bool has_middle = end > request->offset + first;
    const bool skewed =
        (reinterpret_cast<std::uintptr_t>(request->address) + first) % file.mem_align != 0;
    if (file.direct < 0 || skewed) return {{request, Path::buffered, 0, stop}};

    // A write's ends go through the page cache: reading, changing and writing back whole pages
    // would lose a neighbour's bytes when two requests meet inside one page.
    const Path ends = request->write ? Path::buffered : Path::bounce;
    std::vector<Segment> parts;
    const auto add = [&](Path path, std::uint64_t from, std::uint64_t to) {
        if (from < to) parts.push_back({request, path, from, to});
    };
    if (has_middle) {
        const std::uint64_t last = end - request->offset;
        add(ends, 0, first);
        add(Path::direct, first, last);
        add(ends, last, stop);
    } else {
        // Less than one aligned page, or parts of two neighbouring pages.
        const std::uint64_t cut = first == 0 ? stop : std::min(first, stop);
        add(ends, 0, cut);
        add(ends, cut, stop);
    }
    return parts;
}

}  // namespace aio
