// Many tokens: blocks that stay, each with a ring of rows on their way to shared memory. From there
// a thread reads what it writes, 16 bytes of a head, and what they are rotated with, wherever in
// the head that lies; it has the same place in every head, so that it reads its angles once a row.
#pragma once
#include "async_copy.cuh"
#include "rotary_append_packs.cuh"

namespace offload {

constexpr int kMostRingThreads = 512;

struct RingPlan {
    int stages;       // rows that are under way or being read, at least 2
    int run;          // rows of a block, behind each other; 0: every so many until the end
    int width;        // elements of a row, from its beginning to the end of the last head
    int lanes;        // threads of a head, one for each of its packs
    int row_bytes;    // of a stage's row
    int angle_bytes;  // of each of cos and sin, behind it
};

// Where a head comes from and goes to.
template <typename T>
struct alignas(16) HeadEntry {
    T* target;     // of token 0 of sequence 0: in the query, or in the cache's column 0
    int source;    // in the row
    int in_cache;  // 0: a query; 1: a key; 2: a value
};

// A row and where it is in the batch.
struct RowAt {
    int64_t row;
    int batch, token;

    __device__ __forceinline__ RowAt(int64_t row, int tokens)
        : row(row), batch(static_cast<int>(row / tokens)), token(static_cast<int>(row % tokens)) {}

    __device__ __forceinline__ void advance(const RowAt& step, int tokens) {
        row += step.row;
        batch += step.batch;
        token += step.token;
        if (token >= tokens) {
            token -= tokens;
            batch += 1;
        }
    }
};

template <typename T, bool kNormed>
__global__ void __launch_bounds__(kMostRingThreads, 2)
    rotary_append_in_ring(OffloadRotaryAppend x, RingPlan plan) {
    constexpr int N = 16 / sizeof(T), kQuads = N / 4;
    let_next_kernel_begin();
    extern __shared__ __align__(128) unsigned char shared[];
    const int head_count = x.heads + 2 * x.kv_heads;
    const int half = x.rotary_dim / 2;
    const int groups = blockDim.x / plan.lanes;
    const int group = threadIdx.x / plan.lanes;
    const int at = threadIdx.x % plan.lanes * N;  // in every head
    const int64_t rows = plan.run ? min64(static_cast<int64_t>(x.batch) * x.tokens,
                                          (static_cast<int64_t>(blockIdx.x) + 1) * plan.run)
                                  : static_cast<int64_t>(x.batch) * x.tokens;

    HeadEntry<T>* const table = reinterpret_cast<HeadEntry<T>*>(shared);
    // Of q_norm and of k_norm, with their offset, if there is either.
    float* const weights = reinterpret_cast<float*>(table + head_count);
    T* const bias = reinterpret_cast<T*>(weights + (kNormed ? 2 * x.head_dim : 0));  // of a row
    unsigned char* const ring = reinterpret_cast<unsigned char*>(bias + (x.bias ? plan.width : 0));
    const int stage_bytes = plan.row_bytes + 2 * plan.angle_bytes;
    for (int head = threadIdx.x; head < head_count; head += blockDim.x) {
        HeadEntry<T> entry;
        if (head < x.heads) {
            const int per_group = x.heads / x.kv_heads, kv = head / per_group;
            entry.source = static_cast<int>(x.q_offset + kv * x.q_group_stride) +
                           (head - kv * per_group) * x.head_dim;
            entry.target = static_cast<T*>(x.query) + head * x.query_head_stride;
            entry.in_cache = 0;
        } else {
            const bool is_value = head >= x.heads + x.kv_heads;
            const int kv = head - x.heads - (is_value ? x.kv_heads : 0);
            entry.source =
                static_cast<int>((is_value ? x.v_offset : x.k_offset) + kv * x.kv_group_stride);
            entry.target =
                static_cast<T*>(is_value ? x.value_cache : x.key_cache) + kv * x.cache_head_stride;
            entry.in_cache = is_value ? 2 : 1;
        }
        table[head] = entry;
    }
    if (kNormed) {
        for (int i = threadIdx.x; i < 2 * x.head_dim; i += blockDim.x) {
            const OffloadNorm& norm = i < x.head_dim ? x.q_norm : x.k_norm;
            const T* from = static_cast<const T*>(norm.weight);
            const int column = i < x.head_dim ? i : i - x.head_dim;
            weights[i] = from ? to_float(from[column]) + norm.weight_offset : 1.f;
        }
    }
    if (x.bias)
        for (int i = threadIdx.x * N; i < plan.width; i += blockDim.x * N)
            store(bias + i, load<T, N>(static_cast<const T*>(x.bias) + i));

    // Four neighbours are rotated as one: which angles they have, and with whom.
    bool turns[kQuads];
    int angle[kQuads], partner[kQuads];
    float sign[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
        const int i = at + 4 * q;
        const bool is_second = i >= half;
        turns[q] = i < x.rotary_dim;
        angle[q] = !turns[q] ? 0 : x.interleaved ? i / 2 : is_second ? i - half : i;
        partner[q] = !turns[q] ? i : is_second ? i - half : i + half;
        sign[q] = is_second ? 1.f : -1.f;
    }
    const bool whole = half % N == 0;  // all that a thread has is rotated alike
    const bool centred = x.q_norm.kind == OFFLOAD_NORM_LAYER || x.k_norm.kind == OFFLOAD_NORM_LAYER;
    const float share = 1.f / x.head_dim;
    wait_for_previous_kernel();

    const RowAt step(plan.run ? 1 : gridDim.x, x.tokens);
    const RowAt begin(static_cast<int64_t>(blockIdx.x) * (plan.run ? plan.run : 1), x.tokens);
    RowAt now = begin, next = begin;
    const uint64_t policy = evict_first_policy();
    const auto fetch = [&](int stage) {
        if (next.row < rows) {
            const T* from = static_cast<const T*>(x.qkv) + next.row * x.row_stride;
            const uint32_t to = shared_address(ring + stage * stage_bytes);
            for (int i = threadIdx.x * N; i < plan.width; i += blockDim.x * N)
                copy_async16(to + i * static_cast<int>(sizeof(T)), from + i, policy);
            const int64_t first =
                next.batch * x.rotary_batch_stride + static_cast<int64_t>(next.token) * half;
            // Every sequence may have the same angles: L2 keeps them.
            for (int i = threadIdx.x * 4; i < half; i += blockDim.x * 4) {
                const uint32_t angles = to + plan.row_bytes + i * 4;
                copy_async16_or_zero(angles, x.cos + first + i, true);
                copy_async16_or_zero(angles + plan.angle_bytes, x.sin + first + i, true);
            }
        }
        commit_copies();
        next.advance(step, x.tokens);
    };

    for (int ahead = 0; ahead < plan.stages - 1; ++ahead) fetch(ahead);
    for (int stage = 0; now.row < rows; now.advance(step, x.tokens)) {
        const int64_t column =
            static_cast<int64_t>(x.column[static_cast<int64_t>(now.batch) * x.column_stride]) +
            now.token;
        wait_for_copies(plan.stages - 2);
        __syncthreads();
        // The row before this one has been read; its place is the next to be filled.
        fetch(stage == 0 ? plan.stages - 1 : stage - 1);
        const unsigned char* const here = ring + stage * stage_bytes;
        stage = stage + 1 == plan.stages ? 0 : stage + 1;

        const T* const row = reinterpret_cast<const T*>(here);
        const float* const cos = reinterpret_cast<const float*>(here + plan.row_bytes);
        const float* const sin =
            reinterpret_cast<const float*>(here + plan.row_bytes + plan.angle_bytes);
        float c[N], s[N];
        if (x.interleaved) {
            if (turns[0]) {
                to_floats(load<float, N / 2>(cos + angle[0]), c);
                to_floats(load<float, N / 2>(sin + angle[0]), s);
            }
        } else {
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                if (!turns[q]) continue;
                to_floats(load<float, 4>(cos + angle[q]), c + 4 * q);
                to_floats(load<float, 4>(sin + angle[q]), s + 4 * q);
#pragma unroll
                for (int i = 4 * q; i < 4 * q + 4; ++i) s[i] *= sign[q];
            }
        }
        const int64_t in_query =
            now.batch * x.query_batch_stride + now.token * x.query_token_stride;
        const bool is_column = column >= 0 && column < x.cache_capacity;
        const int64_t in_cache = now.batch * x.cache_batch_stride + column * x.head_dim;

        for (int first = 0; first < head_count; first += groups) {
            const bool there = group < groups && first + group < head_count;
            if (!kNormed && !there) continue;
            const HeadEntry<T> entry = table[min(first + group, head_count - 1)];
            const bool is_value = entry.in_cache == 2;
            float v[N];
            to_floats(load<T, N>(row + entry.source + at), v);
            if (x.bias) add_to<T, N>(v, bias + entry.source + at);
            float mean = 0.f, scale = 1.f;
            const OffloadNorm& norm = entry.in_cache ? x.k_norm : x.q_norm;
            const bool is_normed = kNormed && norm.kind && !is_value;
            // n values from place i of the head.
            const auto normalise = [&](float* y, int i, auto count) {
                constexpr int n = decltype(count)::value;
                const float* const weight = weights + (entry.in_cache ? x.head_dim : 0) + i;
                if (centred) {
#pragma unroll
                    for (int j = 0; j < n; ++j) y[j] -= mean;
                }
#pragma unroll
                for (int j = 0; j < n; j += 4) {
                    float w[4];
                    to_floats(load<float, 4>(weight + j), w);
#pragma unroll
                    for (int k = 0; k < 4; ++k) y[j + k] *= scale * w[k];
                }
                if (norm.bias) add_to<T, n>(y, static_cast<const T*>(norm.bias) + i);
            };
            using All = std::integral_constant<int, N>;
            using Four = std::integral_constant<int, 4>;
            if (kNormed) {
                if (centred) {
                    float sum = 0.f;
#pragma unroll
                    for (int j = 0; j < N; ++j) sum += v[j];
                    sum = sum_of_head(sum, plan.lanes);
                    if (norm.kind == OFFLOAD_NORM_LAYER) mean = sum * share;
                }
                float squares = 0.f;
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const float d = v[j] - mean;
                    squares = fmaf(d, d, squares);
                }
                scale = __frsqrt_rn(sum_of_head(squares, plan.lanes) * share + norm.eps);
                if (is_normed) normalise(v, at, All{});
            }
            if (!is_value && x.interleaved) {
                if (turns[0]) {
#pragma unroll
                    for (int j = 0; j < N / 2; ++j) {
                        const float a = v[2 * j], b = v[2 * j + 1];
                        v[2 * j] = a * c[j] - b * s[j];
                        v[2 * j + 1] = b * c[j] + a * s[j];
                    }
                }
            } else if (!is_value && whole) {
                if (turns[0]) {
                    float p[N];
                    to_floats(load<T, N>(row + entry.source + partner[0]), p);
                    if (x.bias) add_to<T, N>(p, bias + entry.source + partner[0]);
                    if (is_normed) normalise(p, partner[0], All{});
#pragma unroll
                    for (int j = 0; j < N; ++j) v[j] = v[j] * c[j] + p[j] * s[j];
                }
            } else if (!is_value) {
#pragma unroll
                for (int q = 0; q < kQuads; ++q) {
                    if (!turns[q]) continue;
                    float p[4];
                    to_floats(load<T, 4>(row + entry.source + partner[q]), p);
                    if (x.bias) add_to<T, 4>(p, bias + entry.source + partner[q]);
                    if (is_normed) normalise(p, partner[q], Four{});
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        v[4 * q + j] = v[4 * q + j] * c[4 * q + j] + p[j] * s[4 * q + j];
                }
            }
            if (there && (is_column || !entry.in_cache))
                store(entry.target + (entry.in_cache ? in_cache : in_query) + at,
                      from_floats<T, N>(v));
        }
    }
    wait_for_copies(0);
}

// Launches it with `stages` rows in the ring (or fewer, where shared memory holds no more; 0: as
// many as are good) where its packs, its shared memory and its lanes allow; `fits` is false where
// they do not, and nothing is launched.
template <typename T>
int launch_append_ring(const OffloadRotaryAppend& x, int threads, int stages, int run,
                       const Device& device, void* stream, bool* fits) {
    constexpr int N = 16 / sizeof(T);
    *fits = false;
    const bool normed = x.q_norm.kind || x.k_norm.kind;
    RingPlan plan;
    plan.lanes = x.head_dim / N;
    if (x.rotary_dim / 2 % 4 || plan.lanes > threads) return 0;
    if (normed && (plan.lanes > 32 || plan.lanes & (plan.lanes - 1))) return 0;
    if (!in_packs<T, N>(x)) return 0;
    const int64_t width = used_width(x);
    const int64_t heads = x.heads + 2 * static_cast<int64_t>(x.kv_heads);
    const int64_t row = width * sizeof(T), angles = x.rotary_dim / 2 * 4;
    const int64_t fixed = heads * sizeof(HeadEntry<T>) +
                          (normed ? 2 * x.head_dim * sizeof(float) : 0) + (x.bias ? row : 0);
    const int64_t stage = row + 2 * angles, most = device.shared_per_block;
    if (2 * stage + fixed > most) return 0;
    *fits = true;
    plan.width = static_cast<int>(width);
    plan.row_bytes = static_cast<int>(row);
    plan.angle_bytes = static_cast<int>(angles);
    auto kernel = normed ? rotary_append_in_ring<T, true> : rotary_append_in_ring<T, false>;
    RingFit fit;
    if (int status = fit_ring("rotary_append", kernel, threads, stage, fixed,
                              device.shared_per_block, stages, &fit))
        return status;
    plan.stages = fit.rows;
    const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
    plan.run = run;
    const dim3 grid = run ? dim3(static_cast<unsigned>((rows + run - 1) / run))
                          : blocks_that_stay(rows, fit, device);
    return launch("rotary_append", kernel, grid, dim3(threads),
                  static_cast<size_t>(plan.stages * stage + fixed), stream, x.launch_early, x,
                  plan);
}

}  // namespace offload
