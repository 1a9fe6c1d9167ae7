// Rows of a block of columns: keys to be multiplied with eight queries, values to be added up with
// eight weights each, and lines of a later block that are asked for meanwhile.
#pragma once
#include "floats.hpp"

namespace {

using offload_host::kBlock;

constexpr int kBlockColumns = 64;
constexpr int kPair = 2 * kLanes;  // elements of a row that are taken together

// Of 16 bits an element.
struct Rows {
    const uint16_t* rows;
    int count;
};

// Sums of kPair elements and eight queries, from element d on: as block_sums has them.
typedef V Sums[kBlock][2];

inline void load_sums(const Work& w, int d, Sums& sums) {
    const float* const from = w.block_sums + d * kBlock;
#pragma GCC unroll 8
    for (int g = 0; g < kBlock; g++) {
        sums[g][0] = Simd::load(from + g * kPair);
        sums[g][1] = Simd::load(from + g * kPair + kLanes);
    }
}
inline void store_sums(const Work& w, int d, const Sums& sums) {
    float* const to = w.block_sums + d * kBlock;
#pragma GCC unroll 8
    for (int g = 0; g < kBlock; g++) {
        store(to + g * kPair, sums[g][0]);
        store(to + g * kPair + kLanes, sums[g][1]);
    }
}

// Where lines of a block lie: as many of keys as of values, kLinesOfPair for kPair elements.
struct Lines {
    const char* keys;
    const char* values;
};
constexpr int kLinesOfPair = kBlockColumns;

// Asks for lines [from, to). Inline, as compilers take calls away that do nothing but that.
template <int Prefetch>
__attribute__((always_inline)) inline void ask_for_lines(const char* lines, int from, int to) {
    for (int i = from; i < to; i++) ask_for<Prefetch>(lines + i * kLine);
}

// Adds values times weights, those of eight queries side by side. All lines of values are asked for
// meanwhile, and of those of keys the last ones, KeyLines of kLinesOfPair.
template <class Cache, int Prefetch, int KeyLines>
OFFLOAD_APART void add_values(const Work& w, const Rows& values, const float* weights,
                              const Lines& ahead) {
    constexpr int kOfFour = 4 * KeyLines / kLinesOfPair;
    static_assert(kOfFour * kLinesOfPair == 4 * KeyLines);
    const char* value_line = ahead.values;
    const char* key_line = ahead.keys + int64_t(w.dim / kPair) * (kLinesOfPair - KeyLines) * kLine;
    for (int d = 0; d < w.dim; d += kPair) {
        Sums sums;
        load_sums(w, d, sums);
        const uint16_t* row = values.rows + d;
        const float* weight = weights;
        const auto add = [&](int i) __attribute__((always_inline)) {
            ask_for<Prefetch>(value_line + i * kLine);
            if (i < kOfFour) ask_for<Prefetch>(key_line + i * kLine);
            V value[2];
            load_block<Cache>(row + i * w.dim, value);
            Simd::hold(value[0]);
            Simd::hold(value[1]);
#pragma GCC unroll 8
            for (int g = 0; g < kBlock; g++) {
                const float factor = weight[i * kBlock + g];
                sums[g][0] += value[0] * factor;
                sums[g][1] += value[1] * factor;
            }
        };
        int r = 0;
        for (; r + 4 <= values.count; r += 4) {
            add(0);
            add(1);
            add(2);
            add(3);
            row += 4 * w.dim;
            weight += 4 * kBlock;
            value_line += 4 * kLine;
            key_line += kOfFour * kLine;
        }
        for (; r < values.count; r++) {
            add(0);
            row += w.dim;
            weight += kBlock;
            value_line += kLine;
        }
        store_sums(w, d, sums);
    }
    // Those of rows that are not there.
    const int pairs = w.dim / kPair;
    ask_for_lines<Prefetch>(ahead.values, pairs * values.count, pairs * kLinesOfPair);
    ask_for_lines<Prefetch>(
        ahead.keys, pairs * (kLinesOfPair - KeyLines + KeyLines * values.count / kBlockColumns),
        pairs * kLinesOfPair);
}

}  // namespace
