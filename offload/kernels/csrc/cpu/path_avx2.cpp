// AVX2 with FMA and F16C: attend.hpp compiled for it.
#include "simd_avx2.hpp"
//
#include "attend.hpp"

namespace offload_host {
void run_avx2(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
