// Groups of many queries by AMX: products of tiles, sixteen rows of 64 bytes each.
//
// For keys a tile of sixteen rows of the cache, as they lie, is multiplied with eight queries, each
// as a high and a low piece: sixteen columns. For values the weights are the rows, eight high ones
// and eight low ones. Where a product wants two rows of bf16 next to each other, rows of the cache
// have two elements of one: so weights stand once beside a zero and once behind one, for even
// elements and for odd ones, which doubles products and leaves the cache as it lies. (NaN or
// infinity in one of two elements thereby makes both sums NaN.) Bytes would want four times the
// products: their rows are made columns by shuffles on the way through L1.
#pragma once
#include "integers.hpp"

namespace {

using offload_host::kBlock;
using offload_host::kBlockRows;
using offload_host::kTileBytes;

constexpr int kLeastGroup = 4;  // queries from which on tiles take less time than vectors
constexpr int kTileRow = 64;    // bytes
constexpr int kChunkDims = 64;  // elements of a row that four tiles of sums are for

alignas(64) const char kZeroRow[2 * kTileRow] = {};

// Compilers take the instructions that load tiles, or their configuration, for ones that read
// little or no memory: what was written must be there before them.
inline void written() { __asm__ volatile("" ::: "memory"); }

// All eight tiles: sixteen rows of 64 bytes.
inline void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    __asm__ volatile("" : : "r"(&config) : "memory");  // it stays until then
}

struct WholeTiles {  // of int8, with codes of 16 bits
    typedef int8_t T;
    typedef I Sums;
    static constexpr int columns = 64;  // of a tile of weights
    static constexpr int together = 256;
    static constexpr Costs costs = {10, 15, 2600};
    static float encode_query(const float* from, int count, char* to, int64_t apart) {
        return encode(from, count, reinterpret_cast<int8_t*>(to), apart);
    }
    static V scores(I high, I low) { return Simd::to_float((high << 8) + low); }
    static void put_sums(const int32_t* high, const int32_t* low, float scale, float* sums) {
        put_wide(high, low, 0, 0, scale, sums, kChunkDims);
    }
    // Four rows make a row of four tiles.
    static void interleave(const char* const (&rows)[4], char* to) {
        Simd::P block[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            block[i] = Simd::load_bytes(reinterpret_cast<const int8_t*>(rows[i]));
        Simd::interleave(block);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) Simd::store_bytes(to + i * kTileBytes, block[i]);
    }
};

struct HalfTiles {  // of bf16, with pieces of bf16
    typedef uint16_t T;
    typedef V Sums;
    static constexpr int columns = 16;
    static constexpr int together = 64;
    static constexpr Costs costs = {10, 17, 2000};
    static float encode_query(const float* from, int count, char* to, int64_t apart) {
        uint16_t* const high = reinterpret_cast<uint16_t*>(to);
        uint16_t* const low = reinterpret_cast<uint16_t*>(to + apart);
        for (int d = 0; d < count; d++) {  // what is cut off the first is the second
            const uint32_t bits = bits_of_float(from[d]);
            const float rest = from[d] - float_of_bits(bits & 0xffff0000);
            high[d] = uint16_t(bits >> 16);
            low[d] = uint16_t(bits_of_float(rest) >> 16);
        }
        return 1;
    }
    static V scores(V high, V low) { return high + low; }
    // 64 sums: of 32 elements the even ones, then the odd ones.
    static void put_sums(const float* high, const float* low, float, float* sums) {
        for (int d = 0; d < kChunkDims; d += 32)
            for (int i = 0; i < 16; i++) {
                sums[d + 2 * i] = high[d + i] + low[d + i];
                sums[d + 2 * i + 1] = high[d + 16 + i] + low[d + 16 + i];
            }
    }
};

template <class Form>
struct Tiles {
    typedef typename Form::T T;
    typedef typename Form::Sums Sums;
    static constexpr int kBytes = sizeof(T);
    static constexpr int kColumns = Form::columns;    // of a tile of weights
    static constexpr int kRowsOfOne = 4 / kBytes;     // of the cache, in a tile's row
    static constexpr int kTogether = Form::together;  // columns whose tiles are there at once
    static constexpr Costs costs = Form::costs;
    static constexpr bool finds_largest = true;  // of scores that have their keys' scales

    static int turns(const Work& w) { return blocks(w); }

    static void begin() { configure_tiles(); }
    static void end() { _tile_release(); }

    static int64_t row_of(int g) { return int64_t(g) / kBlock * kBlockRows + g % kBlock; }
    static int blocks(const Work& w) { return (w.group + kBlock - 1) / kBlock; }

    // Codes, then these as tiles: row k of a tile has word k of each query.
    static void prepare(const Work& w) {
        const int64_t row_bytes = int64_t(w.wide_dim) * kBytes;
        char* const rows = reinterpret_cast<char*>(w.raw);
        for (int g = 0; g < w.group; g++)
            w.code_scales[g] = Form::encode_query(w.queries + int64_t(g) * w.padded_dim, w.dim,
                                                  rows + row_of(g) * row_bytes, kBlock * row_bytes);
        const int64_t words = row_bytes / 4;
        for (int b = 0; b < blocks(w); b++) {
            const uint32_t* const from = reinterpret_cast<uint32_t*>(rows + b * 16 * row_bytes);
            uint32_t* const to = reinterpret_cast<uint32_t*>(w.codes) + b * 16 * words;
            for (int64_t k = 0; k < words; k += 16) {
                V block[kBlockRows];
#pragma GCC unroll 16
                for (int n = 0; n < kBlockRows; n++)
                    block[n] = Simd::load(reinterpret_cast<const float*>(from + n * words + k));
                Simd::transpose(block);
#pragma GCC unroll 16
                for (int n = 0; n < kBlockRows; n++)
                    store(reinterpret_cast<float*>(to + (k + n) * 16), block[n]);
            }
        }
    }

    static void read_keys(const Work& w, const T* keys, int columns, Ahead& ahead) {
        const char* const rows = reinterpret_cast<const char*>(keys);
        const int64_t row_bytes = int64_t(w.dim) * kBytes;
        for (int g = 0; g < w.group; g++) store(w.largest + g * kLanes, all(-INFINITY));
        int t = 0;
        for (; t + 64 <= columns; t += 64) keys_of<4>(w, rows + t * row_bytes, row_bytes, t, ahead);
        for (; t + 16 <= columns; t += 16) keys_of<1>(w, rows + t * row_bytes, row_bytes, t, ahead);
        if (t == columns) return;
        if (columns >= 16) {  // the last few are looked at again with those before them
            t = columns - 16;
            return keys_of<1>(w, rows + t * row_bytes, row_bytes, t, ahead);
        }
        char some[16 * 512 * 2];
        __builtin_memcpy(some, rows, size_t(columns * row_bytes));
        __builtin_memset(some + columns * row_bytes, 0, size_t((16 - columns) * row_bytes));
        Ahead none = ahead;
        none.stop();
        keys_of<1>(w, some, row_bytes, 0, none, columns);
    }

    static void begin_values(const Work& w, int columns) {
        const int64_t row_bytes = w.padded_columns * kBytes;
        for (int g = 0; g < w.group; g++) {
            char* const row = reinterpret_cast<char*>(w.weights) + row_of(g) * row_bytes;
            if constexpr (kBytes == 1)
                w.code_scales[g] =
                    encode(w.scores + g * w.padded_columns, columns, w.code_scales[g],
                           reinterpret_cast<int8_t*>(row), kBlock * row_bytes);
        }
        __builtin_memset(w.raw, 0, size_t(blocks(w)) * kBlockRows * w.wide_dim * 4);
    }

    static void read_values(const Work& w, const T* values, int columns, Ahead& ahead) {
        for (int t = 0; t < columns; t += kTogether) {
            const T* const rows = values + int64_t(t) * w.dim;
            const int count = columns - t < kTogether ? columns - t : kTogether;
            if constexpr (kBytes == 1)
                for (int d = 0; d < w.dim; d += kChunkDims)
                    add_values(w, rows + d, t, count, d, ahead);
            else
                add_halves(w, reinterpret_cast<const char*>(rows), t, count, ahead);
        }
    }

    static void end_values(const Work& w, int) {
        typedef decltype(Sums{}[0] + Sums{}[0]) Sum;
        for (int g = 0; g < w.group; g++) {
            const Sum* const high = reinterpret_cast<Sum*>(w.raw) + row_of(g) * w.wide_dim;
            const Sum* const low = high + int64_t(kBlock) * w.wide_dim;
            float* const sums = w.sums + int64_t(g) * w.padded_dim;
            for (int d = 0; d < w.dim; d += kChunkDims)
                Form::put_sums(high + d, low + d, w.code_scales[g], sums + d);
        }
    }

  private:
    // Scores of 16 N keys, or of `count` that there are.
    template <int N>
    OFFLOAD_APART static void keys_of(const Work& w, const char* rows, int64_t row_bytes, int t,
                                      Ahead& ahead, int count = 16 * N) {
        const int64_t next = 16 * row_bytes;  // tile
        for (int b = 0; b < blocks(w); b++) {
            const char* queries = reinterpret_cast<char*>(w.codes) + b * 16 * row_bytes;
            const int64_t time = w.key_time * 16 * kTileRow / row_bytes / blocks(w);
            written();
            _tile_zero(0);
            if constexpr (N == 4) {
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t d = 0; d < row_bytes; d += kTileRow, queries += kTileBytes) {
                const char* const at = rows + d;
                _tile_loadd(4, queries, kTileRow);
                ahead.pass(time);
                _tile_loadd(5, at, row_bytes);
                if constexpr (kBytes == 1)
                    _tile_dpbssd(0, 5, 4);
                else
                    _tile_dpbf16ps(0, 5, 4);
                if constexpr (N == 4) {
                    ahead.pass(time);
                    _tile_loadd(6, at + next, row_bytes);
                    if constexpr (kBytes == 1)
                        _tile_dpbssd(1, 6, 4);
                    else
                        _tile_dpbf16ps(1, 6, 4);
                    ahead.pass(time);
                    _tile_loadd(7, at + 2 * next, row_bytes);
                    if constexpr (kBytes == 1)
                        _tile_dpbssd(2, 7, 4);
                    else
                        _tile_dpbf16ps(2, 7, 4);
                    ahead.pass(time);
                    _tile_loadd(5, at + 3 * next, row_bytes);
                    if constexpr (kBytes == 1)
                        _tile_dpbssd(3, 5, 4);
                    else
                        _tile_dpbf16ps(3, 5, 4);
                }
            }
            _tile_stored(0, w.tiles, kTileRow);
            if constexpr (N == 4) {
                _tile_stored(1, w.tiles + kTileBytes, kTileRow);
                _tile_stored(2, w.tiles + 2 * kTileBytes, kTileRow);
                _tile_stored(3, w.tiles + 3 * kTileBytes, kTileRow);
            }
            for (int i = 0; i < N; i++)
                put_scores(w, w.tiles + i * kTileBytes, b * kBlock, t + 16 * i, count);
        }
    }

    // A row a key, eight high sums and eight low ones, becomes a row a query.
    static void put_scores(const Work& w, const char* tile, int g, int t, int keys) {
        const float* const sums = reinterpret_cast<const float*>(tile);
        V rows[kBlock];
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; i++) {
            // Which two keys are one vector's is what Simd::transpose_halves wants.
            const float* const a = sums + 16 * (i / 4 * 8 + i % 4);
            const float* const b = a + 4 * 16;
            rows[i] = Form::scores((Sums)Simd::join(a, b), (Sums)Simd::join(a + 8, b + 8));
        }
        Simd::transpose_halves(rows);
        const int count = w.group - g < kBlock ? w.group - g : kBlock;
        float* const scores = w.scores + g * w.padded_columns + t;
        float* const largest = w.largest + g * kLanes;
        V scales = {}, lane;
        if constexpr (kBytes == 1)
            scales = keys < kLanes ? load_some<F32>(w.key_scales + t, keys)
                                   : Simd::load(w.key_scales + t);
        for (int i = 0; i < kLanes; i++) lane[i] = float(i);
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; i++) {
            if (i >= count) break;
            if constexpr (kBytes == 1) rows[i] *= scales;
            store(scores + i * w.padded_columns, rows[i]);
            if (keys < kLanes) rows[i] = lane < float(keys) ? rows[i] : all(-INFINITY);
            const V top = Simd::load(largest + i * kLanes);
            store(largest + i * kLanes, rows[i] > top ? rows[i] : top);
        }
    }

    // Of `count` columns from t on, the weights of block b's queries as tiles, two for sixteen.
    static void spread_weights(const Work& w, int b, int t, int count) {
        for (int g = 0; g < kBlock; g++) {
            char* to = w.tiles + g * kTileRow;
            const int query = b * kBlock + g;
            const float* const weights = w.scores + query * w.padded_columns + t;
            for (int r = 0; r < count; r += 16, to += 2 * kTileBytes)
                Simd::store_pieces(query < w.group ? Simd::load(weights + r) : V{}, to,
                                   to + kTileBytes, kBlock * kTileRow);
        }
    }

    // Of `count` columns from t on, all elements.
    OFFLOAD_APART static void add_halves(const Work& w, const char* rows, int t, int count,
                                         Ahead& ahead) {
        const int64_t row_bytes = int64_t(w.dim) * 2, raw_bytes = int64_t(w.wide_dim) * 4;
        const int64_t time = w.value_time * 8 * kChunkDims / w.dim / blocks(w);
        for (int b = 0; b < blocks(w); b++) {
            spread_weights(w, b, t, count);
            for (int64_t d = 0; d < w.dim; d += kChunkDims) {
                char* const raw =
                    reinterpret_cast<char*>(w.raw) + b * kBlockRows * raw_bytes + d * 4;
                written();
                _tile_loadd(0, raw, raw_bytes);
                _tile_loadd(1, raw + 64, raw_bytes);
                _tile_loadd(2, raw + 128, raw_bytes);
                _tile_loadd(3, raw + 192, raw_bytes);
                const char* weights = w.tiles;
                int r = 0;
                for (; r + 16 <= count; r += 16, weights += 2 * kTileBytes) {
                    ahead.pass(time);
                    add_tiles(weights, rows + r * row_bytes + d * 2, row_bytes);
                    ahead.pass(time);
                }
                if (r < count) {  // what lies behind them may be anything
                    alignas(64) char some[16 * 2 * kTileRow] = {};
                    for (int i = 0; r + i < count; i++)
                        __builtin_memcpy(some + i * 2 * kTileRow,
                                         rows + (r + i) * row_bytes + d * 2, 2 * kTileRow);
                    written();
                    add_tiles(weights, some, 2 * kTileRow);
                    written();
                }
                _tile_stored(0, raw, raw_bytes);
                _tile_stored(1, raw + 64, raw_bytes);
                _tile_stored(2, raw + 128, raw_bytes);
                _tile_stored(3, raw + 192, raw_bytes);
            }
        }
    }

    // Sixteen columns, 64 elements.
    static inline void add_tiles(const char* weights, const char* rows, int64_t row_bytes) {
        _tile_loadd(4, weights, kTileRow);
        _tile_loadd(6, rows, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + kTileBytes, kTileRow);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, rows + kTileRow, row_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }

    // Of `count` columns from t on, elements d to d + kChunkDims: tiles of them, then products.
    OFFLOAD_APART static void add_values(const Work& w, const T* values, int t, int count, int d,
                                         Ahead& ahead) {
        const int64_t time = w.value_time * kChunkDims / w.dim;
        for (int r = 0; r < count; r += kColumns) {
            char* const to = w.tiles + r / kColumns * 4 * kTileBytes;
            for (int k = 0; k < 16; k++) {
                const int row = r + kRowsOfOne * k;
                const char* rows[kRowsOfOne];
#pragma GCC unroll 4
                for (int i = 0; i < kRowsOfOne; i++)
                    rows[i] = reinterpret_cast<const char*>(values + int64_t(row + i) * w.dim);
                if (row + kRowsOfOne > count)
                    for (int i = 0; i < kRowsOfOne; i++)
                        if (row + i >= count) rows[i] = kZeroRow;
                if (row < count) ahead.pass(kRowsOfOne * time);
                Form::interleave(rows, to + k * kTileRow);
            }
        }
        const int64_t weights_bytes = w.padded_columns * kBytes,
                      raw_bytes = int64_t(w.wide_dim) * 4;
        written();
        for (int b = 0; b < blocks(w); b++) {
            const char* const weights =
                reinterpret_cast<char*>(w.weights) + b * kBlockRows * weights_bytes + t * kBytes;
            char* const raw = reinterpret_cast<char*>(w.raw) + b * kBlockRows * raw_bytes + d * 4;
            _tile_loadd(0, raw, raw_bytes);
            _tile_loadd(1, raw + 64, raw_bytes);
            _tile_loadd(2, raw + 128, raw_bytes);
            _tile_loadd(3, raw + 192, raw_bytes);
            for (int r = 0; r < count; r += kColumns) {
                const char* const tiles = w.tiles + r / kColumns * 4 * kTileBytes;
                _tile_loadd(4, weights + r * kBytes, weights_bytes);
                _tile_loadd(5, tiles, kTileRow);
                _tile_loadd(6, tiles + kTileBytes, kTileRow);
                _tile_dpbssd(0, 4, 5);
                _tile_dpbssd(1, 4, 6);
                _tile_loadd(7, tiles + 2 * kTileBytes, kTileRow);
                _tile_loadd(5, tiles + 3 * kTileBytes, kTileRow);
                _tile_dpbssd(2, 4, 7);
                _tile_dpbssd(3, 4, 5);
            }
            _tile_stored(0, raw, raw_bytes);
            _tile_stored(1, raw + 64, raw_bytes);
            _tile_stored(2, raw + 128, raw_bytes);
            _tile_stored(3, raw + 192, raw_bytes);
        }
    }
};

}  // namespace
