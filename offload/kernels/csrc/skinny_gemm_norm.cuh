// A norm of the activations that costs the product nothing but the arithmetic: what it must know of
// a row was left by the kernel that wrote it.
//
// A row's statistics are, of `parts` equal parts of its columns, the mean and the sum of squared
// deviations from it: part i has columns [width * i / parts, width * (i + 1) / parts), which is
// what a block of the staged product has as its outputs. They are merged in a fixed order and
// without cancellation (Chan, Golub, LeVeque 1979): sums are taken about a value that is among
// those that are summed, which leaves at most as many units in the last place as there are values.
#pragma once
#include "async_copy.cuh"
#include "common.cuh"
#include "skinny_gemm_math.cuh"

namespace offload {

constexpr int kMostParts = 192;  // of a row's statistics

// What y = (x - mean) * scale * weight + bias has of a row.
struct RowNorm {
    float mean, scale;
};

// Sums x and y over the warp's lanes, in one order on all of them.
__device__ __forceinline__ void warp_sums(float& x, float& y) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, x, step);
        y += __shfl_xor_sync(0xffffffffu, y, step);
        x += other;
    }
}

__device__ __forceinline__ float of_first_lane(float x) {
    return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(x), 0));
}

// The mean of `count` values, and the sum of their squared deviations from it.
struct Moments {
    float count, mean, deviations;

    __device__ __forceinline__ void add(const Moments& more) {
        if (count == 0.f) {
            *this = more;
            return;
        }
        const float total = count + more.count, share = more.count / total;
        const float apart = more.mean - mean;
        mean += apart * share;
        deviations += more.deviations + apart * apart * count * share;
        count = total;
    }

    // Adds some values, by a warp; share = 1 / values.
    __device__ __forceinline__ void add_row(const float* from, int values, float share, int lane) {
        const float shift = from[0];
        float sum = 0.f, square = 0.f;
        for (int i = lane; i < values; i += 32) {
            const float x = from[i] - shift;
            sum += x;
            square += x * x;
        }
        warp_sums(sum, square);
        const float mean = sum * share;
        add({static_cast<float>(values), shift + mean, fmaxf(square - sum * mean, 0.f)});
    }
};

// Each row's norm, by a warp, from the row's statistics.
__device__ __forceinline__ void find_row_norms(const OffloadSkinnyGemm& a, RowNorm* to) {
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, parts = a.input_parts;
    if (row >= a.rows) return;
    const float2* from = reinterpret_cast<const float2*>(a.input_statistics) + row * parts;
    float2 part[kMostParts / 32];
#pragma unroll
    for (int i = 0; i < kMostParts / 32; ++i) {
        part[i] = make_float2(0.f, 0.f);
        if (i * 32 + lane < parts) part[i] = __ldcg(from + i * 32 + lane);
    }
    // Columns before part i: i * each and this. Products stay far below what floats are exact to.
    const int each = a.depth / parts, rest = a.depth - each * parts;
    const float a_part = 1.f / static_cast<float>(parts);
    auto more_before = [&](int i) {
        return static_cast<int>((static_cast<float>(rest * i) + 0.5f) * a_part);
    };
    const float shift = of_first_lane(part[0].x);
    float sum = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < kMostParts / 32; ++i) {
        const int at = i * 32 + lane;
        if (i * 32 >= parts) break;
        const int count = at < parts ? each + more_before(at + 1) - more_before(at) : 0;
        const float off = at < parts ? part[i].x - shift : 0.f, total = off * count;
        sum += total;
        square += total * off + part[i].y;
    }
    warp_sums(sum, square);
    const float width = static_cast<float>(a.depth), mean = shift + sum / width;
    float spread = fmaxf(square - sum * (sum / width), 0.f) / width;
    // Not a NaN's: fmaxf would hide it.
    if (!(square == square)) spread = square;
    const bool layer = a.norm.kind == OFFLOAD_NORM_LAYER;
    if (!layer) spread += mean * mean;
    if (lane == 0) to[row] = {layer ? mean : 0.f, 1.f / sqrtf(spread + a.norm.eps)};
}

// Begins to copy the norm's weight, and `pitch` bytes behind it its bias, to shared memory; a
// block.
template <typename T>
__device__ __forceinline__ void fetch_norm(const OffloadSkinnyGemm& a, unsigned char* to,
                                           int pitch) {
    const int bytes = a.depth * static_cast<int>(sizeof(T));
    const unsigned char* weight = static_cast<const unsigned char*>(a.norm.weight);
    const unsigned char* bias = static_cast<const unsigned char*>(a.norm.bias);
    for (int at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) {
        if (weight) copy_async16_or_zero(shared_address(to + at), weight + at, true);
        if (bias) copy_async16_or_zero(shared_address(to + pitch + at), bias + at, true);
    }
}

// What the norm makes of 8 columns of a row, whose weight fetch_norm has put at `from`.
template <typename T>
__device__ __forceinline__ uint4 normalise_row(uint4 raw, const OffloadNorm& norm, RowNorm row,
                                               const unsigned char* from, int pitch) {
    float x[8], by[8];
    unpack(raw, x, T());
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (x[i] - row.mean) * row.scale;
    if (norm.weight) {
        unpack(*reinterpret_cast<const uint4*>(from), by, T());
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= by[i] + norm.weight_offset;
    }
    if (norm.bias) {
        unpack(*reinterpret_cast<const uint4*>(from + pitch), by, T());
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += by[i];
    }
    return pack(x, T());
}

}  // namespace offload
