#include "lane.hpp"

#include <algorithm>
#include <utility>

namespace aio {
namespace {

// More than this at once gains nothing through the page cache, and keeps a thread from sharing.
constexpr std::uint64_t kBufferedBytes = 8 << 20;

std::uint64_t cut(const Segment& segment, std::uint64_t block_bytes) {
    std::uint64_t bytes = block_bytes;
    if (segment.path == Path::direct) {
        const std::uint64_t grain = segment.request->file.grain();
        bytes = std::max(bytes / grain * grain, grain);
    } else if (segment.path == Path::buffered) {
        bytes = std::min(bytes, kBufferedBytes);
    }
    return std::min(bytes, segment.stop - segment.at);
}

}  // namespace

void Lane::add(Sleeper* sleeper) {
    const std::lock_guard lock(mutex_);
    sleepers_.push_back(sleeper);
}

void Lane::remove(Sleeper* sleeper) {
    const std::lock_guard lock(mutex_);
    sleepers_.erase(std::remove(sleepers_.begin(), sleepers_.end(), sleeper), sleepers_.end());
}

void Lane::put(Segment segment) {
    const std::lock_guard lock(mutex_);
    segments_.push_back(std::move(segment));
    wake_parked();
}

bool Lane::take(Transfer& transfer) {
    for (;;) {
        std::shared_ptr<Request> dropped;
        std::uint64_t bytes = 0;
        {
            const std::lock_guard lock(mutex_);
            if (segments_.empty()) return false;
            Segment& segment = segments_.front();
            if (!segment.request->failed()) {
                transfer = Transfer{};
                transfer.request = segment.request;
                transfer.path = segment.path;
                transfer.at = segment.at;
                transfer.bytes = cut(segment, block_bytes_);
                segment.at += transfer.bytes;
                if (segment.at == segment.stop) segments_.pop_front();
                return true;
            }
            dropped = std::move(segment.request);
            bytes = segment.stop - segment.at;
            segments_.pop_front();
        }
        dropped->settle(bytes, false);
    }
}

bool Lane::park(Sleeper& sleeper) {
    const std::lock_guard lock(mutex_);
    if (!segments_.empty() || closed_ || std::exchange(sleeper.rung, false)) return false;
    sleeper.parked = true;
    return true;
}

void Lane::unpark(Sleeper& sleeper) {
    const std::lock_guard lock(mutex_);
    sleeper.parked = false;
}

void Lane::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    wake_parked();
}

bool Lane::closed() const {
    const std::lock_guard lock(mutex_);
    return closed_ && segments_.empty();
}

void Lane::ring() {
    const std::lock_guard lock(mutex_);
    for (Sleeper* sleeper : sleepers_) sleeper->rung = true;
    wake_parked();
}

void Lane::wake_parked() {
    for (Sleeper* sleeper : sleepers_) {
        if (std::exchange(sleeper->parked, false)) sleeper->wake();
    }
}

}  // namespace aio
