// What skinny_gemm.cu needs of a GPU beyond host_cuda.hpp: dynamic shared memory, poisoned before
// each block, and a few intrinsics. Force-included before it.
#pragma once
#include "host_shared.hpp"

#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__

namespace host_cuda {

inline uint32_t shuffle(uint32_t x, int lane) {
    static uint32_t table[2][1024];
    uint32_t* side = table[self().warp_barriers % 2];
    side[current] = x;
    warp_barrier();
    return side[current / 32 * 32 + lane];
}

// One block after another, from the last to the first where HOST_BLOCKS=backwards: which block is
// the last to finish a tile then changes.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_gemm(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        Arguments... arguments) {
    const dim3 grid = config->gridDim, block = config->blockDim;
    if (config->dynamicSmemBytes > 232448 || block.x % 32 || block.x > 1024 || !grid.x ||
        grid.x > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    shared_bytes = static_cast<uint32_t>(config->dynamicSmemBytes);
    ++launches;
    const char* order = getenv("HOST_BLOCKS");
    const bool backwards = order && !strcmp(order, "backwards");
    unsigned index = 0;
    auto call = [&] {
        blockIdx.x = index;
        kernel(arguments...);
    };
    body = [](void* f) { (*static_cast<decltype(call)*>(f))(); };
    body_arguments = &call;
    for (unsigned i = 0; i < grid.x; ++i) {
        index = backwards ? grid.x - 1 - i : i;
        run_grid(dim3(1), block);
    }
    return cudaSuccess;
}

}  // namespace host_cuda

#undef cudaLaunchKernelEx
#define cudaLaunchKernelEx host_cuda::launch_gemm
#define cudaFuncSetAttribute(kernel, attribute, value) ((void)(kernel), cudaSuccess)

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
