// What skinny_gemm.cu needs of a GPU beyond host_cuda.hpp: dynamic shared memory, poisoned before
// each block, and a few intrinsics. Force-included before it.
#pragma once
#include "host_shared.hpp"

#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__

namespace host_cuda {

constexpr int kMostThreads = 8192;  // of a cluster

inline uint32_t shuffle(uint32_t x, int lane) {
    static uint32_t table[2][kMostThreads];
    uint32_t* side = table[self().warp_barriers % 2];
    side[current] = x;
    warp_barrier();
    return side[current / 32 * 32 + lane];
}

// The blocks of a cluster, at the same time.
inline void run_cluster(unsigned first, unsigned size, dim3 block) {
    blockDim = block;
    in_cluster = true;
    memset(cluster_memory, 0xff, size_t{kSharedOfBlock} * size);
    at_block();
    run_blocks(first, size,
               [](int rank) { shared_memory = cluster_memory + rank * kSharedOfBlock; });
    in_cluster = false;
    shared_memory = cluster_memory;
}

inline unsigned cluster_size(const cudaLaunchConfig_t* config) {
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            return config->attrs[i].val.clusterDim.x;
    return 1;
}

// One block or cluster after another, from the last to the first where HOST_BLOCKS=backwards: which
// block is the last to finish a tile then changes.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_gemm(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        Arguments... arguments) {
    const dim3 grid = config->gridDim, block = config->blockDim;
    const unsigned size = cluster_size(config);
    if (config->dynamicSmemBytes > 232448 || block.x % 32 || block.x > 1024 || !grid.x ||
        grid.x > INT32_MAX || size * block.x > kMostThreads || grid.x % size)
        return cudaErrorInvalidConfiguration;
    shared_bytes = static_cast<uint32_t>(config->dynamicSmemBytes);
    ++launches;
    const char* order = getenv("HOST_BLOCKS");
    const bool backwards = order && !strcmp(order, "backwards");
    auto call = [&] { kernel(arguments...); };
    body = [](void* f) { (*static_cast<decltype(call)*>(f))(); };
    body_arguments = &call;
    gridDim = grid;
    for (unsigned i = 0; i < grid.x; i += size)
        run_cluster(backwards ? grid.x - size - i : i, size, block);
    return cudaSuccess;
}

// A GPU whose multiprocessors lie in pairs.
template <typename... Parameters>
cudaError_t occupancy_of_clusters(int* count, void (*)(Parameters...),
                                  const cudaLaunchConfig_t* config) {
    *count = 4 / static_cast<int>(cluster_size(config));
    return cudaSuccess;
}

}  // namespace host_cuda

#define cudaOccupancyMaxActiveClusters host_cuda::occupancy_of_clusters
#undef cudaLaunchKernelEx
#define cudaLaunchKernelEx host_cuda::launch_gemm
#define cudaFuncSetAttribute(kernel, attribute, value) ((void)(kernel), cudaSuccess)

namespace offload {

inline void cluster_arrive() { host_cuda::arrive_at_cluster(); }
inline void cluster_wait() { host_cuda::wait_for_cluster(); }

inline void cluster_arrive_relaxed() { cluster_arrive(); }

inline void store_to_block(float* mine, int rank, float x) {
    const auto at = reinterpret_cast<unsigned char*>(mine) - host_cuda::shared_memory;
    host_cuda::require(at >= 0 && at + 4 <= host_cuda::shared_bytes, "a store out of place");
    memcpy(host_cuda::cluster_memory + rank * host_cuda::kSharedOfBlock + at, &x, sizeof x);
}

inline uint32_t address_in_block(const void* mine, int rank) {
    const auto at = static_cast<const unsigned char*>(mine) - host_cuda::shared_memory;
    host_cuda::require(at >= 0 && rank < static_cast<int>(host_cuda::threads.size() / blockDim.x),
                       "an address out of place");
    return static_cast<uint32_t>(rank * host_cuda::kSharedOfBlock + at);
}

inline void store_to_cluster(uint32_t there, float4 x) {
    host_cuda::require(
        there % 16 == 0 && there % host_cuda::kSharedOfBlock + 16 <= host_cuda::shared_bytes,
        "a store out of place");
    memcpy(host_cuda::cluster_memory + there, &x, sizeof x);
}

template <typename T>
T load_from_block(const T* mine, int rank) {
    const auto at = reinterpret_cast<const unsigned char*>(mine) - host_cuda::shared_memory;
    host_cuda::require(at >= 0 && at + sizeof(T) <= host_cuda::shared_bytes, "a load out of place");
    T x;
    memcpy(&x, host_cuda::cluster_memory + rank * host_cuda::kSharedOfBlock + at, sizeof x);
    return x;
}

}  // namespace offload

inline void __syncwarp() { host_cuda::warp_barrier(); }
inline void __threadfence() {}
inline uint32_t __shfl_sync(unsigned, uint32_t x, int lane) { return host_cuda::shuffle(x, lane); }
inline uint32_t atomicAdd(uint32_t* at, uint32_t x) {
    const uint32_t before = *at;
    *at = before + x;
    return before;
}
inline void __stcg(float* at, float x) { *at = x; }
inline float __ldcg(const float* at) { return *at; }
template <typename T>
inline T min(T a, T b) {
    return a < b ? a : b;
}
inline int max(int a, int b) { return a > b ? a : b; }
