// The product for blocks that work together: all warps of a block share its weight rows and the
// activations beside them, a chunk of the depth at a time, in one ring of shared memory.
//
// Every block has an equal number of outputs, to the row, cut into equal tiles of at most kTile
// weight rows: so all SMs read as much, no depth is split, and nothing is added up between blocks.
// Background copies (cp.async) keep all stages but one under way. Activations come with the
// weights, once for a whole tile: 1/8 of the bytes at 8 rows and tiles of 64, from L2. Warps share
// out a tile's groups of 16 rows and, where there are fewer of these than warps, the chunk's depth;
// their sums are added in the order of the depth, so results repeat bit for bit.
#pragma once
#include "async_copy.cuh"
#include "skinny_gemm_math.cuh"

namespace offload {

constexpr int kStagedThreads = 512;  // many warps, since each has few instructions to overlap

// How a staged block lies in shared memory, for the kernel and for the launcher.
template <int kColumns, int kTile, int kChunkBytes>
struct StagedShape {
    static constexpr int kWarps = kStagedThreads / 32;
    static constexpr int kGroups = kTile / 16;
    static constexpr int kParts = kWarps / kGroups;  // of a chunk's depth
    static constexpr int kSteps = kChunkBytes / 64;  // of 32 elements
    static constexpr int kOwnSteps = kSteps / kParts;
    static constexpr int kPieces = kChunkBytes / 16;  // of a row
    static constexpr int kRowsAtOnce = kStagedThreads / kPieces;
    static constexpr int kCopies = kTile / kRowsAtOnce;  // of weights, a thread and stage
    static constexpr int kInputCopies = (kColumns * 8 - 1) / kRowsAtOnce + 1;
    static constexpr int kWeightBytes = kTile * kChunkBytes;
    static constexpr int kInputBytes = kColumns * 8 * kChunkBytes;
    static constexpr int kSumBytes = (kParts - 1) * kGroups * 32 * kColumns * 16;
    static_assert(kRowsAtOnce % 2 == 0 && kCopies * kRowsAtOnce == kTile, "whole copies");
    static_assert(kTile % 16 == 0 && kParts >= 1 && kParts * kGroups == kWarps, "whole groups");
    static_assert(kOwnSteps >= 1 && kOwnSteps * kParts == kSteps, "whole steps");
};

// A block's outputs, tile by tile and chunk by chunk.
struct StagedWalk {
    int left;             // tiles, this one included
    int shorter, longer;  // outputs a tile has; how many more tiles have one more
    int output, outputs;  // the tile's first, and how many
    int chunk;

    __device__ __forceinline__ StagedWalk(int first, int count, int most) {
        left = (count + most - 1) / most;
        shorter = left ? count / left : 0;
        longer = count - shorter * left;
        output = first;
        chunk = 0;
        begin_tile();
    }

    __device__ __forceinline__ void begin_tile() {
        outputs = shorter + (longer > 0);
        --longer;
    }

    __device__ __forceinline__ bool more() const { return left > 0; }

    __device__ __forceinline__ void advance(int chunks) {
        if (++chunk < chunks) return;
        chunk = 0;
        --left;
        output += outputs;
        begin_tile();
    }
};

// Called, so that its registers are not the main loop's.
template <typename T>
__device__ __noinline__ void normalize_rows(const OffloadSkinnyGemm& a, const Plan& p,
                                            unsigned char* shared) {
    // Behind the depth the weights are zeros, and zero times anything is not always zero.
    const int end = a.depth * static_cast<int>(sizeof(T)), rest = p.input_pitch - end;
    for (int i = threadIdx.x * 16; i < a.rows * rest; i += kStagedThreads * 16)
        *reinterpret_cast<uint4*>(shared + p.input_at + i / rest * p.input_pitch + end + i % rest) =
            make_uint4(0, 0, 0, 0);
    normalize_in_block<T>(a, shared + p.input_at, p.input_pitch,
                          reinterpret_cast<float*>(shared + kBarrierBytes));
}

template <typename T, int kColumns, int kTile, int kChunkBytes, int kStages>
__global__ void __launch_bounds__(kStagedThreads, 1)
    staged_gemm_kernel(const __grid_constant__ OffloadSkinnyGemm a, const __grid_constant__ Plan p,
                       float*) {
    using Shape = StagedShape<kColumns, kTile, kChunkBytes>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_kernel_begin();

    const int first = static_cast<int>(static_cast<int64_t>(a.outputs) * blockIdx.x / p.blocks);
    const int count =
        static_cast<int>(static_cast<int64_t>(a.outputs) * (blockIdx.x + 1) / p.blocks) - first;
    const int most = a.gated ? kTile / 2 : kTile;
    const int chunks = (a.depth - 1) / p.chunk + 1;
    const int depth_bytes = a.depth * static_cast<int>(sizeof(T));
    const int stage_bytes = Shape::kWeightBytes + (p.norm_in_block ? 0 : Shape::kInputBytes);
    const uint64_t policy = evict_first_policy();
    StagedWalk ahead(first, count, most), at(first, count, most);

    // A thread copies the same 16 bytes of a chunk in every kRowsAtOnce-th row. There are few warps
    // and much to copy, so addresses are worked out once a tile.
    const int copy_row = threadIdx.x / Shape::kPieces, copy_piece = threadIdx.x % Shape::kPieces;
    const uint32_t copy_to = shared_address(shared) + p.ring_at + copy_row * kChunkBytes +
                             (copy_piece ^ (copy_row & 1) << 2) * 16;
    const unsigned char* weight_from[Shape::kCopies];
    uint32_t wanted = 0;  // a bit a copy: rows without an output are left as they are
    auto begin_tile = [&] {
        if (!ahead.more()) return;
        wanted = 0;
#pragma unroll
        for (int n = 0; n < Shape::kCopies; ++n) {
            const int row = copy_row + n * Shape::kRowsAtOnce;
            // With a gate, a group's first 8 rows are gate rows and the others their up rows.
            const int output = a.gated ? row / 16 * 8 + row % 8 : row;
            const bool there = output < ahead.outputs;
            const int64_t from =
                ahead.output + (there ? output : 0) + (a.gated && row % 16 >= 8 ? a.outputs : 0);
            weight_from[n] = static_cast<const unsigned char*>(a.weight) +
                             from * a.weight_stride * static_cast<int64_t>(sizeof(T)) +
                             copy_piece * 16;
            wanted |= static_cast<uint32_t>(there) << n;
        }
    };
    auto fetch_weights = [&](int stage_at) {
        const uint32_t to = copy_to + stage_at;
        const int skip = ahead.chunk * kChunkBytes;
        if (skip + kChunkBytes <= depth_bytes) {
#pragma unroll
            for (int n = 0; n < Shape::kCopies; ++n)
                copy_async16_if(wanted >> n & 1, to + n * Shape::kRowsAtOnce * kChunkBytes,
                                weight_from[n] + skip, policy);
        } else {
            const bool there = skip + copy_piece * 16 < depth_bytes;
#pragma unroll
            for (int n = 0; n < Shape::kCopies; ++n)
                if (wanted >> n & 1)
                    copy_async16_or_zero(to + n * Shape::kRowsAtOnce * kChunkBytes,
                                         there ? weight_from[n] + skip : a.weight, there, policy);
        }
    };
    const unsigned char* input_from[Shape::kInputCopies];
#pragma unroll
    for (int n = 0; n < Shape::kInputCopies; ++n)
        input_from[n] =
            static_cast<const unsigned char*>(a.input) +
            (copy_row + n * Shape::kRowsAtOnce) * a.input_stride * static_cast<int64_t>(sizeof(T)) +
            copy_piece * 16;
    auto fetch_inputs = [&](int stage_at, int chunk) {
        if (p.norm_in_block) return;
        const uint32_t to = copy_to + stage_at + Shape::kWeightBytes;
        const int skip = chunk * kChunkBytes;
        const bool there = skip + copy_piece * 16 < depth_bytes;
#pragma unroll
        for (int n = 0; n < Shape::kInputCopies; ++n)
            if (copy_row + n * Shape::kRowsAtOnce < a.rows)
                copy_async16_or_zero(to + n * Shape::kRowsAtOnce * kChunkBytes,
                                     there ? input_from[n] + skip : a.input, there);
    };
    auto advance = [&] {
        ahead.advance(chunks);
        if (ahead.chunk == 0) begin_tile();
    };
    begin_tile();

    // Only the weights are sure to be there before the kernel ahead has ended.
    int begun = 0;
    for (; begun + 1 < kStages && ahead.more(); ++begun) {
        fetch_weights(begun * stage_bytes);
        advance();
    }
    wait_for_previous_kernel();
    if (p.norm_in_block) normalize_rows<T>(a, p, shared);
    for (int s = 0; s + 1 < kStages; ++s) {
        if (s < begun) fetch_inputs(s * stage_bytes, s % chunks);
        commit_copies();
    }

    const int group = warp % Shape::kGroups, part = warp / Shape::kGroups;
    const int row = lane / 4, swap = (row & 1) << 2;
    // Everything that a step's addresses have in common with those of other chunks.
    const unsigned char* const weights = shared + p.ring_at + (group * 16 + row) * kChunkBytes;
    const unsigned char* inputs[kColumns];
    int place[Shape::kOwnSteps], input_place[Shape::kOwnSteps];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        inputs[c] = p.norm_in_block
                        ? shared + p.input_at + min(c * 8 + row, a.rows - 1) * p.input_pitch
                        : shared + p.ring_at + Shape::kWeightBytes + (c * 8 + row) * kChunkBytes;
#pragma unroll
    for (int own = 0; own < Shape::kOwnSteps; ++own) {
        const int piece = (part * Shape::kOwnSteps + own) * 4 + lane % 4;
        place[own] = (piece ^ swap) * 16;
        input_place[own] = p.norm_in_block ? piece * 16 : place[own];
    }
    float sums[2][kColumns][4] = {};
    // The stage that was used last is the next to be filled.
    int stage_at = 0, free_at = (kStages - 1) * stage_bytes;
    for (; at.more(); at.advance(chunks)) {
        wait_for_copies(kStages - 2);
        __syncthreads();  // the stage is here for all, and all are done with the one before
        if (ahead.more()) {
            fetch_weights(free_at);
            fetch_inputs(free_at, ahead.chunk);
            advance();
        }
        commit_copies();

        const int input_at = p.norm_in_block ? at.chunk * kChunkBytes : stage_at;
#pragma unroll
        for (int own = 0; own < Shape::kOwnSteps; ++own) {
            const unsigned char* from = weights + stage_at + place[own];
            const uint4 low = *reinterpret_cast<const uint4*>(from);
            const uint4 high = *reinterpret_cast<const uint4*>(from + 8 * kChunkBytes);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const uint4 x =
                    *reinterpret_cast<const uint4*>(inputs[c] + input_at + input_place[own]);
                multiply_tile(sums[0][c], low.x, high.x, low.y, high.y, x.x, x.y, T());
                multiply_tile(sums[1][c], low.z, high.z, low.w, high.w, x.z, x.w, T());
            }
        }
        free_at = stage_at;
        stage_at = stage_at + stage_bytes == kStages * stage_bytes ? 0 : stage_at + stage_bytes;
        if (at.chunk + 1 < chunks) continue;

        float v[kColumns][4];
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[c][i] = sums[0][c][i] + sums[1][c][i];
                sums[0][c][i] = sums[1][c][i] = 0.f;
            }
        if constexpr (Shape::kParts > 1) {
            float4* exchange = reinterpret_cast<float4*>(shared + p.sums_at);
            if (part > 0)
#pragma unroll
                for (int c = 0; c < kColumns; ++c)
                    exchange[(((part - 1) * Shape::kGroups + group) * kColumns + c) * 32 + lane] =
                        make_float4(v[c][0], v[c][1], v[c][2], v[c][3]);
            __syncthreads();
            if (part > 0) continue;
#pragma unroll
            for (int other = 0; other < Shape::kParts - 1; ++other)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const float4 x =
                        exchange[((other * Shape::kGroups + group) * kColumns + c) * 32 + lane];
                    v[c][0] += x.x;
                    v[c][1] += x.y;
                    v[c][2] += x.z;
                    v[c][3] += x.w;
                }
        }
        const T* bias = static_cast<const T*>(a.bias);
        const T* residual = static_cast<const T*>(a.residual);
        T* output = static_cast<T*>(a.output);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (a.gated && i >= 2) break;
                const int r = c * 8 + lane % 4 * 2 + i % 2;
                const int in_tile = a.gated ? group * 8 + row : group * 16 + row + i / 2 * 8;
                if (r >= a.rows || in_tile >= at.outputs) continue;
                const int n = at.output + in_tile;
                float y = activate(v[c][i] + (bias ? to_float(bias[n]) : 0.f), a.activation);
                if (a.gated) y *= v[c][(i + 2) % 4] + (bias ? to_float(bias[n + a.outputs]) : 0.f);
                if (residual) y += to_float(residual[r * a.residual_stride + n]);
                output[r * a.output_stride + n] = from_float<T>(y);
            }
    }
}

}  // namespace offload
