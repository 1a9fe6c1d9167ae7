// Keys of a block by tiles (AMX), bf16: its columns times eight queries.
#pragma once
#include "attend.hpp"
#include "block_rows.hpp"
#include "tiles.hpp"

namespace {

struct TileKeys {
    typedef BF16 Cache;
    static constexpr int kRows = 16;  // of a tile
    // Products take less time than values do, which have their own lines: so few of a pair's are
    // asked for with them, so few with weights, and the rest with values.
    static constexpr int kWithKeys = kLinesOfPair / 2, kWithWeights = kLinesOfPair / 4;
    static constexpr int kLinesOfTile = kWithKeys * kRows / kBlockColumns;

    static bool serves(int group, int head_dim) {
        return group >= kLeastGroup && head_dim % kChunkDims == 0;
    }
    static void begin() { configure_tiles(); }
    static void end() { _tile_release(); }

    // The item's queries as tiles.
    static void prepare(const Job& job, const Item& item, const Work& w) {
        const OffloadHostAttention& c = job.call;
        if (c.query_dtype != OFFLOAD_HOST_BF16) {
            load_queries(job, item, w.queries);
            return Tiles<HalfTiles>::prepare(w);
        }
        // High pieces alone.
        const uint16_t* const queries =
            static_cast<const uint16_t*>(c.query) + first_query(job, item);
        float* to = reinterpret_cast<float*>(w.codes);
        for (int d = 0; d < w.dim; d += kPair) {
            V block[kBlockRows] = {};
            for (int g = 0; g < w.group; g++)
                __builtin_memcpy(&block[g], queries + g * c.query_head_stride + d, sizeof(V));
            Simd::transpose(block);
#pragma GCC unroll 16
            for (int k = 0; k < kBlockRows; k++, to += kLanes) store(to, block[k]);
        }
    }

    // Products of keys with queries, to w.tiles.
    template <int Prefetch>
    OFFLOAD_APART static void score(const Work& w, const Rows& keys, const char* ahead) {
        const int64_t row_bytes = int64_t(w.dim) * 2;
        const int count = (keys.count + kRows - 1) / kRows;
        alignas(64) char rest[kRows * 512 * 2];
        const char* tiles[kBlockColumns / kRows];
        for (int i = 0; i < count; i++)
            tiles[i] = reinterpret_cast<const char*>(keys.rows) + i * kRows * row_bytes;
        if (const int some = keys.count % kRows) {  // what lies behind them may be anything
            __builtin_memcpy(rest, tiles[count - 1], size_t(some * row_bytes));
            __builtin_memset(rest + some * row_bytes, 0, size_t((kRows - some) * row_bytes));
            tiles[count - 1] = rest;
        }
        written();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
// A macro, as instructions have the numbers of their tiles in them.
#define OFFLOAD_ADD_TILE(i)                      \
    if (count > i) {                             \
        _tile_loadd(5, tiles[i] + d, row_bytes); \
        _tile_dpbf16ps(i, 5, 4);                 \
        ask_for_tile<Prefetch>(ahead);           \
    }
        for (int64_t d = 0; d < row_bytes; d += kTileRow) {
            _tile_loadd(4, reinterpret_cast<char*>(w.codes) + d * kBlockRows, kTileRow);
            OFFLOAD_ADD_TILE(0)
            OFFLOAD_ADD_TILE(1)
            OFFLOAD_ADD_TILE(2)
            OFFLOAD_ADD_TILE(3)
        }
#undef OFFLOAD_ADD_TILE
        const int of_tile = w.dim / kPair * kLinesOfTile;
        ask_for_lines<Prefetch>(ahead, 0, (kBlockColumns / kRows - count) * of_tile);
        _tile_stored(0, w.tiles, kTileRow);
        _tile_stored(1, w.tiles + kTileBytes, kTileRow);
        _tile_stored(2, w.tiles + 2 * kTileBytes, kTileRow);
        _tile_stored(3, w.tiles + 3 * kTileBytes, kTileRow);
    }

    // Of those, columns c and c + 1, eight queries each.
    static V products(const Work& w, int c) {
        const float* const a = reinterpret_cast<const float*>(w.tiles) + c * kBlockRows;
        const float* const b = a + kBlockRows;
        return Simd::join(a, b) + Simd::join(a + kBlock, b + kBlock);
    }

  private:
    template <int Prefetch>
    static inline void ask_for_tile(const char*& ahead) {
#pragma GCC unroll 16
        for (int i = 0; i < kLinesOfTile; i++, ahead += kLine) ask_for<Prefetch>(ahead);
    }
};

}  // namespace
