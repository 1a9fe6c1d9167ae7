// AVX2 with FMA and F16C: floats_path.hpp compiled for it.
#include "simd_avx2.hpp"
//
#include "floats_path.hpp"

namespace offload_host {
void run_avx2(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
