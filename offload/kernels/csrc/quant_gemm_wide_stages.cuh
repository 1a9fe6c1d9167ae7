// What fills the stages of quant_gemm_wide.cuh: codes by bulk copies, activations by way of
// registers.
#pragma once
#include "async_copy.cuh"
#include "quant_gemm_wide_plan.cuh"
#include "warpgroup.cuh"

namespace offload {

#ifdef OFFLOAD_HAS_WARPGROUPS

// Fills the stages; bring_codes(place) asks for the codes of the next one. Of 64 bytes of a row of
// activations 4 x 4 pairs are transposed, since a lane's codes are those of 8 neighbours of the
// depth. A warp has 8 rows, and some blocks of 64 bytes.
template <typename Shape, typename F>
__device__ __forceinline__ void fill_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                            const WideWork<Shape>& work, unsigned char* shared,
                                            uint32_t barriers, int warp, int lane,
                                            const F& bring_codes) {
    constexpr int kBlocks = Shape::kStageDepth / 32;                        // of a row of a stage
    constexpr int kItems = kBlocks * Shape::kColumns / Shape::kInputWarps;  // a warp's
    static_assert(kItems > 0 && kBlocks % kItems == 0, "blocks of the same rows");
    constexpr int kSides = Shape::kSides;  // stages on their way
    const int at_first = min(Shape::stages(p), work.stages);
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
            if (stage + side >= Shape::stages(p)) {
                barrier_wait(barriers + (Shape::kMostStages + place) * 8, parity);
                bring_codes(place);
            }
            uint32_t* const to =
                reinterpret_cast<uint32_t*>(shared + place * Shape::stage_bytes(p)) +
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
            if (++place == Shape::stages(p)) {
                place = 0;
                parity ^= 1;
            }
            load(x[side]);
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void bring_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                             const WideWork<Shape>& work, unsigned char* shared,
                                             int warp, int lane) {
    constexpr int kSlots = Shape::kSlots / Shape::kInputWarps;  // a warp's each
    static_assert(kSlots % 2 == 0, "pairs of slots");
    const uint32_t shared_at = shared_address(shared), barriers = shared_at + Shape::barriers_at(p);
    if constexpr (Shape::kMany) {
        const int slot = warp * kSlots + lane;
        const bool there = lane < kSlots && slot < work.bundles * 2;
        const uint4* codes =
            static_cast<const uint4*>(a.codes) +
            (static_cast<int64_t>(work.tile(a, p, slot)) * p.chunks + work.chunk0) * 32;
        const uint64_t policy = evict_first_policy();
        int chunk = 0;  // the next one to be asked for
        fill_stages(a, p, work, shared, barriers, warp, lane, [&](int place) {
            const int bytes = min(Shape::kStageChunks, work.chunks - chunk) * 512;
            const uint32_t barrier = barriers + place * 8;
            if (warp == 0 && lane == 0) barrier_expect(barrier, bytes * work.bundles * 2);
            if (there)
                copy_bulk(shared_at + place * Shape::stage_bytes(p) + Shape::kInputBytes +
                              slot * Shape::kSlotBytes,
                          codes + chunk * 32, bytes, barrier, policy);
            chunk += Shape::kStageChunks;
        });
    } else {
        const uint64_t policy = evict_first_policy();
        const int64_t tile_step = static_cast<int64_t>(p.chunks) * 32;
        int chunk = 0;
        // A slot a lane; of up to 16 rows, where the first codes are waited for, all slots one
        // lane, which needs fewer instructions for each.
        constexpr bool kLanes = Shape::kColumns > 2;
        const int slot0 = warp * kSlots + (kLanes ? lane : 0), slots = work.bundles * 2 - slot0;
        const uint4* const codes = static_cast<const uint4*>(a.codes) +
                                   work.tile(a, p, slot0) * tile_step + work.chunk0 * 32;
        const int64_t to_odd = (work.tile(a, p, slot0 + 1) - work.tile(a, p, slot0)) * tile_step;
        // A last odd tile has no neighbour.
        const bool alone = !a.gated && slots <= kSlots && (work.first + work.bundles) * 2 > p.tiles;
        fill_stages(a, p, work, shared, barriers, warp, lane, [&](int place) {
            const int bytes = min(Shape::kStageChunks, work.chunks - chunk) * 512;
            const uint32_t barrier = barriers + place * 8;
            const uint32_t to = shared_at + place * Shape::stage_bytes(p) + Shape::kInputBytes +
                                slot0 * Shape::kSlotBytes;
            const uint4* from = codes + chunk * 32;
            if constexpr (kLanes) {
                if (warp == 0 && lane == 0) barrier_expect(barrier, bytes * work.bundles * 2);
                if (lane < kSlots && slots > 0) copy_bulk(to, from, bytes, barrier, policy);
            } else if (elect_one()) {
                if (warp == 0) barrier_expect(barrier, bytes * work.bundles * 2);
#pragma unroll
                for (int i = 0; i < kSlots; i += 2, from += a.gated ? tile_step : 2 * tile_step) {
                    if (i >= slots) break;
                    copy_bulk(to + i * Shape::kSlotBytes, from, bytes, barrier, policy);
                    copy_bulk(to + (i + 1) * Shape::kSlotBytes,
                              alone && i + 2 == slots ? from : from + to_odd, bytes, barrier,
                              policy);
                }
            }
            __syncwarp();
            chunk += Shape::kStageChunks;
        });
    }
}

#endif

}  // namespace offload
