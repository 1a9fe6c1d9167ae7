// AVX-512: attend.hpp compiled for it.
#include "simd_avx512.hpp"
//
#include "attend.hpp"

namespace offload_host {
void run_avx512(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
