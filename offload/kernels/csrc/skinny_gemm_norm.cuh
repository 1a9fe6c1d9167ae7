// A norm that nothing waits for: y = W norm(x) with what of the norm is a row's own applied to the
// sums, when they are done.
//
// With d = s (x - m) for a row's s and m, whose choice is free, and gamma = weight + weight_offset,
//
//     norm(x) = (d - mean(d)) / sqrt(var(d) + s^2 eps) * gamma + beta
//     W norm(x) = (W (gamma d) - mean(d) W gamma) / sqrt(var(d) + s^2 eps) + W beta
//
// (RMSNorm: m = 0, and neither means nor beta). gamma d is made where the product reads its
// activations, rounded as a norm's own result would be. W gamma and W beta are two more columns of
// the product, and cost nothing: tiles have 8 or 16, so a layer norm of more than 14 rows is made
// apart. The sums of d and d^2 are added up by the threads that copied x, once for all tiles.
//
// m is 0 or near the row's mean, so that no digits are lost in mean(d); a part of the row is enough
// to know it: the mean of n of K elements is at most sqrt((K - n) / n) deviations off, and usually
// a few hundredths. s is 1 but for float16, whose range gamma x may leave: there it is a power of
// two that brings d to about 1, after a look at the whole row.
#pragma once
#include "common.cuh"
#include "skinny_gemm_math.cuh"
#include "tensor_core.cuh"

namespace offload {

constexpr int kNormSamples = 128;  // 16-byte vectors of a row that its mean is taken of

template <typename T>
struct Late {
    static constexpr bool kNarrow = false;
    static constexpr uint32_t kOnes = 0x3f803f80u;
};
template <>
struct Late<__half> {
    static constexpr bool kNarrow = true;
    static constexpr uint32_t kOnes = 0x3c003c00u;
};

// What d = scale * x + shift is made with; shift is rounded to the elements' dtype.
struct RowScale {
    float scale, shift;
};

template <typename T>
__device__ __forceinline__ uint32_t pair_of(float x) {
    const T y = from_float<T>(x);
    uint16_t bits;
    memcpy(&bits, &y, sizeof bits);
    return bits * 0x10001u;
}

// Whether rows are looked at first.
template <typename T>
__device__ __forceinline__ bool needs_row_scales(const OffloadNorm& norm) {
    return Late<T>::kNarrow || norm.kind == OFFLOAD_NORM_LAYER;
}

// One warp a row. Called, so that its registers are not the main loop's.
template <typename T>
__device__ __noinline__ void choose_row_scales(const OffloadSkinnyGemm& a, RowScale* to) {
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= a.rows) return;
    const uint4* x =
        reinterpret_cast<const uint4*>(static_cast<const T*>(a.input) + row * a.input_stride);
    const int vectors = a.depth / 8;
    const int samples = Late<T>::kNarrow ? vectors : min(vectors, kNormSamples);
    float sum = 0.f, square = 0.f;
#pragma unroll 4
    for (int i = lane; i < samples; i += 32) {
        float y[8];
        unpack(x[static_cast<int64_t>(i) * vectors / samples], y, T());
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sum += y[j];
            square += y[j] * y[j];
        }
    }
    const float count = static_cast<float>(samples) * 8.f;
    const float mean = warp_sum(sum) / count, mean_square = warp_sum(square) / count;
    const float variance = fmaxf(mean_square - mean * mean, 0.f);
    // A small mean stays: x - m would be rounded once more.
    const bool centred = a.norm.kind == OFFLOAD_NORM_LAYER && mean * mean > variance;
    float scale = 1.f;
    if (Late<T>::kNarrow) {
        int exponent = 0;
        frexpf(sqrtf(centred ? variance : mean_square), &exponent);
        scale = ldexpf(1.f, -max(-15, min(exponent, 16)));
    }
    const float shift = centred ? to_float(from_float<T>(-mean * scale)) : 0.f;
    if (lane == 0) to[row] = {scale, shift};
}

// d of 8 elements.
template <typename T>
__device__ __forceinline__ uint4 shift_row(uint4 x, uint32_t scale, uint32_t shift) {
    return make_uint4(
        multiply_add_pair(x.x, scale, shift, T()), multiply_add_pair(x.y, scale, shift, T()),
        multiply_add_pair(x.z, scale, shift, T()), multiply_add_pair(x.w, scale, shift, T()));
}

// gamma d of 8 elements.
template <typename T>
__device__ __forceinline__ uint4 scale_row(uint4 x, uint4 weight, uint32_t scale, uint32_t shift,
                                           uint32_t offset_mask) {
    const uint4 d = shift_row<T>(x, scale, shift);
    // d * weight + d, where an offset of 1 belongs to the weight, is rounded once.
    return make_uint4(multiply_add_pair(d.x, weight.x, d.x & offset_mask, T()),
                      multiply_add_pair(d.y, weight.y, d.y & offset_mask, T()),
                      multiply_add_pair(d.z, weight.z, d.z & offset_mask, T()),
                      multiply_add_pair(d.w, weight.w, d.w & offset_mask, T()));
}

// Adds d and d^2 of 8 elements to a row's sums.
template <typename T>
__device__ __forceinline__ void add_row(uint4 x, uint32_t scale, uint32_t shift, float& sum,
                                        float& square) {
    float d[8];
    unpack(shift_row<T>(x, scale, shift), d, T());
    float sums[2] = {}, squares[2] = {};  // additions to one sum wait for each other
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sums[i % 2] += d[i];
        squares[i % 2] = fmaf(d[i], d[i], squares[i % 2]);
    }
    sum += sums[0] + sums[1];
    square += squares[0] + squares[1];
}

// What a row's sums are divided by and taken from.
struct RowNorm {
    float inverse, mean;
};

// From the sums of d and d^2 over `depth` elements.
__device__ __forceinline__ RowNorm row_norm(const OffloadNorm& norm, int depth, float scale,
                                            float sum, float square) {
    const float width = static_cast<float>(depth);
    const float mean = norm.kind == OFFLOAD_NORM_LAYER ? sum / width : 0.f;
    const float variance = fmaxf(square / width - mean * mean, 0.f);
    return {1.f / sqrtf(variance + norm.eps * scale * scale), mean};
}

}  // namespace offload
