// The instructions that decode attention needs and C++ has no words for.
#pragma once
#include "common.cuh"

namespace offload {
namespace decode {

__device__ __forceinline__ float exp2_approximately(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Within 2e-7 of tanh.
__device__ __forceinline__ float tanh_approximately(float x) {
    return 1.f - __fdividef(2.f, 1.f + exp2_approximately(x * 2.885390082f));
}

// Copies into shared memory; bytes beyond `seen` are zeros, and where it is 0 nothing is read.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int seen) {
    static_assert(kBytes == 4 || kBytes == 16);
    if (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(seen)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(seen)
                     : "memory");
}
__device__ __forceinline__ void copy_async_once(uint32_t to, const void* from, int seen,
                                                uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(seen), "l"(policy)
                 : "memory");
}
// For what is read `once`, or is wanted again soon.
__device__ __forceinline__ uint64_t l2_policy(bool once) {
    uint64_t first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return once ? first : normal;
}
__device__ __forceinline__ void end_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most `running` of this thread's latest groups of copies are still under way.
__device__ __forceinline__ void wait_for_copies(int running) {
    // Not a switch: its jump table is a load.
    if (running == 0)
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    else if (running == 1)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else if (running == 2)
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 3;" ::: "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

// Asks for the bytes there to be in L2 soon; what is written there meanwhile is seen all the same.
__device__ __forceinline__ void expect_in_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)) : "memory");
}

// Adds 1 and returns what was there. Who sees another's 1 sees what that one's CTA wrote before.
__device__ __forceinline__ uint32_t count_and_see(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return before;
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1);
template <>
__device__ __forceinline__ void multiply<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrix_pair(uint32_t (&to)[2], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
}

// Of an 8 x 8 matrix whose row lane / 4 has this lane's pair at lane % 4, that of its transpose.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// What a cluster's CTAs write into each other's shared memory, on sm_90 and in launches with
// clusters only. Each opens its inbox (16 bytes there) for so many bytes, in one thread; when all
// CTAs have, `inboxes_are_open` returns in all threads, and every CTA may send. Bytes are seen by
// who then waited for the inbox.
__device__ __forceinline__ void open_inbox(uint64_t* inbox, uint32_t bytes) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(inbox));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
}
// These two: whole warps at once.
__device__ __forceinline__ void inbox_is_open() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void inboxes_are_open() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_inbox(uint64_t* inbox) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(inbox));
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(at)
            : "memory");
    } while (!done);
}
// The place in CTA `rank`'s shared memory that `own` is in this one's.
__device__ __forceinline__ uint32_t place_in(const void* own, int rank) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(own));
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    return at;
}
__device__ __forceinline__ void send(float4* to, uint64_t* inbox, int rank, float4 x) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(place_in(to, rank)),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(place_in(inbox, rank))
        : "memory");
}
__device__ __forceinline__ void send(float2* to, uint64_t* inbox, int rank, float2 x) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
        "[%3];" ::"r"(place_in(to, rank)),
        "f"(x.x), "f"(x.y), "r"(place_in(inbox, rank))
        : "memory");
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

}  // namespace decode
}  // namespace offload
