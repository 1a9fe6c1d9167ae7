#include "scripted.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "threads.hpp"

namespace aio {

Fault ScriptedBackend::next_fault() {
    return step_ < script_.faults.size() ? script_.faults[step_++] : Fault{};
}

int ScriptedBackend::submit(Transfer* const* transfers, unsigned count) {
    if (!held_.empty()) ++counters_.system_calls;
    if (script_.batch > 0) count = std::min(count, script_.batch);
    for (unsigned i = 0; i < count; ++i) {
        const Fault fault = next_fault();
        if (fault.kind == Fault::Kind::refuse) {
            // Like io_submit: those before it are taken, and the refusal is told by the next call.
            if (i > 0) {
                --step_;
                return static_cast<int>(i);
            }
            return static_cast<int>(-fault.value);
        }
        held_.push_back({transfers[i], fault});
    }
    return static_cast<int>(count);
}

unsigned ScriptedBackend::reap(Completion* out, unsigned capacity, unsigned least) {
    if (held_.empty()) {
        std::unique_lock lock(mutex_);
        if (least > 0) woken_changed_.wait(lock, [this] { return woken_; });
        woken_ = false;
        return 0;
    }
    if (script_.shuffle != 0) std::shuffle(held_.begin(), held_.end(), random_);
    // One at a time where the order is shuffled, so that newer transfers overtake older ones.
    const auto count = std::min<std::size_t>(script_.shuffle != 0 ? 1 : held_.size(), capacity);
    for (std::size_t i = 0; i < count; ++i) {
        const auto [transfer, fault] = held_[i];
        std::int64_t result = -fault.value;
        if (fault.kind != Fault::Kind::error) result = move_now(*transfer);
        if (fault.kind == Fault::Kind::cut) result = std::min(result, fault.value);
        out[i] = {transfer, result};
    }
    held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(count));
    return static_cast<unsigned>(count);
}

void ScriptedBackend::wake() {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    woken_changed_.notify_one();
}

}  // namespace aio
