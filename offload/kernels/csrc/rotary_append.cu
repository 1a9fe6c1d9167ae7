// From a row of a QKV product to rotated queries and to the cache, in one pass: by packs, in the
// form that costs the call's heads the fewest instructions, or, where heads are no packs or do not
// lie at multiples of them, element by element.
#include "rotary_append_columns.cuh"
#include "rotary_append_packs.cuh"
#include "rotary_append_pairs.cuh"

namespace offload {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;  // of one thread, at most

struct Plan {
    int lanes;       // threads of a head; with norms a power of two, at most a warp
    int units;       // pairs of elements in a head; a lane takes every `lanes`-th
    int rotated;     // how many of them are rotated; they come first
    int per_thread;  // heads of a thread
};

// The elements a and b of a head; b is beyond the head's end where they are odd in number.
struct Place {
    int a, b;
};

__device__ __forceinline__ Place place_of(const OffloadRotaryAppend& x, const Plan& plan,
                                          int unit) {
    if (unit >= plan.rotated || x.interleaved) return {2 * unit, 2 * unit + 1};
    return {unit, unit + x.rotary_dim / 2};
}

template <typename T, bool kNormed>
__global__ void __launch_bounds__(kThreads)
    rotary_append_elements(OffloadRotaryAppend x, Plan plan) {
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

    for (int begin = 0; begin < plan.units; begin += plan.lanes) {
        const bool inside = begin + lane < plan.units;
        const int unit = min(begin + lane, plan.units - 1);
        const Place place = place_of(x, plan, unit);
        const bool has_b = place.b < x.head_dim;
        const int place_b = has_b ? place.b : place.a;
        const bool turns = unit < plan.rotated;
        const float c = turns ? cos[unit] : 1.f, s = turns ? sin[unit] : 0.f;
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            if (i >= plan.per_thread) continue;  // for the whole grid
            const int head = min(first + i * groups, head_count - 1);
            const bool is_query = head < x.heads;
            const bool is_value = head >= x.heads + x.kv_heads;
            const auto element = [&](int at) {
                const float y = to_float(row[sources[i] + at]);
                return bias ? y + to_float(bias[sources[i] + at]) : y;
            };
            float a = element(place.a), b = element(place_b);
            if (kNormed) {
                const OffloadNorm& norm = is_query ? x.q_norm : x.k_norm;
                if (begin == 0) {
                    // The sum of f(value) over the head.
                    const auto sum_over = [&](auto f) {
                        float sum = 0.f;
                        for (int other = lane; other < plan.units; other += plan.lanes) {
                            const Place at = place_of(x, plan, other);
                            sum += f(element(at.a));
                            if (at.b < x.head_dim) sum += f(element(at.b));
                        }
                        return sum_of_head(sum, plan.lanes);
                    };
                    float mean = 0.f;
                    if (centred) {
                        const float sum = sum_over([](float y) { return y; });
                        if (norm.kind == OFFLOAD_NORM_LAYER) mean = sum / x.head_dim;
                    }
                    const float squares =
                        sum_over([=](float y) { return (y - mean) * (y - mean); });
                    means[i] = mean;
                    scales[i] = __frsqrt_rn(squares / x.head_dim + norm.eps);
                }
                if (!is_value && norm.kind) {
                    const auto normalise = [&](float y, int at) {
                        y = (y - means[i]) * scales[i];
                        if (norm.weight)
                            y *= to_float(static_cast<const T*>(norm.weight)[at]) +
                                 norm.weight_offset;
                        return norm.bias ? y + to_float(static_cast<const T*>(norm.bias)[at]) : y;
                    };
                    a = normalise(a, place.a);
                    b = normalise(b, place_b);
                }
            }
            if (turns && !is_value) {
                const float before = a;
                a = a * c - b * s;
                b = b * c + before * s;
            }
            if (!inside || !there[i]) continue;
            T* target = targets[i];
            if (!is_query) {
                if (column < 0 || column >= x.cache_capacity) continue;
                target += column * x.head_dim;
            }
            target[place.a] = from_float<T>(a);
            if (has_b) target[place.b] = from_float<T>(b);
        }
    }
}

template <typename T>
int launch_elements(const OffloadRotaryAppend& x, int multiprocessors, void* stream) {
    Plan plan;
    plan.rotated = x.rotary_dim / 2;
    plan.units = (x.head_dim + 1) / 2;
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
    const auto kernel =
        has_norm(x) ? rotary_append_elements<T, true> : rotary_append_elements<T, false>;
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
    if (x.variant < 0 || x.variant > kPackHeads)
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
        if (!in_packs<T>(x)) return launch_elements<T>(x, device.multiprocessors, stream);
        if (in_pairs<T>(x)) return launch_append_pairs<T>(x, device, stream);
        if (in_columns<T>(x, device)) return launch_append_columns<T>(x, device, stream);
        return launch_append_packs<T>(x, device, stream);
    });
}
