// AVX-512 with products of bf16 pairs and of bytes (VNNI), where queries have sixteen bits; the
// rest is AVX-512's.
#define OFFLOAD_HOST_PAIRS
#include "simd_avx512.hpp"
//
#include "attend.hpp"
#include "block_vectors.hpp"
#include "blocks.hpp"
#include "integers.hpp"
#include "pairs.hpp"

namespace offload_host {
void run_avx512_bf16(Job& job, int worker) {
    const OffloadHostAttention& c = job.call;
    if (!c.read_only) {
        if (c.cache_dtype == OFFLOAD_HOST_BF16 && c.query_dtype == OFFLOAD_HOST_BF16) {
            typedef VectorKeys<PairProducts> Keys;
            if (in_blocks<Keys>(job)) return attend_blocks<Keys>(job, worker);
            return attend<Pairs>(job, worker);
        }
        if (c.cache_dtype == OFFLOAD_HOST_I8 && c.query_dtype != OFFLOAD_HOST_F32 &&
            job.chunk <= kMostSummed)
            return attend<Integers>(job, worker);
    }
    run_avx512(job, worker);
}
}  // namespace offload_host
