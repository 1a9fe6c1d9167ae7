// Which columns a cluster has: found by every warp from the lengths in device memory, so that a
// captured launch follows them.
#pragma once
#include "decode_attention_params.cuh"

namespace offload {
namespace decode {

constexpr int kStrip = 16;            // columns
constexpr int kMostCluster = 16;      // CTAs
constexpr int kMostClusterRows = 64;  // sequences whose items may have several clusters
constexpr int kHalvings = 5;          // of the lengths among which a piece's is looked for

// What a cluster does: strips [begin, end) of an item, as one of `parts` clusters, the first of
// which is `first`.
struct Piece : Place {
    Visible see;
    int32_t strips;  // of the item
    int32_t begin, end;
    int32_t parts, first;
};

// Finds the piece of cluster `index` of `clusters`, where a lane has up to kRows sequences; false
// where there are fewer pieces. Pieces are about as short as makes them no more than there are
// clusters. Those of cut items come first, then the longer of the others: what ends last shall be
// short, and have nothing to merge.
template <int kRows>
__device__ __forceinline__ bool find_part(const Params& p, int32_t index, int32_t clusters,
                                          Piece* piece) {
    const int lane = threadIdx.x % 32;
    Visible see[kRows];
    int32_t strips[kRows], most = 0;
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
        most = max(most, strips[r]);
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(0xffffffffu, total, step);
    total *= p.items;

    int32_t parts[kRows];
    const auto fits = [&](int32_t length) {
        int32_t sum = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            parts[r] = strips[r] > 0 ? (strips[r] - 1) / length + 1 : 0;
            sum += parts[r];
        }
        return __reduce_add_sync(0xffffffffu, sum) * p.items <= clusters;
    };
    // The shortest that could do: no item leaves a remainder. Else up to one that does although all
    // leave one, or none is cut.
    int32_t longest = max(static_cast<int32_t>(quotient(total - 1, clusters)) + 1, p.least_strips);
    if (!fits(longest)) {
        int32_t little = longest;
        const int64_t enough = quotient(total - 1, clusters - p.batch * p.items) + 1;
        longest = __reduce_max_sync(0xffffffffu, most);
        if (enough < longest) longest = static_cast<int32_t>(enough);
#pragma unroll 1
        for (int i = 0; i < kHalvings; ++i) {
            const int32_t middle = little + (longest - little) / 2;
            (fits(middle) ? longest : little) = middle;
        }
        fits(longest);
    }

    // Of each of four kinds, how many pieces there are, in 16 bits.
    int32_t kind[kRows];
    uint64_t upto[kRows], before = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int shorter = (strips[r] <= longest / 2) + (strips[r] <= longest / 4);
        kind[r] = parts[r] > 1 ? 0 : 16 * (1 + shorter);
        upto[r] = static_cast<uint64_t>(parts[r] * p.items) << kind[r];
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const uint64_t below = __shfl_up_sync(0xffffffffu, upto[r], step);
            if (lane >= step) upto[r] += below;
        }
        upto[r] += before;
        before = __shfl_sync(0xffffffffu, upto[r], 31);
    }
    // Before the first piece of each kind are those of all kinds before it.
    before = (before << 16) + (before << 32) + (before << 48);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int32_t end = static_cast<int32_t>((upto[r] + before) >> kind[r] & 0xffff);
        const int32_t begin = end - parts[r] * p.items;
        const uint32_t here = __ballot_sync(0xffffffffu, begin <= index && index < end);
        if (here == 0) continue;
        const int row = __ffs(here) - 1;
        piece->b = r * 32 + row;
        piece->parts = __shfl_sync(0xffffffffu, parts[r], row);
        piece->strips = __shfl_sync(0xffffffffu, strips[r], row);
        piece->see.first = __shfl_sync(0xffffffffu, see[r].first, row);
        piece->see.columns = __shfl_sync(0xffffffffu, see[r].columns, row);
        const int32_t in_row = index - __shfl_sync(0xffffffffu, begin, row);
        piece->item = in_row / piece->parts;
        const int32_t part = in_row - piece->item * piece->parts;
        piece->first = index - part;
        const int32_t each = piece->strips / piece->parts;
        const int32_t more = piece->strips - each * piece->parts;
        piece->begin = part * each + min(part, more);
        piece->end = piece->begin + each + (part < more);
        return true;
    }
    return false;
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
