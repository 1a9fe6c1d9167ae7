// From a row of a QKV product to rotated queries and to the cache, in one pass. A thread has one
// place in the head, N elements and the N that they are rotated with, and goes through a few heads
// at that place, so that its angles are read once; all its loads are under way before the first is
// used. Neighbouring threads have neighbouring places, then neighbouring heads.
#include "elementwise.cuh"
#include "rotary_append_ring.cuh"

namespace offload {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;  // of one thread, at most

struct Plan {
    int lanes;       // threads of a head; with norms a power of two, at most a warp
    int units;       // pairs of packs in a head; a lane takes every `lanes`-th
    int rotated;     // how many of them are rotated; they come first
    int per_thread;  // heads of a thread
};

// The packs at `a` and `b` of a head; b is beyond the head's end where packs are odd in number.
struct Place {
    int a, b;
};

template <int N>
__device__ __forceinline__ Place place_of(const OffloadRotaryAppend& x, const Plan& plan,
                                          int unit) {
    if (unit >= plan.rotated || x.interleaved) return {2 * unit * N, 2 * unit * N + N};
    return {unit * N, unit * N + x.rotary_dim / 2};
}

template <typename T, int N, bool kNormed>
__global__ void __launch_bounds__(kThreads) rotary_append_kernel(OffloadRotaryAppend x, Plan plan) {
    let_next_kernel_begin();
    const int lane = threadIdx.x % plan.lanes;
    const int group = threadIdx.x / plan.lanes;
    const int groups = kThreads / plan.lanes;
    const int head_count = x.heads + 2 * x.kv_heads;
    const int first = blockIdx.y * plan.per_thread * groups + group;
    const unsigned batch = blockIdx.x / static_cast<unsigned>(x.tokens);
    const unsigned token = blockIdx.x % static_cast<unsigned>(x.tokens);
    const int queries_per_group = x.heads / x.kv_heads;
    const bool centred = x.q_norm.kind == OFFLOAD_NORM_LAYER || x.k_norm.kind == OFFLOAD_NORM_LAYER;
    const T* bias = static_cast<const T*>(x.bias);

    // Beyond the last head (or with lanes beyond the last group) the last one is read again, so
    // that no load has a branch of its own; it is not written.
    bool there[kHeads];
    int sources[kHeads];  // of the thread's heads, in a row
    T* targets[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
        int head = first + i * groups;
        there[i] = group < groups && i < plan.per_thread && head < head_count;
        head = min(head, head_count - 1);
        if (head < x.heads) {
            const int kv = head / queries_per_group;
            sources[i] = static_cast<int>(x.q_offset + kv * x.q_group_stride) +
                         (head - kv * queries_per_group) * x.head_dim;
            targets[i] = static_cast<T*>(x.query) + batch * x.query_batch_stride +
                         token * x.query_token_stride + head * x.query_head_stride;
        } else {
            head -= x.heads;
            const bool is_value = head >= x.kv_heads;
            if (is_value) head -= x.kv_heads;
            sources[i] =
                static_cast<int>((is_value ? x.v_offset : x.k_offset) + head * x.kv_group_stride);
            targets[i] = static_cast<T*>(is_value ? x.value_cache : x.key_cache) +
                         batch * x.cache_batch_stride + head * x.cache_head_stride;
        }
        if (bias && gridDim.x <= 64) prefetch(bias + sources[i]);  // else L1 and L2 have it
    }
    wait_for_previous_kernel();

    const int64_t column =
        static_cast<int64_t>(x.column[static_cast<int64_t>(batch) * x.column_stride]) + token;
    const T* row = static_cast<const T*>(x.qkv) + static_cast<int64_t>(blockIdx.x) * x.row_stride;
    const float* cos =
        x.cos + batch * x.rotary_batch_stride + static_cast<int64_t>(token) * (x.rotary_dim / 2);
    const float* sin =
        x.sin + batch * x.rotary_batch_stride + static_cast<int64_t>(token) * (x.rotary_dim / 2);
    float means[kHeads], scales[kHeads];

    constexpr bool kOneUnit = N > 1;  // a lane; `fits` sees to it
    for (int begin = 0; begin < (kOneUnit ? 1 : plan.units); begin += plan.lanes) {
        const bool inside = begin + lane < plan.units;
        const int unit = min(begin + lane, plan.units - 1);
        const Place place = place_of<N>(x, plan, unit);
        const bool has_b = place.b < x.head_dim;
        const int place_b = has_b ? place.b : place.a;
        Pack<T, N> as[kHeads], bs[kHeads];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            if (i < plan.per_thread) {  // for the whole grid
                as[i] = load_once<T, N>(row + sources[i] + place.a);
                bs[i] = load_once<T, N>(row + sources[i] + place_b);
            }
        }
        const bool turns = unit < plan.rotated;
        float c[N], s[N];
        if (turns) {
            constexpr int kStep = N == 1 ? 1 : 4;
#pragma unroll
            for (int i = 0; i < N; i += kStep) {
                to_floats(load<float, kStep>(cos + unit * N + i), c + i);
                to_floats(load<float, kStep>(sin + unit * N + i), s + i);
            }
        }
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            if (i >= plan.per_thread) continue;
            const int head = min(first + i * groups, head_count - 1);
            const bool is_query = head < x.heads;
            const bool is_value = head >= x.heads + x.kv_heads;
            float v[2 * N];
            to_floats(as[i], v);
            to_floats(bs[i], v + N);
            if (bias) {
                add_to<T, N>(v, bias + sources[i] + place.a);
                add_to<T, N>(v + N, bias + sources[i] + place_b);
            }
            if (kNormed) {
                const OffloadNorm& norm = is_query ? x.q_norm : x.k_norm;
                if (begin == 0) {
                    // f(values, how many of them belong to the head) for every unit of this lane.
                    const auto for_units = [&](auto f) {
                        if (inside) f(v, has_b ? 2 * N : N);
                        if constexpr (!kOneUnit) {
                            for (int other = lane + plan.lanes; other < plan.units;
                                 other += plan.lanes) {
                                const Place at = place_of<N>(x, plan, other);
                                const bool both = at.b < x.head_dim;
                                float w[2 * N] = {};
                                add_to<T, N>(w, row + sources[i] + at.a);
                                if (both) add_to<T, N>(w + N, row + sources[i] + at.b);
                                if (bias) {
                                    add_to<T, N>(w, bias + sources[i] + at.a);
                                    if (both) add_to<T, N>(w + N, bias + sources[i] + at.b);
                                }
                                f(w, both ? 2 * N : N);
                            }
                        }
                    };
                    means[i] = 0.f;
                    if (centred) {
                        float sum = 0.f;
                        for_units([&](const float* w, int count) {
#pragma unroll
                            for (int j = 0; j < 2 * N; ++j)
                                if (j < count) sum += w[j];
                        });
                        sum = sum_of_head(sum, plan.lanes);
                        if (norm.kind == OFFLOAD_NORM_LAYER) means[i] = sum / x.head_dim;
                    }
                    float squares = 0.f;
                    for_units([&](const float* w, int count) {
#pragma unroll
                        for (int j = 0; j < 2 * N; ++j) {
                            const float d = w[j] - means[i];
                            if (j < count) squares = fmaf(d, d, squares);
                        }
                    });
                    squares = sum_of_head(squares, plan.lanes);
                    scales[i] = __frsqrt_rn(squares / x.head_dim + norm.eps);
                }
                if (!is_value && norm.kind) {
#pragma unroll
                    for (int part = 0; part < 2; ++part) {
                        const int at = part == 0 ? place.a : place_b;
                        float* y = v + part * N;
#pragma unroll
                        for (int j = 0; j < N; ++j) y[j] = (y[j] - means[i]) * scales[i];
                        if (norm.weight) {
                            float w[N];
                            to_floats(load<T, N>(static_cast<const T*>(norm.weight) + at), w);
#pragma unroll
                            for (int j = 0; j < N; ++j) y[j] *= w[j] + norm.weight_offset;
                        }
                        if (norm.bias) add_to<T, N>(y, static_cast<const T*>(norm.bias) + at);
                    }
                }
            }
            if (turns && !is_value) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (x.interleaved) {
                        const float a = v[2 * j], b = v[2 * j + 1];
                        v[2 * j] = a * c[j] - b * s[j];
                        v[2 * j + 1] = b * c[j] + a * s[j];
                    } else {
                        const float a = v[j], b = v[N + j];
                        v[j] = a * c[j] - b * s[j];
                        v[N + j] = b * c[j] + a * s[j];
                    }
                }
            }
            if (!inside || !there[i]) continue;
            T* target = targets[i];
            if (!is_query) {
                if (column < 0 || column >= x.cache_capacity) continue;
                target += column * x.head_dim;
            }
            store(target + place.a, from_floats<T, N>(v));
            if (has_b) store(target + place.b, from_floats<T, N>(v + N));
        }
    }
}

template <int N>
int units_of(const OffloadRotaryAppend& x) {
    return x.rotary_dim / 2 / N + (x.head_dim - x.rotary_dim + 2 * N - 1) / (2 * N);
}

// Whether a lane has one unit, every address is a multiple of a pack, and every pack is rotated as
// a whole or not at all.
template <typename T, int N>
bool fits(const OffloadRotaryAppend& x) {
    if (N > 1 && units_of<N>(x) > (has_norm(x) ? 32 : kThreads)) return false;
    for (int64_t n : {static_cast<int64_t>(x.head_dim), static_cast<int64_t>(x.rotary_dim / 2),
                      x.row_stride, x.q_offset, x.k_offset, x.v_offset, x.q_group_stride,
                      x.kv_group_stride, x.query_batch_stride, x.query_token_stride,
                      x.query_head_stride, x.cache_batch_stride, x.cache_head_stride})
        if (n % N) return false;
    for (const void* p :
         {x.qkv, x.bias, static_cast<const void*>(x.query), static_cast<const void*>(x.key_cache),
          static_cast<const void*>(x.value_cache), x.q_norm.weight, x.q_norm.bias, x.k_norm.weight,
          x.k_norm.bias})
        if (!aligned<T, N>(p)) return false;
    return N == 1 || (aligned16(x.cos) && aligned16(x.sin) && x.rotary_batch_stride % 4 == 0);
}

template <typename T, int N>
int launch_append(const OffloadRotaryAppend& x, int multiprocessors, void* stream) {
    Plan plan;
    plan.rotated = x.rotary_dim / 2 / N;
    plan.units = units_of<N>(x);
    if (has_norm(x)) {
        plan.lanes = 1;
        while (plan.lanes < 32 && plan.lanes < plan.units) plan.lanes *= 2;
    } else {
        plan.lanes = plan.units < kThreads ? plan.units : kThreads;
    }
    const int groups = kThreads / plan.lanes;
    const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
    const int64_t heads = x.heads + 2 * static_cast<int64_t>(x.kv_heads);
    // With few rows a thread takes one head: more blocks, each done sooner.
    const bool few =
        rows * ((heads + groups * kHeads - 1) / (groups * kHeads)) < 4 * multiprocessors;
    const int64_t most = few ? groups : groups * kHeads;
    const int64_t blocks = (heads + most - 1) / most;
    plan.per_thread = static_cast<int>((heads + groups * blocks - 1) / (groups * blocks));
    if (rows > INT32_MAX || blocks > 65535)
        return refuse("rotary_append: %lld rows of %lld heads are too many for one launch",
                      static_cast<long long>(rows), static_cast<long long>(heads));
    auto kernel =
        has_norm(x) ? rotary_append_kernel<T, N, true> : rotary_append_kernel<T, N, false>;
    return launch("rotary_append", kernel,
                  dim3(static_cast<unsigned>(rows), static_cast<unsigned>(blocks)), dim3(kThreads),
                  0, stream, x.launch_early, x, plan);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_rotary_append(const OffloadRotaryAppend* arguments, void* stream) {
    using namespace offload;
    const OffloadRotaryAppend& x = *arguments;
    if (x.batch < 0 || x.tokens < 0 || x.heads < 1 || x.kv_heads < 1 || x.heads % x.kv_heads ||
        x.head_dim < 1 || x.heads > INT32_MAX / 4)
        return refuse("rotary_append: no qkv has %d x %d rows of %d / %d heads of %d", x.batch,
                      x.tokens, x.heads, x.kv_heads, x.head_dim);
    const int64_t queries = static_cast<int64_t>(x.heads / x.kv_heads) * x.head_dim;
    for (int64_t end : {x.q_offset + (x.kv_heads - 1) * x.q_group_stride + queries,
                        x.k_offset + (x.kv_heads - 1) * x.kv_group_stride + x.head_dim,
                        x.v_offset + (x.kv_heads - 1) * x.kv_group_stride + x.head_dim})
        if (end > INT32_MAX / 2)
            return refuse("rotary_append: a row of qkv with %lld elements is too long",
                          static_cast<long long>(end));
    if (x.rotary_dim < 0 || x.rotary_dim % 2 || x.rotary_dim > x.head_dim)
        return refuse("rotary_append: rotary_dim must be even and at most %d, not %d", x.head_dim,
                      x.rotary_dim);
    const int stages = x.variant % 10, threads = x.variant / 10 % 10;
    if (x.variant != 0 && x.variant % 100 != 1 &&
        (stages < 2 || stages > 4 || threads < 1 || threads > 2))
        return refuse("rotary_append: there is no variant %d", x.variant);
    if (x.batch == 0 || x.tokens == 0) return 0;  // what is empty may be null
    if ((x.rotary_dim != 0) != (x.cos != nullptr) || (x.cos == nullptr) != (x.sin == nullptr))
        return refuse("rotary_append: cos and sin come with a rotary_dim, and only with one");
    if (!known_norm(x.q_norm) || !known_norm(x.k_norm))
        return refuse("rotary_append: no norm has the number %d or %d", x.q_norm.kind,
                      x.k_norm.kind);
    if (!x.qkv || !x.query || !x.column) return refuse("rotary_append: a pointer is null");
    if (x.cache_capacity < 0 || (x.cache_capacity > 0 && (!x.key_cache || !x.value_cache)))
        return refuse("rotary_append: a cache of %d columns is null", x.cache_capacity);
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("rotary_append", x.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int N = 16 / sizeof(T);
        // A ring of rows pays where a block has several; not for heads that are normalised, nor for
        // float32 (measured on an H200).
        const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
        const bool ring = rows >= 8 * device.multiprocessors && sizeof(T) == 2 && !x.q_norm.kind &&
                          !x.k_norm.kind;
        const int threads = x.variant ? x.variant / 10 % 10 * 256 : 512;
        const int extra = x.variant / 100, waves = x.variant ? extra : 1;
        bool it_fits;
        if (x.variant ? x.variant % 100 != 1 : ring) {
            const int status = launch_append_ring<T>(
                x, threads, x.variant % 10, extra ? 2 << extra : 0, device, stream, &it_fits);
            if (it_fits) return status;
        }
        const int status = launch_append_packs<T, N>(x, waves, device, stream, &it_fits);
        if (it_fits) return status;
        if constexpr (N > 4) {
            const int status = launch_append_packs<T, 4>(x, waves, device, stream, &it_fits);
            if (it_fits) return status;
        }
        return launch_append<T, 1>(x, device.multiprocessors, stream);
    });
}
