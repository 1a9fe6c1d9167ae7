// Rows of a cache against the queries of a group, in float32: scores of keys, sums of weighted
// values. Over the vectors of `Simd`, one of the simd_*.hpp.
#pragma once
#include "ahead.hpp"
#include "vector_math.hpp"
#include "work.hpp"

// A function of its own, whose loop has all registers to itself.
#define OFFLOAD_APART __attribute__((noinline))

namespace {

using offload_host::Work;

constexpr int kSums = Simd::sums;
constexpr int kQueries = kSums / 4;  // that have their turn together
constexpr int kRows = 16;            // of keys whose sums over lanes are made together
constexpr int kTile = 32;  // rows of values that stay in L1 while all queries have their turn

// A kind of cache: elements to vectors. `mixed`: two vectors at once are the even and the odd ones.
struct F32 {
    static constexpr bool mixed = false;
    typedef float T;
    static V load(const T* p) { return Simd::load(p); }
};
struct F16 {
    static constexpr bool mixed = false;
    typedef uint16_t T;
    static V load(const T* p) { return Simd::load_f16(p); }
};
struct BF16 {
    static constexpr bool mixed = true;
    typedef uint16_t T;
    static V load(const T* p) { return Simd::load_bf16(p); }
};
struct I8 {
    static constexpr bool mixed = false;
    typedef int8_t T;
    static V load(const T* p) { return Simd::load_i8(p); }
};

// The last `count` elements of a row, zeros behind them.
template <class Cache>
inline V load_some(const typename Cache::T* p, int count) {
    typename Cache::T whole[kLanes] = {};
    for (int i = 0; i < count; i++) whole[i] = p[i];
    return Cache::load(whole);
}

inline void store(float* p, V v) { __builtin_memcpy(p, &v, sizeof v); }

// N vectors of a row; mixed in pairs where the cache is, but for one alone.
template <class Cache, int N>
inline void load_block(const typename Cache::T* p, V (&block)[N]) {
    if constexpr (Cache::mixed && N > 1) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i += 2) Simd::load_two_bf16(p + i * kLanes, block[i], block[i + 1]);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) block[i] = Cache::load(p + i * kLanes);
    }
}

// Rows of floats into the order in which load_block has elements, and back.
inline void mix(const Work& w, float* rows, bool back) {
    float block[2 * kLanes];
    for (int g = 0; g < w.group; g++)
        for (int d = 0; d + 2 * kLanes <= w.dim; d += 2 * kLanes) {
            float* const at = rows + int64_t(g) * w.padded_dim + d;
            __builtin_memcpy(block, at, sizeof block);
            for (int i = 0; i < kLanes; i++) {
                const int even = back ? i : 2 * i, odd = back ? kLanes + i : 2 * i + 1;
                at[back ? 2 * i : i] = block[even];
                at[back ? 2 * i + 1 : kLanes + i] = block[odd];
            }
        }
}

// sums[g][r] (+)= q_g . row r over N vectors from element d on, lane by lane. Queries stay in
// registers while rows pass by.
template <class Cache, int Q, int N>
OFFLOAD_APART void dots(const Work& w, const typename Cache::T* rows, int count,
                        const float* queries, int d, V* sums, Ahead& ahead) {
    const int64_t time = w.share(w.key_time, Q, N * kLanes);
    V query[Q][N];
#pragma GCC unroll 8
    for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
            query[g][i] = Simd::load(queries + int64_t(g) * w.padded_dim + d + i * kLanes);
#pragma GCC unroll 1
    for (int r = 0; r < count; r++) {
        const auto* const row = rows + int64_t(r) * w.dim + d;
        ahead.pass(time);
        V block[N], sum[Q];
        load_block<Cache>(row, block);
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) sum[g] = d == 0 ? V{} : sums[g * kRows + r];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            // It is used Q times: to read it from memory each time would take more than the
            // products.
            if constexpr (Q > 1) Simd::hold(block[i]);
#pragma GCC unroll 8
            for (int g = 0; g < Q; g++) sum[g] += block[i] * query[g][i];
        }
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) sums[g * kRows + r] = sum[g];
    }
}

// All elements of Q queries, in blocks of N vectors, then of fewer.
template <class Cache, int Q, int N>
inline void all_dots(const Work& w, const typename Cache::T* rows, int count, const float* queries,
                     int d, V* sums, Ahead& ahead) {
    for (; d + N * kLanes <= w.dim; d += N * kLanes)
        dots<Cache, Q, N>(w, rows, count, queries, d, sums, ahead);
    if constexpr (N > 1) {
        all_dots<Cache, Q, N / 2>(w, rows, count, queries, d, sums, ahead);
    } else if (d < w.dim) {
        for (int r = 0; r < count; r++) {
            const V row = load_some<Cache>(rows + int64_t(r) * w.dim + d, w.dim - d);
            for (int g = 0; g < Q; g++) {
                const V some = row * Simd::load(queries + int64_t(g) * w.padded_dim + d);
                sums[g * kRows + r] = d == 0 ? some : sums[g * kRows + r] + some;
            }
        }
    }
}

// sums[g] += weight[g][t] * row t, over Q queries and N vectors from element d on.
template <class Cache, int Q, int N>
OFFLOAD_APART void add_rows(const Work& w, const typename Cache::T* rows, int count,
                            const float* weights, float* sums, int d, Ahead& ahead) {
    const int64_t time = w.share(w.value_time, Q, N * kLanes);
    V sum[Q][N];
#pragma GCC unroll 8
    for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
            sum[g][i] = Simd::load(sums + int64_t(g) * w.padded_dim + d + i * kLanes);
    for (int t = 0; t < count; t++) {
        const auto* const row = rows + int64_t(t) * w.dim + d;
        ahead.pass(time);
        V value[N];
        load_block<Cache>(row, value);
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) {
            const float weight = weights[g * w.padded_columns + t];
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) sum[g][i] += value[i] * weight;
        }
    }
#pragma GCC unroll 8
    for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
            store(sums + int64_t(g) * w.padded_dim + d + i * kLanes, sum[g][i]);
}

// All elements of Q queries, in blocks of N vectors, then of fewer.
template <class Cache, int Q, int N>
inline void add_all(const Work& w, const typename Cache::T* rows, int count, const float* weights,
                    float* sums, int d, Ahead& ahead) {
    for (; d + N * kLanes <= w.dim; d += N * kLanes)
        add_rows<Cache, Q, N>(w, rows, count, weights, sums, d, ahead);
    if constexpr (N > 1) {
        add_all<Cache, Q, N / 2>(w, rows, count, weights, sums, d, ahead);
    } else if (d < w.dim) {
        for (int t = 0; t < count; t++) {
            const V value = load_some<Cache>(rows + int64_t(t) * w.dim + d, w.dim - d);
            for (int g = 0; g < Q; g++) {
                float* const sum = sums + int64_t(g) * w.padded_dim + d;
                store(sum, Simd::load(sum) + value * weights[g * w.padded_columns + t]);
            }
        }
    }
}

// Scores of `count` rows, kRows at most, and all queries from g on, Q at a time, then fewer.
template <class Kind, int Q>
inline void score_rows(const Work& w, const typename Kind::T* rows, int count, int g, float* scores,
                       Ahead& ahead) {
    V* const sums = reinterpret_cast<V*>(w.tiles);
    for (; g + Q <= w.group; g += Q) {
        Kind::template dots_of<Q>(w, rows, count, g, sums, ahead);
        for (int i = 0; i < Q; i++)
            Simd::store_sums(sums + i * kRows, scores + (g + i) * w.padded_columns);
    }
    if constexpr (Q > 1) score_rows<Kind, Q / 2>(w, rows, count, g, scores, ahead);
}

// The scores of `columns` keys, and anything up to the next multiple of kRows.
template <class Kind>
inline void score_keys(const Work& w, const typename Kind::T* keys, int columns, Ahead& ahead) {
    for (int t = 0; t < columns; t += kRows) {
        const int count = columns - t < kRows ? columns - t : kRows;
        score_rows<Kind, kQueries>(w, keys + int64_t(t) * w.dim, count, 0, w.scores + t, ahead);
    }
}

// What attend.hpp wants of a kind of products.
template <class Cache>
struct Floats {
    typedef typename Cache::T T;
    static constexpr Costs costs = {4, 5, 1200};
    static constexpr bool finds_largest = false;

    static int turns(const Work& w) { return w.group; }  // that the costs are for one of

    static void begin() {}
    static void end() {}
    static void prepare(const Work& w) {
        for (int g = 0; g < w.group; g++) w.code_scales[g] = 1;
        if (Cache::mixed) mix(w, w.queries, false);
    }
    static void read_keys(const Work& w, const T* keys, int columns, Ahead& ahead) {
        score_keys<Floats>(w, keys, columns, ahead);
    }
    static void begin_values(const Work& w, int) {
        __builtin_memset(w.sums, 0, size_t(w.group) * w.padded_dim * sizeof(float));
    }
    static void read_values(const Work& w, const T* values, int columns, Ahead& ahead) {
        const int most = w.group == 1 ? columns : kTile;
        for (int t = 0; t < columns; t += most)
            values_in_turns<kQueries>(w, values + int64_t(t) * w.dim, t,
                                      columns - t < most ? columns - t : most, 0, ahead);
    }
    static void end_values(const Work& w, int) {
        if (Cache::mixed) mix(w, w.sums, true);
    }

    template <int Q>
    static void dots_of(const Work& w, const T* rows, int count, int g, V* sums, Ahead& ahead) {
        constexpr int N = Q == 1 ? 8 : kSums / Q;
        all_dots<Cache, Q, N>(w, rows, count, w.queries + int64_t(g) * w.padded_dim, 0, sums,
                              ahead);
    }

  private:
    template <int Q>
    static void values_in_turns(const Work& w, const T* rows, int t, int count, int g,
                                Ahead& ahead) {
        constexpr int N = Q == 1 ? 8 : kSums / Q;
        for (; g + Q <= w.group; g += Q)
            add_all<Cache, Q, N>(w, rows, count, w.scores + g * w.padded_columns + t,
                                 w.sums + int64_t(g) * w.padded_dim, 0, ahead);
        if constexpr (Q > 1) values_in_turns<Q / 2>(w, rows, t, count, g, ahead);
    }
};

}  // namespace
