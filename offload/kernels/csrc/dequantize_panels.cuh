// Panels: kUnits a warp, whose neighbours have the next columns of the same rows. A lane has codes
// of two rows, whose scales and zeros lie one behind the other.
#pragma once
#include "dequantize_affine.cuh"
#include "panels.cuh"

namespace offload {

// Where those of both rows lie.
__device__ __forceinline__ int64_t pair_at(const OffloadDequantize& a, const Divisors& d, int tile,
                                           int g, int k) {
    const int groups = a.group < a.depth ? a.depth / a.group : 1;
    return (static_cast<int64_t>(tile) * groups + d.group(k)) * (kPanelRows / 2) + g;
}

// The zeros of both rows.
__device__ __forceinline__ uint32_t pair_zeros(const OffloadDequantize& a, int64_t pair) {
    const uint8_t* zeros = static_cast<const uint8_t*>(a.zero);
    if (a.zero_kind == OFFLOAD_ZERO_VALUE)
        return a.zero_value * (a.code == OFFLOAD_UINT4 ? 17u : 257u);
    return a.code == OFFLOAD_UINT4 ? zeros[pair] : zeros[pair * 2] | zeros[pair * 2 + 1] << 8;
}

// Of row p, from what both rows have.
template <int kBits>
__device__ __forceinline__ float zero_of(uint32_t both, int p) {
    return magic(both >> kBits * p & ((1u << kBits) - 1)) - kMagic;
}

__device__ __forceinline__ float scale_of(uint32_t both, int p, int dtype) {
    if (dtype == OFFLOAD_BF16) return __uint_as_float(p ? both & 0xffff0000u : both << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(both >> 16 * p)));
}

constexpr int kPanels4 = 4, kPanels8 = 2;  // of codes of 4 and of 8 bits, a warp

template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads, kBits == 4 ? 3 : 4)
    dequantize_panels_kernel(const OffloadDequantize a, const Divisors d, int count) {
    constexpr int kUnits = kBits == 4 ? kPanels4 : kPanels8, kWarps = kThreads / 32,
                  kHalves = kBits == 4 ? 2 : 1;
    constexpr int kColumns = 32 * kHalves;
    let_next_kernel_begin();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int first = static_cast<int>(blockIdx.x) * kWarps * kUnits + warp;
    const bool one_group = kHalves == 1 || a.group % kColumns == 0 || a.group >= a.depth;
    uint4 raw[kUnits];
    int tile[kUnits], k[kUnits];
    uint32_t scales[kUnits][kHalves], zeros[kUnits][kHalves];  // of both rows
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {  // behind the last panel that one again
        const int unit = min(first + i * kWarps, count - 1);
        tile[i] = d.units(unit);
        k[i] = (unit - tile[i] * d.units.by) * kColumns;
        raw[i] = static_cast<const uint4*>(a.codes)[static_cast<int64_t>(unit) * 32 + lane];
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
            if (h == 1 && one_group) {
                scales[i][h] = scales[i][0], zeros[i][h] = zeros[i][0];
                continue;
            }
            const int64_t pair = pair_at(a, d, tile[i], g, k[i] + 32 * h);
            scales[i][h] = static_cast<const uint32_t*>(a.scale)[pair];
            zeros[i][h] = pair_zeros(a, pair);
        }
    wait_for_previous_kernel();  // which may still read the output
    T* output = static_cast<T*>(a.output);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        if (first + i * kWarps >= count) break;
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
        T* to = output + (static_cast<int64_t>(tile[i]) * kPanelRows + g) * a.output_stride + k[i];
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                const float origin = kMagic + zero_of<kBits>(zeros[i][h], p);
                const float scale = scale_of(scales[i][h], p, a.scale_dtype);
                float x[kUnit];
#pragma unroll
                for (int c = 0; c < kUnit; ++c) {
                    const uint32_t code =
                        kBits == 4 ? words[2 * h + c / 4] >> (8 * panel_byte(c % 4) + 4 * p) & 15u
                                   : words[2 * (c / 4) + p] >> 8 * panel_byte(c % 4) & 255u;
                    x[c] = (magic(code) - origin) * scale;
                }
                store_unit(to + p * (kPanelRows / 2) * a.output_stride + 32 * h + kUnit * t, x);
            }
    }
}

}  // namespace offload
