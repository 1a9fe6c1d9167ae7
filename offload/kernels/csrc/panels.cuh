// Panels, the order in which tensor cores take the codes of a weight that stays on the GPU; see
// offload/kernels/panels.py. Of 16 rows the lane 4 g + t has rows g and g + 8: row "p" is g + 8 p.
#pragma once
#include "common.cuh"

namespace offload {

constexpr int kPanelRows = 16;
constexpr int kPanelBytes = 512;                           // 16 a lane
constexpr int kPanelWords = kPanelBytes / 4 / kPanelRows;  // of a row: 64 codes of 4 bits, 32 of 8

// int4: 4 codes of two rows, each the low half of a word, in one.
__device__ __forceinline__ uint32_t interleave_codes(uint32_t first, uint32_t second) {
    const auto spread = [](uint32_t x) { return (x & 0x0f0fu) | (x & 0xf0f0u) << 12; };
    return spread(first) | spread(second) << 4;
}

// int8: 4 codes of a row in the order of panels, and back: bytes 1 and 2 change places.
__device__ __forceinline__ uint32_t swap_codes(uint32_t word) {
    return (word & 0xff0000ffu) | (word & 0xff00u) << 8 | (word >> 8 & 0xff00u);
}

// Which byte of its word has column i of 4; in int4 that of both rows.
__device__ __forceinline__ constexpr int panel_byte(int i) { return i == 1 ? 2 : i == 2 ? 1 : i; }

// Where the words of a row's neighbours hold it (AutoAWQ's order).
__device__ __forceinline__ int row_word_shift(int row) { return 4 * (row % 8 / 2 + row % 2 * 4); }

}  // namespace offload
