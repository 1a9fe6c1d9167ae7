// AVX-512: floats_path.hpp compiled for it.
#include "simd_avx512.hpp"
//
#include "floats_path.hpp"

namespace offload_host {
void run_avx512(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
