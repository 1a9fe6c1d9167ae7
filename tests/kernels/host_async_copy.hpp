// Stands for async_copy.cuh where kernels run on the host. Copies are done either when they are
// asked for, which shows a stage that is filled while it is read, or when they are waited for,
// which shows one that is read before it is full; the environment variable HOST_COPIES=late picks
// the second. HOST_WITHOUT_BULK_COPIES: as on GPUs before sm_90.
#pragma once
#include <stdlib.h>

#include <deque>
#include <map>

#include "common.cuh"

#ifndef HOST_WITHOUT_BULK_COPIES
#define OFFLOAD_HAS_BULK_COPY 1
#endif

namespace offload {

struct HostCopy {
    unsigned char* to;
    const void* from;
    uint32_t bytes;
    void run() const {
        if (from)
            memcpy(to, from, bytes);
        else
            memset(to, 0, bytes);
    }
};
// A phase is over when all have arrived and all bytes that they expect have.
struct HostBarrier {
    std::vector<HostCopy> copies, landed;  // of this phase; of those before, that nobody waited for
    uint32_t expected = 0, arrived = 0;
    int phase = -1;  // -1: not initialised
    int arrivals = 1, came = 0;

    void look() {
        if (came < arrivals) return;
        host_cuda::require(came == arrivals && arrived <= expected, "more than a barrier expects");
        if (arrived < expected) return;
        landed.insert(landed.end(), copies.begin(), copies.end());
        copies.clear();
        expected = arrived = came = 0;
        phase += 1;
    }
};
inline std::deque<std::vector<HostCopy>> host_groups[8192];
inline std::map<uint32_t, HostBarrier> host_barriers;

// A block begins with nothing under way, and the one before must have left nothing.
inline const bool host_copies_are_watched = [] {
    host_cuda::at_block = [] {
        for (auto& groups : host_groups) {
            for (const auto& group : groups)
                host_cuda::require(group.empty(), "copies that nobody waited for");
            groups.clear();
        }
        for (const auto& [at, barrier] : host_barriers)
            host_cuda::require(
                barrier.copies.empty() && barrier.landed.empty() && !barrier.expected,
                "bulk copies that nobody waited for");
        host_barriers.clear();
    };
    return true;
}();

inline bool copies_are_late() {
    const char* word = getenv("HOST_COPIES");
    return word && !strcmp(word, "late");
}

inline uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - host_cuda::cluster_memory);
}

inline uint64_t evict_first_policy() { return 1; }

inline HostCopy host_copy(uint32_t to, const void* from, uint32_t bytes) {
    host_cuda::require(
        to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0,
        "a copy that is not aligned");
    host_cuda::require(to % host_cuda::kSharedOfBlock + bytes <= host_cuda::shared_bytes,
                       "a copy beyond shared memory");
    return {host_cuda::cluster_memory + to, from, bytes};
}

// From nowhere: zeros.
inline void copy_async16(uint32_t to, const void* from, uint64_t) {
    auto& groups = host_groups[host_cuda::current];
    if (groups.empty()) groups.emplace_back();
    const HostCopy copy = host_copy(to, from, 16);
    if (copies_are_late())
        groups.back().push_back(copy);
    else
        copy.run();
}

inline void copy_async16_if(uint32_t wanted, uint32_t to, const void* from, uint64_t policy) {
    if (wanted) copy_async16(to, from, policy);
}

inline void copy_async16_or_zero(uint32_t to, const void* from, bool there, uint64_t = 0) {
    copy_async16(to, there ? from : nullptr, 0);
}

inline void commit_copies() {
    auto& groups = host_groups[host_cuda::current];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();  // the last one is open
}

inline void wait_for_copies(int pending) {
    auto& groups = host_groups[host_cuda::current];
    while (static_cast<int>(groups.size()) > pending + 1) {
        for (const HostCopy& copy : groups.front()) copy.run();
        groups.pop_front();
    }
}

inline void barrier_init(uint32_t barrier, int arrivals) {
    host_cuda::require(arrivals > 0 && barrier % 8 == 0, "a barrier of another kind");
    HostBarrier& b = host_barriers[barrier] = {};
    b.phase = 0;
    b.arrivals = arrivals;
}

inline void fence_before_bulk_copies() {}
inline void fence_new_barriers() {}

inline HostBarrier& barrier_at(uint32_t barrier) {
    HostBarrier& b = host_barriers[barrier];
    host_cuda::require(b.phase >= 0, "a barrier that was not initialised");
    return b;
}

inline void barrier_arrive(uint32_t barrier) {
    HostBarrier& b = barrier_at(barrier);
    ++b.came;
    b.look();
}

inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    HostBarrier& b = barrier_at(barrier);
    host_cuda::require(b.came < b.arrivals, "a barrier that is not free");
    b.expected += bytes;
    barrier_arrive(barrier);
}

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                      uint64_t = 0) {
    HostBarrier& b = barrier_at(barrier);
    const HostCopy copy = host_copy(to, from, bytes);
    host_cuda::require(bytes > 0, "an empty copy");
    if (copies_are_late())
        b.copies.push_back(copy);
    else
        copy.run();
    b.arrived += bytes;
    b.look();
}

// Not the first one, which no kernel may rely on.
inline bool elect_one() { return threadIdx.x % 32 == 5; }

inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    HostBarrier& b = barrier_at(barrier);
    // Phase p is over when p + 1 has begun; waiting for the parity of the one before returns at
    // once.
    while (b.phase % 2 == static_cast<int>(parity)) host_cuda::change_over();
    for (const HostCopy& copy : b.landed) copy.run();
    b.landed.clear();
}

}  // namespace offload
