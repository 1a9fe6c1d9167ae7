// Strips of 256 weights along the depth, a unit a lane, kUnits strips a warp: a row's address is
// worked out once for all of them. Of what is done for each unit hardly anything is left but its
// load, its numbers and its store: 17 instructions a weight are all that HBM's rate leaves for
// int4.
#pragma once
#include "dequantize_affine.cuh"

namespace offload {

struct Strips {
    Divisor of_row;
    Divisor scale_rows;              // that share a scale
    int group_log2;                  // of columns
    int count;                       // in all
    int code_stride, output_stride;  // they fit
    int scale_row_stride, scale_group_stride, zero_row_stride, zero_group_stride;
};

constexpr int kStrip = 32 * kUnit;

template <typename T, int kCode, int kUnits>
__global__ void __launch_bounds__(kThreads)
    dequantize_strips_kernel(const OffloadDequantize a, const Strips s) {
    let_next_kernel_begin();
    const int first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * kUnits;
    if (first >= s.count) return;
    constexpr int kBits = kCode == OFFLOAD_UINT4 || kCode == OFFLOAD_E2M1 ? 4 : 8;
    int row[kUnits], k[kUnits];
    row[0] = s.of_row(first);
    k[0] = (first - row[0] * s.of_row.by) * kStrip + threadIdx.x % 32 * kUnit;
#pragma unroll
    for (int i = 1; i < kUnits; ++i) {  // behind the last strip that one again
        const bool more = first + i < s.count, ends = k[i - 1] + kStrip >= a.depth;
        row[i] = row[i - 1] + (more && ends);
        k[i] = !more ? k[i - 1] : ends ? k[i - 1] + kStrip - a.depth : k[i - 1] + kStrip;
    }
    const auto at = [](int index, int stride) { return static_cast<int64_t>(index) * stride; };
    uint2 raw[kUnits] = {};
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const unsigned char* from = static_cast<const unsigned char*>(a.codes) +
                                    at(row[i], s.code_stride) + k[i] * kBits / 8;
        if (kBits == 4)
            raw[i].x = *reinterpret_cast<const uint32_t*>(from);
        else
            raw[i] = *reinterpret_cast<const uint2*>(from);
    }
    float scale[kUnits], zero[kUnits];
    const auto group = [&](int i) { return k[i] >> s.group_log2; };
    const auto read = [&](auto value) {  // the dtype is looked at once, not once a unit
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
            scale[i] =
                value(s.scale_rows(row[i]) * a.scale_row_stride + group(i) * a.scale_group_stride);
    };
    switch (a.scale_dtype) {
        case OFFLOAD_F16:
            read([&](int64_t i) { return to_float(static_cast<const __half*>(a.scale)[i]); });
            break;
        case OFFLOAD_BF16:
            read(
                [&](int64_t i) { return to_float(static_cast<const __nv_bfloat16*>(a.scale)[i]); });
            break;
        case OFFLOAD_F32:
            read([&](int64_t i) { return static_cast<const float*>(a.scale)[i]; });
            break;
        default:
            read([&](int64_t i) { return scale_at(a, i); });
    }
    if (a.zero_kind == OFFLOAD_ZERO_VALUE) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) zero[i] = static_cast<float>(a.zero_value);
    } else if (a.zero_kind == OFFLOAD_ZERO_WORDS) {  // of the codes' size, along the rows
        constexpr int kPerWord = 32 / kBits;
        const uint32_t* words = static_cast<const uint32_t*>(a.zero);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const uint32_t word =
                words[at(row[i] / kPerWord, s.zero_row_stride) + at(group(i), s.zero_group_stride)];
            const uint32_t code = (word >> row[i] % kPerWord * kBits) + a.zero_value;
            zero[i] = magic(code & ((1u << kBits) - 1)) - kMagic;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
            zero[i] = zero_at(a, row[i], s.scale_rows(row[i]), group(i));
    }
    wait_for_previous_kernel();  // which may still read the output
    T* output = static_cast<T*>(a.output);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        if (first + i >= s.count) break;
        float x[kUnit];
        decode_unit(raw[i], kCode, Affine{scale[i], zero[i]}, x);
        store_unit(output + at(row[i], s.output_stride) + k[i], x);
    }
}

}  // namespace offload
