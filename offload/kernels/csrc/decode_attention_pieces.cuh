// Which columns a cluster has: found by every warp from the lengths in device memory, so that a
// captured launch follows them.
#pragma once
#include "decode_attention.cuh"

namespace offload {
namespace decode {

constexpr int kStrip = 16;            // columns
constexpr int kMostCluster = 16;      // CTAs
constexpr int kMostClusterRows = 64;  // sequences whose items may have several clusters

// What a cluster does: strips [begin, end) of an item, as one of `parts` clusters, the first of
// which is `first`.
struct Piece : Place {
    Visible see;
    int32_t strips;  // of the item
    int32_t begin, end;
    int32_t parts, first;
};

// Finds the piece of cluster `index` of `clusters`, where a lane has up to kRows sequences; false
// where there are fewer pieces. Pieces are as short as makes them no more than there are clusters.
template <int kRows>
__device__ __forceinline__ bool find_part(const Params& p, int32_t index, int32_t clusters,
                                          Piece* piece) {
    const int lane = threadIdx.x % 32;
    Visible see[kRows];
    int32_t strips[kRows];
    int64_t total = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        see[r] = {0, 0};
        strips[r] = 0;
        if (r * 32 + lane < p.batch) {
            see[r] = visible(p, r * 32 + lane);
            strips[r] = tiles_of(see[r].columns, kStrip);
        }
        total += strips[r];
    }
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int64_t below = __shfl_up_sync(0xffffffffu, total, step);
        if (lane >= step) total += below;
    }
    total = __shfl_sync(0xffffffffu, total, 31) * p.items;
    int32_t longest = max(static_cast<int32_t>(quotient(total - 1, clusters)) + 1, p.least_strips);
    int32_t parts[kRows], upto[kRows];
    while (true) {
        int32_t before = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            parts[r] = strips[r] > 0 ? (strips[r] - 1) / longest + 1 : 0;
            upto[r] = parts[r] * p.items;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int32_t below = __shfl_up_sync(0xffffffffu, upto[r], step);
                if (lane >= step) upto[r] += below;
            }
            upto[r] += before;
            before = __shfl_sync(0xffffffffu, upto[r], 31);
        }
        if (before <= clusters) break;
        // The next length at which some sequence has a part less.
        int32_t next = INT_MAX;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (parts[r] > 1) next = min(next, (strips[r] - 1) / (parts[r] - 1) + 1);
#pragma unroll
        for (int step = 16; step > 0; step >>= 1)
            next = min(next, __shfl_xor_sync(0xffffffffu, next, step));
        longest = next;
    }
    bool found = false;
    int32_t before = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const uint32_t reached = __ballot_sync(0xffffffffu, index < upto[r]);
        if (found || reached == 0) continue;
        found = true;
        const int row = __ffs(reached) - 1;
        piece->b = r * 32 + row;
        piece->parts = __shfl_sync(0xffffffffu, parts[r], row);
        piece->strips = __shfl_sync(0xffffffffu, strips[r], row);
        piece->see.first = __shfl_sync(0xffffffffu, see[r].first, row);
        piece->see.columns = __shfl_sync(0xffffffffu, see[r].columns, row);
        before = __shfl_sync(0xffffffffu, upto[r] - parts[r] * p.items, row);
    }
    if (!found) return false;
    piece->item = (index - before) / piece->parts;
    const int32_t part = (index - before) - piece->item * piece->parts;
    piece->first = index - part;
    const int32_t each = piece->strips / piece->parts, more = piece->strips - each * piece->parts;
    piece->begin = part * each + min(part, more);
    piece->end = piece->begin + each + (part < more);
    return true;
}

// The same for any number of sequences, of at most kMostClusterRows if there are more clusters than
// items. Every warp does it by itself.
__device__ __forceinline__ bool find_piece(const Params& p, int32_t index, int32_t clusters,
                                           Piece* piece) {
    if (clusters != p.batch * p.items)
        return p.batch <= 32 ? find_part<1>(p, index, clusters, piece)
                             : find_part<kMostClusterRows / 32>(p, index, clusters, piece);
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

}  // namespace decode
}  // namespace offload
