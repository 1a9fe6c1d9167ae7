// Any CPU: floats_path.hpp compiled for it.
#include "simd_portable.hpp"
//
#include "floats_path.hpp"

namespace offload_host {
void run_portable(Job& job, int worker) { run(job, worker); }
}  // namespace offload_host
