// Tiles (AMX) for groups of many queries that have sixteen bits; the rest is AVX-512's.
#define OFFLOAD_HOST_PAIRS
#include "simd_avx512.hpp"
//
#include "attend.hpp"
#include "block_tiles.hpp"
#include "blocks.hpp"
#include "tiles.hpp"

namespace offload_host {
void run_amx(Job& job, int worker) {
    const OffloadHostAttention& c = job.call;
    if (!c.read_only && c.query_dtype != OFFLOAD_HOST_F32 && job.group >= kLeastGroup &&
        c.head_dim % kChunkDims == 0 && job.chunk <= kMostSummed) {
        if (c.cache_dtype == OFFLOAD_HOST_BF16 && in_blocks<TileKeys>(job))
            return attend_blocks<TileKeys>(job, worker);
        if (c.cache_dtype == OFFLOAD_HOST_BF16) return attend<Tiles<HalfTiles>>(job, worker);
        if (c.cache_dtype == OFFLOAD_HOST_I8) return attend<Tiles<WholeTiles>>(job, worker);
    }
    run_avx512_bf16(job, worker);
}
}  // namespace offload_host
