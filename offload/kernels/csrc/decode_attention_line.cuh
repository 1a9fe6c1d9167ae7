// How decode attention's work is shared out among CTAs.
//
// Work is counted in tiles: up to so many visible cache columns of one item. All tiles of the batch
// stand in one line, sequence after sequence, item after item, and every CTA takes an equal piece
// of that line (stream-K): whatever the lengths, all CTAs read as much. Where all sequences have as
// many tiles, pieces end where items do if that costs little. Each CTA finds its piece itself from
// the lengths in device memory, so a captured launch follows them.
#pragma once
#include "decode_attention_params.cuh"

namespace offload {
namespace decode {

constexpr int kAloneRows = 64;  // sequences that each warp counts for itself
constexpr int kMostWarps = 12;  // of a CTA

// Into how many pieces the line is cut, and at which multiples of tiles. Piece i begins at unit
// floor(i * units / ctas).
struct Split {
    int32_t ctas;
    int64_t unit, units;
};

// `total` tiles are those of `items` items, of `each` tiles all of them (0: they differ).
__device__ __forceinline__ Split split(int64_t total, int64_t items, int32_t each) {
    const int32_t most = gridDim.x;
    if (total <= most) return {static_cast<int32_t>(total), 1, total};
    // With few tiles a CTA, what is left idle costs less than items that are cut; HBM is busy.
    const bool few = total < static_cast<int64_t>(most) * 32;
    const auto enough = [&](int64_t ctas) {
        return ctas * 10 >= static_cast<int64_t>(most) * (few ? 7 : 9);
    };
    if (each > 0 && items >= most) {
        const int64_t a_cta = quotient(items - 1, most) + 1;
        const int64_t ctas = quotient(items - 1, a_cta) + 1;
        if (enough(ctas)) return {static_cast<int32_t>(ctas), each, items};
    } else if (each > 0) {
        const int32_t parts = most / static_cast<int32_t>(items);
        if (enough(parts * items)) {
            const int32_t longest = (each - 1) / parts + 1;  // fewer parts do that as well
            return {static_cast<int32_t>(((each - 1) / longest + 1) * items), 1, total};
        }
    }
    const int64_t longest = quotient(total - 1, most) + 1;
    return {static_cast<int32_t>(quotient(total - 1, longest) + 1), 1, total};
}

// Where a CTA's piece of the line lies.
struct Share {
    int64_t begin, count;
    int64_t total;  // tiles of the line
    int32_t ctas;
    int32_t b, item, tile;  // what `begin` is

    // Which CTA has tile `at` of the line; only where items are cut.
    __device__ int32_t owner(int64_t at) const {
        return static_cast<int32_t>(quotient((at + 1) * ctas - 1, total));
    }
};

// Finds the share of this CTA; false where there is less work than CTAs. Not inlined, as
// combine_cuts: compiled once, not once a kernel.
static __device__ __noinline__ bool find_share(const Params& p, int32_t width, Share* share) {
    __shared__ int64_t warp_totals[kMostWarps];
    __shared__ int32_t warp_most[kMostWarps];
    __shared__ int32_t place[3];
    const bool alone = p.batch <= kAloneRows;  // no warp waits for another
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int scanners = alone ? 32 : blockDim.x, scanner = alone ? lane : threadIdx.x;
    const int strip = (p.batch - 1) / scanners + 1;
    const int from = min(scanner * strip, p.batch);
    const int to = min(from + strip, p.batch);
    int64_t own = 0;
    int32_t most = 0;
#pragma unroll 1
    for (int b = from; b < to; ++b) {
        const int32_t tiles = tiles_of(visible(p, b).columns, width);
        own += tiles;
        most = max(most, tiles);
    }
    int64_t upto = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int64_t below = __shfl_up_sync(0xffffffffu, upto, step);
        const int32_t highest = __shfl_up_sync(0xffffffffu, most, step);
        if (lane >= step) {
            upto += below;
            most = max(most, highest);
        }
    }
    int64_t sum = __shfl_sync(0xffffffffu, upto, 31);
    most = __shfl_sync(0xffffffffu, most, 31);
    if (!alone) {
        if (lane == 31) {
            warp_totals[warp] = sum;
            warp_most[warp] = most;
        }
        __syncthreads();
        sum = 0;
        for (int w = 0; w < blockDim.x / 32; ++w) {
            if (w == warp) upto += sum;
            sum += warp_totals[w];
            most = max(most, warp_most[w]);
        }
    }
    const bool even = sum == static_cast<int64_t>(most) * p.batch;
    const int64_t total = sum * p.items;
    const Split cut = split(total, static_cast<int64_t>(p.batch) * p.items, even ? most : 0);
    const int32_t cta = blockIdx.x;
    if (cta >= cut.ctas) return false;
    share->total = total;
    share->ctas = cut.ctas;
    share->begin = quotient(cta * cut.units, cut.ctas) * cut.unit;
    share->count = quotient((cta + 1) * cut.units, cut.ctas) * cut.unit - share->begin;
    int64_t rest = share->begin - (upto - own) * p.items;
    const bool here = rest >= 0 && rest < own * p.items;  // true in exactly one scanner
    int32_t b = from, item = 0;
    if (here) {
        int32_t tiles;
#pragma unroll 1
        for (;; ++b) {
            tiles = tiles_of(visible(p, b).columns, width);
            if (rest < static_cast<int64_t>(tiles) * p.items) break;
            rest -= static_cast<int64_t>(tiles) * p.items;
        }
        item = static_cast<int32_t>(quotient(rest, tiles));
        rest -= static_cast<int64_t>(item) * tiles;
    }
    int32_t tile = static_cast<int32_t>(rest);
    if (alone) {
        const int source = __ffs(__ballot_sync(0xffffffffu, here)) - 1;
        share->b = __shfl_sync(0xffffffffu, b, source);
        share->item = __shfl_sync(0xffffffffu, item, source);
        share->tile = __shfl_sync(0xffffffffu, tile, source);
        return true;
    }
    if (here) {
        place[0] = b;
        place[1] = item;
        place[2] = tile;
    }
    __syncthreads();
    share->b = place[0];
    share->item = place[1];
    share->tile = place[2];
    return true;
}

// One tile of a CTA's piece; `segment` counts the items that it touched before this one.
struct Cursor : Place {
    int64_t left;  // tiles from here to the end of the piece
    int32_t tile, tiles;
    int32_t segment;
    Visible see;
    bool fresh;  // the piece's first tile of this item

    __device__ Cursor(const Params& p, const Share& share, int32_t width)
        : Place{share.b, share.item},
          left(share.count),
          tile(share.tile),
          segment(0),
          see(visible(p, share.b)),
          fresh(true) {
        tiles = tiles_of(see.columns, width);
    }

    __device__ void advance(const Params& p, int32_t width) {
        --left;
        fresh = ++tile == tiles;
        if (!fresh) return;
        tile = 0;
        ++segment;
        if (++item < p.items || left == 0) return;
        item = 0;
        see = visible(p, ++b);
        tiles = tiles_of(see.columns, width);
    }
};

}  // namespace decode
}  // namespace offload
