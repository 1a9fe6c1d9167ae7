// Codes along the depth, of any number of units a row: kUnits of every kThreads-th a thread.
#pragma once
#include "dequantize_affine.cuh"

namespace offload {

template <typename T, int kUnits>
__global__ void __launch_bounds__(kThreads)
    dequantize_units_kernel(const OffloadDequantize a, const Divisors d, int64_t units) {
    let_next_kernel_begin();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kUnits + threadIdx.x;
    const bool narrow = bits_of(a.code) == 4;
    uint2 raw[kUnits] = {};
    int row[kUnits], k[kUnits];
    Affine affine[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const int64_t unit = first + i * kThreads;
        const int at = static_cast<int>(unit < units ? unit : 0);
        row[i] = d.units(at);
        k[i] = (at - row[i] * d.units.by) * kUnit;
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const unsigned char* from = static_cast<const unsigned char*>(a.codes) +
                                    row[i] * a.code_stride + (narrow ? k[i] / 2 : k[i]);
        if (narrow)
            raw[i].x = *reinterpret_cast<const uint32_t*>(from);
        else
            raw[i] = *reinterpret_cast<const uint2*>(from);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) affine[i] = affine_at(a, d, row[i], k[i]);
    wait_for_previous_kernel();  // which may still read the output
    T* output = static_cast<T*>(a.output);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        if (first + i * kThreads >= units) break;
        float x[kUnit];
        decode_unit(raw[i], a.code, affine[i], x);
        store_unit(output + row[i] * a.output_stride + k[i], x);
    }
}

}  // namespace offload
