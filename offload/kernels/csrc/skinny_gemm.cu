// SBI-GeMM: a few rows of activations times a whole weight, limited by the rate of reading it.
//
// For 16-bit elements the warps of a block work together: skinny_gemm_staged.cuh. What follows here
// is the form for float32, in which every warp works alone. It owns 4 to 16 rows of the weight at a
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
//
// What no 16-byte loads can reach (an odd depth or stride) is computed by a plain kernel. A norm
// that the staged form cannot take along is a kernel before the product.
#include <algorithm>
#include <atomic>

#include "async_copy.cuh"
#include "common.cuh"
#include "skinny_gemm_math.cuh"

namespace offload {
namespace {

constexpr int kMostRows = 16;
constexpr int kMostSize = 1 << 29;   // of depth and outputs: what they add up to stays an int
constexpr int kBarrierBytes = 1024;  // at most 8 warps with 16 stages
constexpr int kNormThreads = 1024;   // of the kernel that normalises rows apart

// How the work is cut and where things lie in shared memory.
struct Plan {
    uint32_t tiles;   // of warps * tile weight rows (half as many outputs with a gate)
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
    int32_t tile_outputs;        // at most
    int32_t stage_bytes;         // weight rows, activations, the norm's weight and bias
    int32_t inputs_at, norm_at;  // in a stage
    int32_t sums_at;             // what the other block of the cluster leaves
    int32_t sum_pitch;           // floats from row to row of a tile's sums
    int32_t late_norm;           // skinny_gemm_norm.cuh
    int32_t turned;              // blocks begin at different depths
};

// Part u of all tiles' parts begins at this chunk of all tiles' chunks.
__host__ __device__ __forceinline__ uint32_t chunk_of_part(const Plan& p, uint32_t u) {
    return u / p.splits * p.chunks +
           static_cast<uint32_t>(static_cast<uint64_t>(u % p.splits) * p.chunks / p.splits);
}

__device__ __forceinline__ uint32_t first_part(const Plan& p, uint32_t block) {
    return static_cast<uint32_t>(static_cast<uint64_t>(block) * p.tiles * p.splits / p.blocks);
}

// The block b with first_part(b) <= u < first_part(b + 1).
__device__ __forceinline__ uint32_t block_of_part(const Plan& p, uint32_t u) {
    const uint64_t parts = static_cast<uint64_t>(p.tiles) * p.splits;
    return static_cast<uint32_t>(((u + 1ull) * p.blocks - 1) / parts);
}

}  // namespace
}  // namespace offload

#include "skinny_gemm_staged.cuh"

namespace offload {
namespace {

// One warp's stages: which rows go there, how they come, and when they are there.
template <typename T, int kTile>
struct Ring {
    const OffloadSkinnyGemm& a;
    const Plan& p;
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

// Adds what all blocks that share a tile have summed up, if this warp is the last of them to come;
// else leaves this warp's sums for that one, and returns false.
template <int kValues>
__device__ __forceinline__ bool add_parts(const Plan& p, float* partials, uint32_t* counters,
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
    skinny_gemm_kernel(const OffloadSkinnyGemm a, const Plan p, float* partials) {
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

// Normalises rows into `to`, at a pitch of `pitch` elements: one block a row.
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    normalize_rows_kernel(const OffloadSkinnyGemm a, T* to, int64_t pitch) {
    __shared__ float scratch[33];
    let_next_kernel_begin();
    wait_for_previous_kernel();
    const T* x = static_cast<const T*>(a.input) + blockIdx.x * a.input_stride;
    const T* weight = static_cast<const T*>(a.norm.weight);
    const T* bias = static_cast<const T*>(a.norm.bias);
    auto total = [&](float v) {
        v = warp_sum(v);
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x < 32) {
            v = warp_sum(threadIdx.x < blockDim.x / 32 ? scratch[threadIdx.x] : 0.f);
            if (threadIdx.x == 0) scratch[32] = v;
        }
        __syncthreads();
        v = scratch[32];
        __syncthreads();
        return v;
    };
    float mean = 0.f, square = 0.f;
    if (a.norm.kind == OFFLOAD_NORM_LAYER) {
        for (int i = threadIdx.x; i < a.depth; i += blockDim.x) mean += to_float(x[i]);
        mean = total(mean) / a.depth;
    }
    for (int i = threadIdx.x; i < a.depth; i += blockDim.x) {
        const float y = to_float(x[i]) - mean;
        square += y * y;
    }
    const float scale = 1.f / sqrtf(total(square) / a.depth + a.norm.eps);
    for (int i = threadIdx.x; i < a.depth; i += blockDim.x) {
        float y = (to_float(x[i]) - mean) * scale;
        if (weight) y *= to_float(weight[i]) + a.norm.weight_offset;
        if (bias) y += to_float(bias[i]);
        to[blockIdx.x * pitch + i] = from_float<T>(y);
    }
}

// Any depth, stride and address: a warp an output.
template <typename T>
__global__ void __launch_bounds__(256) plain_gemm_kernel(const OffloadSkinnyGemm a) {
    const int lane = threadIdx.x % 32;
    const int64_t n = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    let_next_kernel_begin();
    wait_for_previous_kernel();
    if (n >= a.outputs) return;
    const T* input = static_cast<const T*>(a.input);
    const T* bias = static_cast<const T*>(a.bias);
    float sums[2][kMostRows] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half && !a.gated) break;
        const T* weight =
            static_cast<const T*>(a.weight) + (n + (half ? a.outputs : 0)) * a.weight_stride;
        for (int k = lane; k < a.depth; k += 32) {
            const float w = to_float(weight[k]);
#pragma unroll
            for (int r = 0; r < kMostRows; ++r)
                if (r < a.rows)
                    sums[half][r] = fmaf(w, to_float(input[r * a.input_stride + k]), sums[half][r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kMostRows; ++r) {
        if (r >= a.rows) break;
        float y = warp_sum(sums[0][r]), up = a.gated ? warp_sum(sums[1][r]) : 0.f;
        if (lane) continue;
        y = activate(y + (bias ? to_float(bias[n]) : 0.f), a.activation);
        if (a.gated) y *= up + (bias ? to_float(bias[n + a.outputs]) : 0.f);
        if (a.residual) y += to_float(static_cast<const T*>(a.residual)[r * a.residual_stride + n]);
        static_cast<T*>(a.output)[r * a.output_stride + n] = from_float<T>(y);
    }
}

// ---- on the host ----

using Kernel = void (*)(OffloadSkinnyGemm, Plan, float*);

enum class Way { kFma, kStaged };  // each warp alone, or all of a block together

struct Variant {
    Way way;
    int tile;         // weight rows of a warp; of a block at most, if staged
    int warps;        // of a block
    int chunk_bytes;  // of a row in a stage: a power of two
    int stages;       // at most, if staged
    bool bulk;
    bool turned;  // blocks begin at different depths
};

constexpr Variant kVariants[] = {
    {Way::kStaged, 64, 16, 512, 6, false, false},  {Way::kStaged, 128, 16, 512, 6, false, false},
    {Way::kStaged, 32, 16, 1024, 6, false, false}, {Way::kStaged, 128, 16, 512, 6, false, true},
    {Way::kFma, 16, 4, 512, 3, true, false},  // 101 KB, as the next two
    {Way::kFma, 8, 4, 1024, 3, true, false},       {Way::kFma, 4, 4, 512, 12, true, false},
    {Way::kFma, 16, 4, 512, 3, false, false},  // by cp.async, as those below
    {Way::kFma, 8, 4, 512, 6, false, false},       {Way::kFma, 4, 4, 512, 8, false, false},
};
constexpr int kVariantCount = static_cast<int>(sizeof kVariants / sizeof *kVariants);

struct Choice {
    Kernel kernel = nullptr;
    int index = 0;  // of the kernel, for what must be told to CUDA once
    int threads = 0;
    int block = 0;  // elements of the depth at once
    int parts = 0;  // of a staged block's chunk
};

template <class Math>
Choice choice(int index) {
    return {skinny_gemm_kernel<Math>, index, Math::kThreads, Math::kBlock, 0};
}

template <typename T, int kColumns, int kTile, int kChunkBytes, bool kNormed>
Choice staged(int index) {
    return {staged_gemm_kernel<T, kColumns, kTile, kChunkBytes, kNormed>, index, kStagedThreads,
            kChunkBytes / static_cast<int>(sizeof(T)),
            StagedShape<kColumns, kTile, kChunkBytes>::kParts};
}

constexpr int kKernelCount = 32;

template <typename T, int kColumns, bool kNormed>
Choice staged_kernel(const Variant& v, int base) {
    if (v.tile == 32) return staged<T, kColumns, 32, 1024, kNormed>(base);
    if (v.tile == 64) return staged<T, kColumns, 64, 512, kNormed>(base + 1);
    return staged<T, kColumns, 128, 512, kNormed>(base + 2);
}

// The kernel for a variant on `columns` rows and what of a norm lies beside them, or none.
template <typename T>
Choice half_kernel(const Variant& v, int columns, bool normed, int base) {
    if (v.way != Way::kStaged) return {};
    if (columns <= 8)
        return normed ? staged_kernel<T, 1, true>(v, base)
                      : staged_kernel<T, 1, false>(v, base + 3);
    return normed ? staged_kernel<T, 2, true>(v, base + 6)
                  : staged_kernel<T, 2, false>(v, base + 9);
}

Choice float_kernel(const Variant& v, int rows) {
    if (v.way != Way::kFma) return {};
    if (v.tile == 16 && rows <= 4) {
        if (rows == 1) return choice<Fma<1, 16>>(0);
        return rows == 2 ? choice<Fma<2, 16>>(1) : choice<Fma<4, 16>>(2);
    }
    if (v.tile == 8 && rows > 4 && rows <= 8) return choice<Fma<8, 8>>(3);
    if (v.tile == 4 && rows > 8) return choice<Fma<16, 4>>(4);
    return {};
}

int64_t element_bytes(const OffloadSkinnyGemm& a) { return a.dtype == OFFLOAD_F32 ? 4 : 2; }

// Whether 16-byte loads reach everything; a null pointer counts as aligned.
bool is_wide(const OffloadSkinnyGemm& a) {
    const int64_t width = 16 / element_bytes(a);
    return a.depth % width == 0 && a.weight_stride % width == 0 && aligned16(a.weight);
}

bool input_is_wide(const OffloadSkinnyGemm& a) {
    const int64_t width = 16 / element_bytes(a);
    return (a.rows == 1 || a.input_stride % width == 0) && aligned16(a.input);
}

// Whether the staged form can take the norm along; d + d * weight has only one kind of offset.
bool takes_norm(const OffloadSkinnyGemm& a) {
    const bool offset = a.norm.weight_offset != 0.f;
    return a.norm.kind != OFFLOAD_NORM_NONE && input_is_wide(a) && aligned16(a.norm.weight) &&
           aligned16(a.norm.bias) &&
           (!offset || (a.norm.weight_offset == 1.f && a.norm.kind == OFFLOAD_NORM_RMS)) &&
           (a.norm.kind == OFFLOAD_NORM_LAYER ? a.rows <= kMostRows - 2 : !a.norm.bias);
}

// Rows, and a layer norm's weight and bias where they are multiplied beside them.
int columns_of(const OffloadSkinnyGemm& a) {
    return a.rows + (takes_norm(a) && a.norm.kind == OFFLOAD_NORM_LAYER ? 2 : 0);
}

int fma_ring_bytes(const Variant& v) { return v.warps * v.stages * v.tile * (v.chunk_bytes + 16); }

Choice kernel_of(const Variant& v, const OffloadSkinnyGemm& a, const Device& device) {
    Choice found;
    if (v.bulk && device.major < 9) return found;
    if (a.dtype == OFFLOAD_F32) found = float_kernel(v, a.rows);
    if (a.dtype == OFFLOAD_F16) found = half_kernel<__half>(v, columns_of(a), takes_norm(a), 8);
    if (a.dtype == OFFLOAD_BF16)
        found = half_kernel<__nv_bfloat16>(v, columns_of(a), takes_norm(a), 20);
    if (found.kernel &&
        (v.warps * 32 > found.threads || v.chunk_bytes % (found.block * element_bytes(a)) != 0))
        found.kernel = nullptr;
    if (v.way == Way::kFma && kBarrierBytes + fma_ring_bytes(v) > device.shared_per_block)
        found.kernel = nullptr;
    return found;
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// How many parts to cut a tile's depth into: the fewest that keep all blocks busy to 97 %.
uint32_t choose_splits(int64_t tiles, int64_t chunks, int64_t blocks) {
    uint32_t best = 1;
    double best_busy = 0;
    for (int64_t s = 1; s <= std::min<int64_t>(chunks, 64); ++s) {
        const int64_t parts = tiles * s, turns = (parts + blocks - 1) / blocks;
        const double busy = static_cast<double>(parts) / static_cast<double>(turns * blocks);
        if (busy > best_busy + 0.005) {
            best_busy = busy;
            best = static_cast<uint32_t>(s);
        }
        if (busy >= 0.97) break;
    }
    return best;
}

struct Call {
    const Variant* variant;  // null: the plain kernel
    Choice choice;
    Plan plan;
    int shared;
    bool norm_apart;      // a kernel of its own normalises the rows first
    int64_t norm_bytes;   // of workspace, for these
    int64_t total_bytes;  // of workspace
    int64_t counters;
};

int check_sizes(const OffloadSkinnyGemm& a) {
    if (a.dtype < OFFLOAD_F32 || a.dtype > OFFLOAD_BF16)
        return refuse("skinny_gemm: dtype %d is unknown", a.dtype);
    if (a.rows < 0 || a.rows > kMostRows)
        return refuse("skinny_gemm: rows must be 0 to %d, not %d", kMostRows, a.rows);
    if (a.outputs < 1 || a.depth < 1 || a.outputs > kMostSize || a.depth > kMostSize)
        return refuse("skinny_gemm: outputs and depth must be 1 to %d, not %d and %d", kMostSize,
                      a.outputs, a.depth);
    if (a.weight_stride < a.depth || (a.rows > 1 && a.input_stride < a.depth))
        return refuse("skinny_gemm: strides of input and weight must be at least the depth, %d",
                      a.depth);
    if (a.rows > 1 &&
        (a.output_stride < a.outputs || (a.residual && a.residual_stride < a.outputs)))
        return refuse("skinny_gemm: strides of output and residual must be at least outputs, %d",
                      a.outputs);
    if (a.activation < OFFLOAD_IDENTITY || a.activation > OFFLOAD_SILU)
        return refuse("skinny_gemm: activation %d is unknown", a.activation);
    if (a.norm.kind < OFFLOAD_NORM_NONE || a.norm.kind > OFFLOAD_NORM_RMS)
        return refuse("skinny_gemm: norm kind %d is unknown", a.norm.kind);
    if (a.variant < 0 || a.splits < 0)
        return refuse("skinny_gemm: variant and splits must not be negative, got %d and %d",
                      a.variant, a.splits);
    return 0;
}

// Weight rows that a multiprocessor has to multiply.
int64_t rows_of_block(const OffloadSkinnyGemm& a, const Device& device) {
    return ((a.gated ? 2ll : 1ll) * a.outputs - 1) / device.multiprocessors + 1;
}

// Whether two blocks should have twice the outputs and half of the depth each. Many activations
// beside few weight rows cost L2 too much; up to 32 of these a tile of 32 is quicker all the same.
bool shares_depth(const OffloadSkinnyGemm& a, const Device& device) {
    const int64_t rows = rows_of_block(a, device);
    return device.major >= 9 && a.rows > 8 && rows > 32 && rows <= 48;
}

// Where nothing was measured. 16 bits: the smallest tile that holds all of a block's outputs keeps
// most warps busy; where several must follow each other, the largest, at depths that differ from
// block to block. float32: the first that can run.
int default_variant(const OffloadSkinnyGemm& a, const Device& device) {
    const int64_t rows = rows_of_block(a, device) * (shares_depth(a, device) ? 2 : 1);
    const int tile = rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
    const bool turned = rows > 128 || shares_depth(a, device);
    for (int i = 0; i < kVariantCount; ++i) {
        const Variant& v = kVariants[i];
        if (v.way == Way::kStaged && (v.tile != tile || v.turned != turned)) continue;
        if (kernel_of(v, a, device).kernel) return i;
    }
    return -1;
}

int variant_count(const OffloadSkinnyGemm& a, const Device& device) {
    int count = 0;
    for (const Variant& v : kVariants) count += kernel_of(v, a, device).kernel != nullptr;
    return count;
}

// The table's index of the n-th (from 1) variant that can run these arguments.
int nth_variant(const OffloadSkinnyGemm& a, const Device& device, int n) {
    for (int i = 0; i < kVariantCount; ++i)
        if (kernel_of(kVariants[i], a, device).kernel && --n == 0) return i;
    return -1;
}

uint32_t cluster_size(const OffloadSkinnyGemm& a, const Device& device, const Plan& p) {
    if (device.major < 9 || p.chunks < 2 || device.multiprocessors < 2) return 1;
    if (a.splits) return std::min(a.splits, 2);
    return shares_depth(a, device) ? 2 : 1;
}

void plan_staged(const OffloadSkinnyGemm& a, const Device& device, Call& call) {
    const Variant& v = *call.variant;
    Plan& p = call.plan;
    p.late_norm = takes_norm(a);
    if (p.late_norm) call.norm_apart = false;
    p.turned = v.turned;
    p.splits = cluster_size(a, device, p);
    const int teams = device.multiprocessors / static_cast<int>(p.splits);
    p.blocks = static_cast<uint32_t>(teams) * p.splits;

    const int norm_rows = !p.late_norm ? 0 : a.norm.kind == OFFLOAD_NORM_LAYER ? 2 : 1;
    const int most = v.tile / (a.gated ? 2 : 1), group = a.gated ? 8 : 16;
    const int outputs = (a.outputs - 1) / teams + 1;
    // Fewer rows a tile, if three stages would not fit.
    for (int tiles = (outputs - 1) / most + 1;; ++tiles) {
        p.tile_outputs = (outputs - 1) / tiles + 1;
        const int rows = ((p.tile_outputs - 1) / group + 1) * 16;
        p.inputs_at = rows * v.chunk_bytes;
        p.norm_at = p.inputs_at + a.rows * v.chunk_bytes;
        p.sum_pitch = rows + 4;  // lanes write rows 2 apart to banks 8 apart
        const int values =
            (a.rows + (norm_rows == 2 ? 2 : 0)) * p.sum_pitch + (p.late_norm ? 2 * kMostRows : 0);
        const int left = call.choice.parts * values * static_cast<int>(sizeof(float));
        p.stage_bytes = static_cast<int32_t>(
            round_up(std::max(p.norm_at + norm_rows * v.chunk_bytes, left), 128));
        p.sums_at = kStagedHead;
        p.ring_at = static_cast<int32_t>(
            round_up(kStagedHead + (p.splits > 1 ? values * 4 * std::min(tiles, 2) : 0), 128));
        p.stages = std::min(
            {v.stages, kMostStages, (device.shared_per_block - p.ring_at) / p.stage_bytes});
        if (p.stages >= 3 || p.tile_outputs <= group) break;
    }
    p.stages = std::max<int32_t>(p.stages, 2);
    call.shared = p.ring_at + p.stages * p.stage_bytes;
}

int make_call(const OffloadSkinnyGemm& a, const Device& device, Call& call) {
    call = {};
    const bool norm = a.norm.kind != OFFLOAD_NORM_NONE;
    const int64_t element = element_bytes(a), width = 16 / element;
    call.norm_bytes = norm ? round_up(a.rows * round_up(a.depth, width) * element, 256) : 0;
    call.total_bytes = call.norm_bytes;
    call.norm_apart = norm;
    int index = -1;
    if (is_wide(a) && (norm || input_is_wide(a))) {
        index = a.variant ? nth_variant(a, device, a.variant) : default_variant(a, device);
        if (a.variant && index < 0)
            return refuse("skinny_gemm: variant must be 0 to %d here, not %d",
                          variant_count(a, device), a.variant);
    } else if (a.variant > std::max(1, variant_count(a, device))) {
        return refuse("skinny_gemm: variant must be 0 to %d here, not %d",
                      std::max(1, variant_count(a, device)), a.variant);
    }
    if (index < 0) return 0;  // the plain kernel

    const Variant& v = kVariants[index];
    call.variant = &v;
    call.choice = kernel_of(v, a, device);
    Plan& p = call.plan;
    p.chunk = static_cast<int32_t>(v.chunk_bytes / element);
    const int64_t chunks = (static_cast<int64_t>(a.depth) + p.chunk - 1) / p.chunk;
    const int64_t per_tile = v.warps * v.tile / (a.gated ? 2 : 1);
    const int64_t tiles = (static_cast<int64_t>(a.outputs) + per_tile - 1) / per_tile;
    if (tiles * chunks >= (1ll << 31))
        return refuse("skinny_gemm: a weight of %d x %d is too large", a.outputs, a.depth);
    p.chunks = static_cast<uint32_t>(chunks);
    if (v.way == Way::kStaged) {
        plan_staged(a, device, call);
        return 0;
    }

    p.pitch = v.chunk_bytes + 16;
    p.stages = v.stages;
    while (1 << p.row_shift < v.chunk_bytes) ++p.row_shift;
    p.bulk = v.bulk;
    p.tiles = static_cast<uint32_t>(tiles);
    p.splits = a.splits ? static_cast<uint32_t>(std::min<int64_t>(a.splits, chunks))
                        : choose_splits(tiles, chunks, device.multiprocessors);
    p.blocks = static_cast<uint32_t>(std::min<int64_t>(tiles * p.splits, device.multiprocessors));
    p.ring_at = kBarrierBytes;
    call.shared = p.ring_at + fma_ring_bytes(v);
    if (p.splits > 1) {
        const int bucket = a.rows == 1   ? 1
                           : a.rows == 2 ? 2
                           : a.rows <= 4 ? 4
                           : a.rows <= 8 ? 8
                                         : 16;
        // What a warp leaves of a tile: whole registers of 32 lanes.
        const int64_t values = round_up(v.tile * bucket, 32);
        call.total_bytes += static_cast<int64_t>(p.blocks) * 2 * v.warps * values * 4;
        call.counters = tiles * v.warps;
    }
    return 0;
}

// Tells CUDA once a kernel and device how much shared memory the kernel may have.
int prepare(const Choice& choice, const Device& device) {
    static std::atomic<uint64_t> prepared[kKernelCount];
    const uint64_t bit = 1ull << device.index;
    if (prepared[choice.index].load(std::memory_order_acquire) & bit) return 0;
    const void* kernel = reinterpret_cast<const void*>(choice.kernel);
    if (int status =
            cuda_status("skinny_gemm: cudaFuncSetAttribute",
                        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             device.shared_per_block)))
        return status;
    // All of it, so that the next kernel's blocks find room beside this one's.
    if (int status =
            cuda_status("skinny_gemm: cudaFuncSetAttribute",
                        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared)))
        return status;
    prepared[choice.index].fetch_or(bit, std::memory_order_release);
    return 0;
}

template <typename T>
int launch_norm(const OffloadSkinnyGemm& a, int64_t pitch, void* stream) {
    return launch("skinny_gemm: norm", normalize_rows_kernel<T>, dim3(a.rows), dim3(kNormThreads),
                  0, stream, a.launch_early, a, reinterpret_cast<T*>(a.workspace), pitch);
}

template <typename T>
int launch_plain(const OffloadSkinnyGemm& a, void* stream) {
    constexpr int kWarps = 8;
    return launch("skinny_gemm: plain", plain_gemm_kernel<T>,
                  dim3((a.outputs + kWarps - 1) / kWarps), dim3(kWarps * 32), 0, stream,
                  a.launch_early, a);
}

int launch_staged(const OffloadSkinnyGemm& a, const Call& call, const Device& device,
                  void* stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(call.plan.blocks);
    config.blockDim = dim3(kStagedThreads);
    config.dynamicSmemBytes = call.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    // Older devices refuse both.
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (a.launch_early && device.major >= 9) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (call.plan.splits > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = call.plan.splits;
        attributes[config.numAttrs].val.clusterDim.y = 1;
        attributes[config.numAttrs++].val.clusterDim.z = 1;
    }
    return cuda_status("skinny_gemm", cudaLaunchKernelEx(&config, call.choice.kernel, a, call.plan,
                                                         static_cast<float*>(nullptr)));
}

int run(const OffloadSkinnyGemm& arguments, void* stream) {
    OffloadSkinnyGemm a = arguments;
    if (int status = check_sizes(a)) return status;
    if (a.rows == 0) return 0;
    if (!a.input || !a.weight || !a.output)
        return refuse("skinny_gemm: input, weight and output must not be null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    Call call;
    if (int status = make_call(a, device, call)) return status;
    const int64_t needed = call.norm_apart ? call.total_bytes
                           : call.counters ? call.total_bytes
                                           : 0;
    if (needed > a.workspace_bytes || (needed && (!a.workspace || !aligned16(a.workspace))))
        return refuse("skinny_gemm: needs %lld bytes of workspace at a multiple of 16, got %lld",
                      static_cast<long long>(needed), static_cast<long long>(a.workspace_bytes));
    if (call.counters && !a.counters) return refuse("skinny_gemm: counters must not be null");

    float* partials = a.workspace ? a.workspace + call.norm_bytes / 4 : nullptr;
    if (call.norm_apart) {
        const int64_t pitch = round_up(a.depth, 16 / element_bytes(a));
        int status = 0;
        if (a.dtype == OFFLOAD_F32) status = launch_norm<float>(a, pitch, stream);
        if (a.dtype == OFFLOAD_F16) status = launch_norm<__half>(a, pitch, stream);
        if (a.dtype == OFFLOAD_BF16) status = launch_norm<__nv_bfloat16>(a, pitch, stream);
        if (status) return status;
        a.input = a.workspace;
        a.input_stride = pitch;
        a.norm = {};
        a.launch_early = 1;  // behind the norm
    }
    if (!call.variant) {
        if (a.dtype == OFFLOAD_F32) return launch_plain<float>(a, stream);
        if (a.dtype == OFFLOAD_F16) return launch_plain<__half>(a, stream);
        return launch_plain<__nv_bfloat16>(a, stream);
    }
    if (int status = prepare(call.choice, device)) return status;
    if (call.variant->way == Way::kStaged) return launch_staged(a, call, device, stream);
    return launch("skinny_gemm", call.choice.kernel, dim3(call.plan.blocks),
                  dim3(call.variant->warps * 32), call.shared, stream, a.launch_early, a, call.plan,
                  partials);
}

// The sizes of a call whose pointers may all be null.
int size_call(const OffloadSkinnyGemm& a, Call& call) {
    if (int status = check_sizes(a)) return status;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    call = {};
    return a.rows ? make_call(a, device, call) : 0;
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_skinny_gemm(const OffloadSkinnyGemm* arguments, void* stream) {
    return offload::run(*arguments, stream);
}

OFFLOAD_API int64_t offload_skinny_gemm_workspace(const OffloadSkinnyGemm* arguments) {
    offload::Call call;
    return offload::size_call(*arguments, call) ? -1 : call.total_bytes;
}

OFFLOAD_API int64_t offload_skinny_gemm_counters(const OffloadSkinnyGemm* arguments) {
    offload::Call call;
    return offload::size_call(*arguments, call) ? -1 : call.counters;
}

OFFLOAD_API int32_t offload_skinny_gemm_variants(const OffloadSkinnyGemm* arguments) {
    using namespace offload;
    if (check_sizes(*arguments)) return -1;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    const bool wide = is_wide(*arguments) &&
                      (arguments->norm.kind != OFFLOAD_NORM_NONE || input_is_wide(*arguments));
    return wide ? std::max(1, variant_count(*arguments, device)) : 1;
}
