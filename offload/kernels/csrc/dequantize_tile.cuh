// Words along the depth that lie along the rows (OFFLOAD_DEPTH_WORDS), or words of rows
// (OFFLOAD_ROW_WORDS): a block reads a tile, kTileRows rows and 128 bytes of each, in the order of
// the words, and its output changes its order in shared memory.
#pragma once
#include "dequantize_affine.cuh"

namespace offload {

constexpr int kTileRows = 256;  // of the output
constexpr int kRowBytes = 128;  // of a tile's row
constexpr int kPieces = kRowBytes / 16;

// A scale that is no power of two.
__device__ __forceinline__ float word_scale_at(const OffloadDequantize& a, int64_t at) {
    if (a.scale_dtype == OFFLOAD_F32) return static_cast<const float*>(a.scale)[at];
    const uint16_t bits = static_cast<const uint16_t*>(a.scale)[at];
    return a.scale_dtype == OFFLOAD_BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                         : __half2float(__ushort_as_half(bits));
}

// affine_at for codes in words, whose zeros are in words too and whose scales are no powers of two.
__device__ __forceinline__ Affine word_affine_at(const OffloadDequantize& a, const Divisors& d,
                                                 int row, int k) {
    const int64_t g = group_of(a, d, k);
    const int64_t at = row * a.scale_row_stride + g * a.scale_group_stride;
    return {word_scale_at(a, at), word_zero_at(a, row, g)};
}

// A tile's 16-byte pieces lie so that neither neighbouring rows nor every eighth row meet in a
// bank.
__device__ __forceinline__ uint4* tile_piece(unsigned char* tile, int row, int piece) {
    const int swapped = piece ^ ((row ^ row >> 3) & (kPieces - 1));
    return reinterpret_cast<uint4*>(tile + row * kRowBytes + swapped * 16);
}

template <typename T>
__device__ __forceinline__ void put_unit(unsigned char* tile, int row, int unit,
                                         const float (&x)[kUnit]) {
    constexpr int kWidth = 16 / sizeof(T), kOfUnit = kUnit / kWidth;
#pragma unroll
    for (int i = 0; i < kOfUnit; ++i) {
        const Pack<T, kWidth> pack = from_floats<T, kWidth>(x + i * kWidth);
        *tile_piece(tile, row, unit * kOfUnit + i) =
            make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    dequantize_tile_kernel(const OffloadDequantize a, const Divisors d, int column_tiles) {
    constexpr int kUnits = kRowBytes / static_cast<int>(sizeof(T)) / kUnit;
    __shared__ __align__(16) unsigned char tile[kTileRows * kRowBytes];
    let_next_kernel_begin();
    // Blocks that run together are neighbours along the rows, which lie next to each other.
    const int row_tiles = static_cast<int>(gridDim.x) / column_tiles;
    const int first_row = static_cast<int>(blockIdx.x) % row_tiles * kTileRows;
    const int first_k = static_cast<int>(blockIdx.x) / row_tiles * kUnits * kUnit;
    const unsigned char* codes = static_cast<const unsigned char*>(a.codes);
    if (a.order == OFFLOAD_DEPTH_WORDS) {
        const int row = first_row + static_cast<int>(threadIdx.x);
        const int words = bits_of(a.code) / 4;  // of a unit
        const int code = words == 2 ? OFFLOAD_UINT8 : OFFLOAD_UINT4;
        const auto load_unit = [&](int k) {
            const unsigned char* from =
                codes + static_cast<int64_t>(k / kUnit * words) * a.code_stride + row * 4ll;
            uint2 raw = {};
            raw.x = *reinterpret_cast<const uint32_t*>(from);
            if (words == 2) raw.y = *reinterpret_cast<const uint32_t*>(from + a.code_stride);
            return raw;
        };
        const int count = row < a.rows ? min(kUnits, (a.depth - first_k) / kUnit) : 0;
        if (d.whole_groups) {
            uint2 raw[kUnits];
            Affine affine[kUnits];
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                if (u >= count) break;
                raw[u] = load_unit(first_k + u * kUnit);
                affine[u] = word_affine_at(a, d, row, first_k + u * kUnit);
            }
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                if (u >= count) break;
                float x[kUnit];
                decode_unit(raw[u], code, affine[u], x);
                put_unit<T>(tile, threadIdx.x, u, x);
            }
        } else {  // act order: a group a column, all rows' alike
            __shared__ int groups[kUnits * kUnit];
            for (int i = threadIdx.x; i < kUnits * kUnit; i += kThreads)
                groups[i] = first_k + i < a.depth ? group_of(a, d, first_k + i) : 0;
            __syncthreads();
            const int kept = row < a.rows ? row : 0;
            const int log2 = words == 2 ? 2 : 3, shift = (kept & ((1 << log2) - 1)) * 4 * words;
            const uint32_t* zeros = static_cast<const uint32_t*>(a.zero) +
                                    static_cast<int64_t>(kept >> log2) * a.zero_row_stride;
            const int64_t scales = kept * a.scale_row_stride;
            const int zero_step = static_cast<int>(a.zero_group_stride);
            const int scale_step = static_cast<int>(a.scale_group_stride);
            const uint32_t mask = (16u << 4 * (words - 1)) - 1;
#pragma unroll 1
            for (int u = 0; u < count; ++u) {
                const uint2 raw = load_unit(first_k + u * kUnit);
                uint32_t zero[kUnit];
                float scale[kUnit], x[kUnit];
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {  // all of them are under way at once
                    const int64_t g = groups[u * kUnit + i];
                    zero[i] = zeros[g * zero_step];
                    scale[i] = word_scale_at(a, scales + g * scale_step);
                }
                decode_unit(raw, code, 0.f, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    const uint32_t of_row = ((zero[i] >> shift) + a.zero_value) & mask;
                    x[i] = (x[i] - (magic(of_row) - kMagic)) * scale[i];
                }
                put_unit<T>(tile, threadIdx.x, u, x);
            }
        }
    } else {
        const int in_tile = static_cast<int>(threadIdx.x) % 32 * 8;
        const int row = first_row + in_tile, u = static_cast<int>(threadIdx.x) / 32;
        const int k = first_k + u * kUnit;
        if (u < kUnits && row < a.rows && k < a.depth) {
            uint32_t words[kUnit];
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                words[i] = *reinterpret_cast<const uint32_t*>(
                    codes + static_cast<int64_t>(k + i) * a.code_stride + row / 8 * 4ll);
            Affine affine[8];
#pragma unroll
            for (int r = 0; r < 8; ++r) affine[r] = word_affine_at(a, d, row + r, k);
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                const int shift = row_word_shift(r);
                uint2 raw = {};
#pragma unroll
                for (int i = 0; i < kUnit; ++i) raw.x |= (words[i] >> shift & 15u) << 4 * i;
                float x[kUnit];
                decode_unit(raw, OFFLOAD_UINT4, affine[r], x);
                put_unit<T>(tile, in_tile + r, u, x);
            }
        }
    }
    wait_for_previous_kernel();  // which may still read the output
    __syncthreads();
    constexpr int kWidth = 16 / sizeof(T);
    T* output = static_cast<T*>(a.output);
#pragma unroll 4
    for (int i = threadIdx.x; i < kTileRows * kPieces; i += kThreads) {
        const int row = first_row + i / kPieces, k = first_k + i % kPieces * kWidth;
        if (row >= a.rows || k >= a.depth) continue;
        const uint4 piece = *tile_piece(tile, i / kPieces, i % kPieces);
        Pack<T, kWidth> pack;
        pack.words[0] = piece.x;
        pack.words[1] = piece.y;
        pack.words[2] = piece.z;
        pack.words[3] = piece.w;
        store_once<T, kWidth>(output + row * a.output_stride + k, pack);
    }
}

}  // namespace offload
