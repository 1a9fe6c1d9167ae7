// Rows of a cache against the queries of a group: scores of keys, sums of weighted values, and what
// is asked for ahead of both. Over the vectors of `Simd`, one of the simd_*.hpp.
#pragma once
#include "job.hpp"
#include "vector_math.hpp"

// A function of its own, whose loop has all registers to itself.
#define OFFLOAD_APART __attribute__((noinline))

namespace {

constexpr int kRowsAtOnce = 4;
constexpr int kTile = 16;  // rows of values that stay in L1 while all queries have their turn

struct F32 {
    static constexpr bool pairs = false;
    typedef float T;
    static V load(const T* p) { return Simd::load(p); }
};
struct F16 {
    static constexpr bool pairs = false;
    typedef uint16_t T;
    static V load(const T* p) { return Simd::load_f16(p); }
};
struct BF16 {
    static constexpr bool pairs = false;
    typedef uint16_t T;
    static V load(const T* p) { return Simd::load_bf16(p); }
};
struct BF16Pairs : BF16 {  // with queries of bf16
    static constexpr bool pairs = true;
};
struct I8 {
    static constexpr bool pairs = false;
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

// What lies `distance` bytes ahead in the order of reading: within a block, then from the next on.
class Ahead {
  public:
    Ahead(const OffloadHostAttention& call)
        : kind_(call.prefetch < 0 ? OFFLOAD_HOST_PREFETCH_L1 : call.prefetch),
          distance_(call.prefetch_distance > 0 ? call.prefetch_distance : 2048) {}

    int64_t distance() const { return kind_ == OFFLOAD_HOST_PREFETCH_NONE ? 0 : distance_; }

    void enter(const char* end, const char* next) {
        end_ = end;
        next_ = next;
    }

    // For `bytes` that are read now at `here`.
    inline void touch(const char* here, int64_t bytes) const {
        if (kind_ == OFFLOAD_HOST_PREFETCH_NONE) return;
        const char* p = here + distance_;
        if (p >= end_) {
            if (next_ == nullptr) return;
            p = next_ + (p - end_);
        }
        if (kind_ == OFFLOAD_HOST_PREFETCH_L1)
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
        else if (kind_ == OFFLOAD_HOST_PREFETCH_L2)
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
        else
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 0);
    }

  private:
    const int kind_;
    const int64_t distance_;
    const char* end_ = nullptr;
    const char* next_ = nullptr;
};

// A thread's scratch memory and the sizes of the call.
struct Work {
    int group, dim, padded_dim;
    int64_t padded_columns;
    float* queries;   // [group, padded_dim]
    uint16_t* pairs;  // [group, dim]: the same as bf16, where products of pairs are used
    float* sums;      // [group, padded_dim], tops [group], totals [group]: a part
    float* scores;    // [group, padded_columns]

    float* tops() const { return sums + int64_t(group) * padded_dim; }
    float* totals() const { return tops() + group; }
};

// Without a loop, so that the sums are registers from the start.
template <int R, int Q>
inline void clear(V (&sums)[R][Q]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) sums[r][g] = V{};
}

template <int R, int Q>
inline void store_scores(const Work& w, const V (&sums)[R][Q], float* scores) {
#pragma GCC unroll 8
    for (int g = 0; g < Q; g++) {
        float* const out = scores + g * w.padded_columns;
        if constexpr (R == 4)
            Simd::store_sums(sums[0][g], sums[1][g], sums[2][g], sums[3][g], out);
        else
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) out[r] = Simd::sum(sums[r][g]);
    }
}

// scores[g][r] = q_g . row r for R rows and Q queries.
template <class Cache, int R, int Q>
OFFLOAD_APART void dots(const Work& w, const typename Cache::T* rows, const float* queries,
                        float* scores) {
    V sums[R][Q];
    clear(sums);
    int d = 0;
    for (; d + kLanes <= w.dim; d += kLanes) {
        V row[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            row[r] = Cache::load(rows + int64_t(r) * w.dim + d);
            // It is used Q times: to read it from memory each time would take more than the
            // products.
            if constexpr (Q > 1) Simd::hold(row[r]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) {
            const V query = Simd::load(queries + int64_t(g) * w.padded_dim + d);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][g] += row[r] * query;
        }
    }
    if (d < w.dim)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const V row = load_some<Cache>(rows + int64_t(r) * w.dim + d, w.dim - d);
#pragma GCC unroll 8
            for (int g = 0; g < Q; g++)
                sums[r][g] += row * Simd::load(queries + int64_t(g) * w.padded_dim + d);
        }
    store_scores<R, Q>(w, sums, scores);
}

#if defined(OFFLOAD_HOST_PAIRS)
// The same with queries that are bf16 themselves, by products of pairs.
template <int R, int Q>
OFFLOAD_APART void dots_of_pairs(const Work& w, const uint16_t* rows, const uint16_t* queries,
                                 float* scores) {
    V sums[R][Q];
    clear(sums);
    for (int d = 0; d < w.dim; d += 2 * kLanes) {
        const int some = w.dim - d < 2 * kLanes ? w.dim - d : 2 * kLanes;
        Simd::P row[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) row[r] = Simd::load_pairs(rows + int64_t(r) * w.dim + d, some);
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) {
            const Simd::P query = Simd::load_pairs(queries + int64_t(g) * w.dim + d, some);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][g] = Simd::add_pairs(sums[r][g], row[r], query);
        }
    }
    store_scores<R, Q>(w, sums, scores);
}

#endif

// Rows against the Q queries from g on.
template <class Cache, int R, int Q>
inline void dots_from(const Work& w, const typename Cache::T* rows, int g, float* scores) {
    float* const out = scores + g * w.padded_columns;
#if defined(OFFLOAD_HOST_PAIRS)
    if constexpr (Cache::pairs)
        return dots_of_pairs<R, Q>(w, rows, w.pairs + int64_t(g) * w.dim, out);
#endif
    dots<Cache, R, Q>(w, rows, w.queries + int64_t(g) * w.padded_dim, out);
}

template <class Cache, int R>
inline void dots_of_group(const Work& w, const typename Cache::T* rows, float* scores) {
    constexpr int kMost = Simd::sums / R < 4 ? Simd::sums / R : 4;
    int g = 0;
    for (; g + kMost <= w.group; g += kMost) dots_from<Cache, R, kMost>(w, rows, g, scores);
    for (; g + 2 <= w.group; g += 2) dots_from<Cache, R, 2>(w, rows, g, scores);
    for (; g < w.group; g++) dots_from<Cache, R, 1>(w, rows, g, scores);
}

template <class Cache>
void read_keys(const Work& w, const typename Cache::T* keys, int columns, const Ahead& ahead) {
    const int64_t row_bytes = int64_t(w.dim) * sizeof(typename Cache::T);
    int t = 0;
    for (; t + kRowsAtOnce <= columns; t += kRowsAtOnce) {
        const auto* rows = keys + int64_t(t) * w.dim;
        ahead.touch(reinterpret_cast<const char*>(rows), kRowsAtOnce * row_bytes);
        dots_of_group<Cache, kRowsAtOnce>(w, rows, w.scores + t);
    }
    for (; t < columns; t++) dots_of_group<Cache, 1>(w, keys + int64_t(t) * w.dim, w.scores + t);
}

// sums[g] += weight[g][t] * row t, over Q queries and N vectors from element d on.
template <class Cache, int Q, int N>
OFFLOAD_APART void add_rows(const Work& w, const typename Cache::T* rows, int count,
                            const float* weights, float* sums, int d, const Ahead* ahead) {
    const int64_t row_bytes = int64_t(w.dim) * sizeof(typename Cache::T);
    V sum[Q][N];
#pragma GCC unroll 8
    for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
            sum[g][i] = Simd::load(sums + int64_t(g) * w.padded_dim + d + i * kLanes);
    for (int t = 0; t < count; t++) {
        const auto* row = rows + int64_t(t) * w.dim;
        if (ahead != nullptr) ahead->touch(reinterpret_cast<const char*>(row), row_bytes);
        V value[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) value[i] = Cache::load(row + d + i * kLanes);
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
                    float* sums, int d, const Ahead* ahead) {
    for (; d + N * kLanes <= w.dim; d += N * kLanes) {
        add_rows<Cache, Q, N>(w, rows, count, weights, sums, d, ahead);
        ahead = nullptr;  // the first block has asked for whole rows
    }
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

// All queries, in blocks of a few: `count` rows, which are columns t on.
template <class Cache>
inline void add_to_group(const Work& w, const typename Cache::T* rows, int t, int count,
                         const Ahead* ahead) {
    constexpr int kSums = Simd::sums;
    int g = 0;
    const auto weights = [&] { return w.scores + g * w.padded_columns + t; };
    const auto sums = [&] { return w.sums + int64_t(g) * w.padded_dim; };
    for (; g + 4 <= w.group; g += 4, ahead = nullptr)  // the first block has asked for all
        add_all<Cache, 4, kSums / 4>(w, rows, count, weights(), sums(), 0, ahead);
    for (; g + 2 <= w.group; g += 2, ahead = nullptr)
        add_all<Cache, 2, kSums / 2>(w, rows, count, weights(), sums(), 0, ahead);
    for (; g < w.group; g++, ahead = nullptr)
        add_all<Cache, 1, 8>(w, rows, count, weights(), sums(), 0, ahead);
}

// Rows [from, to) of the item's values.
template <class Cache>
void read_values(const Work& w, const typename Cache::T* values, int from, int to,
                 const Ahead& ahead) {
    for (int t = from; t < to; t += kTile) {
        const auto* rows = values + int64_t(t) * w.dim;
        const int count = to - t < kTile ? to - t : kTile;
        add_to_group<Cache>(w, rows, t, count, &ahead);
    }
}

}  // namespace
