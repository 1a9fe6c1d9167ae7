// A call: its variant, how its work is cut, and the workspace and the counters that it needs.
#pragma once
#include <algorithm>

#include "skinny_gemm_variants.cuh"

namespace offload {

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// How many parts to cut a tile's depth into: the fewest that keep all blocks busy to 97 %.
inline uint32_t choose_splits(int64_t tiles, int64_t chunks, int64_t blocks) {
    uint32_t best = 1;
    double best_busy = 0;
    for (int64_t s = 1; s <= std::min<int64_t>(chunks, 64); ++s) {
        const int64_t parts = tiles * s, turns = (parts + blocks - 1) / blocks;
        const double busy = static_cast<double>(parts) / static_cast<double>(turns * blocks);
        if (busy > best_busy + 0.005) {
            best_busy = busy;
            best = static_cast<uint32_t>(s);
        }
        if (busy >= 0.97) break;
    }
    return best;
}

struct GemmCall {
    const GemmVariant* variant;  // null: the plain kernel
    GemmChoice choice;
    GemmPlan plan;
    int shared;
    bool norm_apart;      // a kernel of its own normalises the rows first
    int64_t norm_bytes;   // of workspace, for these
    int64_t total_bytes;  // of workspace
    int64_t counters;
};

inline uint32_t cluster_size(const OffloadSkinnyGemm& a, const Device& device, const GemmPlan& p) {
    if (device.major < 9 || p.chunks < 2 || device.multiprocessors < 2) return 1;
    if (a.splits) return std::min(a.splits, 2);
    return shares_depth(a, device) ? 2 : 1;
}

inline void plan_staged(const OffloadSkinnyGemm& a, const Device& device, GemmCall& call) {
    const GemmVariant& v = *call.variant;
    GemmPlan& p = call.plan;
    p.late_norm = takes_norm(a);
    if (p.late_norm) call.norm_apart = false;
    p.splits = cluster_size(a, device, p);
    const int teams = device.multiprocessors / static_cast<int>(p.splits);
    p.blocks = static_cast<uint32_t>(teams) * p.splits;
    p.turn = v.turned ? 1.f / static_cast<float>(teams) : 0.f;
    p.outputs = a.outputs / teams;
    p.more_outputs = a.outputs % teams;

    const int norm_rows = !p.late_norm ? 0 : a.norm.kind == OFFLOAD_NORM_LAYER ? 2 : 1;
    const int most = v.tile / (a.gated ? 2 : 1), group = a.gated ? 8 : 16;
    const int outputs = (a.outputs - 1) / teams + 1;
    // Fewer rows a tile, if three stages would not fit.
    for (int tiles = (outputs - 1) / most + 1;; ++tiles) {
        p.tile_outputs = (outputs - 1) / tiles + 1;
        p.tiles = static_cast<uint32_t>((outputs - 1) / p.tile_outputs + 1);
        const int rows = ((p.tile_outputs - 1) / group + 1) * 16;
        p.inputs_at = rows * v.chunk_bytes;
        p.norm_at = p.inputs_at + a.rows * v.chunk_bytes;
        p.sum_pitch = rows + 4;  // lanes write rows 2 apart to banks 8 apart
        const int values =
            (a.rows + (norm_rows == 2 ? 2 : 0)) * p.sum_pitch + (p.late_norm ? 2 * kMostRows : 0);
        const int left = call.choice.parts * values * static_cast<int>(sizeof(float));
        p.stage_bytes = static_cast<int32_t>(
            round_up(std::max(p.norm_at + norm_rows * v.chunk_bytes, left), 128));
        p.sums_at = kStagedHead;
        p.ring_at = static_cast<int32_t>(
            round_up(kStagedHead + (p.splits > 1 ? values * 4 * std::min(tiles, 2) : 0), 128));
        p.stages = std::min(
            {v.stages, kMostStages, (device.shared_per_block - p.ring_at) / p.stage_bytes});
        if (p.stages >= 3 || p.tile_outputs <= group) break;
    }
    p.stages = std::max<int32_t>(p.stages, 2);
    call.shared = p.ring_at + p.stages * p.stage_bytes;
}

inline int make_call(const OffloadSkinnyGemm& a, const Device& device, GemmCall& call) {
    call = {};
    const bool norm = a.norm.kind != OFFLOAD_NORM_NONE;
    const int64_t element = element_bytes(a), width = 16 / element;
    call.norm_bytes = norm ? round_up(a.rows * round_up(a.depth, width) * element, 256) : 0;
    call.total_bytes = call.norm_bytes;
    call.norm_apart = norm;
    int index = -1;
    if (is_wide(a) && (norm || input_is_wide(a))) {
        index = a.variant ? nth_variant(a, device, a.variant) : default_variant(a, device);
        if (a.variant && index < 0)
            return refuse("skinny_gemm: variant must be 0 to %d here, not %d",
                          variant_count(a, device), a.variant);
    } else if (a.variant > std::max(1, variant_count(a, device))) {
        return refuse("skinny_gemm: variant must be 0 to %d here, not %d",
                      std::max(1, variant_count(a, device)), a.variant);
    }
    if (index < 0) return 0;  // the plain kernel

    const GemmVariant& v = kVariants[index];
    call.variant = &v;
    call.choice = kernel_of(v, a, device);
    GemmPlan& p = call.plan;
    p.chunk = static_cast<int32_t>(v.chunk_bytes / element);
    const int64_t chunks = (static_cast<int64_t>(a.depth) + p.chunk - 1) / p.chunk;
    const int64_t per_tile = v.warps * v.tile / (a.gated ? 2 : 1);
    const int64_t tiles = (static_cast<int64_t>(a.outputs) + per_tile - 1) / per_tile;
    if (tiles * chunks >= (1ll << 31))
        return refuse("skinny_gemm: a weight of %d x %d is too large", a.outputs, a.depth);
    p.chunks = static_cast<uint32_t>(chunks);
    if (v.way == GemmWay::kStaged) {
        plan_staged(a, device, call);
        return 0;
    }

    p.pitch = v.chunk_bytes + 16;
    p.stages = v.stages;
    while (1 << p.row_shift < v.chunk_bytes) ++p.row_shift;
    p.bulk = v.bulk;
    p.tiles = static_cast<uint32_t>(tiles);
    p.splits = a.splits ? static_cast<uint32_t>(std::min<int64_t>(a.splits, chunks))
                        : choose_splits(tiles, chunks, device.multiprocessors);
    p.blocks = static_cast<uint32_t>(std::min<int64_t>(tiles * p.splits, device.multiprocessors));
    p.ring_at = kBarrierBytes;
    call.shared = p.ring_at + fma_ring_bytes(v);
    if (p.splits > 1) {
        const int bucket = a.rows == 1   ? 1
                           : a.rows == 2 ? 2
                           : a.rows <= 4 ? 4
                           : a.rows <= 8 ? 8
                                         : 16;
        // What a warp leaves of a tile: whole registers of 32 lanes.
        const int64_t values = round_up(v.tile * bucket, 32);
        call.total_bytes += static_cast<int64_t>(p.blocks) * 2 * v.warps * values * 4;
        call.counters = tiles * v.warps;
    }
    return 0;
}

}  // namespace offload
