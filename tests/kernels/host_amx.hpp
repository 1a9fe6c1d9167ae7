// AMX as the host library uses it: eight tiles of sixteen rows of 64 bytes, one function an
// instruction, by its definition. It traps where a tile is used before tiles are configured.
#pragma once
#include <stdint.h>
#include <string.h>

namespace emulated {

struct Tile {
    unsigned char rows[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline Tile& tile(int i) {
    if (!configured || i < 0 || i > 7) __builtin_trap();
    return tiles[i];
}

inline void tile_loadconfig(const void* config) {
    unsigned char bytes[64];
    memcpy(bytes, config, sizeof bytes);
    if (configured || bytes[0] != 1 || bytes[1] != 0) __builtin_trap();
    for (int i = 0; i < 8; i++)
        if (bytes[16 + 2 * i] != 64 || bytes[17 + 2 * i] != 0 || bytes[48 + i] != 16)
            __builtin_trap();
    memset(tiles, 0, sizeof tiles);
    configured = true;
}

inline void tile_release() { configured = false; }

inline void tile_zero(int to) { memset(&tile(to), 0, sizeof(Tile)); }

inline void tile_loadd(int to, const void* from, int64_t stride) {
    for (int i = 0; i < 16; i++)
        memcpy(tile(to).rows[i], static_cast<const char*>(from) + i * stride, 64);
}

inline void tile_stored(int from, void* to, int64_t stride) {
    for (int i = 0; i < 16; i++)
        memcpy(static_cast<char*>(to) + i * stride, tile(from).rows[i], 64);
}

// to[m][n] += sum of a[m][k][i] * b[k][n][i] over the words k and what is in each.
template <class Element, class Sum, class Add>
void multiply(int to, int a, int b, Add add) {
    constexpr int in_word = 4 / sizeof(Element);
    Element left[16][16][in_word], right[16][16][in_word];
    Sum sums[16][16];
    memcpy(left, &tile(a), sizeof left);
    memcpy(right, &tile(b), sizeof right);
    memcpy(sums, &tile(to), sizeof sums);
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) add(sums[m][n], left[m][k], right[k][n]);
    memcpy(&tile(to), sums, sizeof sums);
}

inline void tile_dpbssd(int to, int a, int b) {
    multiply<int8_t, uint32_t>(to, a, b, [](uint32_t& sum, const int8_t* x, const int8_t* y) {
        for (int i = 0; i < 4; i++) sum += static_cast<uint32_t>(x[i] * y[i]);
    });
}

// Subnormal numbers count as zero, in what comes out too.
inline void tile_dpbf16ps(int to, int a, int b) {
    const auto flushed = [](float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0 * x : x; };
    const auto value = [=](uint16_t half) {
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float x;
        memcpy(&x, &bits, 4);
        return flushed(x);
    };
    multiply<uint16_t, float>(to, a, b, [=](float& sum, const uint16_t* x, const uint16_t* y) {
        sum = flushed(__builtin_fmaf(value(x[0]), value(y[0]), sum));
        sum = flushed(__builtin_fmaf(value(x[1]), value(y[1]), sum));
    });
}

}  // namespace emulated
