// Caches of int8 against queries of sixteen bits, by products of bytes that add up in integers.
//
// Queries and weights become integers of 16 bits times a scale, kept as two bytes: 256 * high +
// low. For weights that is 2^-16 of the largest one, which in a sum over a thousand columns is a
// fraction of what rounding it to float16 takes. Products take one side without a sign: the cache's
// bytes are used as value + 128, and what that adds is known, 128 times the other side's sum.
#pragma once
#include "floats.hpp"

namespace {

constexpr int kWide = 4 * kLanes;         // bytes of a vector
constexpr float kMostCode = 127 * 256;    // high and low are bytes with a sign
constexpr int32_t kMostSummed = 1 << 15;  // columns: sums of 255 * 128 each fit 31 bits

// `count` floats, of which `largest` is the largest magnitude, as codes with zeros behind them, to
// a multiple of kWide; low ones lie `apart` bytes behind high ones. Returns what a code of 1 stands
// for: NaN if `largest` is no number, or infinite.
inline float encode(const float* from, int count, float largest, int8_t* to, int64_t apart) {
    V lane;
    for (int i = 0; i < kLanes; i++) lane[i] = float(i);
    const float factor = largest > 0 ? kMostCode / largest : 0;
    for (int d = 0; d < count; d += kWide) {
        V some[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int left = count - d - i * kLanes;
            some[i] = left > 0 ? Simd::load(from + d + i * kLanes) * factor : V{};
            if (left < kLanes) some[i] = lane < float(left) ? some[i] : V{};
        }
        Simd::store_codes(some, to + d, to + apart + d);
    }
    return largest == 0 ? 1 : largest / kMostCode + (largest - largest);
}

// The same of floats that have zeros behind them, to a multiple of kLanes.
inline float encode(const float* from, int count, int8_t* to, int64_t apart) {
    I largest = {};
    for (int d = 0; d < count; d += kLanes) largest = larger(largest, Simd::load(from + d));
    return encode(from, count, largest_of(largest), to, apart);
}

// kWide sums, or the `count` that there are, from the order in which Simd::interleave has columns.
inline void put_wide(const int32_t* high, const int32_t* low, int32_t high_excess,
                     int32_t low_excess, float scale, float* sums, int count) {
    V some[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        I highs, lows;
        __builtin_memcpy(&highs, high + i * kLanes, sizeof highs);
        __builtin_memcpy(&lows, low + i * kLanes, sizeof lows);
        some[i] =
            (256.0f * Simd::to_float(highs - high_excess) + Simd::to_float(lows - low_excess)) *
            scale;
    }
    Simd::transpose_quarters(some);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        if (i * kLanes < count) store(sums + i * kLanes, some[i]);
}

// sums[g][r] (+)= q_g . row r over N vectors from element d on, the last of `some` elements, lane
// by lane.
template <int Q, int N>
OFFLOAD_APART void dots_of_bytes(const Work& w, const int8_t* rows, int count, int g, int d,
                                 int some, V* sums, Ahead& ahead);

struct Integers {
    typedef int8_t T;
    static constexpr Costs costs = {5, 4, 1800};
    static constexpr bool finds_largest = false;

    static int turns(const Work& w) { return w.group; }

    static void begin() {}
    static void end() {}

    // Row g of the block that query g is in: high codes; kBlock rows behind them the low ones.
    static int64_t row_of(int g) {
        return int64_t(g) / offload_host::kBlock * offload_host::kBlockRows +
               g % offload_host::kBlock;
    }
    static int8_t* codes_of(const Work& w, int g) {
        return reinterpret_cast<int8_t*>(w.codes) + row_of(g) * w.wide_dim;
    }
    static int8_t* weights_of(const Work& w, int g) {
        return reinterpret_cast<int8_t*>(w.weights) + row_of(g) * w.padded_columns;
    }
    static int32_t* raw_of(const Work& w, int g) {
        return reinterpret_cast<int32_t*>(w.raw) + row_of(g) * w.wide_dim;
    }

    static void prepare(const Work& w) {
        for (int g = 0; g < w.group; g++)
            w.code_scales[g] = encode(w.queries + int64_t(g) * w.padded_dim, w.dim, codes_of(w, g),
                                      offload_host::kBlock * int64_t(w.wide_dim));
    }
    static void read_keys(const Work& w, const T* keys, int columns, Ahead& ahead) {
        score_keys<Integers>(w, keys, columns, ahead);
    }
    static void begin_values(const Work& w, int columns) {
        for (int g = 0; g < w.group; g++) {
            w.code_scales[g] = encode(w.scores + g * w.padded_columns, columns, w.code_scales[g],
                                      weights_of(w, g), offload_host::kBlock * w.padded_columns);
            int32_t* const raw = raw_of(w, g);
            __builtin_memset(raw, 0, size_t(w.wide_dim) * 4);
            __builtin_memset(raw + offload_host::kBlock * w.wide_dim, 0, size_t(w.wide_dim) * 4);
        }
    }
    static void read_values(const Work& w, const T* values, int columns, Ahead& ahead) {
        const int most = w.group == 1 ? columns : 2 * kTile;
        for (int t = 0; t < columns; t += most)
            add_in_turns<2>(w, values + int64_t(t) * w.dim, t,
                            columns - t < most ? columns - t : most, 0, ahead);
    }
    static void end_values(const Work& w, int columns) {
        for (int g = 0; g < w.group; g++) {
            const int8_t* const weights = weights_of(w, g);
            const int32_t high = 128 * sum_of(weights, columns);
            const int32_t low =
                128 * sum_of(weights + offload_host::kBlock * w.padded_columns, columns);
            put_sums(w, g, high, low);
        }
    }

    template <int Q>
    static void dots_of(const Work& w, const T* rows, int count, int g, V* sums, Ahead& ahead) {
        int d = 0;
        for (; d + 2 * kWide <= w.dim; d += 2 * kWide)
            dots_of_bytes<Q, 2>(w, rows, count, g, d, kWide, sums, ahead);
        for (; d < w.dim; d += kWide)
            dots_of_bytes<Q, 1>(w, rows, count, g, d, w.dim - d, sums, ahead);
    }

    // The item's sums from what products gave, less what is too much in both.
    static void put_sums(const Work& w, int g, int32_t high_excess, int32_t low_excess) {
        const int32_t* const high = raw_of(w, g);
        const int32_t* const low = high + offload_host::kBlock * w.wide_dim;
        float* const sums = w.sums + int64_t(g) * w.padded_dim;
        for (int d = 0; d < w.padded_dim; d += kWide)
            put_wide(high + d, low + d, high_excess, low_excess, w.code_scales[g], sums + d,
                     w.padded_dim - d);
    }

  private:
    static int32_t sum_of(const int8_t* bytes, int count) {
        const Simd::P ones = Simd::all_bytes(1);
        I sums = {};
        for (int i = 0; i < count; i += kWide)
            sums = Simd::add_fours(sums, ones, Simd::load_bytes(bytes + i));
        int32_t sum = 0;
        for (int i = 0; i < kLanes; i++) sum += sums[i];
        return sum;
    }

    template <int Q>
    static void add_in_turns(const Work& w, const T* rows, int t, int count, int g, Ahead& ahead);
};

template <int Q, int N>
OFFLOAD_APART void dots_of_bytes(const Work& w, const int8_t* rows, int count, int g, int d,
                                 int some, V* sums, Ahead& ahead) {
    const int64_t time = w.share(w.key_time, Q, N > 1 ? N * kWide : some);
    const Simd::P offset = Simd::all_bytes(128);
    const auto load = [&](const int8_t* p, int i) {
        p += i * kWide;
        return N > 1 ? Simd::load_bytes(p) : Simd::load_bytes(p, some);
    };
    Simd::P high[Q][N], low[Q][N];
    I begin[Q];  // what the offset would add
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
        I highs = {}, lows = {};
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const int8_t* const codes = Integers::codes_of(w, g + q) + d;
            high[q][i] = load(codes, i);
            low[q][i] = load(codes + offload_host::kBlock * int64_t(w.wide_dim), i);
            highs = Simd::add_fours(highs, offset, high[q][i]);
            lows = Simd::add_fours(lows, offset, low[q][i]);
        }
        begin[q] = -(highs * 256 + lows);
    }
#pragma GCC unroll 1
    for (int r = 0; r < count; r++) {
        const int8_t* const row = rows + int64_t(r) * w.dim + d;
        ahead.pass(time);
        I highs[Q] = {}, lows[Q];
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++) lows[q] = begin[q];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const Simd::P block = Simd::flip(load(row, i), offset);
#pragma GCC unroll 8
            for (int q = 0; q < Q; q++) {
                highs[q] = Simd::add_fours(highs[q], block, high[q][i]);
                lows[q] = Simd::add_fours(lows[q], block, low[q][i]);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++) {
            const V sum = Simd::to_float((highs[q] << 8) + lows[q]);
            sums[q * kRows + r] = d == 0 ? sum : sums[q * kRows + r] + sum;
        }
    }
}

// raw[g] += weight[g][t] * row t, over Q queries and N vectors from element d on, the last of
// `some` elements; four rows at a time.
template <int Q, int N>
OFFLOAD_APART void add_bytes(const Work& w, const int8_t* rows, int t, int count, int g, int d,
                             int some, Ahead& ahead) {
    const int64_t time = w.share(w.value_time, Q, N > 1 ? N * kWide : some);
    const Simd::P offset = Simd::all_bytes(128);
    const int64_t raw_apart = offload_host::kBlock * int64_t(w.wide_dim);
    const int64_t weights_apart = offload_host::kBlock * w.padded_columns;
    I high[Q][4 * N], low[Q][4 * N];
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int i = 0; i < 4 * N; i++) {
            const int32_t* const raw = Integers::raw_of(w, g + q) + d + i * kLanes;
            __builtin_memcpy(&high[q][i], raw, sizeof(I));
            __builtin_memcpy(&low[q][i], raw + raw_apart, sizeof(I));
        }
    for (int r = 0; r < count; r += 4) {
        const int8_t* row[4];  // the last one stands for those behind it, whose weights are zero
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            row[i] = rows + int64_t(r + i < count ? r + i : count - 1) * w.dim + d;
            ahead.pass(time);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            Simd::P block[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const int8_t* const p = row[i] + n * kWide;
                block[i] =
                    Simd::flip(N > 1 ? Simd::load_bytes(p) : Simd::load_bytes(p, some), offset);
            }
            Simd::interleave(block);
#pragma GCC unroll 8
            for (int q = 0; q < Q; q++) {
                const int8_t* const weights = Integers::weights_of(w, g + q) + t + r;
                const Simd::P highs = Simd::same_four(weights);
                const Simd::P lows = Simd::same_four(weights + weights_apart);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    high[q][4 * n + i] = Simd::add_fours(high[q][4 * n + i], block[i], highs);
                    low[q][4 * n + i] = Simd::add_fours(low[q][4 * n + i], block[i], lows);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int i = 0; i < 4 * N; i++) {
            int32_t* const raw = Integers::raw_of(w, g + q) + d + i * kLanes;
            __builtin_memcpy(raw, &high[q][i], sizeof(I));
            __builtin_memcpy(raw + raw_apart, &low[q][i], sizeof(I));
        }
}

template <int Q>
inline void Integers::add_in_turns(const Work& w, const T* rows, int t, int count, int g,
                                   Ahead& ahead) {
    constexpr int N = 2 / Q;
    for (; g + Q <= w.group; g += Q) {
        int d = 0;
        if constexpr (N > 1)
            for (; d + N * kWide <= w.dim; d += N * kWide)
                add_bytes<Q, N>(w, rows, t, count, g, d, kWide, ahead);
        for (; d < w.dim; d += kWide) add_bytes<Q, 1>(w, rows, t, count, g, d, w.dim - d, ahead);
    }
    if constexpr (Q > 1) add_in_turns<Q / 2>(w, rows, t, count, g, ahead);
}

}  // namespace
