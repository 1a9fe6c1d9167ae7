// Whole packs: a thread has one place in the head, N elements and the N that they are rotated with,
// and goes through a few heads at that place, so that its angles and its norm's weights are read
// once; all its loads are under way before the first is used. Neighbouring threads have
// neighbouring places, then neighbouring heads. All heads of a block are of one kind, and what can
// be known before the launch is: index arithmetic would cost as much as the rotation.
#pragma once
#include "elementwise.cuh"

namespace offload {

constexpr int kPackThreads = 128;  // of a block, at most
constexpr int kPackHeads = 4;      // of one thread, at most

// The queries, the keys or the values of a row.
struct HeadsOfKind {
    int count;
    int blocks;      // of a row
    int per_thread;  // heads
    int offset;      // of the first, in the row
    int stride;      // from one to the next; of queries, from one group to the next
};

struct PackPlan {
    HeadsOfKind kinds[3];  // queries, keys, values
    Divisor lanes;         // threads of a head; with norms a power of two, at most a warp
    Divisor blocks;        // of a row
    Divisor tokens;        // of a sequence
    Divisor per_group;     // queries of a group; 1 where all lie at one stride
    int units;             // pairs of packs in a head, one a lane
    int rotated;           // how many of them are rotated; they come first
    int groups;            // heads of a block at a time
    int ahead;             // a block asks for the row so many after its own; 0: for none
    int row_bytes;         // of a row that is asked for
    float share;           // 1 / head_dim
};

template <typename T, int N, bool kNormed>
__global__ void __launch_bounds__(kPackThreads, kNormed ? 4 : 6)
    rotary_append_packs(OffloadRotaryAppend x, PackPlan plan) {
    let_next_kernel_begin();
    const int row_index = plan.blocks(blockIdx.x);
    const int part = blockIdx.x - row_index * plan.blocks.by;
    const int batch = plan.tokens(row_index), token = row_index - batch * plan.tokens.by;
    const int before_values = plan.kinds[0].blocks + plan.kinds[1].blocks;
    const int kind = (part >= plan.kinds[0].blocks) + (part >= before_values);
    const HeadsOfKind& heads = plan.kinds[kind];
    const int part_of_kind =
        part - (kind ? plan.kinds[0].blocks : 0) - (kind == 2 ? plan.kinds[1].blocks : 0);
    const int group = plan.lanes(threadIdx.x), lane = threadIdx.x - group * plan.lanes.by;
    const int first = part_of_kind * heads.per_thread * plan.groups + group;
    const T* const bias = static_cast<const T*>(x.bias);

    // The packs at a and b; b is beyond the head's end where packs are odd in number.
    const int unit = min(lane, plan.units - 1);
    const bool turns = unit < plan.rotated && kind < 2;
    const bool apart = unit < plan.rotated && !x.interleaved;
    const int a = apart ? unit * N : 2 * unit * N;
    const int b = apart ? unit * N + x.rotary_dim / 2 : 2 * unit * N + N;
    const bool inside = group < plan.groups && lane < plan.units, has_b = b < x.head_dim;
    const int b_or_a = has_b ? b : a;

    // Beyond the last head (or with lanes beyond the last group) the last one is read again, so
    // that no load has a branch of its own; it is not written.
    int sources[kPackHeads];
#pragma unroll
    for (int i = 0; i < kPackHeads; ++i) {
        const int head = min(first + i * plan.groups, heads.count - 1);
        if (kind || plan.per_group.by == 1) {
            sources[i] = heads.offset + head * heads.stride;
        } else {
            const int kv = plan.per_group(head);
            sources[i] =
                heads.offset + kv * heads.stride + (head - kv * plan.per_group.by) * x.head_dim;
        }
        if (bias && gridDim.x <= 256) prefetch(bias + sources[i]);  // else L1 and L2 have it
    }
    wait_for_previous_kernel();

    const T* const row =
        static_cast<const T*>(x.qkv) + static_cast<int64_t>(row_index) * x.row_stride;
    Pack<T, N> as[kPackHeads], bs[kPackHeads];
#pragma unroll
    for (int i = 0; i < kPackHeads; ++i) {
        if (i < heads.per_thread) {  // for the whole block
            as[i] = load_once<T, N>(row + a + sources[i]);
            bs[i] = load_once<T, N>(row + b_or_a + sources[i]);
        }
    }
    if (plan.ahead && part == 0 && threadIdx.x == 0 && row_index + plan.ahead < x.batch * x.tokens)
        prefetch_bulk(row + static_cast<int64_t>(plan.ahead) * x.row_stride, plan.row_bytes);

    float c[N], s[N];
    if (turns) {
        const int64_t angles = batch * x.rotary_batch_stride +
                               static_cast<int64_t>(token) * (x.rotary_dim / 2) + unit * N;
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            to_floats(load<float, 4>(x.cos + angles + i), c + i);
            to_floats(load<float, 4>(x.sin + angles + i), s + i);
        }
    }
    T* target;
    int64_t stride;
    bool is_written = inside;
    if (kind == 0) {
        target =
            static_cast<T*>(x.query) + batch * x.query_batch_stride + token * x.query_token_stride;
        stride = x.query_head_stride;
    } else {
        const int64_t column =
            static_cast<int64_t>(x.column[static_cast<int64_t>(batch) * x.column_stride]) + token;
        target = static_cast<T*>(kind == 1 ? x.key_cache : x.value_cache) +
                 batch * x.cache_batch_stride + column * x.head_dim;
        stride = x.cache_head_stride;
        is_written = inside && column >= 0 && column < x.cache_capacity;
    }

    const OffloadNorm& norm = kind ? x.k_norm : x.q_norm;
    const bool is_normed = kNormed && kind < 2 && norm.kind;
    float weights[kNormed ? 2 * N : 1];
    if (kNormed && is_normed) {
#pragma unroll
        for (int j = 0; j < 2 * N; ++j) weights[j] = 1.f;
        if (norm.weight) {
            to_floats(load<T, N>(static_cast<const T*>(norm.weight) + a), weights);
            to_floats(load<T, N>(static_cast<const T*>(norm.weight) + b_or_a), weights + N);
#pragma unroll
            for (int j = 0; j < 2 * N; ++j) weights[j] += norm.weight_offset;
        }
    }

#pragma unroll
    for (int i = 0; i < kPackHeads; ++i) {
        if (i >= heads.per_thread) continue;
        float v[2 * N];
        to_floats(as[i], v);
        to_floats(bs[i], v + N);
        if (bias) {
            add_to<T, N>(v, bias + sources[i] + a);
            add_to<T, N>(v + N, bias + sources[i] + b_or_a);
        }
        if (kNormed && is_normed) {
            const auto mean_of = [&](auto of_value) {
                float first_half = 0.f, second_half = 0.f;
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    first_half = of_value(v[j], first_half);
                    second_half = of_value(v[N + j], second_half);
                }
                const float both = first_half + (has_b ? second_half : 0.f);
                return sum_of_head(lane < plan.units ? both : 0.f, plan.lanes.by) * plan.share;
            };
            if (norm.kind == OFFLOAD_NORM_LAYER) {
                const float mean = mean_of([](float y, float sum) { return sum + y; });
#pragma unroll
                for (int j = 0; j < 2 * N; ++j) v[j] -= mean;
            }
            const float scale =
                __frsqrt_rn(mean_of([](float y, float sum) { return fmaf(y, y, sum); }) + norm.eps);
#pragma unroll
            for (int j = 0; j < 2 * N; ++j) v[j] *= scale * weights[j];
            if (norm.bias) {
                add_to<T, N>(v, static_cast<const T*>(norm.bias) + a);
                add_to<T, N>(v + N, static_cast<const T*>(norm.bias) + b_or_a);
            }
        }
        if (turns) {
            const auto turn = [&](float& p, float& q, int j) {
                const float before = p;
                p = p * c[j] - q * s[j];
                q = q * c[j] + before * s[j];
            };
#pragma unroll
            for (int j = 0; j < N; ++j)
                if (x.interleaved)
                    turn(v[2 * j], v[2 * j + 1], j);
                else
                    turn(v[j], v[N + j], j);
        }
        const int head = first + i * plan.groups;
        if (!is_written || head >= heads.count) continue;
        T* const to = target + head * stride;
        store(to + a, from_floats<T, N>(v));
        if (has_b) store(to + b, from_floats<T, N>(v + N));
    }
}

template <int N>
int pairs_of_packs(const OffloadRotaryAppend& x) {
    return x.rotary_dim / 2 / N + (x.head_dim - x.rotary_dim + 2 * N - 1) / (2 * N);
}

// Whether every address is a multiple of a pack.
template <typename T, int N>
bool in_packs(const OffloadRotaryAppend& x) {
    for (int64_t n :
         {static_cast<int64_t>(x.head_dim), x.row_stride, x.q_offset, x.k_offset, x.v_offset,
          x.q_group_stride, x.kv_group_stride, x.query_batch_stride, x.query_token_stride,
          x.query_head_stride, x.cache_batch_stride, x.cache_head_stride})
        if (n % N) return false;
    for (const void* p :
         {x.qkv, x.bias, static_cast<const void*>(x.query), static_cast<const void*>(x.key_cache),
          static_cast<const void*>(x.value_cache), x.q_norm.weight, x.q_norm.bias, x.k_norm.weight,
          x.k_norm.bias})
        if (!aligned<T, N>(p)) return false;
    return aligned16(x.cos) && aligned16(x.sin) && x.rotary_batch_stride % 4 == 0;
}

inline bool has_norm(const OffloadRotaryAppend& x) { return x.q_norm.kind || x.k_norm.kind; }

// Elements of a row, from its beginning to the end of the last head.
inline int64_t used_width(const OffloadRotaryAppend& x) {
    const int per_group = x.heads / x.kv_heads * x.head_dim;
    int64_t width = x.q_offset + (x.kv_heads - 1) * x.q_group_stride + per_group;
    for (int64_t offset : {x.k_offset, x.v_offset}) {
        const int64_t end = offset + (x.kv_heads - 1) * x.kv_group_stride + x.head_dim;
        width = end > width ? end : width;
    }
    return width;
}

// Launches it where a lane has one pair of packs, and every pack is rotated as a whole or not at
// all; `fits` is false where that is not so, and nothing is launched.
template <typename T, int N>
int launch_append_packs(const OffloadRotaryAppend& x, int waves, const Device& device, void* stream,
                        bool* fits) {
    const int units = pairs_of_packs<N>(x);
    const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
    *fits = in_packs<T, N>(x) && x.rotary_dim / 2 % N == 0 &&
            units <= (has_norm(x) ? 32 : kPackThreads);
    if (!*fits) return 0;
    PackPlan plan = {};
    plan.units = units;
    plan.rotated = x.rotary_dim / 2 / N;
    int lanes = units;
    if (has_norm(x))
        for (lanes = 1; lanes < units;) lanes *= 2;
    plan.lanes = Divisor(lanes);
    // As few threads as have a few heads each, so that more rows are under way. With few rows a
    // thread takes one head: more blocks, each done sooner.
    int threads = (lanes * x.heads / kPackHeads + 31) / 32 * 32;
    threads = threads < lanes ? (lanes + 31) / 32 * 32 : threads;
    threads = threads < 64 ? 64 : threads;
    const bool few = rows * ((static_cast<int64_t>(threads) + kPackThreads - 1) / kPackThreads) <
                     4 * device.multiprocessors;
    if (few || threads > kPackThreads) threads = kPackThreads;
    plan.groups = threads / lanes;
    int64_t blocks = 0;
    for (int kind = 0; kind < 3; ++kind) {
        HeadsOfKind& heads = plan.kinds[kind];
        heads.count = kind ? x.kv_heads : x.heads;
        const int most = few ? plan.groups : plan.groups * kPackHeads;
        heads.blocks = (heads.count + most - 1) / most;
        const int slots = plan.groups * heads.blocks;
        heads.per_thread = (heads.count + slots - 1) / slots;
        heads.offset = static_cast<int>(kind == 0   ? x.q_offset
                                        : kind == 1 ? x.k_offset
                                                    : x.v_offset);
        heads.stride = static_cast<int>(kind ? x.kv_group_stride : x.q_group_stride);
        blocks += heads.blocks;
    }
    int per_group = x.heads / x.kv_heads;
    if (x.kv_heads == 1 || x.q_group_stride == static_cast<int64_t>(per_group) * x.head_dim) {
        plan.kinds[0].stride = x.head_dim;
        per_group = 1;
    }
    plan.per_group = Divisor(per_group);
    if (rows * blocks > INT32_MAX)
        return refuse("rotary_append: %lld rows of %d heads are too many for one launch",
                      static_cast<long long>(rows), x.heads);
    plan.blocks = Divisor(static_cast<int>(blocks));
    plan.tokens = Divisor(x.tokens);
    plan.share = 1.f / x.head_dim;
    auto kernel = has_norm(x) ? rotary_append_packs<T, N, true> : rotary_append_packs<T, N, false>;
    const int64_t bytes = used_width(x) * sizeof(T);
    if (waves && bytes % 16 == 0 && aligned16(x.qkv) && x.row_stride * sizeof(T) % 16 == 0) {
        int resident = 0;
        if (int status = cuda_status("rotary_append", cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                                                          &resident, kernel, threads, 0)))
            return status;
        plan.ahead = waves * resident * device.multiprocessors / plan.blocks.by;
        plan.row_bytes = static_cast<int>(bytes);
    }
    return launch("rotary_append", kernel, dim3(static_cast<unsigned>(rows * blocks)),
                  dim3(threads), 0, stream, x.launch_early, x, plan);
}

}  // namespace offload
