// Decode attention's kernel of shares: a CTA's piece of the line of all tiles, fed to the math.
#pragma once
#include "decode_attention_parts.cuh"

namespace offload {
namespace decode {

// Math is what one CTA does with a tile:
//   columns(p)                 the most columns of a tile
//   load(p, stage, cursor)     begin copying the cursor's tile (and its queries, if it is fresh)
//   load_early(p, stage, cursor)  as much of that as does not come from the kernels ahead
//   load_late(p, stage, cursor)   the rest, now and past L1, which may have what was there before
//   begin(p, cursor)           a new item: forget the sums
//   tile(p, stage, cursor)     add a tile
//   store(p, cursor)           the item was whole: normalise, write the output
//   store_part(p, cursor, slot)  write the sums as they are
template <typename Math>
__global__ void __launch_bounds__(Math::kMostThreads, Math::kLeastCtas)
    decode_attention_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    let_next_kernel_begin();
    const int32_t width = Math::columns(p);
    Share share;
    if (!find_share(p, width, &share)) return;

    Math math(p, shared);
    Cursor ahead(p, share, width), at(p, share, width);
    const int lead = p.stages - 1;
    Cursor early = at;
#pragma unroll 1
    for (int stage = 0; stage < lead; ++stage) {
        if (early.left > 0) {
            math.load_early(p, stage, early);
            early.advance(p, width);
        }
        end_copies();
    }
    wait_for_previous_kernel();
#pragma unroll 1
    for (int stage = 0; stage < lead && ahead.left > 0; ++stage) {
        math.load_late(p, stage, ahead);
        ahead.advance(p, width);
    }

    int32_t begun = 0;  // the first tile of this item in this piece
    for (int stage = 0; at.left > 0; at.advance(p, width)) {
        wait_for_copies(p.stages - 2);
        __syncthreads();  // the tile is here for all, and all are done with the one before
        if (ahead.left > 0) {
            math.load(p, stage == 0 ? p.stages - 1 : stage - 1, ahead);
            ahead.advance(p, width);
        }
        end_copies();
        if (at.fresh) {
            begun = at.tile;
            math.begin(p, at);
        }
        math.tile(p, stage, at);
        stage = stage + 1 == p.stages ? 0 : stage + 1;
        const bool complete = at.tile + 1 == at.tiles;
        if (!complete && at.left > 1) continue;
        if (complete && begun == 0)
            math.store(p, at);
        else
            math.store_part(p, at, 2 * static_cast<int64_t>(blockIdx.x) + (begun == 0));
    }
    const Cursor end = at;  // `at` itself stays in registers
    combine_cuts<typename Math::Element>(p, share, width, end, reinterpret_cast<float2*>(shared));
}

}  // namespace decode
}  // namespace offload
