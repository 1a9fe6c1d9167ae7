// AVX-512: floats_path.hpp compiled for it, and groups of eight queries and more to 16-bit numbers.
#include "simd_avx512.hpp"
//
#include "block_vectors.hpp"
#include "blocks.hpp"
#include "eights.hpp"
#include "floats_path.hpp"

namespace offload_host {
void run_avx512(Job& job, int worker) {
    const int32_t cache = job.call.cache_dtype;
    typedef VectorKeys<FloatProducts<F16>> F16Keys;
    typedef VectorKeys<FloatProducts<BF16>> BF16Keys;
    if (cache == OFFLOAD_HOST_F16 && in_blocks<F16Keys>(job))
        return attend_blocks<F16Keys>(job, worker);
    if (cache == OFFLOAD_HOST_BF16 && in_blocks<BF16Keys>(job))
        return attend_blocks<BF16Keys>(job, worker);
    if (!job.call.read_only && job.group >= kEight) {
        if (cache == OFFLOAD_HOST_F16) return attend<Eights<F16>>(job, worker);
        if (cache == OFFLOAD_HOST_BF16) return attend<Eights<BF16>>(job, worker);
    }
    run(job, worker);
}
}  // namespace offload_host
