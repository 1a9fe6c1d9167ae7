// Two blocks of a cluster (sm_90): they run at the same time and write to each other's shared
// memory.
#pragma once
#include "common.cuh"

namespace offload {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define OFFLOAD_HAS_CLUSTERS 1

// Every thread of the cluster arrives, and later waits for all others to have done so: what they
// wrote before is then seen.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Where nothing was written that others read: it only says how far this thread is.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// Writes x where block `rank` of the cluster has what lies at `mine` here.
__device__ __forceinline__ void store_to_block(float* mine, int rank, float x) {
    const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}

// Where block `rank` of the cluster has what lies at `mine` here, for the two below.
__device__ __forceinline__ uint32_t address_in_block(const void* mine, int rank) {
    const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}

__device__ __forceinline__ void store_to_cluster(uint32_t there, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// x lands there in the background, which the barrier there announces: it must expect the bytes.
__device__ __forceinline__ void send_to_cluster(uint32_t there, float4 x, uint32_t barrier_there) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(there),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier_there)
        : "memory");
}

// What block `rank` of the cluster has where `mine` lies here.
__device__ __forceinline__ float4 load_from_block(const float4* mine, int rank) {
    const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    uint32_t there;
    float4 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(there)
                 : "memory");
    return x;
}

// The same of one float.
__device__ __forceinline__ float load_from_block(const float* mine, int rank) {
    const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    uint32_t there;
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
    return x;
}
#endif

}  // namespace offload
