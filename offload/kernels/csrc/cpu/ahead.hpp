// What is asked for ahead of where memory is read.
#pragma once
#include "job.hpp"

namespace {

// What lies `distance` bytes ahead in the order of reading: within a block, then from the next on.
class Ahead {
  public:
    Ahead(const OffloadHostAttention& call)
        : kind_(call.prefetch < 0 ? OFFLOAD_HOST_PREFETCH_L1 : call.prefetch),
          distance_(call.prefetch_distance > 0 ? call.prefetch_distance : 2048) {}

    void stop() { kind_ = OFFLOAD_HOST_PREFETCH_NONE; }

    int64_t distance() const { return kind_ == OFFLOAD_HOST_PREFETCH_NONE ? 0 : distance_; }

    void enter(const char* end, const char* next) {
        end_ = end;
        next_ = next;
    }

    // For `bytes` that are read now at `here`.
    inline void touch(const void* here, int64_t bytes) const {
        if (kind_ == OFFLOAD_HOST_PREFETCH_NONE) return;
        const char* p = static_cast<const char*>(here) + distance_;
        if (p >= end_) {
            if (next_ == nullptr) return;
            p = next_ + (p - end_);
        }
        if (kind_ == OFFLOAD_HOST_PREFETCH_L1)
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
        else if (kind_ == OFFLOAD_HOST_PREFETCH_L2)
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
        else
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 0);
    }

  private:
    int kind_;
    int64_t distance_;
    const char* end_ = nullptr;
    const char* next_ = nullptr;
};

}  // namespace
