// Up to eight queries of sixteen bits over caches of sixteen, in blocks of 64 columns: keys of a
// block, values of the block before it, and so on. Keys are multiplied as `Keys` does, values are
// added up by vectors.
//
// Scores lie as tiles leave them, eight queries' of a column side by side, and so do weights, which
// vectors take whole. They are relative to a score that was the largest when it was chosen: where a
// block has one that is worth 256 times as much it takes that place, and what was summed up is
// scaled. Lines are asked for a block ahead, across items, as evenly in time as products are:
// memory that is asked for more than it can answer keeps a core waiting, less and it waits itself.
#pragma once
#include "attend.hpp"
#include "block_rows.hpp"

namespace {

constexpr float kSlack = 8;  // that exponents of two may be above zero

// An item, and what is known of it so far.
struct Side {
    Item item;
    int columns, blocks;
    V zero;   // of a query: the exponent of two that weights are relative to
    V total;  // of a query's weights; those of odd columns are in the upper half

    int columns_of(int block) const {
        const int left = columns - block * kBlockColumns;
        return left < kBlockColumns ? left : kBlockColumns;
    }
};

// Takes the next item, and makes it ready to be read.
inline bool open(Job& job, Side& side) {
    if (!take(job, &side.item)) return false;
    append(job, side.item);
    side.columns = side.item.end - side.item.begin;
    side.blocks = side.columns == 0 ? 1 : (side.columns + kBlockColumns - 1) / kBlockColumns;
    side.zero = all(-INFINITY);
    side.total = V{};
    return true;
}

inline V larger_of(V a, V b) { return a > b ? a : b; }

// Where a block has scores far above those before it.
__attribute__((noinline, cold)) void rescale(const Work& w, Side& side, bool first, V top) {
    const V zero = top > side.zero + kSlack ? top : side.zero;
    const V factor = zero == side.zero ? all(1) : Simd::exp2_of(side.zero - zero);
    side.zero = zero;
    side.total *= factor;
    if (first) return;  // the sums are still another item's
    for (int d = 0; d < w.dim; d += kPair) {
        Sums sums;
        load_sums(w, d, sums);
        for (int g = 0; g < kBlock; g++)
            for (V& sum : sums[g]) sum *= factor[g];
        store_sums(w, d, sums);
    }
}

// Products of a block's keys become weights of its values; lines of keys are asked for meanwhile.
template <class Keys, int Prefetch>
OFFLOAD_APART void weigh_block(const Work& w, Side& side, int block, float to_exponent,
                               float* weights, const char* ahead) {
    const int count = side.columns_of(block), padded = (count + 7) / 8 * 8;
    V tops[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) tops[i] = all(-INFINITY);
    for (int t = 0; t < padded; t += 8)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int c = t + 2 * i;
            V score = Keys::products(w, c) * to_exponent;
            if (c + 1 >= count) score = c < count ? Simd::lower(score, -INFINITY) : all(-INFINITY);
            store(weights + c * kBlock, score);
            tops[i] = larger_of(score, tops[i]);
        }
    V top = larger_of(larger_of(tops[0], tops[1]), larger_of(tops[2], tops[3]));
    top = larger_of(top, Simd::other_half(top));
    if (Simd::any(top > side.zero + kSlack)) rescale(w, side, block == 0, top);
    const V zero = side.zero == all(-INFINITY) ? V{} : side.zero;
    V totals[4] = {};
    const int pairs = w.dim / kPair;
    ahead += pairs * Keys::kWithKeys * kLine;
    const int lines = pairs * Keys::kWithWeights;
    for (int t = 0; t < padded; t += 8) {
        ask_for_lines<Prefetch>(ahead, lines * t / kBlockColumns, lines * (t + 8) / kBlockColumns);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float* const at = weights + (t + 2 * i) * kBlock;
            const V weight = Simd::exp2_of(Simd::load(at) - zero);
            totals[i] += weight;
            store(at, weight);
        }
    }
    ask_for_lines<Prefetch>(ahead, lines * padded / kBlockColumns, lines);
    side.total += (totals[0] + totals[1]) + (totals[2] + totals[3]);
}

// The item's part, as merge() wants it.
template <class Cache>
void put_part(const Work& w, const Side& side) {
    for (int d = 0; d < w.dim; d += kPair) {
        Sums sums;
        load_sums(w, d, sums);
        for (int g = 0; g < w.group; g++) {
            if (Cache::mixed) Simd::merge(sums[g]);
            float* const to = w.sums + int64_t(g) * w.padded_dim + d;
            store(to, sums[g][0]);
            store(to + kLanes, sums[g][1]);
        }
    }
    const V total = side.total + Simd::other_half(side.total);
    for (int g = 0; g < w.group; g++) {
        w.tops()[g] = side.zero[g] * 0.693147181f;
        w.totals()[g] = total[g];
    }
}

// Lines of a block of `side`, or behind its end of `next`.
inline Lines lines_of(const Work& w, const Side* side, const Side* next, int block) {
    if (block >= side->blocks && next != nullptr) {
        block -= side->blocks;
        side = next;
    }
    // A block that ends where the columns do: what lies behind is not wanted.
    const int last = side->columns > kBlockColumns ? side->columns - kBlockColumns : 0;
    const int column = block * kBlockColumns < last ? block * kBlockColumns : last;
    const int64_t at = int64_t(column) * w.dim * 2;
    return {side->item.keys + at, side->item.values + at};
}

// Whether blocks are for such a call: nothing but a scale stands between products and scores.
template <class Keys>
bool in_blocks(const Job& job) {
    const OffloadHostAttention& c = job.call;
    return !c.read_only && job.group <= kBlock && Keys::serves(job.group, c.head_dim) &&
           c.query_dtype != OFFLOAD_HOST_F32 && c.softcap == 0 && c.slopes == nullptr &&
           c.scale > 0;
}

template <class Keys, int Prefetch>
void attend_blocks(Job& job, int worker) {
    const OffloadHostAttention& c = job.call;
    Work w;
    w.lay_out(job.group, c.head_dim, job.chunk, job.scratch + worker * job.scratch_floats);
    float* const own_sums = w.sums;
    const int64_t floats = part_floats(job);
    const float to_exponent = c.scale * 1.44269504f;
    const int64_t bytes = int64_t(2 * kBlockColumns) * w.dim * 2;  // of a block, keys and values
    const int distance = int((c.prefetch_distance + bytes - 1) / bytes);
    const auto rows_of = [&](const char* from, const Side& side, int block) {
        const int64_t at = int64_t(block) * kBlockColumns * w.dim;
        return Rows{reinterpret_cast<const uint16_t*>(from) + at, side.columns_of(block)};
    };

    Side sides[2];
    Side* now = &sides[0];
    Side* next = nullptr;
    if (!open(job, *now)) return;
    bool more = true;
    Keys::begin();
    for (int i = 0; i < distance; i++) {
        const Lines lines = lines_of(w, now, nullptr, i);
        ask_for_lines<Prefetch>(lines.keys, 0, w.dim / kPair * kLinesOfPair);
        ask_for_lines<Prefetch>(lines.values, 0, w.dim / kPair * kLinesOfPair);
    }
    int turn = 0;
    for (int block = -1;;) {  // whose values are to be read
        const bool last = block + 1 == now->blocks;
        if (next == nullptr && more && block + distance + 2 >= now->blocks) {
            Side* const other = now == sides ? sides + 1 : sides;
            more = open(job, *other);
            if (more) next = other;
        }
        Side* const side = last ? next : now;  // whose keys are
        const int ahead = last ? 0 : block + 1;
        Rows keys = {}, values = {};
        if (side != nullptr) {
            if (ahead == 0) Keys::prepare(job, side->item, w);
            keys = rows_of(side->item.keys, *side, ahead);
        }
        if (block >= 0) values = rows_of(now->item.values, *now, block);
        if (block <= 0) __builtin_memset(w.block_sums, 0, size_t(kBlock * w.dim) * sizeof(float));
        const Lines lines = {lines_of(w, now, next, block + 1 + distance).keys,
                             lines_of(w, now, next, block + distance).values};
        Keys::template score<Prefetch>(w, keys, lines.keys);
        add_values<typename Keys::Cache, Prefetch,
                   kLinesOfPair - Keys::kWithKeys - Keys::kWithWeights>(
            w, values, w.block_weights[turn], lines);
        turn ^= 1;
        if (side != nullptr)
            weigh_block<Keys, Prefetch>(w, *side, ahead, to_exponent, w.block_weights[turn],
                                        lines.keys);
        block++;
        if (!last) continue;
        const Item& item = now->item;
        float* const parts = job.partials + (item.index - item.part) * floats;
        w.sums = item.parts == 1 ? own_sums : parts + item.part * floats;
        put_part<typename Keys::Cache>(w, *now);
        if (last_part(job, item)) {
            const float* const from = item.parts == 1 ? own_sums : parts;
            w.sums = own_sums;
            merge(job, item, w, from);
        }
        if (next == nullptr) break;
        now = next;
        next = nullptr;
        block = 0;
    }
    Keys::end();
}

template <class Keys>
void attend_blocks(Job& job, int worker) {
    switch (job.call.prefetch) {
        case OFFLOAD_HOST_PREFETCH_NONE:
            return attend_blocks<Keys, OFFLOAD_HOST_PREFETCH_NONE>(job, worker);
        case OFFLOAD_HOST_PREFETCH_L1:
            return attend_blocks<Keys, OFFLOAD_HOST_PREFETCH_L1>(job, worker);
        case OFFLOAD_HOST_PREFETCH_L2:
            return attend_blocks<Keys, OFFLOAD_HOST_PREFETCH_L2>(job, worker);
        default:
            return attend_blocks<Keys, OFFLOAD_HOST_PREFETCH_NTA>(job, worker);
    }
}

}  // namespace
