// Keys against eight queries at once: their elements are converted once for all of them, and no sum
// leaves its register before it is whole. Values as ever.
#pragma once
#include "floats.hpp"

namespace {

constexpr int kEight = 8;

// Packs up to eight queries from g on, zeros for those that are not there: of kLanes elements a
// vector of each. Returns the packed ones' end.
inline float* pack_eight(const Work& w, int g, float* to) {
    for (int d = 0; d < w.padded_dim; d += kLanes)
        for (int i = g; i < g + kEight; i++, to += kLanes)
            store(to, i < w.group ? Simd::load(w.queries + int64_t(i) * w.padded_dim + d) : V{});
    return to;
}

// Adds the products of 2 * kLanes elements of two rows with those of eight queries, these packed.
template <class Cache>
__attribute__((always_inline)) inline void add_eight(const typename Cache::T* a,
                                                     const typename Cache::T* b,
                                                     const float* queries, V (&sums)[2 * kEight]) {
    V x[2], y[2];
    load_block<Cache>(a, x);
    load_block<Cache>(b, y);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        Simd::hold(x[i]);
        Simd::hold(y[i]);
#pragma GCC unroll 8
        for (int g = 0; g < kEight; g++) {
            const V query = Simd::load(queries + (i * kEight + g) * kLanes);
            sums[g] += x[i] * query;
            sums[kEight + g] += y[i] * query;
        }
    }
}

// Scores of kRows rows and eight queries, these packed: of all eight a vector each in turn.
template <class Cache>
OFFLOAD_APART void score_eight(const Work& w, const typename Cache::T* rows, const float* queries,
                               float* scores, Ahead& ahead) {
    const int64_t time = w.share(w.key_time, kEight, 2 * 2 * kLanes);
    V pairs[kEight];
    for (int p = 0; p < kEight; p++) {  // two rows: sixteen sums
        const auto* const a = rows + int64_t(2 * p) * w.dim;
        const auto* const b = a + w.dim;
        const float* query = queries;
        V sums[2 * kEight] = {};
        int d = 0;
        for (; d + 2 * kLanes <= w.dim; d += 2 * kLanes, query += 2 * kEight * kLanes) {
            ahead.pass(time);
            add_eight<Cache>(a + d, b + d, query, sums);
        }
        for (; d < w.dim; d += kLanes, query += kEight * kLanes) {
            const bool whole = d + kLanes <= w.dim;
            const V x = whole ? Cache::load(a + d) : load_some<Cache>(a + d, w.dim - d);
            const V y = whole ? Cache::load(b + d) : load_some<Cache>(b + d, w.dim - d);
#pragma GCC unroll 8
            for (int g = 0; g < kEight; g++) {
                const V q = Simd::load(query + g * kLanes);
                sums[g] += x * q;
                sums[kEight + g] += y * q;
            }
        }
        pairs[p] = Simd::sums_of(sums);
    }
    Simd::transpose_pairs(pairs);
#pragma GCC unroll 8
    for (int g = 0; g < kEight; g++) store(scores + g * w.padded_columns, pairs[g]);
}

template <class Cache>
struct Eights : Floats<Cache> {
    typedef typename Cache::T T;
    typedef Floats<Cache> Base;

    static int packed(const Work& w) { return w.group / kEight * kEight; }  // so many queries are

    static void prepare(const Work& w) {
        Base::prepare(w);
        float* to = reinterpret_cast<float*>(w.codes);
        for (int g = 0; g < packed(w); g += kEight) to = pack_eight(w, g, to);
    }
    static void read_keys(const Work& w, const T* keys, int columns, Ahead& ahead) {
        const float* const queries = reinterpret_cast<float*>(w.codes);
        int t = 0;
        for (; t + kRows <= columns; t += kRows) {
            const T* const rows = keys + int64_t(t) * w.dim;
            for (int g = 0; g < packed(w); g += kEight)
                score_eight<Cache>(w, rows, queries + int64_t(g) * w.padded_dim,
                                   w.scores + g * w.padded_columns + t, ahead);
            score_rows<Base, kQueries>(w, rows, kRows, packed(w), w.scores + t, ahead);
        }
        if (t < columns)
            score_rows<Base, kQueries>(w, keys + int64_t(t) * w.dim, columns - t, 0, w.scores + t,
                                       ahead);
    }
};

}  // namespace
