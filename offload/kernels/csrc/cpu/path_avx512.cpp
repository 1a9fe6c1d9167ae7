// AVX-512: floats_path.hpp compiled for it, and groups of eight queries and more to 16-bit numbers.
#include "simd_avx512.hpp"
//
#include "eights.hpp"
#include "floats_path.hpp"

namespace offload_host {
void run_avx512(Job& job, int worker) {
    if (!job.call.read_only && job.group >= kEight) {
        if (job.call.cache_dtype == OFFLOAD_HOST_F16) return attend<Eights<F16>>(job, worker);
        if (job.call.cache_dtype == OFFLOAD_HOST_BF16) return attend<Eights<BF16>>(job, worker);
    }
    run(job, worker);
}
}  // namespace offload_host
