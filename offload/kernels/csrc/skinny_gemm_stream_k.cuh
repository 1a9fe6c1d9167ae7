// The product for float32, in which every warp works alone. It owns 4 to 16 rows of the weight at a
// time and walks along the depth; its own ring of stages in shared memory is filled by background
// copies of 512 or 1024 contiguous bytes a row, so that about 100 KB of an SM are under way
// (Little: 4.4 TB/s need some 30 KB). The activations come through L1, a block ahead, into
// registers. No warp waits for another.
//
// Blocks stay, one an SM, and share the work evenly: the depth of each tile is cut into `splits`
// parts, block b takes parts [b * parts / blocks, (b + 1) * parts / blocks). A tile that several
// blocks share is finished by whichever warp arrives last, which adds their float32 sums in block
// order: results repeat bit for bit. This is stream-K (arXiv 2301.03598) with coarse cuts.
//
// With programmatic dependent launch the ring is filled with weights before the kernel waits for
// the one before it.
#pragma once
#include "skinny_gemm_math.cuh"
#include "skinny_gemm_ring.cuh"

namespace offload {

// Part u of all tiles' parts begins at this chunk of all tiles' chunks.
__host__ __device__ __forceinline__ uint32_t chunk_of_part(const GemmPlan& p, uint32_t u) {
    return u / p.splits * p.chunks +
           static_cast<uint32_t>(static_cast<uint64_t>(u % p.splits) * p.chunks / p.splits);
}

__device__ __forceinline__ uint32_t first_part(const GemmPlan& p, uint32_t block) {
    return static_cast<uint32_t>(static_cast<uint64_t>(block) * p.tiles * p.splits / p.blocks);
}

// The block b with first_part(b) <= u < first_part(b + 1).
__device__ __forceinline__ uint32_t block_of_part(const GemmPlan& p, uint32_t u) {
    const uint64_t parts = static_cast<uint64_t>(p.tiles) * p.splits;
    return static_cast<uint32_t>(((u + 1ull) * p.blocks - 1) / parts);
}

// Adds what all blocks that share a tile have summed up, if this warp is the last of them to come;
// else leaves this warp's sums for that one, and returns false.
template <int kValues>
__device__ __forceinline__ bool add_parts(const GemmPlan& p, float* partials, uint32_t* counters,
                                          uint32_t tile, uint32_t first, uint32_t last,
                                          float (&v)[kValues], int lane) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    // A block has two places: for its first tile, and for its last.
    auto place = [&](uint32_t block) {
        const bool begins_here = first_part(p, block) / p.splits == tile;
        return partials +
               ((static_cast<int64_t>(block) * 2 + (begins_here ? 0 : 1)) * warps + warp) *
                   (kValues * 32) +
               lane;
    };
    float* mine = place(blockIdx.x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) __stcg(mine + i * 32, v[i]);
    __threadfence();
    __syncwarp();
    uint32_t before = 0;
    uint32_t* counter = counters + static_cast<int64_t>(tile) * warps + warp;
    if (lane == 0) before = atomicAdd(counter, 1u);
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before != last - first) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    for (uint32_t block = first; block <= last; ++block) {
        const float* part = place(block);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] += __ldcg(part + i * 32);
    }
    if (lane == 0) *counter = 0;
    return true;
}

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, 2)
    skinny_gemm_kernel(const OffloadSkinnyGemm a, const GemmPlan p, float* partials) {
    using T = typename Math::T;
    constexpr int kTile = Math::kTile;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_kernel_begin();

    Ring<T, kTile> ring{a,
                        p,
                        shared + p.ring_at + warp * p.stages * kTile * p.pitch,
                        shared_address(shared) + warp * p.stages * 8,
                        evict_first_policy(),
                        lane};
    ring.init();
    const uint32_t begin = chunk_of_part(p, first_part(p, blockIdx.x));
    uint32_t end = chunk_of_part(p, first_part(p, blockIdx.x + 1));
    // In the last tile there may be nothing for this warp.
    if (ring.first_output(p.tiles - 1) >= a.outputs) end = min(end, (p.tiles - 1) * p.chunks);

    uint32_t fetch_tile = begin / p.chunks, fetch_chunk = begin % p.chunks, fetched = begin;
    auto fetch_next = [&](int slot) {
        if (fetched < end) {
            ring.fetch(slot, fetch_tile, fetch_chunk);
            ++fetched;
            if (++fetch_chunk == p.chunks) {
                fetch_chunk = 0;
                ++fetch_tile;
            }
        } else {
            ring.fetch_nothing();
        }
    };
    for (int s = 0; s < p.stages; ++s) fetch_next(s);

    // Only the weights are sure to be there before this.
    wait_for_previous_kernel();
    const unsigned char* input = static_cast<const unsigned char*>(a.input);
    const int64_t input_stride = a.input_stride * static_cast<int64_t>(sizeof(T));

    Math math;
    math.clear();
    uint32_t tile = begin / p.chunks, chunk = begin % p.chunks, parity = 0;
    int slot = 0;
    uint4 now[Math::kLoads], next[Math::kLoads];
    Math::load(now, input, input_stride, a.rows, static_cast<int>(chunk) * p.chunk, a.depth, lane);
    for (uint32_t at = begin; at < end; ++at) {
        const int k = static_cast<int>(chunk) * p.chunk;
        const int valid = min(p.chunk, a.depth - k);
        const int blocks = (valid + Math::kBlock - 1) / Math::kBlock;
        const unsigned char* stage = ring.wait(slot, parity);
        if (valid % Math::kBlock) ring.clear_rest(slot, valid);
#pragma unroll 1
        for (int b = 0; b < blocks; ++b) {
            int k_next = k + (b + 1) * Math::kBlock;
            if (b + 1 == blocks) k_next = chunk + 1 == p.chunks ? 0 : k + p.chunk;
            Math::load(next, input, input_stride, a.rows, k_next, a.depth, lane);
            math.multiply(stage + b * Math::kBlock * static_cast<int>(sizeof(T)), p.pitch, now,
                          lane);
#pragma unroll
            for (int i = 0; i < Math::kLoads; ++i) now[i] = next[i];
        }
        __syncwarp();  // all lanes have read the stage
        fetch_next(slot);
        if (++slot == p.stages) {
            slot = 0;
            parity ^= 1;
        }
        const bool tile_ends = ++chunk == p.chunks;
        if (!tile_ends && at + 1 < end) continue;

        float v[Math::kValues];
        math.totals(v, lane);
        math.clear();
        bool whole = true;
        if (p.splits > 1) {
            const uint32_t first = block_of_part(p, tile * p.splits);
            const uint32_t last = block_of_part(p, tile * p.splits + p.splits - 1);
            if (first != last)
                whole = add_parts(p, partials, a.counters, tile, first, last, v, lane);
        }
        if (whole) {
            const T* bias = static_cast<const T*>(a.bias);
            const T* residual = static_cast<const T*>(a.residual);
            T* output = static_cast<T*>(a.output);
            const int64_t first = ring.first_output(tile);
#pragma unroll
            for (int i = 0; i < Math::kValues; ++i) {
                const float up = a.gated ? Math::up(v, i) : 0.f;
                const Place place = Math::place(i, lane);
                const int64_t n = first + ring.output_of(place.weight);
                if (!place.mine || place.row >= a.rows || n >= a.outputs ||
                    ring.is_up(place.weight))
                    continue;
                float y = v[i] + (bias ? to_float(bias[n]) : 0.f);
                y = activate(y, a.activation);
                if (a.gated) y *= up + (bias ? to_float(bias[n + a.outputs]) : 0.f);
                if (residual) y += to_float(residual[place.row * a.residual_stride + n]);
                output[place.row * a.output_stride + n] = from_float<T>(y);
            }
        }
        if (tile_ends) {
            chunk = 0;
            ++tile;
        }
    }
}

}  // namespace offload
