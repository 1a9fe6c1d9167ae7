// Copies from global to shared memory that run in the background: 16 bytes a thread (cp.async,
// sm_80), or a whole row piece a thread (cp.async.bulk, sm_90), which mbarriers announce.
#pragma once
#include "common.cuh"

namespace offload {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// What is read once should leave L2 first: activations and the KV cache stay.
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_async16(uint32_t to, const void* from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "l"(policy)
                 : "memory");
}

// The same where `wanted` is not 0, without a branch.
__device__ __forceinline__ void copy_async16_if(uint32_t wanted, uint32_t to, const void* from,
                                                uint64_t policy) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n"
        "}" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "l"(policy), "r"(wanted)
        : "memory");
}

// The same, or zeros without reading.
__device__ __forceinline__ void copy_async16_or_zero(uint32_t to, const void* from, bool there,
                                                     uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0), "l"(policy)
                 : "memory");
}

// Of what other blocks read too, and L2 should keep.
__device__ __forceinline__ void copy_async16_or_zero(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most `pending` (at most 7) of this thread's latest groups are still under way.
__device__ __forceinline__ void wait_for_copies(int pending) {
    // Not a switch: its jump table is a load.
    if (pending >= 4) {
        if (pending == 4)
            asm volatile("cp.async.wait_group 4;" ::: "memory");
        else if (pending == 5)
            asm volatile("cp.async.wait_group 5;" ::: "memory");
        else if (pending == 6)
            asm volatile("cp.async.wait_group 6;" ::: "memory");
        else
            asm volatile("cp.async.wait_group 7;" ::: "memory");
    } else if (pending == 3) {
        asm volatile("cp.async.wait_group 3;" ::: "memory");
    } else if (pending == 2) {
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else if (pending == 1) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define OFFLOAD_HAS_BULK_COPY 1

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// What this thread did to shared memory comes before later bulk copies there.
__device__ __forceinline__ void fence_before_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival, and `bytes` of copies that must have landed before the phase is over.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Of what other blocks read too, and L2 should keep.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}

// Barriers that were initialised are seen by other blocks of the cluster once they have met.
__device__ __forceinline__ void fence_new_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// True in one lane of a whole warp. The compiler knows that it is one: behind a comparison of
// lanes it puts a loop around each bulk copy, whose operands are of the warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t one = 0;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "@p mov.u32 %0, 1;\n"
        "}"
        : "+r"(one));
    return one != 0;
}
#endif

}  // namespace offload
