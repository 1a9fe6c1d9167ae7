// What the kernels over rows need of a GPU beyond host_cuda.hpp: dynamic shared memory, poisoned
// before each block. Force-included before them.
#pragma once
#include <stdio.h>
#include <stdlib.h>

#include "host_cuda.hpp"

namespace host_cuda {

inline unsigned char* shared_memory = static_cast<unsigned char*>(aligned_alloc(1024, 256 << 10));
inline uint32_t shared_bytes = 0;
inline long long block_seen = -1, launches = 0;
inline void (*at_block)() = nullptr;

inline void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "on the host: %s (block %u, thread %d)\n", what, blockIdx.x, current);
    abort();
}

inline unsigned char* dynamic_shared() {
    const long long block = launches << 32 | blockIdx.x;
    if (block != block_seen) {
        block_seen = block;
        memset(shared_memory, 0xff, 256 << 10);  // NaN in every dtype
        if (at_block) at_block();
    }
    return shared_memory;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_rows(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        Arguments... arguments) {
    if (config->dynamicSmemBytes > 232448) return cudaErrorInvalidConfiguration;
    shared_bytes = static_cast<uint32_t>(config->dynamicSmemBytes);
    ++launches;
    return host_launch(config, kernel, arguments...);
}

}  // namespace host_cuda

#undef cudaLaunchKernelEx
#define cudaLaunchKernelEx host_cuda::launch_rows
#define cudaFuncSetAttribute(kernel, attribute, value) ((void)(kernel), cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, shared) \
    (*(count) = 1, (void)(kernel), cudaSuccess)
