#include "stream.hpp"

#include <algorithm>
#include <chrono>

namespace aio {

Stream::Stream(Engine& engine, Course course) : engine_(engine), course_(std::move(course)) {
    for (unsigned slot = course_.slots; slot-- > 0;) free_.push_back(slot);
    const std::lock_guard lock(mutex_);
    read_ahead();
}

std::shared_ptr<Request> Stream::next() {
    const std::lock_guard lock(mutex_);
    if (!waiting_ && held_.size() >= course_.kept) {
        free_.push_back(held_.front());
        held_.pop_front();
        read_ahead();
    }
    if (in_flight_.empty()) return nullptr;
    waiting_ = true;
    return in_flight_.front().second;
}

void Stream::take() {
    const std::lock_guard lock(mutex_);
    waiting_ = false;
    if (closed_) return;
    held_.push_back(in_flight_.front().first);
    in_flight_.pop_front();
}

std::uint64_t Stream::place(const Request& request) const {
    return static_cast<std::uint64_t>(request.address - course_.buffer);
}

void Stream::read_ahead() {
    std::uint64_t offset, bytes;
    while (!free_.empty() && cut(offset, bytes)) {
        const unsigned slot = free_.back();
        free_.pop_back();
        char* const address = course_.buffer + slot * course_.chunk + offset % course_.file.grain();
        in_flight_.emplace_back(slot, std::make_shared<Request>(0, false, course_.file, address,
                                                                offset, bytes, nullptr));
        engine_.start(in_flight_.back().second);
    }
}

bool Stream::cut(std::uint64_t& offset, std::uint64_t& bytes) {
    while (range_ < course_.ranges.size()) {
        const auto& [start, length] = course_.ranges[range_];
        if (done_ < length) {
            offset = start + done_;
            bytes = std::min(course_.chunk - offset % course_.chunk, length - done_);
            done_ += bytes;
            return true;
        }
        ++range_;
        done_ = 0;
    }
    return false;
}

void Stream::close() {
    if (abandoned_) return;
    std::deque<std::pair<unsigned, std::shared_ptr<Request>>> last;
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        range_ = course_.ranges.size();
        last.swap(in_flight_);
    }
    for (auto& [slot, request] : last) request->cancel();
    for (auto& [slot, request] : last) {
        while (!request->wait_for(std::chrono::hours(1))) {
        }
    }
}

void Stream::abandon() {
    // Nor may they be destroyed: a thread that is not here may wait for them.
    abandoned_ = true;
    [[maybe_unused]] const auto* const left = new std::deque(std::move(in_flight_));
}

}  // namespace aio
