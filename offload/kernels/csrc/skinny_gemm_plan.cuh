// How the work of a product is cut, and where things lie in shared memory.
#pragma once
#include <stdint.h>

namespace offload {

constexpr int kMostRows = 16;  // of activations

struct GemmPlan {
    uint32_t tiles;   // of warps * tile weight rows (half as many outputs with a gate); staged: of
                      // a block, at most
    uint32_t chunks;  // stages a tile's depth takes
    uint32_t splits;  // parts that a tile's depth may be cut into; staged: blocks of a cluster
    uint32_t blocks;
    int32_t chunk;  // elements of a row in a stage
    int32_t pitch;  // bytes from row to row in a stage
    int32_t stages;
    int32_t row_shift;  // log2 of a row's bytes in a stage
    int32_t bulk;       // copies are bulk copies
    int32_t ring_at;
    // Of a staged block alone:
    int32_t outputs;             // of a block, or of the two of a cluster
    int32_t more_outputs;        // how many of these have one more
    int32_t tile_outputs;        // at most
    int32_t stage_bytes;         // weight rows, activations, the norm's weight and bias
    int32_t inputs_at, norm_at;  // in a stage
    int32_t sums_at;             // what the other block of the cluster leaves
    int32_t sum_pitch;           // floats from row to row of a tile's sums
    int32_t late_norm;           // skinny_gemm_norm.cuh
    float turn;                  // how much deeper than the one before a block begins; 1: all
};

}  // namespace offload
