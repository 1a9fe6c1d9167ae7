// Codes as they are stored -> panels (panels.cuh), at HBM's rate. A lane's 16 bytes are made of 16
// bytes: four words along the depth. Where words hold neighbours of the other dimension they are
// turned on their way through shared memory.
#include "elementwise.cuh"
#include "panels.cuh"

namespace offload {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnits = 4;  // panels of a warp, all of them under way at once

// A lane's words of a panel, of words along the depth: those of rows g and g + 8, `low` and `high`.
template <int kBits>
__device__ __forceinline__ uint4 panel_words(const uint32_t (&low)[2], const uint32_t (&high)[2]) {
    if (kBits == 8)
        return make_uint4(swap_codes(low[0]), swap_codes(high[0]), swap_codes(low[1]),
                          swap_codes(high[1]));
    return make_uint4(
        interleave_codes(low[0], high[0]), interleave_codes(low[0] >> 16, high[0] >> 16),
        interleave_codes(low[1], high[1]), interleave_codes(low[1] >> 16, high[1] >> 16));
}

// Which word of a row's kPanelWords in a panel lane t takes first and second.
template <int kBits>
__device__ __forceinline__ int panel_word(int t, int i) {
    return kBits == 4 ? 4 * i + t : 2 * t + i;
}

__device__ __forceinline__ void store_panel(const OffloadArrange& a, int chunks, int tile,
                                            int chunk, uint4 words) {
    Pack<uint32_t, 4> pack;
    pack.words[0] = words.x;
    pack.words[1] = words.y;
    pack.words[2] = words.z;
    pack.words[3] = words.w;
    const int64_t at = (static_cast<int64_t>(tile) * chunks + chunk) * (kPanelBytes / 4);
    store_once<uint32_t, 4>(static_cast<uint32_t*>(a.panels) + at + threadIdx.x % 32 * 4, pack);
}

// Words along the depth, a row's beside each other (kAlongDepth) or those of neighbouring rows. The
// warps of a block are neighbours in the order of the words, so that they read long pieces.
template <int kBits, bool kAlongDepth>
__global__ void __launch_bounds__(kThreads)
    arrange_words_kernel(const OffloadArrange a, int tiles, int chunks, Divisor blocks_a_tile) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int outer = blocks_a_tile(static_cast<int>(blockIdx.x));
    const int inner = static_cast<int>(blockIdx.x) - outer * blocks_a_tile.by;
    const uint32_t* codes = static_cast<const uint32_t*>(a.codes);
    const int64_t row_step = kAlongDepth ? static_cast<int64_t>(chunks) * kPanelWords : 1;
    const int64_t word_step = kAlongDepth ? 1 : a.rows;
    uint32_t low[kUnits][2], high[kUnits][2];
    const auto tile_of = [&](int) { return kAlongDepth ? outer : inner * kWarps + warp; };
    const auto chunk_of = [&](int i) {
        return kAlongDepth ? (inner * kUnits + i) * kWarps + warp : outer * kUnits + i;
    };
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        if (tile_of(i) >= tiles || chunk_of(i) >= chunks) continue;
        const uint32_t* from = codes +
                               (static_cast<int64_t>(tile_of(i)) * kPanelRows + g) * row_step +
                               static_cast<int64_t>(chunk_of(i)) * kPanelWords * word_step;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int64_t at = panel_word<kBits>(t, j) * word_step;
            low[i][j] = from[at];
            high[i][j] = from[at + 8 * row_step];
        }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        if (tile_of(i) >= tiles || chunk_of(i) >= chunks) continue;
        store_panel(a, chunks, tile_of(i), chunk_of(i), panel_words<kBits>(low[i], high[i]));
    }
}

constexpr int kTurnedWords = 64;  // of 8 rows each
constexpr int kTurnedTiles = kTurnedWords * 8 / kPanelRows;
constexpr int kTurnedChunks = 2;
constexpr int kTurnedDepth = kTurnedChunks * 64;
constexpr int kTurnedPitch = kTurnedWords + 1;  // lanes t, 8 columns apart, meet in no bank

// Words of 8 neighbouring rows in AutoAWQ's order.
__global__ void __launch_bounds__(kThreads)
    arrange_row_words_kernel(const OffloadArrange a, int tiles, int chunks,
                             Divisor blocks_a_chunk) {
    __shared__ uint32_t words[kTurnedDepth * kTurnedPitch];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int outer = blocks_a_chunk(static_cast<int>(blockIdx.x));
    const int first_word =
        (static_cast<int>(blockIdx.x) - outer * blocks_a_chunk.by) * kTurnedWords;
    const int first_k = outer * kTurnedDepth, row_words = a.rows / 8;
    const uint32_t* codes = static_cast<const uint32_t*>(a.codes);
    const int word = static_cast<int>(threadIdx.x) % kTurnedWords;
#pragma unroll 16
    for (int k = static_cast<int>(threadIdx.x) / kTurnedWords; k < kTurnedDepth;
         k += kThreads / kTurnedWords)
        if (first_word + word < row_words && first_k + k < a.depth)
            words[k * kTurnedPitch + word] =
                codes[static_cast<int64_t>(first_k + k) * row_words + first_word + word];
    __syncthreads();
    const int shift = row_word_shift(g);
#pragma unroll 1
    for (int i = warp; i < kTurnedTiles * kTurnedChunks; i += kWarps) {
        const int in_tiles = i / kTurnedChunks, in_chunks = i % kTurnedChunks;
        const int tile = first_word / 2 + in_tiles, chunk = outer * kTurnedChunks + in_chunks;
        if (tile >= tiles || chunk >= chunks) continue;
        uint32_t low[2] = {}, high[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int k = in_chunks * 64 + panel_word<4>(t, h) * 8 + j;
                const uint32_t* of_tile = words + k * kTurnedPitch + in_tiles * 2;
                low[h] |= (of_tile[0] >> shift & 15u) << 4 * j;
                high[h] |= (of_tile[1] >> shift & 15u) << 4 * j;
            }
        store_panel(a, chunks, tile, chunk, panel_words<4>(low, high));
    }
}

int check_sizes(const OffloadArrange& a) {
    if (a.bits != 4 && a.bits != 8) return refuse("arrange: bits must be 4 or 8, not %d", a.bits);
    if (a.order < OFFLOAD_ALONG_DEPTH || a.order > OFFLOAD_ROW_WORDS)
        return refuse("arrange: no order of codes has the number %d", a.order);
    if (a.order == OFFLOAD_ROW_WORDS && a.bits != 4)
        return refuse("arrange: words of rows hold codes of 4 bits, not %d", a.bits);
    const int columns = kPanelWords * 32 / a.bits;
    if (a.rows < 0 || a.depth < 0 || a.rows % kPanelRows || a.depth % columns)
        return refuse("arrange: %d rows of %d do not divide into panels of %d and %d", a.rows,
                      a.depth, kPanelRows, columns);
    return 0;
}

template <int kBits>
int launch_words(const OffloadArrange& a, int tiles, int chunks, void* stream) {
    const bool along = a.order == OFFLOAD_ALONG_DEPTH;
    const int inner = along ? (chunks - 1) / (kWarps * kUnits) + 1 : (tiles - 1) / kWarps + 1;
    const int64_t blocks =
        static_cast<int64_t>(inner) * (along ? tiles : (chunks - 1) / kUnits + 1);
    if (blocks > INT32_MAX)
        return refuse("arrange: %d rows of %d are too many for one launch", a.rows, a.depth);
    return launch("arrange",
                  along ? arrange_words_kernel<kBits, true> : arrange_words_kernel<kBits, false>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, false, a, tiles,
                  chunks, Divisor(inner));
}

int launch_arrange(const OffloadArrange& a, void* stream) {
    const int tiles = a.rows / kPanelRows, chunks = a.depth * a.bits / (kPanelWords * 32);
    if (a.bits == 8) return launch_words<8>(a, tiles, chunks, stream);
    if (a.order != OFFLOAD_ROW_WORDS) return launch_words<4>(a, tiles, chunks, stream);
    const int inner = (tiles - 1) / kTurnedTiles + 1;
    const int64_t blocks = static_cast<int64_t>(inner) * ((chunks - 1) / kTurnedChunks + 1);
    if (blocks > INT32_MAX)
        return refuse("arrange: %d rows of %d are too many for one launch", a.rows, a.depth);
    return launch("arrange", arrange_row_words_kernel, dim3(static_cast<unsigned>(blocks)),
                  dim3(kThreads), 0, stream, false, a, tiles, chunks, Divisor(inner));
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_arrange(const OffloadArrange* arguments, void* stream) {
    using namespace offload;
    const OffloadArrange& a = *arguments;
    if (int status = check_sizes(a)) return status;
    if (a.rows == 0 || a.depth == 0) return 0;
    if (!a.codes || !a.panels || reinterpret_cast<uintptr_t>(a.codes) % 4 || !aligned16(a.panels))
        return refuse("arrange: codes must lie at a multiple of 4 bytes and panels of 16");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return launch_arrange(a, stream);
}
