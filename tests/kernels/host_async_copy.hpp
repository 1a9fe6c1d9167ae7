// Stands for async_copy.cuh where kernels run on the host. Copies are done either when they are
// asked for, which shows a stage that is filled while it is read, or when they are waited for,
// which shows one that is read before it is full; the environment variable HOST_COPIES=late picks
// the second.
#pragma once
#include <stdlib.h>

#include <deque>
#include <map>

#include "common.cuh"

#define OFFLOAD_HAS_BULK_COPY 1

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
struct HostBarrier {
    std::vector<HostCopy> copies;
    uint32_t expected = 0, arrived = 0;
    int phase = -1;  // -1: not initialised
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
            host_cuda::require(barrier.copies.empty() && !barrier.expected,
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
    host_cuda::require(arrivals == 1 && barrier % 8 == 0, "a barrier of another kind");
    host_barriers[barrier] = {{}, 0, 0, 0};
}

inline void fence_before_bulk_copies() {}

inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    HostBarrier& b = host_barriers[barrier];
    host_cuda::require(b.phase >= 0 && b.expected == 0, "a barrier that is not free");
    b.expected = bytes;
}

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                      uint64_t = 0) {
    HostBarrier& b = host_barriers[barrier];
    const HostCopy copy = host_copy(to, from, bytes);
    host_cuda::require(bytes > 0, "an empty copy");
    b.arrived += bytes;
    host_cuda::require(b.arrived <= b.expected, "more bytes than expected");
    if (copies_are_late())
        b.copies.push_back(copy);
    else
        copy.run();
    if (b.arrived == b.expected) b.phase += 1;
}

// Not the first one, which no kernel may rely on.
inline bool elect_one() { return threadIdx.x % 32 == 5; }

inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    HostBarrier& b = host_barriers[barrier];
    host_cuda::require(b.phase >= 0, "a barrier that was not initialised");
    // Phase p is over when p + 1 has begun; waiting for the parity of the one before returns at
    // once.
    while (b.phase % 2 == static_cast<int>(parity)) host_cuda::change_over();
    for (const HostCopy& copy : b.copies) copy.run();
    b.copies.clear();
    b.expected = b.arrived = 0;
}

}  // namespace offload
