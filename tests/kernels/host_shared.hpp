// Dynamic shared memory where kernels run on the host: poisoned before each block.
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

}  // namespace host_cuda
