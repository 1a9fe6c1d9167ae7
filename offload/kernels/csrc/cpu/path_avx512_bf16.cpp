// AVX-512 with products of bf16 pairs: attend.hpp compiled for it.
#define OFFLOAD_HOST_PAIRS
#include "simd_avx512.hpp"
//
#include "attend.hpp"

namespace offload_host {
void run_avx512_bf16(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
