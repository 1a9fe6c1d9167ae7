// Stored weights -> weights at HBM's rate, for every layout of offload/kernels/weight_format.py.
//
// The unit of work is 8 neighbours along the depth: 4 or 8 bytes of codes, 16 bytes of a 16-bit
// output. Where codes lie along the depth, loads and stores are contiguous as they are. Where words
// hold neighbours of the other dimension, or lie along it, a block reads a tile in the order of the
// words, and its 256 x 128 bytes of output change their order in shared memory.
//
// All is computed in float32 as the reference does, so results are equal to the bit. An integer
// becomes a float by its bits: 0x4b000000 | code is 2^23 + code, and a subtraction is exact. That
// takes some 5 instructions a weight; at 4.3 TB/s, int4 to 16 bits, an H200 has about 18.
#include "elementwise.cuh"
#include "panels.cuh"

namespace offload {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 8;        // weights
constexpr int kTileRows = 256;  // of the output
constexpr int kRowBytes = 128;  // of a tile's row
constexpr int kPieces = kRowBytes / 16;
constexpr float kMagic = 8388608.f;  // 2^23

struct Divisors {
    Divisor units;       // in a row
    Divisor scale_rows;  // that share a scale
    Divisor group;
    int whole_groups;  // a unit has one scale
};

__device__ __forceinline__ float magic(uint32_t code) {
    return __uint_as_float(0x4b000000u | code);
}

__device__ __forceinline__ int bits_of(int code) {
    return code == OFFLOAD_UINT4 || code == OFFLOAD_E2M1 ? 4 : 8;
}

// The 8 codes of `raw` as numbers, above `zero`, an integer.
__device__ __forceinline__ void decode(uint2 raw, int code, float zero, float (&x)[kUnit]) {
    switch (code) {
        case OFFLOAD_UINT4: {
            const float origin = kMagic + zero;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) x[i] = magic(raw.x >> 4 * i & 15u) - origin;
            break;
        }
        case OFFLOAD_E2M1:
            // Exponent and mantissa as a float32 that is too small by 2^126, subnormal or not.
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const uint32_t nibble = raw.x >> 4 * i;
                x[i] =
                    __uint_as_float((nibble & 7u) << 22 | (nibble & 8u) << 28) * 8.507059173e37f -
                    zero;
            }
            break;
        case OFFLOAD_E4M3:
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const uint32_t byte = (i < 4 ? raw.x : raw.y) >> 8 * (i % 4);
                const float small = __uint_as_float((byte & 127u) << 20 | (byte & 128u) << 24);
                x[i] = (byte & 127u) == 127u ? __uint_as_float(0x7fffffffu)
                                             : small * 1.329227996e36f - zero;  // 2^120
            }
            break;
        default: {
            const uint32_t flip = code == OFFLOAD_INT8 ? 128u : 0u;
            const float origin = kMagic + static_cast<float>(flip) + zero;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const uint32_t byte = (i < 4 ? raw.x : raw.y) >> 8 * (i % 4) & 255u;
                x[i] = magic(byte ^ flip) - origin;
            }
        }
    }
}

__device__ __forceinline__ float scale_at(const OffloadDequantize& a, int64_t at) {
    switch (a.scale_dtype) {
        case OFFLOAD_F16:
            return to_float(static_cast<const __half*>(a.scale)[at]);
        case OFFLOAD_BF16:
            return to_float(static_cast<const __nv_bfloat16*>(a.scale)[at]);
        case OFFLOAD_E8M0: {
            const uint32_t e = static_cast<const uint8_t*>(a.scale)[at];
            if (e == 255u) return __uint_as_float(0x7fffffffu);
            return __uint_as_float(e ? e << 23 : 0x00400000u);
        }
        default:
            return static_cast<const float*>(a.scale)[at];
    }
}

__device__ __forceinline__ float word_zero_at(const OffloadDequantize& a, int row, int64_t g) {
    const int bits = bits_of(a.code), log2 = bits == 4 ? 3 : 2;
    const uint32_t word = static_cast<const uint32_t*>(
        a.zero)[(row >> log2) * a.zero_row_stride + g * a.zero_group_stride];
    const int shift = a.zero_kind == OFFLOAD_ZERO_ROW_WORDS ? row_word_shift(row)
                                                            : (row & ((1 << log2) - 1)) * bits;
    const uint32_t zero = (word >> shift) + static_cast<uint32_t>(a.zero_value);
    return static_cast<float>(static_cast<int>(zero & ((1u << bits) - 1)));
}

__device__ __forceinline__ float zero_at(const OffloadDequantize& a, int row, int scale_row,
                                         int64_t g) {
    if (a.zero_kind == OFFLOAD_ZERO_VALUE) return static_cast<float>(a.zero_value);
    if (a.zero_kind == OFFLOAD_ZERO_BYTES)
        return static_cast<float>(static_cast<const int8_t*>(
            a.zero)[scale_row * a.zero_row_stride + g * a.zero_group_stride]);
    return word_zero_at(a, row, g);
}

__device__ __forceinline__ int group_of(const OffloadDequantize& a, const Divisors& d, int k) {
    return a.group_index ? a.group_index[k] : d.group(k);
}

struct Affine {
    float scale, zero;
};

__device__ __forceinline__ Affine affine_at(const OffloadDequantize& a, const Divisors& d, int row,
                                            int k) {
    const int64_t g = group_of(a, d, k);
    const int scale_row = d.scale_rows(row);
    return {scale_at(a, scale_row * a.scale_row_stride + g * a.scale_group_stride),
            zero_at(a, row, scale_row, g)};
}

__device__ __forceinline__ void decode(uint2 raw, int code, Affine affine, float (&x)[kUnit]) {
    decode(raw, code, affine.zero, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] *= affine.scale;
}

template <typename T>
__device__ __forceinline__ void store_unit(T* to, const float (&x)[kUnit]) {
    constexpr int kWidth = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kUnit; i += kWidth)
        store_once<T, kWidth>(to + i, from_floats<T, kWidth>(x + i));
}

// Strips of 256 weights along the depth, a unit a lane, kUnits strips a warp: a row's address is
// worked out once for all of them. Of what is done for each unit hardly anything is left but its
// load, its numbers and its store: 17 instructions a weight are all that HBM's rate leaves for
// int4.
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
        decode(raw[i], kCode, Affine{scale[i], zero[i]}, x);
        store_unit(output + at(row[i], s.output_stride) + k[i], x);
    }
}

// Codes along the depth, of any number of units a row: kUnits of every kThreads-th a thread.
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
        decode(raw[i], a.code, affine[i], x);
        store_unit(output + row[i] * a.output_stride + k[i], x);
    }
}

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

// Words along the depth that lie along the rows (OFFLOAD_DEPTH_WORDS), or words of rows
// (OFFLOAD_ROW_WORDS): a block has kTileRows rows and 128 bytes of each.
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
                decode(raw[u], code, affine[u], x);
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
                decode(raw, code, 0.f, x);
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
                decode(raw, OFFLOAD_UINT4, affine[r], x);
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

// Where a lane's scales and zeros lie that are those of two rows, one behind the other.
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

// Panels: kUnits a warp, whose neighbours have the next columns of the same rows.
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

// The code of one weight in panels.
__device__ __forceinline__ uint32_t panel_code(const OffloadDequantize& a, int row, int k) {
    const int g = row % 8, p = row / 8 % 2;
    const bool narrow = a.code == OFFLOAD_UINT4;
    const int columns = narrow ? 64 : 32, c = k % columns;
    const int64_t panel =
        static_cast<int64_t>(row / kPanelRows) * (a.depth / columns) + k / columns;
    const int word = narrow ? c / 32 * 2 + c % 8 / 4 : c % 8 / 4 * 2 + p;
    const uint8_t code = static_cast<const uint8_t*>(
        a.codes)[panel * kPanelBytes + (g * 4 + c % 32 / 8) * 16 + word * 4 + panel_byte(c % 4)];
    return narrow ? code >> 4 * p & 15u : code;
}

// Any depth, stride and address: one weight after another.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_plain_kernel(const OffloadDequantize a, const Divisors d) {
    let_next_kernel_begin();
    wait_for_previous_kernel();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int row = static_cast<int>(at / a.depth), k = static_cast<int>(at % a.depth);
    if (row >= a.rows) return;
    const int bits = bits_of(a.code), per_word = 32 / bits;
    const unsigned char* codes = static_cast<const unsigned char*>(a.codes);
    float x[kUnit];
    T* output = static_cast<T*>(a.output);
    if (a.order == OFFLOAD_PANELS) {
        const int64_t pair = pair_at(a, d, row / kPanelRows, row % 8, k);
        const int p = row / 8 % 2;
        const uint32_t zeros = pair_zeros(a, pair);
        const Affine affine{scale_at(a, pair * 2 + p),
                            bits == 4 ? zero_of<4>(zeros, p) : zero_of<8>(zeros, p)};
        decode(make_uint2(panel_code(a, row, k), 0u), a.code, affine, x);
        output[row * a.output_stride + k] = from_float<T>(x[0]);
        return;
    }
    uint32_t code;
    if (a.order == OFFLOAD_ALONG_DEPTH) {
        code = codes[row * a.code_stride + (bits == 4 ? k / 2 : k)];
        if (bits == 4) code >>= k % 2 * 4;
    } else if (a.order == OFFLOAD_DEPTH_WORDS) {
        code = *reinterpret_cast<const uint32_t*>(codes + k / per_word * a.code_stride + row * 4ll);
        code >>= k % per_word * bits;
    } else {
        code = *reinterpret_cast<const uint32_t*>(codes + k * a.code_stride + row / 8 * 4ll);
        code >>= row_word_shift(row);
    }
    const Affine affine = affine_at(a, d, row, k);
    decode(make_uint2(bits == 4 ? code & 15u : code & 255u, 0u), a.code, affine, x);
    output[row * a.output_stride + k] = from_float<T>(x[0]);
}

// ---- on the host ----

int check_sizes(const OffloadDequantize& a) {
    if (a.rows < 0 || a.depth < 0)
        return refuse("dequantize: there are no %d rows of %d", a.rows, a.depth);
    if (a.code < OFFLOAD_UINT4 || a.code > OFFLOAD_E2M1)
        return refuse("dequantize: no code has the number %d", a.code);
    if (a.order < OFFLOAD_ALONG_DEPTH || a.order > OFFLOAD_PANELS)
        return refuse("dequantize: no order of codes has the number %d", a.order);
    const bool integer = a.code == OFFLOAD_UINT4 || a.code == OFFLOAD_UINT8;
    if (a.order != OFFLOAD_ALONG_DEPTH && !integer)
        return refuse("dequantize: code %d does not lie in words", a.code);
    if (a.order == OFFLOAD_ROW_WORDS && (a.code != OFFLOAD_UINT4 || a.rows % 8))
        return refuse("dequantize: words of rows hold 8 codes of 4 bits, not %d rows of code %d",
                      a.rows, a.code);
    if (a.order == OFFLOAD_DEPTH_WORDS && a.depth % (a.code == OFFLOAD_UINT4 ? 8 : 4))
        return refuse("dequantize: a depth of %d does not divide into words", a.depth);
    if (a.zero_kind < OFFLOAD_ZERO_VALUE || a.zero_kind > OFFLOAD_ZERO_PANELS)
        return refuse("dequantize: no kind of zero has the number %d", a.zero_kind);
    if (a.order == OFFLOAD_PANELS) {
        const int columns = a.code == OFFLOAD_UINT4 ? 64 : 32;
        if (a.rows % kPanelRows || a.depth % columns)
            return refuse("dequantize: %d rows of %d do not divide into panels of %d and %d",
                          a.rows, a.depth, kPanelRows, columns);
        if (a.group_index || a.scale_rows != 1 ||
            (a.group < a.depth && (a.group % 32 || a.depth % a.group)))
            return refuse(
                "dequantize: panels have a scale a row and group of 32 columns, or some times "
                "that, not of %d rows and %d columns",
                a.scale_rows, a.group);
        if (a.scale_dtype != OFFLOAD_F16 && a.scale_dtype != OFFLOAD_BF16)
            return refuse("dequantize: panels have no scales of dtype %d", a.scale_dtype);
    }
    if ((a.order == OFFLOAD_PANELS && a.zero_kind != OFFLOAD_ZERO_VALUE) !=
        (a.zero_kind == OFFLOAD_ZERO_PANELS))
        return refuse("dequantize: codes in the order %d have no zeros of the kind %d", a.order,
                      a.zero_kind);
    if (a.zero_kind == OFFLOAD_ZERO_WORDS && !integer)
        return refuse("dequantize: code %d has no zeros in words", a.code);
    if (a.zero_kind == OFFLOAD_ZERO_ROW_WORDS && a.code != OFFLOAD_UINT4)
        return refuse("dequantize: code %d has no zeros in words of rows", a.code);
    if (a.scale_dtype < OFFLOAD_F32 || a.scale_dtype > OFFLOAD_E8M0)
        return refuse("dequantize: no dtype of scales has the number %d", a.scale_dtype);
    if (a.scale_rows < 1 || a.group < 1)
        return refuse("dequantize: %d rows and %d columns share a scale", a.scale_rows, a.group);
    if (a.variant < 0 || a.variant > 2)
        return refuse("dequantize: variant must be 0 to 2, not %d", a.variant);
    if (a.output_stride < a.depth && a.rows > 1)
        return refuse("dequantize: the output's stride must be at least the depth, %d", a.depth);
    return 0;
}

template <typename T>
int launch_units(const OffloadDequantize& a, const Divisors& d, void* stream) {
    constexpr int kUnits = 4;
    const int64_t units = static_cast<int64_t>(a.rows) * (a.depth / kUnit);
    const int64_t blocks = (units - 1) / (kThreads * kUnits) + 1;
    return launch("dequantize", dequantize_units_kernel<T, kUnits>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a.launch_early, a,
                  d, units);
}

template <typename T, int kCode>
int launch_strips_of(const OffloadDequantize& a, const Strips& s, void* stream) {
    constexpr int kUnits = kCode == OFFLOAD_UINT4 || kCode == OFFLOAD_E2M1 ? 8 : 4;
    const int64_t blocks = (s.count - 1ll) / (kThreads / 32 * kUnits) + 1;
    return launch("dequantize", dequantize_strips_kernel<T, kCode, kUnits>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a.launch_early, a,
                  s);
}

template <typename T>
int launch_strips(const OffloadDequantize& a, const Divisors& d, int group_log2, void* stream) {
    Strips s;
    s.of_row = Divisor(a.depth / kStrip);
    s.scale_rows = d.scale_rows;
    s.group_log2 = group_log2;
    s.count = a.rows * (a.depth / kStrip);
    s.code_stride = static_cast<int>(a.code_stride);
    s.scale_row_stride = static_cast<int>(a.scale_row_stride);
    s.scale_group_stride = static_cast<int>(a.scale_group_stride);
    s.output_stride = static_cast<int>(a.output_stride);
    s.zero_row_stride = static_cast<int>(a.zero_row_stride);
    s.zero_group_stride = static_cast<int>(a.zero_group_stride);
    switch (a.code) {
        case OFFLOAD_UINT4:
            return launch_strips_of<T, OFFLOAD_UINT4>(a, s, stream);
        case OFFLOAD_UINT8:
            return launch_strips_of<T, OFFLOAD_UINT8>(a, s, stream);
        case OFFLOAD_INT8:
            return launch_strips_of<T, OFFLOAD_INT8>(a, s, stream);
        case OFFLOAD_E4M3:
            return launch_strips_of<T, OFFLOAD_E4M3>(a, s, stream);
        default:
            return launch_strips_of<T, OFFLOAD_E2M1>(a, s, stream);
    }
}

// Of a group's columns; 31 where a row is one group, -1 where they are no power of two.
int group_log2(const OffloadDequantize& a) {
    if (a.group >= a.depth) return 31;
    int log2 = 0;
    while ((1 << log2) < a.group) ++log2;
    return 1 << log2 == a.group ? log2 : -1;
}

template <typename T>
int launch_dequantize(const OffloadDequantize& a, void* stream) {
    constexpr int kWidth = 16 / sizeof(T);
    const int code_bytes = a.code == OFFLOAD_UINT4 || a.code == OFFLOAD_E2M1 ? 4 : 8;  // a unit
    const int64_t units = static_cast<int64_t>(a.rows) * (a.depth / kUnit);
    Divisors d;
    d.units = Divisor(a.depth / kUnit > 0 ? a.depth / kUnit : 1);
    d.scale_rows = Divisor(a.scale_rows);
    d.group = Divisor(a.group);
    d.whole_groups = !a.group_index && (a.group % kUnit == 0 || a.group >= a.depth);
    const bool wide_output = a.depth % kUnit == 0 && a.output_stride % kWidth == 0 &&
                             aligned<T, kWidth>(a.output) && units < INT32_MAX;
    int64_t widest = 0;
    for (int64_t stride : {a.code_stride, a.output_stride, a.scale_row_stride, a.scale_group_stride,
                           a.zero_row_stride, a.zero_group_stride})
        widest = stride > widest ? stride : widest;
    const uintptr_t codes = reinterpret_cast<uintptr_t>(a.codes) | a.code_stride;
    if (wide_output && a.order == OFFLOAD_PANELS && codes % 16 == 0 &&
        reinterpret_cast<uintptr_t>(a.scale) % 4 == 0) {
        const bool narrow = a.code == OFFLOAD_UINT4;
        d.units = Divisor(a.depth / (narrow ? 64 : 32));
        const int count = a.rows / kPanelRows * d.units.by;
        const int units = kThreads / 32 * (narrow ? kPanels4 : kPanels8);
        const auto kernel =
            narrow ? dequantize_panels_kernel<T, 4> : dequantize_panels_kernel<T, 8>;
        const int64_t blocks = (count - 1ll) / units + 1;
        return launch("dequantize", kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                      stream, a.launch_early, a, d, count);
    }
    if (wide_output && a.order == OFFLOAD_ALONG_DEPTH && codes % code_bytes == 0 &&
        d.whole_groups) {
        const int log2 = group_log2(a);
        if (a.variant != 1 && a.depth % kStrip == 0 && log2 >= 0 && widest <= INT32_MAX)
            return launch_strips<T>(a, d, log2, stream);
        return launch_units<T>(a, d, stream);
    }
    const bool word_zeros =
        a.zero_kind == OFFLOAD_ZERO_WORDS || a.zero_kind == OFFLOAD_ZERO_ROW_WORDS;
    const bool in_words = a.order == OFFLOAD_DEPTH_WORDS || a.order == OFFLOAD_ROW_WORDS;
    if (wide_output && in_words && codes % 4 == 0 && word_zeros && a.scale_rows == 1 &&
        a.scale_dtype != OFFLOAD_E8M0 &&
        (d.whole_groups || (a.order == OFFLOAD_DEPTH_WORDS && widest <= INT32_MAX &&
                            a.zero_kind == OFFLOAD_ZERO_WORDS))) {
        constexpr int kColumns = kRowBytes / sizeof(T);
        const int column_tiles = (a.depth - 1) / kColumns + 1;
        const int64_t blocks = ((a.rows - 1ll) / kTileRows + 1) * column_tiles;
        if (blocks <= INT32_MAX)
            return launch("dequantize", dequantize_tile_kernel<T>,
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                          a.launch_early, a, d, column_tiles);
    }
    const int64_t blocks = (static_cast<int64_t>(a.rows) * a.depth - 1) / kThreads + 1;
    if (blocks > INT32_MAX)
        return refuse("dequantize: %d rows of %d are too many for one launch", a.rows, a.depth);
    return launch("dequantize", dequantize_plain_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                  dim3(kThreads), 0, stream, a.launch_early, a, d);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_dequantize(const OffloadDequantize* arguments, void* stream) {
    using namespace offload;
    const OffloadDequantize& a = *arguments;
    if (int status = check_sizes(a)) return status;
    if (a.rows == 0 || a.depth == 0) return 0;
    if (!a.codes || !a.scale || !a.output || (a.zero_kind != OFFLOAD_ZERO_VALUE && !a.zero))
        return refuse("dequantize: codes, scale, zero or output is null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("dequantize", a.dtype,
                    [&](auto element) { return launch_dequantize<decltype(element)>(a, stream); });
}
