// One warp's ring of stages in shared memory: which rows of the weight go there, how they come, and
// when they are there.
#pragma once
#include "async_copy.cuh"
#include "common.cuh"
#include "skinny_gemm_plan.cuh"

namespace offload {

constexpr int kBarrierBytes = 1024;  // ahead of the rings: of at most 8 warps with 16 stages

template <typename T, int kTile>
struct Ring {
    const OffloadSkinnyGemm& a;
    const GemmPlan& p;
    unsigned char* stages;
    uint32_t barriers;
    uint64_t policy;
    int lane;

    // Code for older GPUs may run on a newer one that could copy in bulk.
    __device__ __forceinline__ bool bulk() const {
#ifdef OFFLOAD_HAS_BULK_COPY
        return p.bulk;
#else
        return false;
#endif
    }

    __device__ __forceinline__ int stage_bytes() const { return kTile * p.pitch; }

    // First output of this warp in a tile.
    __device__ __forceinline__ int64_t first_output(uint32_t tile) const {
        const int64_t warp_tile = static_cast<int64_t>(tile) * (blockDim.x / 32) + threadIdx.x / 32;
        return warp_tile * (a.gated ? kTile / 2 : kTile);
    }

    // A gated tile has groups of 16 rows (or one smaller), whose first half are gate rows.
    static constexpr int kGroup = kTile < 16 ? kTile : 16;

    __device__ __forceinline__ bool is_up(int row) const {
        return a.gated && row % kGroup >= kGroup / 2;
    }

    // Which of the warp's outputs a row of its tile is for.
    __device__ __forceinline__ int output_of(int row) const {
        return a.gated ? row / kGroup * (kGroup / 2) + row % (kGroup / 2) : row;
    }

    // Rows past the last output repeat it; nobody looks at their sums.
    __device__ __forceinline__ const unsigned char* weight_row(uint32_t tile, int row) const {
        int64_t at = first_output(tile) + output_of(row);
        if (at >= a.outputs) at = a.outputs - 1;
        if (is_up(row)) at += a.outputs;
        return static_cast<const unsigned char*>(a.weight) +
               at * a.weight_stride * static_cast<int64_t>(sizeof(T));
    }

    __device__ __forceinline__ void init() {
#ifdef OFFLOAD_HAS_BULK_COPY
        if (p.bulk) {
            if (lane == 0) {
                for (int s = 0; s < p.stages; ++s) barrier_init(barriers + s * 8, 1);
                fence_before_bulk_copies();
            }
            __syncwarp();
        }
#endif
    }

    // Starts the copies of chunk `chunk` of a tile into stage `slot`.
    __device__ __forceinline__ void fetch(int slot, uint32_t tile, uint32_t chunk) {
        const uint32_t to = shared_address(stages + slot * stage_bytes());
        const int64_t begin = static_cast<int64_t>(chunk) * p.chunk;
        const int bytes =
            static_cast<int>(min(static_cast<int64_t>(p.chunk), a.depth - begin) * sizeof(T));
        const int64_t skip = begin * static_cast<int64_t>(sizeof(T));
#ifdef OFFLOAD_HAS_BULK_COPY
        if (p.bulk) {
            const uint32_t barrier = barriers + slot * 8;
            if (lane == 0) barrier_expect(barrier, kTile * bytes);
            __syncwarp();
            if (lane < kTile)
                copy_bulk(to + lane * p.pitch, weight_row(tile, lane) + skip, bytes, barrier,
                          policy);
            return;
        }
#endif
        const int row_bytes = 1 << p.row_shift;
#pragma unroll 4
        for (int at = lane * 16; at < kTile * row_bytes; at += 512) {
            const int row = at >> p.row_shift, column = at & (row_bytes - 1);
            if (column < bytes)
                copy_async16(to + row * p.pitch + column, weight_row(tile, row) + skip + column,
                             policy);
        }
        commit_copies();
    }

    // Stands for a fetch where there is nothing left: copies are waited for by counting.
    __device__ __forceinline__ void fetch_nothing() {
        if (!bulk()) commit_copies();
    }

    __device__ __forceinline__ const unsigned char* wait(int slot, uint32_t parity) {
#ifdef OFFLOAD_HAS_BULK_COPY
        if (p.bulk) {
            barrier_wait(barriers + slot * 8, parity);
        } else
#endif
        {
            wait_for_copies(p.stages - 1);
        }
        __syncwarp();
        return stages + slot * stage_bytes();
    }

    // Zeros behind the first `valid` elements of each row: what the copies of a short chunk left
    // there may be anything, and anything times zero is not always zero.
    __device__ __forceinline__ void clear_rest(int slot, int valid) {
        const int bytes = valid * static_cast<int>(sizeof(T)), rest = p.pitch - 16 - bytes;
        unsigned char* stage = stages + slot * stage_bytes();
        for (int at = lane * 16; at < kTile * rest; at += 512)
            *reinterpret_cast<uint4*>(stage + at / rest * p.pitch + bytes + at % rest) =
                make_uint4(0, 0, 0, 0);
#ifdef OFFLOAD_HAS_BULK_COPY
        fence_before_bulk_copies();
#endif
        __syncwarp();
    }
};

}  // namespace offload
