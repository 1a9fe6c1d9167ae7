// What the kernels over rows need of a GPU beyond host_cuda.hpp: dynamic shared memory, poisoned
// before each block. Force-included before them.
#pragma once
#include "host_shared.hpp"

namespace host_cuda {

template <typename... Parameters, typename... Arguments>
cudaError_t launch_rows(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        Arguments... arguments) {
    if (config->dynamicSmemBytes > 232448) return cudaErrorInvalidConfiguration;
    shared_bytes = static_cast<uint32_t>(config->dynamicSmemBytes);
    ++launches;
    return host_launch(config, kernel, arguments...);
}

}  // namespace host_cuda

#undef cudaLaunchKernelEx
#define cudaLaunchKernelEx host_cuda::launch_rows
#define cudaFuncSetAttribute(kernel, attribute, value) ((void)(kernel), cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, shared) \
    (*(count) = 1, (void)(kernel), cudaSuccess)
