// Which columns a cluster has: found by every warp from the lengths in device memory, so that a
// captured launch follows them.
#pragma once
#include "decode_attention.cuh"

namespace offload {
namespace decode {

constexpr int kStrip = 16;            // columns
constexpr int kMostCluster = 16;      // CTAs
constexpr int kMostClusterRows = 32;  // sequences whose items may have several clusters: one a lane

// What a cluster does: strips [begin, end) of an item, as one of `parts` clusters, the first of
// which is `first`.
struct Piece : Place {
    Visible see;
    int32_t strips;  // of the item
    int32_t begin, end;
    int32_t parts, first;
};

// Finds the piece of cluster `index` of `clusters`; false where there are fewer pieces. Every warp
// does it by itself. Pieces are as short as makes them no more than there are clusters.
__device__ __forceinline__ bool find_piece(const Params& p, int32_t index, int32_t clusters,
                                           Piece* piece) {
    if (clusters == p.batch * p.items) {  // an item each, whatever the lengths
        piece->b = index / p.items;
        piece->item = index - piece->b * p.items;
        piece->see = visible(p, piece->b);
        piece->strips = tiles_of(piece->see.columns, kStrip);
        piece->begin = 0;
        piece->end = piece->strips;
        piece->parts = 1;
        piece->first = index;
        return true;
    }
    const int lane = threadIdx.x % 32;
    Visible see = {0, 0};
    int32_t strips = 0;
    if (lane < p.batch) {
        see = visible(p, lane);
        strips = tiles_of(see.columns, kStrip);
    }
    int64_t total = strips;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int64_t below = __shfl_up_sync(0xffffffffu, total, step);
        if (lane >= step) total += below;
    }
    total = __shfl_sync(0xffffffffu, total, 31) * p.items;
    int32_t longest = max(static_cast<int32_t>(quotient(total - 1, clusters)) + 1, p.least_strips);
    int32_t parts, upto;
    while (true) {
        parts = strips > 0 ? (strips - 1) / longest + 1 : 0;
        upto = parts * p.items;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int32_t below = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += below;
        }
        if (__shfl_sync(0xffffffffu, upto, 31) <= clusters) break;
        // The next length at which some sequence has a part less.
        int32_t next = parts > 1 ? (strips - 1) / (parts - 1) + 1 : INT_MAX;
#pragma unroll
        for (int step = 16; step > 0; step >>= 1)
            next = min(next, __shfl_xor_sync(0xffffffffu, next, step));
        longest = next;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, index < upto);
    if (reached == 0) return false;
    const int row = __ffs(reached) - 1;
    const int32_t before = __shfl_sync(0xffffffffu, upto - parts * p.items, row);
    piece->b = row;
    piece->parts = __shfl_sync(0xffffffffu, parts, row);
    piece->strips = __shfl_sync(0xffffffffu, strips, row);
    piece->see.first = __shfl_sync(0xffffffffu, see.first, row);
    piece->see.columns = __shfl_sync(0xffffffffu, see.columns, row);
    piece->item = (index - before) / piece->parts;
    const int32_t part = (index - before) - piece->item * piece->parts;
    piece->first = index - part;
    const int32_t each = piece->strips / piece->parts, more = piece->strips - each * piece->parts;
    piece->begin = part * each + min(part, more);
    piece->end = piece->begin + each + (part < more);
    return true;
}

}  // namespace decode
}  // namespace offload
