// AVX-512 with tiles (AMX) for groups of many queries: attend.hpp compiled for it.
#define OFFLOAD_HOST_PAIRS
#define OFFLOAD_HOST_TILES
#include "simd_avx512.hpp"
//
#include "attend.hpp"

namespace offload_host {
void run_amx(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
