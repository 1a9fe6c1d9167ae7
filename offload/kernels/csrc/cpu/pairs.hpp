// Keys of bf16 against queries that are bf16 themselves, by products of pairs; values as ever.
#pragma once
#include "floats.hpp"

namespace {

// As `dots`, over N vectors of pairs; the last has `some` elements.
template <int Q, int N>
OFFLOAD_APART void dots_of_pairs(const Work& w, const uint16_t* rows, int count,
                                 const uint16_t* queries, int d, int some, V* sums, Ahead& ahead) {
    const int64_t time = w.share(w.key_time, Q, N > 1 ? N * 2 * kLanes : some);
    const auto load = [&](const uint16_t* p, int i) {
        p += i * 2 * kLanes;
        return N > 1 ? Simd::load_pairs(p) : Simd::load_pairs(p, some);
    };
    Simd::P query[Q][N];
#pragma GCC unroll 8
    for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) query[g][i] = load(queries + int64_t(g) * w.wide_dim + d, i);
#pragma GCC unroll 1
    for (int r = 0; r < count; r++) {
        const uint16_t* const row = rows + int64_t(r) * w.dim + d;
        ahead.pass(time);
        V sum[Q];
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) sum[g] = d == 0 ? V{} : sums[g * kRows + r];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const Simd::P block = load(row, i);
#pragma GCC unroll 8
            for (int g = 0; g < Q; g++) sum[g] = Simd::add_pairs(sum[g], block, query[g][i]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++) sums[g * kRows + r] = sum[g];
    }
}

struct Pairs : Floats<BF16> {
    static void prepare(const Work& w) {
        for (int g = 0; g < w.group; g++) {
            w.code_scales[g] = 1;
            for (int d = 0; d < w.padded_dim; d++) {
                uint32_t bits;
                __builtin_memcpy(&bits, w.queries + int64_t(g) * w.padded_dim + d, 4);
                w.codes[int64_t(g) * w.wide_dim + d] = uint16_t(bits >> 16);
            }
        }
    }
    static void read_keys(const Work& w, const T* keys, int columns, Ahead& ahead) {
        score_keys<Pairs>(w, keys, columns, ahead);
    }
    template <int Q>
    static void dots_of(const Work& w, const T* rows, int count, int g, V* sums, Ahead& ahead) {
        const uint16_t* const queries = w.codes + int64_t(g) * w.wide_dim;
        constexpr int kStep = 2 * kLanes;
        int d = 0;
        for (; d + 4 * kStep <= w.dim; d += 4 * kStep)
            dots_of_pairs<Q, 4>(w, rows, count, queries, d, kStep, sums, ahead);
        for (; d + 2 * kStep <= w.dim; d += 2 * kStep)
            dots_of_pairs<Q, 2>(w, rows, count, queries, d, kStep, sums, ahead);
        for (; d < w.dim; d += kStep)
            dots_of_pairs<Q, 1>(w, rows, count, queries, d, w.dim - d < kStep ? w.dim - d : kStep,
                                sums, ahead);
    }
};

}  // namespace
