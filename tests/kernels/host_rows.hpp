// What the kernels over rows need of a GPU beyond host_cuda.hpp. Force-included before them.
#pragma once
#include "host_cuda.hpp"

namespace host_cuda {

inline float shuffle_from(float x, int lane) {
    const int side = self().warp_barriers % 2;
    self().exchange[side] = x;
    warp_barrier();
    return threads[current / 32 * 32 + lane % 32].exchange[side];
}

}  // namespace host_cuda

inline float __shfl_sync(unsigned, float x, int lane) { return host_cuda::shuffle_from(x, lane); }
inline unsigned __shfl_sync(unsigned, unsigned x, int lane) {
    return __float_as_uint(host_cuda::shuffle_from(__uint_as_float(x), lane));
}
