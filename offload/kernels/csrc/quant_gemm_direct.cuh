// The product for a few rows with a quantised weight whose codes go straight from global memory
// into the registers of the lanes that multiply with them: no barrier and no copy stands in the
// loop. See quant_gemm.cuh for what both forms have in common.
//
// A warp has 16 rows of a tile and a part of its depth. It takes 128 bytes of each row at a time, a
// unit, two of them under way: of a quarter of a unit the 4 lanes of a row read 32 bytes at once,
// as many columns (64 of int4, 32 of int8) as share a scale. A lane reads scale and zero of one
// quarter for the 4 of its row.
#pragma once
#include "quant_gemm.cuh"

namespace offload {

constexpr int kUnitBytes = 128;  // of a row
constexpr int kUnitHalves = 4;   // of a step, of 32 bytes
constexpr int kNothing = 512;    // bytes of zeros in shared memory

// A unit of a lane: of rows 8 apart 8 bytes of each quarter; of scales and zeros those of the
// quarter that has the lane's number, or where a quarter has several, its own of each quarter.
template <bool kScaleWeights, bool kWide>
struct QuantUnit {
    static constexpr int kOwn = kScaleWeights ? kUnitHalves : kWide ? 2 : 1;
    uint2 codes[2][kUnitHalves];  // wide: 16 bytes of each half of the unit
    uint32_t scales[2][kOwn];
    uint32_t zeros[2][kOwn];  // words
    int zero_shift[2];
};

// 8 bytes of what is read once: past L1, out of L2 first.
__device__ __forceinline__ uint2 load_once(const unsigned char* from, uint64_t policy) {
#ifdef __CUDA_ARCH__
    uint2 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(from), "l"(policy));
    return x;
#else
    return *reinterpret_cast<const uint2*>(from);
#endif
}

__device__ __forceinline__ uint4 load_once16(const unsigned char* from, uint64_t policy) {
#ifdef __CUDA_ARCH__
    uint4 x;
    asm volatile(
        "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from), "l"(policy));
    return x;
#else
    return *reinterpret_cast<const uint4*>(from);
#endif
}

template <typename T, int kBits, int kColumns, int kGroups, int kParts, int kBlocks,
          bool kScaleWeights, bool kWide>
__global__ void __launch_bounds__(kGroups * kParts * 32, kBlocks)
    direct_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                       const __grid_constant__ QuantPlan p) {
    using Shape = QuantShape<kBits, kColumns, kGroups * kParts, 1, kGroups, 1>;
    using Code = Codes<T, kBits>;
    using Unit = QuantUnit<kScaleWeights, kWide>;
    constexpr int kLaneBytes = kWide ? 16 : 8, kOwn = Unit::kOwn;
    static_assert(!kWide || (kColumns == 1 && !kScaleWeights), "up to 4 rows");
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    // From a lane: so the compiler sees that a warp has the same.
    const int warp =
        static_cast<int>(__shfl_sync(0xffffffffu, static_cast<uint32_t>(thread / 32), 0));
    const int group = warp % kGroups, part = warp / kGroups;
    const int row = lane / 4, quarter = lane % 4;
    constexpr int kPerWord = 32 / kBits;
    constexpr uint32_t kMask = (1u << kBits) - 1;
    let_next_kernel_begin();
    const uint64_t policy = evict_first_policy();

    // What is loaded: unit `ahead` of a row, of tile `ahead_tile`, in the pass from `ahead_pass`
    // on. Of a pass's units a warp has those from first_of to end_of.
    auto units_of = [&](int pass) { return min(p.pass_chunks, p.chunks - pass); };
    auto first_of = [&](int pass) { return pass + units_of(pass) * part / kParts; };
    auto end_of = [&](int pass) { return pass + units_of(pass) * (part + 1) / kParts; };
    int ahead_pass = 0, ahead_tile = 0, ahead = first_of(0), ahead_end = end_of(0);
    const unsigned char* codes_at[2];
    const uint16_t* scales_at[2];
    const uint32_t* zeros_at[2];
    int zero_shift[2];
    bool there[2];  // of rows without an output nothing is read
    auto begin_rows = [&] {
        const QuantTile at(a, p, ahead_tile);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_tile = group * 16 + h * 8 + row, n = at.row_of(a, in_tile);
            there[h] = at.output_of(a, in_tile) < at.outputs;
            codes_at[h] = static_cast<const unsigned char*>(a.codes) +
                          static_cast<int64_t>(n) * p.row_bytes + quarter * kLaneBytes;
            scales_at[h] = static_cast<const uint16_t*>(a.scale) + n * p.groups;
            zeros_at[h] = static_cast<const uint32_t*>(a.zero) + n / kPerWord * p.groups;
            zero_shift[h] = n % kPerWord * kBits;
        }
    };
    auto fetch = [&](Unit& to, auto zeros) {
        constexpr bool kZeros = decltype(zeros)::value;
        if (ahead_pass >= p.chunks) return;
        const int skip = ahead * kUnitBytes;
        // Behind a row's end the activations are zeros, and any code is finite.
        auto load = [&](int h, int j, int at) {
            if constexpr (kWide) {
                const uint4 x = load_once16(codes_at[h] + at, policy);
                to.codes[h][j * 2] = make_uint2(x.x, x.y);
                to.codes[h][j * 2 + 1] = make_uint2(x.z, x.w);
            } else {
                to.codes[h][j] = load_once(codes_at[h] + at, policy);
            }
        };
        constexpr int kLoads = kUnitBytes / 4 / kLaneBytes;
        if (skip + kUnitBytes <= p.row_bytes) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (there[h]) {
#pragma unroll
                    for (int j = 0; j < kLoads; ++j) load(h, j, skip + j * 4 * kLaneBytes);
                }
        } else {
            const int last = p.row_bytes - kLaneBytes - quarter * kLaneBytes;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 0; j < kLoads; ++j) load(h, j, min(skip + j * 4 * kLaneBytes, last));
        }
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            const int half = ahead * kUnitHalves + (kScaleWeights ? j
                                                    : kWide       ? j * 2 + quarter / 2
                                                                  : quarter);
            int column = half * Shape::kHalfDepth;
            if (kScaleWeights) column += quarter * (Shape::kHalfDepth / 4);
            const int g = min(column >> p.group_shift, p.groups - 1);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                to.scales[h][j] = scales_at[h][g];
                if (kZeros) to.zeros[h][j] = zeros_at[h][g];
            }
        }
        if (kZeros) {
#pragma unroll
            for (int h = 0; h < 2; ++h) to.zero_shift[h] = zero_shift[h];
        }
        if (++ahead < ahead_end) return;
        if (++ahead_tile == p.tiles) {
            ahead_tile = 0;
            do {
                ahead_pass += p.pass_chunks;
                ahead_end = ahead_pass < p.chunks ? end_of(ahead_pass) : 0;
            } while (ahead_pass < p.chunks && first_of(ahead_pass) == ahead_end);
        }
        if (ahead_pass >= p.chunks) return;
        ahead = first_of(ahead_pass);
        begin_rows();
    };

    // Only the weight is sure to be there before the kernel ahead has ended.
    Unit slots[2] = {};
    begin_rows();
    while (ahead == ahead_end && ahead_pass < p.chunks) {
        ahead_pass += p.pass_chunks;
        if (ahead_pass < p.chunks) {
            ahead = first_of(ahead_pass);
            ahead_end = end_of(ahead_pass);
        }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        if (a.zero)
            fetch(slots[s], std::true_type());
        else
            fetch(slots[s], std::false_type());
    }
    wait_for_previous_kernel();

    constexpr int kCorrected = kBits == 4 ? Code::kOffset + Code::kMiddle : Code::kMiddle;
    const unsigned char* const input_sums = shared + p.input_sums_at + quarter * 16;
    // Columns without a row of activations are not looked at: they have the last one's.
    const unsigned char* inputs_of[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        inputs_of[c] =
            shared + p.inputs_at + min(c * 8 + row, a.rows - 1) * p.input_pitch + quarter * 16;

    float sums[kColumns][4] = {};
    // `unit` of a pass.
    auto multiply = [&](int unit, const Unit& at, auto zeros) {
        constexpr bool kZeros = decltype(zeros)::value;
        float scale_of[2], correction_of[2];
        if constexpr (!kScaleWeights) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale_of[h] = scale_in(at.scales[h][0], false, T());
                if (kZeros)
                    correction_of[h] =
                        scale_of[h] *
                        (static_cast<float>(
                             static_cast<int>(at.zeros[h][0] >> at.zero_shift[h] & kMask) -
                             Code::kMiddle) *
                         (1.f / kCorrected));
            }
        }
#pragma unroll
        for (int j = 0; j < kUnitHalves; ++j) {
            const int half = unit * kUnitHalves + j;
            uint32_t w[2][Shape::kWords][4];
            float scale[2], correction[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                expand_codes<T, kBits>(at.codes[h][j], w[h]);
                if constexpr (kScaleWeights) {
                    const int zero =
                        kZeros ? static_cast<int>(at.zeros[h][j] >> at.zero_shift[h] & kMask)
                               : int{Code::kMiddle};
                    scale_codes<T, kBits>(w[h], at.scales[h][j], zero);
                } else {
                    scale[h] = __uint_as_float(
                        __shfl_sync(0xffffffffu, __float_as_uint(scale_of[h]), (lane & 28) | j));
                    if (kZeros)
                        correction[h] = __uint_as_float(__shfl_sync(
                            0xffffffffu, __float_as_uint(correction_of[h]), (lane & 28) | j));
                }
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const unsigned char* const from = inputs_of[c] + half * Shape::kHalfInputs;
                if constexpr (kScaleWeights) {
                    multiply_words<T, Shape::kWords>(sums[c], w, from);
                } else {
                    float sum[4] = {};
                    float4 start = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (kBits == 4 || kZeros)
                        start = *reinterpret_cast<const float4*>(input_sums +
                                                                 half * Shape::kHalfSums + c * 64);
                    if (kBits == 4) {
                        sum[0] = start.x;
                        sum[1] = start.y;
                        sum[2] = start.z;
                        sum[3] = start.w;
                    }
                    multiply_words<T, Shape::kWords>(sum, w, from);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[c][i] += scale[i / 2] * sum[i];
                    if (kZeros) {
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            sums[c][i] += correction[i / 2] * (i % 2 ? start.y : start.x);
                    }
                }
            }
        }
    };

    // With up to 4 rows of activations a product's 8 columns are twice these 4: of the first half
    // of 64 bytes, which lanes 0 and 1 of a row have, and of the second half. The others' part of
    // the operand is zeros.
    const bool mine = row / 4 == quarter / 2;
    const unsigned char* const wide_inputs =
        mine ? shared + p.inputs_at + min(row % 4, a.rows - 1) * p.input_pitch +
                   quarter / 2 * Shape::kHalfInputs + quarter % 2 * 32
             : shared + p.parts_at - kNothing + 16;
    const int wide_step = mine ? kUnitHalves * Shape::kHalfInputs : 0;
    const unsigned char* const wide_sums =
        shared + p.input_sums_at + quarter / 2 * Shape::kHalfSums + quarter % 2 * 16;
    auto multiply_wide = [&](int unit, const Unit& at, auto zeros) {
        constexpr bool kZeros = decltype(zeros)::value;
        const unsigned char* const from = wide_inputs + unit * wide_step;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float scale[2], correction[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h] = scale_in(at.scales[h][j % kOwn], false, T());
                if (kZeros)
                    correction[h] =
                        scale[h] *
                        (static_cast<float>(
                             static_cast<int>(at.zeros[h][j % kOwn] >> at.zero_shift[h] & kMask) -
                             Code::kMiddle) *
                         (1.f / kCorrected));
            }
            float sum[4] = {};
            float4 start = make_float4(0.f, 0.f, 0.f, 0.f);
            if (kBits == 4 || kZeros)
                start = *reinterpret_cast<const float4*>(wide_sums + (unit * kUnitHalves + j * 2) *
                                                                         Shape::kHalfSums);
            if (kBits == 4) {
                sum[0] = start.x;
                sum[1] = start.y;
                sum[2] = start.z;
                sum[3] = start.w;
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {  // of 8 bytes
                uint32_t w[2][Shape::kWords][4];
#pragma unroll
                for (int h = 0; h < 2; ++h) expand_codes<T, kBits>(at.codes[h][j * 2 + k], w[h]);
#pragma unroll
                for (int i = 0; i < Shape::kWords; ++i) {
                    const uint4 x = *reinterpret_cast<const uint4*>(
                        from + j * 2 * Shape::kHalfInputs + i * 64 + k * 16);
                    multiply_tile(sum, w[0][i][0], w[1][i][0], w[0][i][1], w[1][i][1], x.x, x.y,
                                  T());
                    multiply_tile(sum, w[0][i][2], w[1][i][2], w[0][i][3], w[1][i][3], x.z, x.w,
                                  T());
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] += scale[i / 2] * sum[i];
            if (kZeros) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[0][i] += correction[i / 2] * (i % 2 ? start.y : start.x);
            }
        }
    };

    float* const all_parts = reinterpret_cast<float*>(shared + p.parts_at);
    float* const passes = reinterpret_cast<float*>(shared + p.passes_at);
    int ends = 0;
    auto end_tile = [&](int tile, bool first, bool last) {
        // One of two places: the other may still be read.
        float* const parts = all_parts + ends++ % 2 * (kColumns * Shape::kSumFloats);
        if (kWide) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] += __shfl_xor_sync(0xffffffffu, sums[0][i], 2);
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                parts[c * Shape::kSumFloats + (part * 8 + quarter * 2 + i % 2) * Shape::kSumPitch +
                      group * 16 + i / 2 * 8 + row] = sums[c][i];
                sums[c][i] = 0.f;
            }
        __syncthreads();
        finish_tile<T, Shape::kTileRows, kParts>(a, p, tile, parts, passes, first, last);
    };
    auto run = [&](auto zeros) {
        for (int pass = 0; pass < p.chunks; pass += p.pass_chunks) {
            if (pass > 0) __syncthreads();  // all are done with the activations
            if (kWide && pass == 0 && thread < kNothing / 16)
                *reinterpret_cast<uint4*>(shared + p.parts_at - kNothing + thread * 16) =
                    make_uint4(0, 0, 0, 0);
            begin_inputs<T, kBits, kColumns, Shape::kThreads, kScaleWeights>(a, p, shared, pass * 2,
                                                                             units_of(pass) * 2);
            const bool last = pass + p.pass_chunks >= p.chunks;
            const int first = first_of(pass), units = end_of(pass) - first;
            int tile = 0, unit = 0, left = p.tiles * units;
            if (units == 0)
                while (tile < p.tiles) end_tile(tile++, pass == 0, last);
            while (left > 0) {
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    if (left == 0) break;
                    --left;
                    if constexpr (kWide)
                        multiply_wide(first - pass + unit, slots[s], zeros);
                    else
                        multiply(first - pass + unit, slots[s], zeros);
                    fetch(slots[s], zeros);
                    if (++unit == units) {
                        end_tile(tile, pass == 0, last);
                        ++tile;
                        unit = 0;
                    }
                }
            }
            if (!last && p.tiles * units % 2) {
                const Unit other = slots[0];
                slots[0] = slots[1];
                slots[1] = other;
            }
        }
    };
    if (a.zero)
        run(std::true_type());
    else
        run(std::false_type());
}

}  // namespace offload
