// Lines that are asked for ahead of where memory is read.
#pragma once
#include "job.hpp"

namespace {

using offload_host::first_query;
using offload_host::Item;
using offload_host::Job;

constexpr int64_t kLine = 64;

template <int Prefetch>
__attribute__((always_inline)) inline void ask_for(const char* line) {
    if constexpr (Prefetch == OFFLOAD_HOST_PREFETCH_L1) __builtin_prefetch(line, 0, 3);
    if constexpr (Prefetch == OFFLOAD_HOST_PREFETCH_L2) __builtin_prefetch(line, 0, 2);
    if constexpr (Prefetch == OFFLOAD_HOST_PREFETCH_NTA) __builtin_prefetch(line, 0, 0);
}

// What an item's parts take of a thread's time, in a unit of its own: a byte of keys, a byte of
// values, what makes weights of sixteen scores.
struct Costs {
    int key, value, weights;
};

// The lines of items, each one's in the order in which they are read, ahead of that. They are asked
// for as time passes and not as bytes are read: memory would stand still where a thread computes,
// and what it has to do is all that counts.
class Ahead {
  public:
    Ahead(const Job& job)
        : job_(job), kind_(job.call.prefetch), distance_(job.call.prefetch_distance) {}

    // An item begins, which takes `time`, of which its keys take `key_time`. They are read faster
    // than memory gives lines, values more slowly: lines are asked for so far ahead at an item's
    // end that `distance` of it is left when the next one's keys are read.
    void enter(const Item& item, int64_t key_time, int64_t time) {
        if (kind_ == OFFLOAD_HOST_PREFETCH_NONE) return;  // a rate of zero
        const bool first = !followed_;
        if (first) {
            list(item, lines_);
            go(0);
        } else {
            for (int i = 0; i < kKinds; i++) lines_[i] = lines_[kKinds + i];
            now_ -= kKinds;
            if (now_ < 0) go(0);
            followed_ = false;
        }
        int64_t wanted = distance_, bytes = lines_[kKeys].bytes;
        if (time > 2 * key_time) wanted += bytes - int64_t(double(2 * bytes) * key_time / time);
        if (first)
            for (int64_t i = 0; i < distance_; i += kGroup * kLine) ask();
        for (int i = 0; i < kKinds; i++)
            if (i >= now_) wanted += i == now_ ? left_ : lines_[i].bytes;
        rate_ = time > 0 ? (wanted << kFraction) / (kGroup * kLine * time) : 0;
    }
    // What comes after the item.
    void follow(const Item& next) {
        list(next, lines_ + kKinds);
        followed_ = true;
    }
    void stop() { rate_ = 0; }

    inline void pass(int64_t time) {
        credit_ += (time * rate_ + (int64_t(1) << (kFraction - 5))) >> (kFraction - 4);
        for (; credit_ >= 16; credit_ -= 16) ask();
    }

  private:
    static constexpr int kFraction = 28;
    static constexpr int kGroup = 4;  // lines that are asked for together
    static constexpr int kKeys = 1, kKinds = 5;
    struct Lines {
        const char* at;
        int64_t bytes;
    };

    // Queries, keys, scales, values.
    void list(const Item& item, Lines* lines) const {
        const OffloadHostAttention& c = job_.call;
        const auto at = [](const void* p) { return static_cast<const char*>(p); };
        const int64_t columns = item.end - item.begin;
        const int64_t bytes = columns * c.head_dim * offload_host::element_bytes(c.cache_dtype);
        const int64_t scales = item.key_scales == nullptr || c.read_only ? 0 : 4 * columns;
        const int64_t element = offload_host::element_bytes(c.query_dtype);
        const bool together = c.query_head_stride == c.head_dim && !c.read_only;
        const int64_t queries = together ? job_.group * c.head_dim * element : 0;
        lines[0] = {at(c.query) + first_query(job_, item) * element, queries};
        lines[kKeys] = {item.keys, bytes};
        lines[2] = {at(item.key_scales), scales};
        lines[3] = {at(item.value_scales), scales};
        lines[4] = {item.values, bytes};
    }
    void go(int i) {
        now_ = i;
        at_ = lines_[i].at;
        left_ = lines_[i].bytes;
    }
    inline void ask() {
        if (kind_ != OFFLOAD_HOST_PREFETCH_L2 || left_ < kGroup * kLine) return ask_slowly();
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; i++) ask_for<OFFLOAD_HOST_PREFETCH_L2>(at_ + i * kLine);
        at_ += kGroup * kLine;
        left_ -= kGroup * kLine;
    }
    __attribute__((noinline)) void ask_slowly() {
        for (int i = 0; i < kGroup; i++) {
            while (left_ <= 0) {
                if (now_ + 1 == (followed_ ? 2 * kKinds : kKinds)) return;
                go(now_ + 1);
            }
            switch (kind_) {
                case OFFLOAD_HOST_PREFETCH_L1:
                    ask_for<OFFLOAD_HOST_PREFETCH_L1>(at_);
                    break;
                case OFFLOAD_HOST_PREFETCH_L2:
                    ask_for<OFFLOAD_HOST_PREFETCH_L2>(at_);
                    break;
                default:
                    ask_for<OFFLOAD_HOST_PREFETCH_NTA>(at_);
            }
            at_ += kLine;
            left_ -= kLine;
        }
    }

    const Job& job_;
    const int kind_;
    const int64_t distance_;
    Lines lines_[2 * kKinds] = {};  // of an item, and of the next one
    bool followed_ = false;         // which is known
    int now_ = 0;                   // lines of these are asked for
    const char* at_ = nullptr;
    int64_t left_ = 0;
    int64_t rate_ = 0;
    int64_t credit_ = 0;
};

}  // namespace
