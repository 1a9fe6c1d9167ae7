// A thread's scratch memory, and the sizes of the call.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace offload_host {

// Numbers with more digits than their kind holds are kept as two pieces, a high and a low one.
// Tiles take eight queries with both their pieces at once: sixteen rows.
constexpr int kBlock = 8;
constexpr int kBlockRows = 2 * kBlock;
constexpr int64_t kTileBytes = 1024;

struct Work {
    int group, dim, padded_dim, wide_dim;
    int64_t padded_columns;
    int64_t key_time, value_time, weights_time;  // of a row, of sixteen scores (see Costs)

    const float* key_scales;  // of the item's columns; null unless int8

    float* queries;      // [group, padded_dim]
    float* code_scales;  // [group]: what the products give, times this, is a score (then: a sum);
                         // between them, the largest weight
    uint16_t* codes;     // the queries as the products want them: [blocks, kBlockRows, wide_dim]
    float* sums;         // [group, padded_dim], tops [group], totals [group]: a part
    float* scores;       // [group, padded_columns], then the weights of the values
    float* largest;      // [group, 16]: of the scores, lane by lane, where read_keys finds them
    uint16_t* weights;   // these as the products want them: [blocks, kBlockRows, padded_columns]
    float* raw;          // sums as the products leave them: [blocks, kBlockRows, wide_dim]
    char* tiles;         // [16, kTileBytes]
    float* block_weights[2];  // [64, kBlock], of two blocks of columns
    float* block_sums;        // [wide_dim / 32, kBlock, 32]

    // Of a row's time, what products of so many elements with so many queries take. Each passes its
    // own, so that lines are asked for evenly: all at a row's first products they would wait for
    // each other, and memory for the next row.
    int64_t share(int64_t row_time, int queries, int elements) const {
        return row_time * (queries * elements) / (int64_t(group) * dim);
    }

    float* tops() const { return sums + int64_t(group) * padded_dim; }
    float* totals() const { return tops() + group; }

    // Places its arrays in `memory`; returns how many floats they take, a multiple of a cache
    // line's. With null it only counts.
    int64_t lay_out(int group_, int dim_, int chunk, float* memory) {
        group = group_;
        dim = dim_;
        padded_dim = int(padded(dim, 16));
        wide_dim = int(padded(dim, 64));
        padded_columns = padded(chunk, 64);
        const int64_t rows = padded(group, kBlock), matrix = int64_t(group) * padded_dim;
        int64_t floats = 0;
        const auto take = [&](int64_t count) {
            float* const at = memory == nullptr ? nullptr : memory + floats;
            floats += padded(count, 16);
            return at;
        };
        queries = take(matrix);
        code_scales = take(group);
        codes = reinterpret_cast<uint16_t*>(take(rows * wide_dim));
        sums = take(matrix + 2 * group);
        scores = take(group * padded_columns);
        largest = take(group * 16);
        weights = reinterpret_cast<uint16_t*>(take(rows * padded_columns));
        raw = take(2 * rows * wide_dim);
        tiles = reinterpret_cast<char*>(take(16 * kTileBytes / 4));
        for (float*& some : block_weights) some = take(64 * kBlock);
        block_sums = take(int64_t(kBlock) * wide_dim);
        return floats;
    }

    static int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
};

}  // namespace offload_host
