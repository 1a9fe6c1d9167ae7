// A few rows of activations times a quantised weight that is read as it is stored: int4 and int8
// codes along the depth (compressed-tensors `pack-quantized`), one scale a row or a group.
//
// Weights are the 16-row operand of the tensor cores at any number of rows: a scalar form has no
// issue slots left for more than one. See quant_codes.cuh for how codes become operands.
//
// Stream-K (arXiv 2301.03598): a tile is kTile rows of the weight, a unit of work a chunk of its
// depth, and every block takes an equal run of units, so all SMs read as much whatever the shape. A
// tile that several blocks share is finished by the last of them to come, which adds the others'
// float32 sums in block order: results repeat bit for bit. Within a block a warp has 32 weight rows
// and a part of each chunk's depth. Codes and activations come in stages by background copies;
// scales and zeros, which lie a few bytes a row, come through L1 into registers, a unit ahead.
//
// With programmatic dependent launch the codes of all stages are under way before the kernel waits
// for the one before it.
//
// The budget [instructions a weight] on an H200 at 0.8 of 4.42 TB/s: 4.2 for int4, 8.5 for int8.
#pragma once
#include "async_copy.cuh"
#include "quant_codes.cuh"

namespace offload {

constexpr int kSegmentBytes = 64;  // of a row, read by 4 lanes at once
constexpr int kWarpRows = 32;      // of the weight
constexpr int kSumPadding = 4;     // of rows of sums: those 2 apart lie 8 banks apart

struct QuantPlan {
    uint32_t tiles, chunks, units, blocks;
    int32_t row_bytes, groups, group_shift;
};

__host__ __device__ __forceinline__ uint32_t first_unit(const QuantPlan& p, uint32_t block) {
    return static_cast<uint32_t>(static_cast<uint64_t>(block) * p.units / p.blocks);
}

// The block b with first_unit(b) <= u < first_unit(b + 1).
__device__ __forceinline__ uint32_t block_of_unit(const QuantPlan& p, uint32_t u) {
    return static_cast<uint32_t>(((u + 1ull) * p.blocks - 1) / p.units);
}

template <int kBits, int kColumns, int kTile, int kChunkBytes, int kThreads>
struct QuantShape {
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kGroups = kTile / kWarpRows;  // of warps
    static constexpr int kParts = kWarps / kGroups;    // of a chunk's depth
    static constexpr int kSegments = kChunkBytes / kSegmentBytes;
    static constexpr int kOwn = kSegments / kParts;
    static constexpr int kDepth = kChunkBytes * 8 / kBits;  // columns of a chunk
    static constexpr int kLaneDepth = 128 / kBits;          // columns in a lane's 16 bytes
    static constexpr int kPieces = kChunkBytes / 16;
    static constexpr int kRowsAtOnce = kThreads / kPieces;
    static constexpr int kCopies = kTile / kRowsAtOnce;  // of codes, a thread and stage
    static constexpr int kInputPitch = kDepth * 2;
    static constexpr int kInputPieces = kInputPitch / 16;
    static constexpr int kInputRowsAtOnce = kThreads / kInputPieces;
    static constexpr int kInputCopies = (kColumns * 8 - 1) / kInputRowsAtOnce + 1;
    static constexpr int kWeightBytes = kTile * kChunkBytes;
    static constexpr int kStageBytes = kWeightBytes + kColumns * 8 * kInputPitch;
    static constexpr int kSumPitch = kTile + kSumPadding;
    static constexpr int kSumBytes = kParts * 8 * kSumPitch * static_cast<int>(sizeof(float));
    static_assert(kParts * kGroups == kWarps && kOwn * kParts == kSegments, "whole parts");
    static_assert(kCopies * kRowsAtOnce == kTile && kRowsAtOnce % 16 == 0, "whole copies");
    static_assert(kInputRowsAtOnce % 2 == 0, "a thread's rows are all odd or all even");
};

// Where a row of a tile lies in the weight. With a gate, a group's first 8 rows are gate rows and
// the others their up rows.
struct TileRow {
    int output, row;
    bool there;
    __device__ __forceinline__ TileRow(const OffloadQuantGemm& a, int tile_outputs, uint32_t tile,
                                       int in_tile) {
        const int in_group = a.gated ? in_tile / 16 * 8 + in_tile % 8 : in_tile;
        output = static_cast<int>(tile) * tile_outputs + in_group;
        there = output < a.outputs;
        output = there ? output : a.outputs - 1;
        row = output + (a.gated && in_tile % 16 >= 8 ? a.outputs : 0);
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

// Where the sums of a tile's rows are, and what is to become of them.
struct TileEnd {
    uint32_t tile, first_block, last_block;
    int tile_rows, columns, parts;
    const float* sums;  // of the block's parts, [parts, 8, tile_rows + 4]
};

// Where a block leaves its sums of a tile that it shares: a place for its first, and for its last.
__device__ __forceinline__ float* place_of(const OffloadQuantGemm& a, const QuantPlan& p,
                                           const TileEnd& at, uint32_t block) {
    const bool begins_here = first_unit(p, block) / p.chunks == at.tile;
    return a.workspace + (static_cast<int64_t>(block) * 2 + (begins_here ? 0 : 1)) *
                             (at.tile_rows * at.columns * 8);
}

// 8 rows of activations: adds what the block's parts have summed up, and writes it to the output,
// or to the block's place if others share the tile. With `whole` adds what these have, in order.
// Called, and one for all shapes, since it is long and seldom runs.
template <typename T>
__device__ __noinline__ void finish_rows(const OffloadQuantGemm& a, const QuantPlan& p,
                                         const TileEnd& at, int c, bool whole) {
    const int tile_outputs = a.gated ? at.tile_rows / 2 : at.tile_rows;
    const bool shared_tile = at.first_block != at.last_block;
    float* const mine = place_of(a, p, at, blockIdx.x);
    const int pitch = at.tile_rows + kSumPadding;
    for (int i = static_cast<int>(threadIdx.x); i < tile_outputs * 8; i += blockDim.x) {
        const int in_group = i % tile_outputs, r = c * 8 + i / tile_outputs;
        const int in_tile = a.gated ? in_group / 8 * 16 + in_group % 8 : in_group;
        const int n = static_cast<int>(at.tile) * tile_outputs + in_group;
        if (r >= a.rows || n >= a.outputs) continue;
        float gate = 0.f, up = 0.f;
        if (whole) {
#pragma unroll 4
            for (uint32_t block = at.first_block; block <= at.last_block; ++block) {
                const float* const from = place_of(a, p, at, block) + r * at.tile_rows + in_tile;
                gate += __ldcg(from);
                if (a.gated) up += __ldcg(from + 8);
            }
        } else {
            for (int part = 0; part < at.parts; ++part) {
                const float* const from = at.sums + (part * 8 + r % 8) * pitch + in_tile;
                gate += from[0];
                if (a.gated) up += from[8];
            }
        }
        if (shared_tile && !whole) {
            __stcg(mine + r * at.tile_rows + in_tile, gate);
            if (a.gated) __stcg(mine + r * at.tile_rows + in_tile + 8, up);
        } else {
            finish_output<T>(a, n, r, gate, up);
        }
    }
}

// Finishes a tile that several blocks share, if this one is the last of them. `word` is shared.
template <typename T>
__device__ __forceinline__ void finish_tile(const OffloadQuantGemm& a, const QuantPlan& p,
                                            const TileEnd& at, volatile uint32_t* word) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *word = atomicAdd(a.counters + at.tile, 1u);
    __syncthreads();
    const bool last = *word == at.last_block - at.first_block;
    __syncthreads();  // before the word's memory is used again
    if (!last) return;
    __threadfence();
    for (int c = 0; c * 8 < a.rows; ++c) finish_rows<T>(a, p, at, c, true);
    if (threadIdx.x == 0) a.counters[at.tile] = 0;
}

template <typename T, int kBits, int kColumns, int kTile, int kChunkBytes, int kStages,
          int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    quant_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                      const __grid_constant__ QuantPlan p) {
    using Shape = QuantShape<kBits, kColumns, kTile, kChunkBytes, kThreads>;
    using Code = Codes<T, kBits>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    let_next_kernel_begin();

    const uint32_t begin = first_unit(p, blockIdx.x), end = first_unit(p, blockIdx.x + 1);
    const int tile_outputs = a.gated ? kTile / 2 : kTile;
    const uint64_t policy = evict_first_policy();

    // What is copied: the same 16 bytes of a chunk in every kRowsAtOnce-th row. Addresses are
    // worked out once a tile.
    uint32_t ahead = begin, ahead_tile = begin / p.chunks, ahead_chunk = begin % p.chunks;
    const int copy_row = thread / Shape::kPieces, copy_piece = thread % Shape::kPieces;
    const uint32_t copy_to =
        shared_address(shared) + copy_row * kChunkBytes + (copy_piece ^ (copy_row & 1) << 2) * 16;
    const unsigned char* codes_from;
    const int64_t codes_step =
        static_cast<int64_t>(a.gated ? Shape::kRowsAtOnce / 2 : Shape::kRowsAtOnce) * p.row_bytes;
    int wanted = 0;  // copies: rows without an output, the last ones, are left as they are
    auto begin_tile = [&] {
        const TileRow first(a, tile_outputs, ahead_tile, copy_row);
        codes_from = static_cast<const unsigned char*>(a.codes) +
                     static_cast<int64_t>(first.row) * p.row_bytes + copy_piece * 16;
        wanted = 0;
#pragma unroll
        for (int n = 0; n < Shape::kCopies; ++n) {
            const TileRow at(a, tile_outputs, ahead_tile, copy_row + n * Shape::kRowsAtOnce);
            wanted += at.there;
        }
    };
    auto fetch_codes = [&](int stage_at) {
        const int skip = static_cast<int>(ahead_chunk) * kChunkBytes;
        // Behind a row's end the activations are zeros, and any code is finite.
        const int now = skip + copy_piece * 16 < p.row_bytes ? wanted : 0;
#pragma unroll
        for (int n = 0; n < Shape::kCopies; ++n)
            copy_async16_if(n < now, copy_to + stage_at + n * Shape::kRowsAtOnce * kChunkBytes,
                            codes_from + n * codes_step + skip, policy);
    };
    auto advance = [&] {
        ++ahead;
        if (++ahead_chunk == p.chunks) {
            ahead_chunk = 0;
            ++ahead_tile;
            if (ahead < end) begin_tile();
        }
    };
    // Piece j of lane t's pieces of a segment goes to place 4 j + t, and odd rows change places 4
    // apart: 8 lanes that read at the same time meet no bank twice.
    const int input_row = thread / Shape::kInputPieces, input_piece = thread % Shape::kInputPieces;
    const int in_segment = input_piece % (4 * Code::kPieces);
    const int input_place = input_piece - in_segment +
                            ((in_segment % Code::kPieces * 4) ^ (input_row & 1) << 2) +
                            in_segment / Code::kPieces;
    const uint32_t input_to = shared_address(shared) + Shape::kWeightBytes +
                              input_row * Shape::kInputPitch + input_place * 16;
    const unsigned char* const input_from = static_cast<const unsigned char*>(a.input) +
                                            input_row * a.input_stride * 2 + input_piece * 16;
    const int64_t input_step = Shape::kInputRowsAtOnce * a.input_stride * 2;
    auto fetch_inputs = [&](int stage_at, uint32_t chunk) {
        const bool there = static_cast<int>(chunk) * Shape::kDepth + input_piece * 8 < a.depth;
        const int64_t skip = static_cast<int64_t>(chunk) * Shape::kInputPitch;
#pragma unroll
        for (int n = 0; n < Shape::kInputCopies; ++n)
            if (input_row + n * Shape::kInputRowsAtOnce < a.rows)
                copy_async16_or_zero(
                    input_to + stage_at + n * Shape::kInputRowsAtOnce * Shape::kInputPitch,
                    there ? input_from + n * input_step + skip : a.input, there);
    };

    // What is computed: of the unit at hand the codes, of the next one scales and zeros.
    const int group = warp % Shape::kGroups, part = warp / Shape::kGroups;
    const int row = lane / 4, quarter = lane % 4, swap = (row & 1) << 2;
    uint32_t soon = begin, soon_tile = ahead_tile, soon_chunk = ahead_chunk;
    constexpr int kPerWord = 32 / kBits;
    constexpr uint32_t kMask = (1u << kBits) - 1;
    uint32_t scale_at[2], zero_at[2];  // of rows 8 apart; 16 apart they are a step apart
    // Tiles begin at whole words, so a lane's rows have the same place in theirs in all of them.
    const int zero_shift[2] = {row % kPerWord * kBits,
                               (a.gated ? a.outputs % kPerWord + row : row) % kPerWord * kBits};
    uint32_t scales[Shape::kOwn][2][2];
    uint32_t zeros[Shape::kOwn][2][2];
#pragma unroll
    for (int i = 0; i < Shape::kOwn * 4; ++i)  // of symmetric codes
        (&zeros[0][0][0])[i] = kBits == 4 ? 0x88888888u : 0x80808080u;
    const uint32_t scale_step = static_cast<uint32_t>((a.gated ? 8 : 16) * p.groups);
    const uint32_t products = static_cast<uint32_t>(a.gated ? 2 * a.outputs : a.outputs);
    const uint32_t last_scale = products * p.groups - 1;
    const uint32_t last_zero = ((products - 1) / kPerWord + 1) * p.groups - 1;
    auto begin_affine = [&] {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const TileRow at(a, tile_outputs, soon_tile, group * kWarpRows + h * 8 + row);
            scale_at[h] = static_cast<uint32_t>(at.row) * p.groups;
            zero_at[h] = static_cast<uint32_t>(at.row / kPerWord) * p.groups;
        }
    };
    auto load_affine = [&] {
#pragma unroll
        for (int own = 0; own < Shape::kOwn; ++own) {
            const int column = static_cast<int>(soon_chunk) * Shape::kDepth +
                               ((part * Shape::kOwn + own) * 4 + quarter) * Shape::kLaneDepth;
            const uint32_t g = min(column >> p.group_shift, p.groups - 1);
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    // What is read for rows without an output does not matter.
                    const uint32_t at = min(scale_at[h] + m * scale_step + g, last_scale);
                    scales[own][m][h] = static_cast<const uint16_t*>(a.scale)[at];
                    if (a.zero) {
                        const uint32_t word =
                            min(zero_at[h] + m * (scale_step / kPerWord) + g, last_zero);
                        zeros[own][m][h] = static_cast<const uint32_t*>(a.zero)[word];
                    }
                }
        }
        ++soon;
        if (++soon_chunk == p.chunks) {
            soon_chunk = 0;
            ++soon_tile;
            if (soon < end) begin_affine();
        }
    };

    // Only the weight is sure to be there before the kernel ahead has ended.
    uint32_t tile = ahead_tile, chunk = ahead_chunk;
    begin_tile();
    begin_affine();
    int begun = 0;
    for (; begun + 1 < kStages && ahead < end; ++begun) {
        fetch_codes(begun * Shape::kStageBytes);
        advance();
    }
    load_affine();
    wait_for_previous_kernel();
    for (int s = 0; s + 1 < kStages; ++s) {
        if (s < begun) fetch_inputs(s * Shape::kStageBytes, (chunk + s) % p.chunks);
        commit_copies();
    }

    const unsigned char* const codes_at = shared + (group * kWarpRows + row) * kChunkBytes;
    int code_place[Shape::kOwn];
#pragma unroll
    for (int own = 0; own < Shape::kOwn; ++own)
        code_place[own] = (((part * Shape::kOwn + own) * 4 + quarter) ^ swap) * 16;
    const unsigned char* const inputs_at = shared + Shape::kWeightBytes + row * Shape::kInputPitch +
                                           part * Shape::kOwn * (4 * Code::kPieces * 16) +
                                           quarter * 16;
    float* const sums_at = reinterpret_cast<float*>(shared + kStages * Shape::kStageBytes);
    float sums[2][kColumns][4] = {};
    int stage_at = 0, free_at = (kStages - 1) * Shape::kStageBytes;
    for (uint32_t unit = begin; unit < end; ++unit) {
        wait_for_copies(kStages - 2);
        __syncthreads();  // the stage is here for all, and all are done with the one before
        if (ahead < end) {
            fetch_codes(free_at);
            fetch_inputs(free_at, ahead_chunk);
            advance();
        }
        commit_copies();

        CodeAffine affine[Shape::kOwn][2][2];
#pragma unroll
        for (int own = 0; own < Shape::kOwn; ++own)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    affine[own][m][h] =
                        Code::affine(scales[own][m][h], zeros[own][m][h] >> zero_shift[h] & kMask);
        if (soon < end) load_affine();

#pragma unroll
        for (int own = 0; own < Shape::kOwn; ++own) {
            const unsigned char* const from = codes_at + stage_at + code_place[own];
            uint4 raw[2][2];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    raw[m][h] =
                        *reinterpret_cast<const uint4*>(from + (m * 16 + h * 8) * kChunkBytes);
            const unsigned char* const x_from =
                inputs_at + stage_at + own * (4 * Code::kPieces * 16);
#pragma unroll
            for (int piece = 0; piece < Code::kPieces; ++piece) {
                uint32_t w[2][2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        Code::expand(raw[m][h], piece, affine[own][m][h], w[m][h]);
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    if (kColumns > 2 && c * 8 >= a.rows) break;
                    const uint4 x = Code::arrange(*reinterpret_cast<const uint4*>(
                        x_from + c * 8 * Shape::kInputPitch + ((piece * 4) ^ swap) * 16));
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        multiply_tile(sums[m][c], w[m][0][0], w[m][1][0], w[m][0][1], w[m][1][1],
                                      x.x, x.y, T());
                        multiply_tile(sums[m][c], w[m][0][2], w[m][1][2], w[m][0][3], w[m][1][3],
                                      x.z, x.w, T());
                    }
                }
            }
        }
        free_at = stage_at;
        stage_at = stage_at + Shape::kStageBytes == kStages * Shape::kStageBytes
                       ? 0
                       : stage_at + Shape::kStageBytes;
        const bool tile_ends = ++chunk == p.chunks;
        if (!tile_ends && unit + 1 < end) continue;

        const TileEnd at{tile,
                         block_of_unit(p, tile * p.chunks),
                         block_of_unit(p, tile * p.chunks + p.chunks - 1),
                         kTile,
                         kColumns,
                         Shape::kParts,
                         sums_at};
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if (c * 8 >= a.rows) break;
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums_at[(part * 8 + quarter * 2 + i % 2) * Shape::kSumPitch +
                            group * kWarpRows + m * 16 + i / 2 * 8 + row] = sums[m][c][i];
                    sums[m][c][i] = 0.f;
                }
            __syncthreads();
            finish_rows<T>(a, p, at, c, false);
            __syncthreads();
        }
        if (at.first_block != at.last_block)
            finish_tile<T>(a, p, at, reinterpret_cast<volatile uint32_t*>(sums_at));
        if (tile_ends) {
            chunk = 0;
            ++tile;
        }
    }
}

}  // namespace offload
