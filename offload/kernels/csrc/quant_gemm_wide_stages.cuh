// What fills the stages of quant_gemm_wide.cuh: codes by bulk copies, activations by way of
// registers.
#pragma once
#include "async_copy.cuh"
#include "quant_gemm_wide_plan.cuh"
#include "warpgroup.cuh"

namespace offload {

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

#endif

}  // namespace offload
