// Dynamic shared memory where kernels run on the host: poisoned before each block.
#pragma once
#include <stdlib.h>

#include "host_cuda.hpp"

namespace host_cuda {

// Blocks of a cluster have theirs next to each other.
constexpr int kSharedOfBlock = 256 << 10, kMostCluster = 16;
inline unsigned char* const cluster_memory =
    static_cast<unsigned char*>(aligned_alloc(1024, kMostCluster* kSharedOfBlock));
inline unsigned char* shared_memory = cluster_memory;  // of the block that runs
inline bool in_cluster = false;
inline uint32_t shared_bytes = 0;
inline long long block_seen = -1, launches = 0;
inline void (*at_block)() = nullptr;

inline unsigned char* dynamic_shared() {
    if (in_cluster) return shared_memory;
    const long long block = launches << 32 | blockIdx.x;
    if (block != block_seen) {
        block_seen = block;
        memset(shared_memory, 0xff, kSharedOfBlock);  // NaN in every dtype
        if (at_block) at_block();
    }
    return shared_memory;
}

}  // namespace host_cuda
