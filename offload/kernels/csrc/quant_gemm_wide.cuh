// Many rows of activations times a quantised weight in panels, on warpgroups (sm_90a).
//
// The weights are operand A, in registers, where codes become what a weight made whole would hold:
// code times scale, rounded once. The activations are operand B, in shared memory. A block has some
// tiles of 16 outputs, shared out to its warps, and all of their depth (a cluster's blocks share it
// out), which passes through a ring of stages: codes by bulk copies, and activations by way of the
// registers of four warps that do nothing else, since their order must be that of the panels'
// columns. Sums stay in registers to the end, and are then added up across the cluster in order:
// results repeat bit for bit.
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "quant_gemm_work.cuh"
#include "tensor_core.cuh"
#include "warpgroup.cuh"

namespace offload {

struct WidePlan {
    int32_t cluster, cluster_bits;                // blocks that share out the depth; its log2
    int32_t bundles, longer_clusters;             // of a cluster; the first ones have one more
    int32_t chunks, block_chunks, longer_blocks;  // of a row; of a block, the first have one more
    int32_t tiles;                                // of 16 outputs
    int32_t groups, group_shift;                  // of a row; log2 of the chunks that share one
};

template <int kBits, int kHalves_, int kColumns_, int kTiles_, int kWarps_, int kStageChunks_,
          int kStages_>
struct WideShape {
    static constexpr int kHalves = kHalves_;    // of a chunk, with scales of their own
    static constexpr int kColumns = kColumns_;  // of 8 rows of activations each
    static constexpr int kTiles = kTiles_;      // of a warp
    static constexpr int kWarps = kWarps_, kWarpgroups = kWarps / 4;  // that multiply
    static constexpr int kInputWarps = kWarps == 8 ? 8 : 4;           // that bring stages
    static constexpr int kThreads = (kWarps + kInputWarps) * 32;
    // A thread's registers, of those that multiply and of those that bring stages.
    static constexpr int kMultiplyRegisters = kWarps == 8 ? 200 : 104;
    static constexpr int kInputRegisters = kWarps == 8 ? 56 : 64;
    static constexpr int kChunkDepth = 4096 / kBits / 16;
    static constexpr int kSteps = kChunkDepth / 16;  // of a chunk
    static constexpr int kGroupSteps = kSteps / 2;   // of a group of products
    static constexpr int kSlots = kWarps * kTiles;
    static constexpr int kStages = kStages_, kStageChunks = kStageChunks_;
    static constexpr int kFirstStages = 2;  // asked for before the activations
    static constexpr int kStageDepth = kStageChunks * kChunkDepth;
    static constexpr int kInputBytes = kColumns * 16 * kStageDepth;  // of a stage
    static constexpr int kSlotBytes = kStageChunks * 512;
    static constexpr int kStageBytes = kInputBytes + kSlots * kSlotBytes;
    // Sums: pieces of a warp, of 16 outputs and 8 rows each, shared out to the blocks of a cluster.
    static constexpr int kPieces = kTiles * kColumns, kPieceFloats = 144;
    static constexpr int kMostCluster = 8;
    static constexpr int kPartsBytes =
        (kPieces > kMostCluster ? kPieces : kMostCluster) * kWarps * kPieceFloats * 4;
    static constexpr int kBarriersAt =
        kStages * kStageBytes > kPartsBytes ? kStages * kStageBytes : kPartsBytes;
    static constexpr int kShared = kBarriersAt + 2 * kStages * 8;
    static_assert(kWarps == 8 || kWarps == 16, "pairs of warpgroups");
    static_assert(kStageChunks == 2 || kStageChunks == 4, "a lane of each quarter has scales");
    static_assert(kShared <= 232448, "what a block may have");
};

// Which part of the product a block has.
template <typename Shape>
struct WideWork {
    int rank, first, bundles;    // of outputs: two tiles each, neighbours or a gate's and its up's
    int chunk0, chunks, stages;  // of the depth

    __device__ __forceinline__ WideWork(const WidePlan& p, int block) {
        const int cluster = block >> p.cluster_bits;
        rank = block - (cluster << p.cluster_bits);
        first = cluster * p.bundles + min(cluster, p.longer_clusters);
        bundles = p.bundles + (cluster < p.longer_clusters);
        chunk0 = rank * p.block_chunks + min(rank, p.longer_blocks);
        chunks = p.block_chunks + (rank < p.longer_blocks);
        stages = (chunks + Shape::kStageChunks - 1) / Shape::kStageChunks;
    }

    // The tile of a slot. Behind the last one, the last one.
    __device__ __forceinline__ int tile(const OffloadQuantGemm& a, const WidePlan& p,
                                        int slot) const {
        slot = min(slot, bundles * 2 - 1);
        return a.gated ? first + slot / 2 + slot % 2 * p.tiles : min(first * 2 + slot, p.tiles - 1);
    }
};

// How four slots at a time are shared out to the warpgroups. Each has `whole`; those that are left
// over are one each of the first warpgroups, or, where there are two for each, in pairs: each of a
// pair has half of a stage's chunks, and its sums are added to the other's in the end.
template <typename Shape>
struct WideShares {
    int whole, left;
    bool paired;

    __device__ __forceinline__ explicit WideShares(const WideWork<Shape>& work) {
        const int fours = (work.bundles + 1) / 2;
        whole = fours / Shape::kWarpgroups;
        left = fours % Shape::kWarpgroups;
        paired = left > 0 && left * 2 <= Shape::kWarpgroups;
    }

    __device__ __forceinline__ int busy_warps() const {
        return (whole > 0 ? Shape::kWarpgroups : paired ? left * 2 : left) * 4;
    }

    // Of warpgroup g: whether it is one of a pair, which one, and how many it has alone.
    __device__ __forceinline__ bool in_pair(int g) const { return paired && g < left * 2; }
    __device__ __forceinline__ int half(int g) const { return g >= left; }
    __device__ __forceinline__ int alone(int g) const { return whole + (!paired && g < left); }

    // The first slot of its m-th four; a pair's comes after those that it has alone.
    __device__ __forceinline__ int slot(int g, int m) const {
        return (m * Shape::kWarpgroups + (m == whole && in_pair(g) && g >= left ? g - left : g)) *
               4;
    }
};

// A lane's scales and zero points of the two rows that it has of a tile, as operands.
template <typename T, int kBits, bool kZeros>
struct Rescale;

// Codes are operands as they are: numbers in steps of 2^-133, see quant_codes.cuh, those of int4's
// second row 16 times as large. The scale brings them to 2^-33 of what they stand for, which sums
// make good in the end: room for scales up to 2^27.
template <int kBits, bool kZeros>
struct Rescale<__nv_bfloat16, kBits, kZeros> {
    static constexpr float kUndo = 0x1p33f;
    uint32_t scale, offset;  // of the first row, and above it of the second
    Rescale() = default;

    __device__ __forceinline__ Rescale(uint32_t scales, uint32_t zeros) {
        constexpr uint32_t kTimes = kBits == 4 ? 0x6f807180u : 0x71807180u;   // 2^100; 2^96
        constexpr uint32_t kMiddle = kBits == 4 ? 0xb080b080u : 0xb280b280u;  // -8, -128 * 2^-33
        scale = multiply_add_pair(scales, kTimes, 0x80008000u, __nv_bfloat16());
        if (kZeros) {
            const uint32_t first = zeros & ((1u << kBits) - 1);
            const uint32_t second = kBits == 4 ? zeros & 0xf0u : zeros >> 8;
            offset = first | second << 16 | 0x80008000u;
        } else {
            offset = multiply_add_pair(scales, kMiddle, 0x80008000u, __nv_bfloat16());
        }
    }

    __device__ __forceinline__ uint32_t apply(uint32_t codes, bool second) const {
        const uint32_t s = second ? high_twice(scale) : low_twice(scale);
        const uint32_t o = second ? high_twice(offset) : low_twice(offset);
        if (!kZeros) return multiply_add_pair(codes, s, o, __nv_bfloat16());
        const uint32_t x = multiply_add_pair(codes, 0x3f803f80u, o, __nv_bfloat16());
        return multiply_add_pair(x, s, 0x80008000u, __nv_bfloat16());
    }

    __device__ __forceinline__ static uint32_t number(uint32_t codes) { return codes; }
};

// Codes are made the last bits of 1024 and more.
template <int kBits, bool kZeros>
struct Rescale<__half, kBits, kZeros> {
    static constexpr float kUndo = 1.f;
    uint32_t scale, offset;
    Rescale() = default;

    __device__ __forceinline__ Rescale(uint32_t scales, uint32_t zeros) : scale(scales) {
        constexpr uint32_t kMiddle = 1u << (kBits - 1);
        const uint32_t first = kZeros ? zeros & ((1u << kBits) - 1) : kMiddle;
        const uint32_t second = kZeros ? zeros >> kBits & ((1u << kBits) - 1) : kMiddle;
        // -(1024 + first); -(64 + second) or -(1024 + second)
        offset = (first | 0xe400u) | (kBits == 4 ? second << 4 | 0xd400u : second | 0xe400u) << 16;
    }

    __device__ __forceinline__ uint32_t apply(uint32_t codes, bool second) const {
        constexpr uint32_t kOne = 0x3c003c00u, kSixteenth = 0x2c002c00u;
        const uint32_t s = second ? high_twice(scale) : low_twice(scale);
        const uint32_t o = second ? high_twice(offset) : low_twice(offset);
        const uint32_t x =
            multiply_add_pair(codes, kBits == 4 && second ? kSixteenth : kOne, o, __half());
        return multiply_add_pair(x, s, 0x80008000u, __half());
    }

    __device__ __forceinline__ static uint32_t number(uint32_t codes) {
        return codes | 0x64006400u;
    }
};

// Operand A of step j of a lane's 16 bytes.
template <int kBits, typename Rescaled>
__device__ __forceinline__ void make_operand(const uint4& words, int j, const Rescaled& rescale,
                                             uint32_t (&w)[4]) {
    if constexpr (kBits == 4) {
        const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
        const uint32_t later = word >> 8;
        w[0] = rescale.apply(Rescaled::number(word & 0x000f000fu), 0);
        w[1] = rescale.apply(Rescaled::number(word & 0x00f000f0u), 1);
        w[2] = rescale.apply(Rescaled::number(later & 0x000f000fu), 0);
        w[3] = rescale.apply(Rescaled::number(later & 0x00f000f0u), 1);
    } else {
        const uint32_t first = j ? words.z : words.x, second = j ? words.w : words.y;
        w[0] = rescale.apply(Rescaled::number(first & 0x00ff00ffu), 0);
        w[1] = rescale.apply(Rescaled::number(second & 0x00ff00ffu), 1);
        w[2] = rescale.apply(Rescaled::number(first >> 8 & 0x00ff00ffu), 0);
        w[3] = rescale.apply(Rescaled::number(second >> 8 & 0x00ff00ffu), 1);
    }
}

#ifdef OFFLOAD_HAS_WARPGROUPS

// Fills the stages. Of 64 bytes of a row of activations 4 x 4 pairs are transposed, since a lane's
// codes are those of 8 neighbours of the depth. A warp has 8 rows, and some blocks of 64 bytes.
template <typename Shape>
__device__ __forceinline__ void bring_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                             const WideWork<Shape>& work, unsigned char* shared,
                                             int warp, int lane) {
    constexpr int kBlocks = Shape::kStageDepth / 32;                        // of a row of a stage
    constexpr int kItems = kBlocks * Shape::kColumns / Shape::kInputWarps;  // a warp's
    static_assert(kItems > 0 && kBlocks % kItems == 0, "blocks of the same rows");
    constexpr int kSides = 2;                                   // stages on their way
    constexpr int kSlots = Shape::kSlots / Shape::kInputWarps;  // a lane's each
    const uint32_t shared_at = shared_address(shared), barriers = shared_at + Shape::kBarriersAt;

    const int slot = warp * kSlots + lane;
    const bool there = lane < kSlots && slot < work.bundles * 2;
    const uint4* codes =
        static_cast<const uint4*>(a.codes) +
        (static_cast<int64_t>(work.tile(a, p, slot)) * p.chunks + work.chunk0) * 32;
    const uint64_t policy = evict_first_policy();
    int chunk = 0;  // the next one to be asked for
    auto bring_codes = [&](int place) {
        const int bytes = min(Shape::kStageChunks, work.chunks - chunk) * 512;
        const uint32_t barrier = barriers + place * 8;
        if (warp == 0 && lane == 0) barrier_expect(barrier, bytes * work.bundles * 2);
        if (there)
            copy_bulk(shared_at + place * Shape::kStageBytes + Shape::kInputBytes +
                          slot * Shape::kSlotBytes,
                      codes + chunk * 32, bytes, barrier, policy);
        chunk += Shape::kStageChunks;
    };
    const int at_first = min(Shape::kStages, work.stages);
    int place = 0;
    for (; place < min(Shape::kFirstStages, at_first); ++place) bring_codes(place);

    const int column = warp / (kBlocks / kItems), block0 = warp % (kBlocks / kItems) * kItems;
    const int row = column * 8 + lane / 4;
    const int blocks =
        row < a.rows ? work.chunks * (Shape::kChunkDepth / 32) - block0 : 0;  // from block0 on
    const uint16_t* const input = static_cast<const uint16_t*>(a.input) + row * a.input_stride +
                                  work.chunk0 * Shape::kChunkDepth + block0 * 32 + lane % 4 * 8;
    uint4 x[kSides][kItems];
    int loaded = 0;
    auto load = [&](uint4(&to)[kItems]) {
        const uint16_t* const from = input + loaded * Shape::kStageDepth;
        const int in_stage = blocks - loaded * kBlocks;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            to[i] = make_uint4(0, 0, 0, 0);
            if (i < in_stage) to[i] = *reinterpret_cast<const uint4*>(from + i * 32);
        }
        ++loaded;
    };
    wait_for_previous_kernel();
#pragma unroll
    for (int side = 0; side < kSides; ++side) load(x[side]);
    for (; place < at_first; ++place) bring_codes(place);
    uint32_t parity = 1;
    place = 0;
    for (int stage = 0; stage < work.stages; stage += kSides) {
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
            if (stage + side >= work.stages) break;
            if (stage + side >= Shape::kStages) {
                barrier_wait(barriers + (Shape::kStages + place) * 8, parity);
                bring_codes(place);
            }
            uint32_t* const to = reinterpret_cast<uint32_t*>(shared + place * Shape::kStageBytes) +
                                 (block0 * 4 * Shape::kColumns + column) * 32 + lane;
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                to[(i * 4) * Shape::kColumns * 32] = x[side][i].x;
                to[(i * 4 + 1) * Shape::kColumns * 32] = x[side][i].y;
                to[(i * 4 + 2) * Shape::kColumns * 32] = x[side][i].z;
                to[(i * 4 + 3) * Shape::kColumns * 32] = x[side][i].w;
            }
            fence_before_bulk_copies();
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers + place * 8);
            if (++place == Shape::kStages) {
                place = 0;
                parity ^= 1;
            }
            load(x[side]);
        }
    }
}

// kAlone: fours of slots that the warpgroup has alone; kPair: it shares another one. Each case has
// code of its own, without branches: so the compiler converts further ahead.
template <typename T, int kBits, bool kZeros, int kAlone, bool kPair, typename Shape>
__device__ __forceinline__ void multiply_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                                const WideWork<Shape>& work,
                                                const WideShares<Shape>& shares,
                                                const unsigned char* shared, int warp, int lane,
                                                float (&sums)[Shape::kTiles][Shape::kColumns][4]) {
    using Zero = std::conditional_t<kBits == 4, uint8_t, uint16_t>;  // those of two rows
    constexpr int kTiles = kAlone + kPair, kHalves = Shape::kHalves, kColumns = Shape::kColumns;
    constexpr int kGroupSteps = Shape::kGroupSteps;
    const int row = lane / 4, quarter = lane % 4, g = warp / 4;
    const uint32_t barriers = shared_address(shared) + Shape::kBarriersAt;

    // Scales of a stage are asked for a stage ahead, by a quarter's lanes those of a chunk.
    const uint32_t* scales_of[kTiles];
    const Zero* zeros_of[kTiles];
    int codes_of[kTiles];  // in a stage
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        const int slot = shares.slot(g, m) + warp % 4;
        const int64_t tile = work.tile(a, p, slot);
        scales_of[m] = static_cast<const uint32_t*>(a.scale) + tile * p.groups * 8 + row;
        zeros_of[m] = static_cast<const Zero*>(a.zero) + tile * p.groups * 8 + row;
        codes_of[m] = Shape::kInputBytes + slot * Shape::kSlotBytes + lane * 16;
    }
    uint32_t next_scales[kTiles][kHalves], next_zeros[kTiles][kHalves];
    auto fetch_scales = [&](int stage) {
        const int in_block = stage * Shape::kStageChunks + quarter % Shape::kStageChunks;
        const bool there = in_block < work.chunks;  // else its codes are anything
        const int chunk = work.chunk0 + min(in_block, work.chunks - 1);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
            const int group = (kHalves == 2 ? chunk * 2 + h : chunk >> p.group_shift) * 8;
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                next_scales[m][h] = there ? scales_of[m][group] : 0;
                if (kZeros) next_zeros[m][h] = zeros_of[m][group];
            }
        }
    };
    fetch_scales(0);

    const uint64_t inputs = describe_pieces(shared_address(shared), kColumns * 128, 128);
    const int half = shares.half(g) * (Shape::kStageChunks / 2);
    uint32_t place = 0, parity = 0, last = 0;
    for (int stage = 0; stage < work.stages; ++stage) {
        uint32_t scales[kTiles][kHalves], zeros[kTiles][kHalves];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                scales[m][h] = next_scales[m][h];
                zeros[m][h] = kZeros ? next_zeros[m][h] : 0;
            }
        fetch_scales(stage + 1);
        barrier_wait(barriers + place * 8, parity);
        const unsigned char* const codes = shared + place * Shape::kStageBytes;
        const uint64_t stage_inputs = inputs + place * (Shape::kStageBytes / 16);
        auto stage_before_is_read = [&] {
            if (stage > 0 && lane == 0) barrier_arrive(barriers + (Shape::kStages + last) * 8);
        };
        // Of the next chunk of a tile, asked for while one is converted.
        uint4 next_words;
        uint32_t next_scale[kHalves], next_zero[kHalves];
        auto fetch = [&](int i, int m) {
            next_words = *reinterpret_cast<const uint4*>(codes + codes_of[m] + i * 512);
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                next_scale[h] = __shfl_sync(0xffffffffu, scales[m][h], row * 4 + i);
                next_zero[h] = kZeros ? __shfl_sync(0xffffffffu, zeros[m][h], row * 4 + i) : 0;
            }
        };
        constexpr int kOfPair = Shape::kStageChunks / 2, kWithout = Shape::kStageChunks * kAlone;
        constexpr int kAll = kWithout + (kPair ? kOfPair : 0);
        auto chunk_of = [&](int k) {
            return k < kWithout ? k / max(kAlone, 1) : k - kWithout + half;
        };
        auto tile_of = [](int k) { return k < kWithout ? k % max(kAlone, 1) : kAlone; };
        fetch(chunk_of(0), tile_of(0));
#pragma unroll
        for (int k = 0; k < kAll; ++k) {
            const int i = chunk_of(k), m = tile_of(k);
            const uint4 words = next_words;
            Rescale<T, kBits, kZeros> rescale[kHalves];
#pragma unroll
            for (int h = 0; h < kHalves; ++h)
                rescale[h] = Rescale<T, kBits, kZeros>(next_scale[h], next_zero[h]);
            if (k + 1 < kAll) fetch(chunk_of(k + 1), tile_of(k + 1));
#pragma unroll
            for (int j = 0; j < Shape::kSteps; j += kGroupSteps) {
                uint32_t w[kGroupSteps][4];
#pragma unroll
                for (int step = 0; step < kGroupSteps; ++step) {
                    make_operand<kBits>(words, j + step,
                                        rescale[(j + step) * kHalves / Shape::kSteps], w[step]);
                    settle(w[step]);
                }
                begin_products();
#pragma unroll
                for (int step = 0; step < kGroupSteps; ++step)
                    multiply_group(sums[m], w[step],
                                   stage_inputs + (i * Shape::kSteps + j + step) * (kColumns * 16),
                                   T());
                commit_products();
                wait_for_products<1>();
                if (k == 0 && j == 0) stage_before_is_read();
            }
        }
        last = place;
        if (++place == Shape::kStages) {
            place = 0;
            parity ^= 1;
        }
    }
    wait_for_products<0>();
}

// How the pieces of a warp are shared out to kCluster blocks: those of a block lie in its shared
// memory by the block that they come from, then in order, then by warp.
template <int kCluster, typename Shape>
struct WidePieces {
    static constexpr int kEach = Shape::kPieces > kCluster ? Shape::kPieces / kCluster : 1;
    static constexpr int kStep = Shape::kWarps * Shape::kPieceFloats;  // to a warp's next one
    static constexpr int kOfBlock = kEach * kStep;                     // from a block
};

// Sends the sums of a warp to the blocks that add them up. What a lane has of a piece are 16 bytes;
// the second half lies where reading 4 outputs a lane has no conflicts of banks.
template <int kCluster, typename Shape>
__device__ __forceinline__ void send_sums(const WideWork<Shape>& work,
                                          const WideShares<Shape>& shares, float* parts, int warp,
                                          int lane,
                                          const float (&sums)[Shape::kTiles][Shape::kColumns][4]) {
    using Pieces = WidePieces<kCluster, Shape>;
    float* const mine = parts + work.rank * Pieces::kOfBlock + warp * Shape::kPieceFloats +
                        lane * 4 + lane / 16 * 16;
    uint32_t to[kCluster];
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank)
        to[rank] = kCluster > 1 ? address_in_block(mine, rank) : 0;
#pragma unroll
    for (int m = 0; m < Shape::kTiles; ++m) {
        const int g = warp / 4;
        if (m >= shares.alone(g) + shares.in_pair(g) ||
            shares.slot(g, m) + warp % 4 >= work.bundles * 2)
            break;
#pragma unroll
        for (int c = 0; c < Shape::kColumns; ++c) {
            const int piece = m * Shape::kColumns + c, at = piece / kCluster * Pieces::kStep;
            const float (&x)[4] = sums[m][c];
            const bool own = piece % kCluster == work.rank;
            if (kCluster > 1 && !own)
                store_to_cluster(to[piece % kCluster] + at * 4,
                                 make_float4(x[0], x[1], x[2], x[3]));
            else
                *reinterpret_cast<float4*>(mine + at) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

// Adds up the pieces that this block got and writes their outputs: 4 of one of 8 rows a lane.
template <int kCluster, typename T, int kBits, typename Shape>
__device__ __forceinline__ void write_outputs(const OffloadQuantGemm& a, const WidePlan& p,
                                              const WideWork<Shape>& work,
                                              const WideShares<Shape>& shares, const float* parts,
                                              int warp, int lane) {
    using Pieces = WidePieces<kCluster, Shape>;
    constexpr float kUndo = Rescale<T, kBits, false>::kUndo;
    constexpr int kAllWarps = Shape::kThreads / 32;
    const T* const bias = static_cast<const T*>(a.bias);
    const T* const residual = static_cast<const T*>(a.residual);
    const int in_row = lane / 4, quarter = lane % 4;
    const int in_piece = quarter % 2 * 80 + quarter / 2 * 2 + in_row / 2 * 4 + in_row % 2;
    const bool whole = reinterpret_cast<uintptr_t>(a.output) % 8 == 0 && a.output_stride % 4 == 0;
    const int slots = work.bundles * 2, slot_step = a.gated ? 2 : 1;
    for (int slot = warp * slot_step; slot < slots; slot += kAllWarps * slot_step) {
        const int tile = a.gated ? work.first + slot / 2 : work.first * 2 + slot;
        if (tile >= p.tiles) break;
        const int m = slot / Shape::kWarps, n = tile * 16 + quarter * 4;
        const bool paired = shares.paired && m == shares.whole;
        float own_bias[2][4] = {};  // of gate and up
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (bias) own_bias[0][j] = to_float(bias[n + j]);
            if (bias && a.gated) own_bias[1][j] = to_float(bias[n + j + a.outputs]);
        }
        const int c0 = (work.rank - m * Shape::kColumns) & (kCluster - 1);
        const float* from = parts + (m * Shape::kColumns + c0) / kCluster * Pieces::kStep +
                            slot % Shape::kWarps * Shape::kPieceFloats + in_piece;
        int row = c0 * 8 + in_row;
        T* to = static_cast<T*>(a.output) + row * a.output_stride + n;
#pragma unroll 2
        for (int c = c0; c < Shape::kColumns; c += kCluster) {
            float y[2][4] = {};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (k > 0 && !a.gated) break;
#pragma unroll
                for (int rank = 0; rank < kCluster; ++rank)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        y[k][j] += from[rank * Pieces::kOfBlock + k * Shape::kPieceFloats + j * 16];
                if (paired)
#pragma unroll
                    for (int rank = 0; rank < kCluster; ++rank)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            y[k][j] += from[rank * Pieces::kOfBlock + j * 16 +
                                            (shares.left * 4 + k) * Shape::kPieceFloats];
#pragma unroll
                for (int j = 0; j < 4; ++j) y[k][j] = y[k][j] * kUndo + own_bias[k][j];
            }
            if (a.activation != OFFLOAD_IDENTITY)
#pragma unroll 1
                for (int j = 0; j < 4; ++j) {  // in turn: its code is long
                    const float z = activate(y[0][0], a.activation);
                    y[0][0] = y[0][1];
                    y[0][1] = y[0][2];
                    y[0][2] = y[0][3];
                    y[0][3] = z;
                }
            if (row < a.rows) {
                T out[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (a.gated) y[0][j] *= y[1][j];
                    if (residual) y[0][j] += to_float(residual[row * a.residual_stride + n + j]);
                    out[j] = from_float<T>(y[0][j]);
                }
                if (whole) {
                    uint2 all;
                    memcpy(&all, out, sizeof all);
                    *reinterpret_cast<uint2*>(to) = all;
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) to[j] = out[j];
                }
            }
            from += Pieces::kStep;
            row += kCluster * 8;
            to += kCluster * 8 * a.output_stride;
        }
    }
}

// f of what a warpgroup has, known to the compiler.
template <typename Shape, int kAlone = 0, typename F>
__device__ __forceinline__ void with_share(const WideShares<Shape>& shares, int g, const F& f) {
    using Alone = std::integral_constant<int, kAlone>;
    if constexpr (kAlone < Shape::kTiles) {
        if (shares.alone(g) > kAlone) {
            with_share<Shape, kAlone + 1>(shares, g, f);
            return;
        }
        if (kAlone == 0 || shares.in_pair(g)) {
            f(Alone(), std::true_type());
            return;
        }
    }
    if constexpr (kAlone > 0) f(Alone(), std::false_type());
}

// f of the number of blocks of a cluster, known to the compiler.
template <typename F>
__device__ __forceinline__ void with_cluster(int bits, const F& f) {
    if (bits == 1)
        f(std::integral_constant<int, 2>());
    else if (bits == 0)
        f(std::integral_constant<int, 1>());
    else if (bits == 2)
        f(std::integral_constant<int, 4>());
    else
        f(std::integral_constant<int, 8>());
}

template <typename T, int kBits, bool kZeros, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    wide_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                     const __grid_constant__ WidePlan p) {
    constexpr int kTiles = Shape::kTiles, kWarps = Shape::kWarps;
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // known to be the same for all
    const WideWork<Shape> work(p, static_cast<int>(blockIdx.x));
    const WideShares<Shape> shares(work);
    const int busy_warps = shares.busy_warps();
    const uint32_t barriers = shared_address(shared) + Shape::kBarriersAt;
    if (warp == kWarps) {
        if (lane < 2 * Shape::kStages)
            barrier_init(barriers + lane * 8,
                         lane < Shape::kStages ? 1 + Shape::kInputWarps : busy_warps);
        fence_before_bulk_copies();
    }
    __syncthreads();
    let_next_kernel_begin();

    float* const parts = reinterpret_cast<float*>(shared);
    // Stages become the place of sums when all blocks have read theirs.
    auto stages_are_read = [&] {
        if (p.cluster > 1) {
            cluster_arrive_relaxed();
            cluster_wait();
        } else {
            __syncthreads();
        }
    };
    if (warp >= kWarps) {
        keep_registers<Shape::kInputRegisters>();
        bring_stages<Shape>(a, p, work, shared, warp - kWarps, lane);
        stages_are_read();
    } else {
        take_registers<Shape::kMultiplyRegisters>();
        if (warp >= busy_warps) {
            stages_are_read();
        } else {
            float sums[kTiles][Shape::kColumns][4] = {};
            with_share<Shape>(shares, warp / 4, [&](auto alone, auto pair) {
                multiply_stages<T, kBits, kZeros, decltype(alone)::value, decltype(pair)::value>(
                    a, p, work, shares, shared, warp, lane, sums);
            });
            stages_are_read();
            with_cluster(p.cluster_bits, [&](auto cluster) {
                send_sums<decltype(cluster)::value, Shape>(work, shares, parts, warp, lane, sums);
            });
        }
    }
    wait_for_previous_kernel();
    if (p.cluster > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    with_cluster(p.cluster_bits, [&](auto cluster) {
        write_outputs<decltype(cluster)::value, T, kBits, Shape>(a, p, work, shares, parts, warp,
                                                                 lane);
    });
}
#else
template <typename T, int kBits, bool kZeros, typename Shape>
__global__ void wide_gemm_kernel(const __grid_constant__ OffloadQuantGemm,
                                 const __grid_constant__ WidePlan) {}
#endif

}  // namespace offload
