// A few rows of activations times a quantised weight that is read as it is stored: int4 and int8
// codes along the depth (compressed-tensors `pack-quantized`), one scale a row or a group.
//
// Weights are the 16-row operand of the tensor cores at any number of rows: a scalar form has no
// issue slots left for more than one. They go straight from global memory into the registers of the
// lane that multiplies with them, 16 bytes of a row at once; see quant_codes.cuh for how codes
// become operands. A lane keeps kSlots steps of 64 bytes a row under way, across tiles: the loads
// of a step are issued as soon as the registers of an earlier one are free.
//
// A block has a range of the weight's rows and a part of its depth (`splits` of them), and keeps
// the activations of that part in shared memory, in the order of the operands, from beginning to
// end. Its warps share a tile of rows: kGroups of them have rows of their own, kParts share the
// depth, whose float32 sums are added in order through shared memory. Where blocks share the depth,
// the last of them to come adds all sums in order: results repeat bit for bit.
//
// With programmatic dependent launch the first steps of the weight are under way before the kernel
// waits for the one before it.
//
// The budget [instructions a weight] on an H200 at 0.8 of 4.42 TB/s: 4.2 for int4, 8.5 for int8;
// for up to 8 rows of bfloat16 int4 takes 2.4, of which codes to operands are 1.9.
#pragma once
#include "async_copy.cuh"
#include "quant_codes.cuh"

namespace offload {

constexpr int kStepBytes = 64;  // of a row, read by 4 lanes at once
constexpr int kSumPadding = 4;  // of rows of sums: those 2 apart lie 8 banks apart

struct QuantPlan {
    uint32_t tiles;       // of rows
    uint32_t ranges;      // of tiles: a block has one
    uint32_t splits;      // of the depth: a block has one
    uint32_t steps;       // of kStepBytes in a row
    uint32_t row_pieces;  // of 16 bytes, in a row
    int32_t groups, group_shift;
    int32_t input_pitch;  // bytes of shared memory a row of activations takes
};

// The begin of part `i` of `parts` of `n` things.
__host__ __device__ __forceinline__ uint32_t part_begin(uint32_t n, uint32_t i, uint32_t parts) {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * i / parts);
}

template <int kBits, int kColumns, int kTiles, int kGroups, int kParts>
struct QuantShape {
    static constexpr int kThreads = kGroups * kParts * 32;
    static constexpr int kWarpRows = kTiles * 16;
    static constexpr int kTileRows = kGroups * kWarpRows;
    static constexpr int kStepDepth = kStepBytes * 8 / kBits;  // columns of a step
    static constexpr int kLaneDepth = 128 / kBits;             // columns of a lane's 16 bytes
    static constexpr int kInputPieces = kStepDepth / 8;        // of 16 bytes, a step and row
    static constexpr int kSumPitch = kTileRows + kSumPadding;
    static constexpr int kSumFloats = kParts * 8 * kSumPitch;
    static constexpr int kSumBytes = 2 * kSumFloats * static_cast<int>(sizeof(float));
};

// 16 bytes of what is read once: past L1, out of L2 first.
__device__ __forceinline__ uint4 load_once(const uint4* from, uint64_t policy) {
#ifdef __CUDA_ARCH__
    uint4 x;
    asm volatile(
        "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from), "l"(policy));
    return x;
#else
    return *from;
#endif
}

// Where a row of a tile lies in the weight. With a gate, a group's first 8 rows are gate rows and
// the others their up rows. Rows without an output are read as the last one.
__device__ __forceinline__ uint32_t weight_row(const OffloadQuantGemm& a, int tile_outputs,
                                               uint32_t tile, int in_tile) {
    const int in_group = a.gated ? in_tile / 16 * 8 + in_tile % 8 : in_tile;
    const int output = min(static_cast<int>(tile) * tile_outputs + in_group, a.outputs - 1);
    return static_cast<uint32_t>(output + (a.gated && in_tile % 16 >= 8 ? a.outputs : 0));
}

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

// Where a split leaves its sum for a row of a tile.
__device__ __forceinline__ float* place_of(const OffloadQuantGemm& a, const QuantPlan& p,
                                           uint32_t split, int r, uint32_t tile, int tile_rows,
                                           int in_tile) {
    const uint32_t row = split * a.rows + r;
    return a.workspace + (static_cast<int64_t>(row) * p.tiles + tile) * tile_rows + in_tile;
}

// Adds what the parts have summed up of 8 rows of activations, [parts, 8, tile_rows + padding], and
// writes it to the output, or to the split's place. Called, and not inlined, since it is long and
// seldom runs.
template <typename T, int kTileRows, int kParts>
__device__ __noinline__ void finish_rows(const OffloadQuantGemm& a, const QuantPlan& p,
                                         uint32_t tile, int c, const float* sums) {
    constexpr int kPitch = kTileRows + kSumPadding;
    const int shift = a.gated ? 1 : 0, tile_outputs = kTileRows >> shift;
    const int count = tile_outputs * min(8, a.rows - c * 8);
    const int threads = static_cast<int>(blockDim.x);
    // Another warp's turn from tile to tile.
    const int thread = static_cast<int>((threadIdx.x + tile * 32) % threads);
    for (int i = thread; i < count; i += threads) {
        const int in_group = i & (tile_outputs - 1), r = i / tile_outputs;
        const int in_tile = a.gated ? in_group / 8 * 16 + in_group % 8 : in_group;
        const int n = static_cast<int>(tile) * tile_outputs + in_group;
        if (n >= a.outputs) continue;
        float gate = 0.f, up = 0.f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const float* const from = sums + (part * 8 + r) * kPitch + in_tile;
            gate += from[0];
            if (a.gated) up += from[8];
        }
        if (p.splits == 1) {
            finish_output<T>(a, n, c * 8 + r, gate, up);
        } else {
            float* const place =
                place_of(a, p, blockIdx.x % p.splits, c * 8 + r, tile, kTileRows, in_tile);
            __stcg(place, gate);
            if (a.gated) __stcg(place + 8, up);
        }
    }
}

// Finishes a range of tiles that several blocks share, if this one is the last of them. `word` is
// shared.
template <typename T>
__device__ __noinline__ void finish_range(const OffloadQuantGemm& a, const QuantPlan& p,
                                          int tile_rows, volatile uint32_t* word) {
    const uint32_t range = blockIdx.x / p.splits;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *word = atomicAdd(a.counters + range, 1u);
    __syncthreads();
    if (*word != p.splits - 1) return;
    __threadfence();
    const uint32_t begin = part_begin(p.tiles, range, p.ranges);
    const int tiles = static_cast<int>(part_begin(p.tiles, range + 1, p.ranges) - begin);
    const int tile_outputs = a.gated ? tile_rows / 2 : tile_rows;
    const int outputs = tiles * tile_outputs;
    const int64_t step = static_cast<int64_t>(a.rows) * p.tiles * tile_rows;
    for (int r = 0; r < a.rows; ++r) {
        for (int i = static_cast<int>(threadIdx.x); i < outputs; i += blockDim.x) {
            const int n = static_cast<int>(begin) * tile_outputs + i;
            if (n >= a.outputs) break;
            const float* from =
                place_of(a, p, 0, r, begin, tile_rows, a.gated ? i / 8 * 16 + i % 8 : i);
            float gate = 0.f, up = 0.f;
#pragma unroll 4
            for (uint32_t split = 0; split < p.splits; ++split, from += step) {
                gate += __ldcg(from);
                if (a.gated) up += __ldcg(from + 8);
            }
            finish_output<T>(a, n, r, gate, up);
        }
    }
    if (threadIdx.x == 0) a.counters[range] = 0;
}

// A step of a lane: of each of its rows (a tile's are 8 apart) 16 bytes, their scale and zero.
template <int kTiles>
struct QuantStep {
    uint4 codes[kTiles][2];
    uint32_t scales[kTiles][2], zeros[kTiles][2];
};

template <typename T, int kBits, int kColumns, int kTiles, int kGroups, int kParts, int kSlots,
          int kBlocks>
__global__ void __launch_bounds__(kGroups * kParts * 32, kBlocks)
    quant_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                      const __grid_constant__ QuantPlan p) {
    using Shape = QuantShape<kBits, kColumns, kTiles, kGroups, kParts>;
    using Code = Codes<T, kBits>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int group = warp % kGroups, part = warp / kGroups;
    const int row = lane / 4, quarter = lane % 4;
    let_next_kernel_begin();

    const uint32_t range = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
    const uint32_t tile_end = part_begin(p.tiles, range + 1, p.ranges);
    uint32_t tile = part_begin(p.tiles, range, p.ranges);
    const uint32_t block_first = part_begin(p.steps, split, p.splits);
    const uint32_t block_steps = part_begin(p.steps, split + 1, p.splits) - block_first;
    const uint32_t first = part_begin(block_steps, part, kParts);
    const uint32_t steps = part_begin(block_steps, part + 1, kParts) - first;
    const int tile_outputs = a.gated ? Shape::kTileRows / 2 : Shape::kTileRows;
    const uint64_t policy = evict_first_policy();

    // What is loaded: step `ahead_step` of tile `ahead_tile`.
    uint32_t ahead_tile = tile, ahead_step = 0;
    uint32_t code_at[kTiles][2], scale_at[kTiles][2], zero_at[kTiles][2];
    constexpr int kPerWord = 32 / kBits;
    constexpr uint32_t kMask = (1u << kBits) - 1;
    auto begin_tile = [&] {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t n = weight_row(a, tile_outputs, ahead_tile,
                                              group * Shape::kWarpRows + m * 16 + h * 8 + row);
                code_at[m][h] = n * p.row_pieces;
                scale_at[m][h] = n * p.groups;
                zero_at[m][h] = n / kPerWord * p.groups;
            }
    };
    auto fetch = [&](QuantStep<kTiles>& to) {
        if (ahead_tile == tile_end) return;
        const uint32_t at = block_first + first + ahead_step;
        // Behind a row's end the activations are zeros, and any code is finite.
        const uint32_t piece = min(at * 4 + quarter, p.row_pieces - 1);
        const uint32_t g = piece * Shape::kLaneDepth >> p.group_shift;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                to.codes[m][h] =
                    load_once(static_cast<const uint4*>(a.codes) + (code_at[m][h] + piece), policy);
                to.scales[m][h] = static_cast<const uint16_t*>(a.scale)[scale_at[m][h] + g];
                if (a.zero)
                    to.zeros[m][h] = static_cast<const uint32_t*>(a.zero)[zero_at[m][h] + g];
            }
        if (++ahead_step == steps) {
            ahead_step = 0;
            if (++ahead_tile != tile_end) begin_tile();
        }
    };
    // Tiles begin at whole words, so a lane's rows have the same place in theirs in all of them.
    const int zero_shift[2] = {row % kPerWord * kBits,
                               (a.gated ? a.outputs % kPerWord + row : row) % kPerWord * kBits};

    // Only the weight is sure to be there before the kernel ahead has ended.
    QuantStep<kTiles> slots[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
#pragma unroll
        for (int i = 0; i < kTiles * 2; ++i)  // of symmetric codes
            (&slots[s].zeros[0][0])[i] = kBits == 4 ? 0x88888888u : 0x80808080u;
    begin_tile();
    if (steps) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) fetch(slots[s]);
    }
    wait_for_previous_kernel();

    // Piece j of lane t's pieces of a step goes to place 4 j + t, and rows lie an odd number of 64
    // bytes apart: 8 lanes that read at the same time meet no bank twice.
    {
        const int begin = static_cast<int>(first) * Shape::kInputPieces;
        const int end = static_cast<int>(first + steps) * Shape::kInputPieces;
        const int there = a.depth / 8 - static_cast<int>(block_first) * Shape::kInputPieces;
        for (int r = group; r < a.rows; r += kGroups) {
            const uint4* const from =
                reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.input) +
                                               r * a.input_stride) +
                static_cast<int64_t>(block_first) * Shape::kInputPieces;
            constexpr int kAtOnce = 4;
            for (int q = begin + lane; q < end; q += 32 * kAtOnce) {
                uint4 x[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    x[i] = make_uint4(0, 0, 0, 0);
                    if (q + i * 32 < min(end, there)) x[i] = from[q + i * 32];
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int in_step = (q + i * 32) % Shape::kInputPieces;
                    const int place = q + i * 32 - in_step + in_step % Code::kPieces * 4 +
                                      in_step / Code::kPieces;
                    if (q + i * 32 < end)
                        *reinterpret_cast<uint4*>(shared + r * p.input_pitch + place * 16) =
                            Code::arrange(x[i]);
                }
            }
        }
        if (kGroups == 1)
            __syncwarp();
        else
            __syncthreads();
    }

    // Columns without a row of activations are not looked at: they have the last one's.
    const unsigned char* inputs_at[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        inputs_at[c] = shared + min(c * 8 + row, a.rows - 1) * p.input_pitch +
                       first * (Shape::kInputPieces * 16) + quarter * 16;
    float* const all_sums = reinterpret_cast<float*>(shared + a.rows * p.input_pitch);
    int side = 0;
    float sums[kTiles][kColumns][4] = {};
    auto end_tile = [&] {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if (c * 8 >= a.rows) break;
            float* const to = all_sums + side * Shape::kSumFloats;
            side ^= 1;  // the other side may still be read
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    to[(part * 8 + quarter * 2 + i % 2) * Shape::kSumPitch +
                       group * Shape::kWarpRows + m * 16 + i / 2 * 8 + row] = sums[m][c][i];
                    sums[m][c][i] = 0.f;
                }
            __syncthreads();
            finish_rows<T, Shape::kTileRows, kParts>(a, p, tile, c, to);
        }
        ++tile;
    };
    uint32_t step = 0;
    auto multiply = [&](const QuantStep<kTiles>& at) {
        CodeAffine affine[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                affine[m][h] =
                    Code::affine(at.scales[m][h], at.zeros[m][h] >> zero_shift[h] & kMask);
#pragma unroll
        for (int piece = 0; piece < Code::kPieces; ++piece) {
            uint32_t w[kTiles][2][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    Code::expand(at.codes[m][h], piece, affine[m][h], w[m][h]);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                if (kColumns > 2 && c * 8 >= a.rows) break;
                const uint4 x = *reinterpret_cast<const uint4*>(
                    inputs_at[c] + step * (Shape::kInputPieces * 16) + piece * 64);
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    multiply_tile(sums[m][c], w[m][0][0], w[m][1][0], w[m][0][1], w[m][1][1], x.x,
                                  x.y, T());
                    multiply_tile(sums[m][c], w[m][0][2], w[m][1][2], w[m][0][3], w[m][1][3], x.z,
                                  x.w, T());
                }
            }
        }
    };
    if (steps == 0) {
        while (tile < tile_end) end_tile();
    } else {
        while (tile < tile_end) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                if (tile == tile_end) break;
                multiply(slots[s]);
                fetch(slots[s]);
                if (++step == steps) {
                    step = 0;
                    end_tile();
                }
            }
        }
    }
    if (p.splits > 1)
        finish_range<T>(a, p, Shape::kTileRows, reinterpret_cast<volatile uint32_t*>(shared));
}

}  // namespace offload
