// Lines that are asked for ahead of where memory is read.
#pragma once
#include "job.hpp"

namespace {

constexpr int64_t kLine = 64;

// What an item's parts take of a thread's time, in a unit of its own: a byte of keys, a byte of
// values, what makes weights of sixteen scores.
struct Costs {
    int key, value, weights;
};

// The lines of items (keys, then values, then the next item's keys), `distance` bytes ahead. They
// are asked for as time passes and not as bytes are read: memory would stand still where a thread
// computes, and what it has to do is all that counts.
class Ahead {
  public:
    Ahead(const OffloadHostAttention& call)
        : kind_(call.prefetch), distance_(call.prefetch_distance) {}

    // An item begins, `bytes` of keys and as many values, which takes `time`. At its end the lines
    // that are asked for lie `distance` into the next one, wherever they lie now.
    void enter(const char* keys, const char* values, int64_t bytes, int64_t time) {
        if (kind_ == OFFLOAD_HOST_PREFETCH_NONE) return;  // a rate of zero
        if (block_ != keys) {
            block_ = at_ = keys;
            left_ = bytes;
        }
        then_ = values;
        then_bytes_ = bytes;
        later_ = nullptr;
        const int64_t asked = bytes - left_;
        if (asked == 0) ask(distance_ / kLine);
        const int64_t wanted = 2 * bytes + distance_ - (bytes - left_);
        rate_ = wanted > 0 && time > 0 ? (wanted / kLine << kFraction) / time : 0;
    }
    // What follows the item's values.
    void follow(const char* keys, int64_t bytes) {
        later_ = keys;
        later_bytes_ = bytes;
    }
    void stop() { rate_ = 0; }

    inline void pass(int64_t time) {
        credit_ += time * rate_;
        const int64_t lines = credit_ >> kFraction;
        credit_ &= (int64_t(1) << kFraction) - 1;
        if (lines > 0) ask(lines);
    }

  private:
    static constexpr int kFraction = 20;

    inline void ask(int64_t lines) {
        if (kind_ != OFFLOAD_HOST_PREFETCH_L2 || left_ < lines * kLine) return ask_slowly(lines);
        for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at_ + i * kLine, 0, 2);
        at_ += lines * kLine;
        left_ -= lines * kLine;
    }
    __attribute__((noinline)) void ask_slowly(int64_t lines) {
        for (; lines > 0; lines--) {
            if (left_ <= 0 && !advance()) return;
            switch (kind_) {
                case OFFLOAD_HOST_PREFETCH_L1:
                    __builtin_prefetch(at_, 0, 3);
                    break;
                case OFFLOAD_HOST_PREFETCH_L2:
                    __builtin_prefetch(at_, 0, 2);
                    break;
                default:
                    __builtin_prefetch(at_, 0, 0);
            }
            at_ += kLine;
            left_ -= kLine;
        }
    }
    bool advance() {
        if (then_ == nullptr) {
            then_ = later_;
            then_bytes_ = later_bytes_;
            later_ = nullptr;
        }
        if (then_ == nullptr) return false;
        block_ = at_ = then_;
        left_ = then_bytes_;
        then_ = nullptr;
        return true;
    }

    int kind_;
    int64_t distance_;
    const char* block_ = nullptr;  // keys or values that lines are asked of
    const char* at_ = nullptr;
    int64_t left_ = 0;
    const char* then_ = nullptr;
    int64_t then_bytes_ = 0;
    const char* later_ = nullptr;
    int64_t later_bytes_ = 0;
    int64_t rate_ = 0;
    int64_t credit_ = 0;
};

}  // namespace
