// A few rows of activations times a quantised weight that is read as it is stored: int4 and int8
// codes along the depth (compressed-tensors `pack-quantized`), one scale a row or a group.
//
// Weights are the 16-row operand of the tensor cores at any number of rows: a scalar form has no
// issue slots left for more than one. See quant_codes.cuh for how codes become operands.
//
// Every block has an equal number of outputs, to the row, cut into equal tiles of at most kTileRows
// weight rows: so all SMs read as much. Its codes come in stages by background copies, in long
// pieces of a row: HBM gives half as much where pieces of 64 bytes are read. Scales and zeros come
// through L1 into registers, a stage ahead. The activations stay in shared memory, in the order of
// the operands, with their sums; where there is no room for all of their depth, a block goes over
// its tiles several times, a part of the depth each time (`passes`).
//
// Warps share out a tile's rows and a chunk's depth. Of a row, 32 bytes are multiplied at once by
// the 4 lanes that hold it: as many columns (64 of int4, 32 of int8) share a scale, so that the
// scale may wait for the sum. The parts of the depth are added in order through shared memory:
// results repeat bit for bit.
//
// With programmatic dependent launch the codes of the first stages are under way before the kernel
// waits for the one before it.
//
// The budget [instructions a weight] on an H200 at 0.8 of 4.42 TB/s: 4.2 for int4, 8.5 for int8.
#pragma once
#include "async_copy.cuh"
#include "quant_codes.cuh"

namespace offload {

constexpr int kQuantWarps = 16;  // of a multiprocessor, in one block or more
constexpr int kStepBytes = 64;   // of a row
constexpr int kSumPadding = 4;   // of rows of sums: those 2 apart lie 8 banks apart

// What a step's two halves, of 32 bytes a row, have of scales and zeros.
enum StepScales : int32_t {
    kScalesApart,   // each its own, at any place
    kScalesPaired,  // each its own, next to each other at a multiple of two
    kScalesShared   // one
};

struct QuantPlan {
    int32_t block_outputs, longer_blocks;  // the first ones have one more
    int32_t tiles, tile_outputs;           // of a block; of a tile, but for the last
    int32_t chunks;                        // of a row
    int32_t pass_chunks;                   // of them a pass
    int32_t steps;                         // of kStepBytes, in a row
    int32_t row_bytes;
    int32_t groups, group_shift;
    int32_t step_scales;
    int32_t stages;
    // Of shared memory, in bytes: what a row of activations takes, and where begin the activations,
    // their sums, the sums of the parts of the depth, those of earlier passes.
    int32_t input_pitch, inputs_at, input_sums_at, parts_at, passes_at;
};

template <int kBits, int kColumns, int kWarps, int kTiles, int kGroups, int kSteps>
struct QuantShape {
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kParts = kWarps / kGroups;  // of a chunk's depth
    static constexpr int kWarpRows = kTiles * 16;
    static constexpr int kTileRows = kGroups * kWarpRows;
    static constexpr int kChunkSteps = kParts * kSteps;
    static constexpr int kChunkBytes = kChunkSteps * kStepBytes;
    static constexpr int kStageBytes = kTileRows * kChunkBytes;
    static constexpr int kPieces = kChunkBytes / 16;  // of a row
    static constexpr int kRowsAtOnce = kThreads / kPieces;
    static constexpr int kCopies = kTileRows / kRowsAtOnce;  // a thread and stage
    static constexpr int kHalfDepth = 256 / kBits;           // columns of half a step
    static constexpr int kStepDepth = 2 * kHalfDepth;
    static constexpr int kWords = 8 / kBits;  // pieces of 8 codes, of a lane in half a step
    static constexpr int kHalfInputs = kHalfDepth * 2;  // bytes of a row of activations
    static constexpr int kHalfSums = kColumns * 64;     // bytes of their sums
    static constexpr int kSumPitch = kTileRows + kSumPadding;
    static constexpr int kSumFloats = kParts * 8 * kSumPitch;  // of 8 rows of activations
    static constexpr int kPartsBytes = kColumns * kSumFloats * static_cast<int>(sizeof(float));
    static_assert(kParts * kGroups == kWarps, "whole parts");
    static_assert(kCopies * kRowsAtOnce == kTileRows && kRowsAtOnce % 4 == 0, "whole copies");
};

// Of activations, past L1: the kernel ahead may have written them.
__device__ __forceinline__ uint4 load_past_l1(const uint4* from) {
#ifdef __CUDA_ARCH__
    return __ldcg(from);
#else
    return *from;
#endif
}

__device__ __forceinline__ void prefetch_into_l2(const void* at) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// The scale in the low half of a word, or in its high half.
__device__ __forceinline__ float scale_in(uint32_t word, bool high, __nv_bfloat16) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(__byte_perm(word, 0u, high ? 0x3244u : 0x1044u));
#else
    return __uint_as_float(high ? word & 0xffff0000u : word << 16);
#endif
}

__device__ __forceinline__ float scale_in(uint32_t word, bool high, __half) {
    return bits_to_float(high ? word >> 16 : word & 0xffffu, __half());
}

// Some of a block's outputs, and where their rows lie in the weight. With a gate, a group's first 8
// rows are gate rows and the others their up rows.
struct QuantTile {
    int output, outputs;  // the first, and how many

    __device__ __forceinline__ QuantTile(const OffloadQuantGemm& a, const QuantPlan& p, int tile) {
        const int block = static_cast<int>(blockIdx.x);
        const int begin = tile * p.tile_outputs;
        const int count = p.block_outputs + (block < p.longer_blocks);
        output = block * p.block_outputs + min(block, p.longer_blocks) + begin;
        outputs = max(min(count - begin, p.tile_outputs), 0);
    }

    __device__ __forceinline__ static int output_of(const OffloadQuantGemm& a, int in_tile) {
        return a.gated ? in_tile / 16 * 8 + in_tile % 8 : in_tile;
    }

    // Rows without an output are taken for the last one.
    __device__ __forceinline__ int row_of(const OffloadQuantGemm& a, int in_tile) const {
        return max(output + min(output_of(a, in_tile), outputs - 1), 0) +
               (a.gated && in_tile % 16 >= 8 ? a.outputs : 0);
    }
};

template <typename T>
__device__ __forceinline__ void finish_output(const OffloadQuantGemm& a, int n, int r, float gate,
                                              float up) {
    const T* bias = static_cast<const T*>(a.bias);
    const T* residual = static_cast<const T*>(a.residual);
    float y = activate(gate + (bias ? to_float(bias[n]) : 0.f), a.activation);
    if (a.gated) y *= up + (bias ? to_float(bias[n + a.outputs]) : 0.f);
    if (residual) y += to_float(residual[r * a.residual_stride + n]);
    static_cast<T*>(a.output)[r * a.output_stride + n] = from_float<T>(y);
}

// Adds what the parts have summed up, [rows / 8, parts, 8, tile_rows + padding], to what earlier
// passes have, and writes it to the output after the last of them. Called, and not inlined, since
// it is long and seldom runs.
template <typename T, int kTileRows, int kParts>
__device__ __noinline__ void finish_tile(const OffloadQuantGemm& a, const QuantPlan& p, int tile,
                                         const float* parts, float* passes, bool first, bool last) {
    constexpr int kPitch = kTileRows + kSumPadding;
    const QuantTile at(a, p, tile);
    const int shift = a.gated ? 1 : 0, width = kTileRows >> shift;
    const int count = width * a.rows;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += blockDim.x) {
        const int n = i & (width - 1), r = i / width;
        if (n >= at.outputs) continue;
        const float* from =
            parts + (r / 8 * kParts * 8 + r % 8) * kPitch + (a.gated ? n / 8 * 16 + n % 8 : n);
        float gate = 0.f, up = 0.f;
#pragma unroll
        for (int part = 0; part < kParts; ++part, from += 8 * kPitch) {
            gate += from[0];
            if (a.gated) up += from[8];
        }
        float* const place = passes + (static_cast<int64_t>(tile) * count + i << shift);
        if (!first) {
            gate += place[0];
            if (a.gated) up += place[1];
        }
        if (last) {
            finish_output<T>(a, at.output + n, r, gate, up);
        } else {
            place[0] = gate;
            if (a.gated) place[1] = up;
        }
    }
}

// The pair forms of 8 codes a word, or of 4, in the order of `arrange`.
template <typename T, int kBits>
__device__ __forceinline__ void expand_codes(const uint2& codes, uint32_t (&w)[8 / kBits][4]) {
    if constexpr (kBits == 4) {
        Codes<T, 4>::expand(codes.x, w[0]);
        Codes<T, 4>::expand(codes.y, w[1]);
    } else {
        Codes<T, 8>::expand(codes.x, reinterpret_cast<uint32_t (&)[2]>(w[0][0]));
        Codes<T, 8>::expand(codes.y, reinterpret_cast<uint32_t (&)[2]>(w[0][2]));
    }
}

// (code - zero) * scale, rounded to T.
template <typename T, int kBits>
__device__ __forceinline__ void scale_codes(uint32_t (&w)[8 / kBits][4], uint32_t scale, int zero) {
    const uint32_t minus = pair_of<T>(static_cast<float>(-zero - Codes<T, kBits>::kOffset));
    const uint32_t times = low_halves(scale, scale);
    constexpr uint32_t kMinusZero = 0x80008000u;
#pragma unroll
    for (int i = 0; i < 8 / kBits * 4; ++i) {
        uint32_t& x = w[i / 4][i % 4];
        x = multiply_add_pair(multiply_add_pair(x, kOnes<T>, minus, T()), times, kMinusZero, T());
    }
}

// The codes of half a step, of rows 8 apart, times the activations of 8 rows, 8 at once in two
// products.
template <typename T, int kWords>
__device__ __forceinline__ void multiply_words(float (&sum)[4], const uint32_t (&w)[2][kWords][4],
                                               const unsigned char* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i * 64);
        multiply_tile(sum, w[0][i][0], w[1][i][0], w[0][i][1], w[1][i][1], x.x, x.y, T());
        multiply_tile(sum, w[0][i][2], w[1][i][2], w[0][i][3], w[1][i][3], x.z, x.w, T());
    }
}

// What the sums of activations are kept times.
template <typename T, int kBits>
constexpr int kCorrectedBy =
    kBits == 4 ? Codes<T, kBits>::kOffset + Codes<T, kBits>::kMiddle : Codes<T, kBits>::kMiddle;

// Brings the activations of `steps` steps into shared memory, and their sums. Piece i of lane t's
// pieces of half a step goes to place 4 i + t, and rows lie an odd number of 64 bytes apart: 8
// lanes that read at the same time meet no bank twice. For half a step, -kCorrectedBy times the sum
// of the activations of each row is what sums of products with codes start from, and what corrects
// them where a zero is not the middle one.
template <typename T, int kBits, int kColumns, int kThreads, bool kScaleWeights>
__device__ __forceinline__ void begin_inputs(const OffloadQuantGemm& a, const QuantPlan& p,
                                             unsigned char* shared, int first, int steps) {
    constexpr int kHalfDepth = 256 / kBits, kWords = 8 / kBits;
    constexpr int kHalfPieces = kHalfDepth / 8, kStepPieces = 2 * kHalfPieces;
    const int thread = static_cast<int>(threadIdx.x), row = thread % 32 / 4, quarter = thread % 4;
    unsigned char* const inputs = shared + p.inputs_at;
    const int pieces = steps * kStepPieces, there = a.depth / 8 - first * kStepPieces;
    const uint16_t* const from =
        static_cast<const uint16_t*>(a.input) + static_cast<int64_t>(first) * (2 * kHalfDepth);
    constexpr int kAtOnce = 4;
    int r = thread / pieces, q = thread % pieces;
    while (r < a.rows) {
        uint4 x[kAtOnce];
        int to[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            x[i] = make_uint4(0, 0, 0, 0);
            to[i] = -1;
            if (r < a.rows) {
                const int in_half = q % kHalfPieces;
                to[i] = r * p.input_pitch +
                        (q - in_half + in_half % kWords * 4 + in_half / kWords) * 16;
                if (q < there)
                    x[i] =
                        load_past_l1(reinterpret_cast<const uint4*>(from + r * a.input_stride) + q);
                for (q += kThreads; q >= pieces; q -= pieces) ++r;
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (to[i] >= 0)
                *reinterpret_cast<uint4*>(inputs + to[i]) = Codes<T, kBits>::arrange(x[i]);
    }
    __syncthreads();
    if (kScaleWeights || (kBits == 8 && !a.zero)) return;
    for (int half = thread / 32; half < steps * 2; half += kThreads / 32) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const unsigned char* const x_of = inputs +
                                              min(c * 8 + row, a.rows - 1) * p.input_pitch +
                                              half * (kHalfDepth * 2) + quarter * 16;
            constexpr uint32_t kOne = kOnes<T>;
            uint32_t ones[2][kWords][4];
#pragma unroll
            for (int i = 0; i < 2 * kWords * 4; ++i) (&ones[0][0][0])[i] = kOne;
            float sum[4] = {};
            multiply_words<T, kWords>(sum, ones, x_of);
            constexpr float kTimes = -kCorrectedBy<T, kBits>;
            if (row == 0)
                *reinterpret_cast<float4*>(shared + p.input_sums_at + (half * kColumns + c) * 64 +
                                           quarter * 16) =
                    make_float4(kTimes * sum[0], kTimes * sum[1], kTimes * sum[0], kTimes * sum[1]);
        }
    }
    __syncthreads();
}

// Scales and zeros of a warp's step: of each of a lane's rows (8 apart) what the halves have,
// scales in a word of each, or both in one, the first's in its low half.
template <int kTiles, bool kApart>
struct QuantScales {
    uint32_t scales[kTiles][2][kApart ? 2 : 1], zeros[kTiles][2][2];
};

template <typename T, int kBits, int kColumns, int kWarps, int kTiles, int kGroups, int kSteps,
          bool kScaleWeights>
__global__ void __launch_bounds__(kWarps * 32, kQuantWarps / kWarps)
    quant_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                      const __grid_constant__ QuantPlan p) {
    using Shape = QuantShape<kBits, kColumns, kWarps, kTiles, kGroups, kSteps>;
    using Code = Codes<T, kBits>;
    using Scales = QuantScales<kTiles, kScaleWeights>;
    constexpr int kParts = Shape::kParts;
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int group = warp % kGroups, part = warp / kGroups;
    const int row = lane / 4, quarter = lane % 4;
    let_next_kernel_begin();
    const uint64_t policy = evict_first_policy();

    constexpr int kPerWord = 32 / kBits;
    constexpr uint32_t kMask = (1u << kBits) - 1;

    // What is copied: the same 16 bytes of a chunk in every kRowsAtOnce-th row. In shared memory
    // pairs of pieces lie in another order in each of 4 rows, so that a lane's 8 bytes of 4 rows
    // meet no bank twice.
    const int copy_row = thread / Shape::kPieces, copy_piece = thread % Shape::kPieces;
    const uint32_t copy_to = shared_address(shared) + copy_row * Shape::kChunkBytes +
                             (copy_piece ^ copy_row % 4 * 2) * 16;
    int ahead_first = 0, ahead_tile = 0, ahead_chunk = 0;  // of a pass the first chunk
    uint32_t copies_at[Shape::kCopies];                    // of 16 bytes
    uint32_t wanted = 0;  // a bit a copy: rows without an output are left as they are
    // Scales and zeros are asked of HBM together with the codes.
    const unsigned char* line_of = nullptr;
    const bool has_line = thread < Shape::kTileRows * (a.zero ? 2 : 1);
    auto begin_copies = [&] {
        const QuantTile at(a, p, ahead_tile);
        if (has_line) {
            const int n = at.row_of(a, thread % Shape::kTileRows);
            line_of =
                thread < Shape::kTileRows
                    ? static_cast<const unsigned char*>(a.scale) + n * p.groups * 2ll
                    : static_cast<const unsigned char*>(a.zero) + n / kPerWord * p.groups * 4ll;
        }
        wanted = 0;
#pragma unroll
        for (int n = 0; n < Shape::kCopies; ++n) {
            const int in_tile = copy_row + n * Shape::kRowsAtOnce;
            copies_at[n] = static_cast<uint32_t>(at.row_of(a, in_tile)) * (p.row_bytes / 16) +
                           ahead_first * Shape::kPieces + copy_piece;
            if (at.output_of(a, in_tile) < at.outputs) wanted |= 1u << n;
        }
    };
    // Behind a row's end the activations are zeros, and any code is finite.
    auto fetch_codes = [&](int stage_at) {
        if (ahead_first >= p.chunks) return;
        const uint32_t now =
            (ahead_chunk * Shape::kPieces + copy_piece) * 16 < p.row_bytes ? wanted : 0;
#pragma unroll
        for (int n = 0; n < Shape::kCopies; ++n) {
            copy_async16_if(now & 1u << n,
                            copy_to + stage_at + n * Shape::kRowsAtOnce * Shape::kChunkBytes,
                            static_cast<const uint4*>(a.codes) + copies_at[n], policy);
            copies_at[n] += Shape::kPieces;
        }
        if (has_line) {
            const int g = ahead_chunk * (Shape::kChunkSteps * Shape::kStepDepth) >> p.group_shift;
            prefetch_into_l2(line_of + g * (thread < Shape::kTileRows ? 2 : 4));
        }
        if (++ahead_chunk < min(ahead_first + p.pass_chunks, p.chunks)) return;
        if (++ahead_tile == p.tiles) {
            ahead_tile = 0;
            ahead_first += p.pass_chunks;
        }
        ahead_chunk = ahead_first;
        begin_copies();
    };

    // Scales and zeros, which lie a few bytes a row.
    const uint16_t* scales_at[kTiles][2];
    const uint32_t* zeros_at[kTiles][2];
    int zero_shift[kTiles][2], soon_shift[kTiles][2];
    auto begin_scales = [&](int tile) {
        const QuantTile at(a, p, tile);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = at.row_of(a, group * Shape::kWarpRows + m * 16 + h * 8 + row);
                scales_at[m][h] = static_cast<const uint16_t*>(a.scale) + n * p.groups;
                zeros_at[m][h] = static_cast<const uint32_t*>(a.zero) + n / kPerWord * p.groups;
                soon_shift[m][h] = n % kPerWord * kBits;
            }
    };
    Scales soon[2][kSteps] = {};
    auto load_scales = [&](Scales(&into)[kSteps], int chunk, auto zeros) {
        constexpr bool kZeros = decltype(zeros)::value;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            Scales& to = into[s];
            const int step = min(chunk * Shape::kChunkSteps + s * kParts + part, p.steps - 1);
            if (!kScaleWeights && p.step_scales == kScalesPaired) {
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        to.scales[m][h][0] =
                            reinterpret_cast<const uint32_t*>(scales_at[m][h])[step];
                        if (kZeros) {
                            const uint2 both = reinterpret_cast<const uint2*>(zeros_at[m][h])[step];
                            to.zeros[m][h][0] = both.x;
                            to.zeros[m][h][1] = both.y;
                        }
                    }
            } else if (!kScaleWeights && p.step_scales == kScalesShared) {
                const int g = step * Shape::kStepDepth >> p.group_shift;
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        to.scales[m][h][0] = scales_at[m][h][g];
                        if (kZeros) to.zeros[m][h][0] = zeros_at[m][h][g];
                    }
            } else {
                int g[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    int column = (step * 2 + j) * Shape::kHalfDepth;
                    if (kScaleWeights) column += quarter * (Shape::kHalfDepth / 4);
                    g[j] = min(column >> p.group_shift, p.groups - 1);
                }
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        to.scales[m][h][0] = scales_at[m][h][g[0]];
                        if (kScaleWeights)
                            to.scales[m][h][kScaleWeights] = scales_at[m][h][g[1]];
                        else
                            to.scales[m][h][0] |= static_cast<uint32_t>(scales_at[m][h][g[1]])
                                                  << 16;
                        if (kZeros) {
                            to.zeros[m][h][0] = zeros_at[m][h][g[0]];
                            to.zeros[m][h][1] = zeros_at[m][h][g[1]];
                        }
                    }
            }
        }
    };

    // Only the weight is sure to be there before the kernel ahead has ended.
    begin_copies();
    for (int s = 0; s + 1 < p.stages; ++s) {
        fetch_codes(s * Shape::kStageBytes);
        commit_copies();
    }
    begin_scales(0);
    if (a.zero)
        load_scales(soon[0], 0, std::true_type());
    else
        load_scales(soon[0], 0, std::false_type());
    wait_for_previous_kernel();

    unsigned char* const inputs = shared + p.inputs_at;
    // -kCorrected times the sums of the activations of half a step: what the sums of products with
    // codes start from, and what corrects them where a zero is not the middle one.
    constexpr int kCorrected = kBits == 4 ? Code::kOffset + Code::kMiddle : Code::kMiddle;
    unsigned char* const input_sums = shared + p.input_sums_at + quarter * 16;
    // Columns without a row of activations are not looked at: they have the last one's.
    const unsigned char* inputs_of[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        inputs_of[c] = inputs + min(c * 8 + row, a.rows - 1) * p.input_pitch + quarter * 16;
    const unsigned char* codes_of[2];  // of the first step of a stage, of its halves
#pragma unroll
    for (int j = 0; j < 2; ++j)
        codes_of[j] = shared + (group * Shape::kWarpRows + row) * Shape::kChunkBytes +
                      ((part * 4 + j * 2 + quarter / 2) ^ row % 4 * 2) * 16 + quarter % 2 * 8;
    const bool shared_scale = !kScaleWeights && p.step_scales == kScalesShared;
    float sums[kTiles][kColumns][4] = {};
    // `step` of a pass, `s` of a warp's in the stage at `stage_at`.
    auto multiply = [&](int step, int s, int stage_at, const Scales& at, auto zeros) {
        constexpr bool kZeros = decltype(zeros)::value;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int half = step * 2 + j;
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                uint32_t w[2][Shape::kWords][4];
                float scale[2], correction[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    expand_codes<T, kBits>(*reinterpret_cast<const uint2*>(
                                               codes_of[j] + stage_at + s * (kParts * kStepBytes) +
                                               (m * 16 + h * 8) * Shape::kChunkBytes),
                                           w[h]);
                    int zero = Code::kMiddle;
                    if (kZeros) {
                        const uint32_t word =
                            j && !shared_scale ? at.zeros[m][h][1] : at.zeros[m][h][0];
                        zero = static_cast<int>(word >> zero_shift[m][h] & kMask);
                    }
                    if (kScaleWeights) {
                        scale_codes<T, kBits>(w[h], at.scales[m][h][j * kScaleWeights], zero);
                    } else {
                        scale[h] = scale_in(at.scales[m][h][0], j && !shared_scale, T());
                        correction[h] = scale[h] * (static_cast<float>(zero - Code::kMiddle) *
                                                    (1.f / kCorrected));
                    }
                }
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const unsigned char* const from = inputs_of[c] + half * Shape::kHalfInputs;
                    if constexpr (kScaleWeights) {
                        multiply_words<T, Shape::kWords>(sums[m][c], w, from);
                    } else {
                        float sum[4] = {};
                        float4 start = make_float4(0.f, 0.f, 0.f, 0.f);
                        if (kBits == 4 || kZeros)
                            start = *reinterpret_cast<const float4*>(
                                input_sums + half * Shape::kHalfSums + c * 64);
                        if (kBits == 4) {
                            sum[0] = start.x;
                            sum[1] = start.y;
                            sum[2] = start.z;
                            sum[3] = start.w;
                        }
                        multiply_words<T, Shape::kWords>(sum, w, from);
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[m][c][i] += scale[i / 2] * sum[i];
                        if (kZeros) {
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                sums[m][c][i] += correction[i / 2] * (i % 2 ? start.y : start.x);
                        }
                    }
                }
            }
        }
    };

    float* const parts = reinterpret_cast<float*>(shared + p.parts_at);
    float* const passes = reinterpret_cast<float*>(shared + p.passes_at);
    auto end_tile = [&](int tile, bool first, bool last) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    parts[c * Shape::kSumFloats +
                          (part * 8 + quarter * 2 + i % 2) * Shape::kSumPitch +
                          group * Shape::kWarpRows + m * 16 + i / 2 * 8 + row] = sums[m][c][i];
                    sums[m][c][i] = 0.f;
                }
        __syncthreads();  // and another one stands before the next tile's end
        finish_tile<T, Shape::kTileRows, kParts>(a, p, tile, parts, passes, first, last);
    };
    auto run = [&](auto zeros) {
        // The stage that was used last is the next to be filled.
        int stage_at = 0, free_at = (p.stages - 1) * Shape::kStageBytes;
        for (int first = 0; first < p.chunks; first += p.pass_chunks) {
            const int end = min(first + p.pass_chunks, p.chunks);
            if (first > 0) __syncthreads();  // all are done with the activations
            begin_inputs<T, kBits, kColumns, Shape::kThreads, kScaleWeights>(
                a, p, shared, first * Shape::kChunkSteps,
                min(p.pass_chunks * Shape::kChunkSteps, p.steps - first * Shape::kChunkSteps));
            int tile = 0, chunk = first;
            // One stage, whose scales are `now`; those of the stage behind it come into `then`. Two
            // in turn, since a copy would wait for what has just been asked for.
            auto stage = [&](const Scales(&now)[kSteps], Scales(&then)[kSteps]) {
                wait_for_copies(p.stages - 2);
                __syncthreads();  // the stage is here for all, and all are done with the one before
                fetch_codes(free_at);
                commit_copies();
                if (chunk == first) {
#pragma unroll
                    for (int m = 0; m < kTiles * 2; ++m)
                        (&zero_shift[0][0])[m] = (&soon_shift[0][0])[m];
                }
                int next = chunk + 1;
                if (next == end) {
                    const bool more = tile + 1 < p.tiles;
                    next = more ? first : end;
                    begin_scales(more ? tile + 1 : 0);
                }
                if (next < p.chunks) load_scales(then, next, zeros);
#pragma unroll
                for (int s = 0; s < kSteps; ++s) {
                    const int step = chunk * Shape::kChunkSteps + s * kParts + part;
                    if (step < p.steps)
                        multiply(step - first * Shape::kChunkSteps, s, stage_at, now[s], zeros);
                }
                free_at = stage_at;
                stage_at += Shape::kStageBytes;
                if (stage_at == p.stages * Shape::kStageBytes) stage_at = 0;
                if (++chunk == end) {
                    end_tile(tile, first == 0, end == p.chunks);
                    ++tile;
                    chunk = first;
                }
            };
            for (int left = p.tiles * (end - first); left > 0; left -= 2) {
                stage(soon[0], soon[1]);
                if (left == 1) {
#pragma unroll
                    for (int s = 0; s < kSteps; ++s) soon[0][s] = soon[1][s];
                    break;
                }
                stage(soon[1], soon[0]);
            }
        }
    };
    if (a.zero)
        run(std::true_type());
    else
        run(std::false_type());
    wait_for_copies(0);
}

}  // namespace offload
