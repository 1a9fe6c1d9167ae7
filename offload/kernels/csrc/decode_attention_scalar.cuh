// Decode attention's math for everything that the tensor cores do not take: float32, heads of any
// size up to kMostDim, caches at any alignment. All of it is float32.
//
// A tile's scores are one thread a column and few queries; each warp then works out the weights of
// its queries; for the output a thread has four elements of all queries and every so-manyth column,
// and the threads' sums are added at the item's end, in a fixed order.
#pragma once
#include "decode_attention_tiles.cuh"

namespace offload {
namespace decode {

constexpr int kScalarThreads = 128;
constexpr int kMostDim = 4 * kScalarThreads;

struct ScalarShape {
    int row;  // bytes of a cache column in shared memory: an odd number of 16-byte chunks
    int columns, queries, padded_dim;

    __host__ __device__ ScalarShape(int padded_dim, int element_bytes, int columns, int queries)
        : row(((padded_dim * element_bytes + 15) / 16 | 1) * 16),
          columns(columns),
          queries(queries),
          padded_dim(padded_dim) {}

    __host__ __device__ int stage_bytes() const { return 2 * columns * row; }
    __host__ __device__ int score_stride() const { return columns + 4; }
    __host__ __device__ int shared_bytes(int stages) const {
        return stages * stage_bytes() + kScalarThreads * 16 +
               queries * (padded_dim + score_stride() + 4) * 4;
    }
};

__device__ __forceinline__ float4 load_four(const float* from) {
    return *reinterpret_cast<const float4*>(from);
}
template <typename T>
__device__ __forceinline__ float4 load_four(const T* from) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    const T* x = reinterpret_cast<const T*>(&bits);
    return {to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])};
}

template <typename T, int kQueries>
struct ScalarMath {
    using Element = T;
    static constexpr int kMostThreads = kScalarThreads;
    static constexpr int kLeastCtas = 2;
    static constexpr int kTogether = kQueries < 16 ? 1 : 4;  // queries that share a read of K

    __device__ static int32_t columns(const Params& p) { return p.columns; }

    const ScalarShape shape;
    unsigned char* const stages;
    float4* const exchange;  // [threads]
    float* const queries;    // [kQueries, padded_dim]
    float* const scores;     // [kQueries, score_stride], then weights
    float* const most;       // [kQueries] each
    float* const sum;
    float* const shrink;
    const int quads;  // fours of elements
    const int lanes;  // threads that share out the columns of one four
    const float scale;
    float4 output[kQueries];

    __device__ ScalarMath(const Params& p, unsigned char* shared)
        : shape(p.padded_dim, sizeof(T), p.columns, kQueries),
          stages(shared),
          exchange(reinterpret_cast<float4*>(shared + p.stages * shape.stage_bytes())),
          queries(reinterpret_cast<float*>(exchange + kScalarThreads)),
          scores(queries + kQueries * p.padded_dim),
          most(scores + kQueries * shape.score_stride()),
          sum(most + kQueries),
          shrink(sum + kQueries),
          quads(p.padded_dim / 4),
          lanes(kScalarThreads / quads),
          scale(score_scale(p)) {}

    __device__ unsigned char* keys(int stage) const { return stages + stage * shape.stage_bytes(); }
    __device__ unsigned char* values(int stage) const {
        return keys(stage) + shape.columns * shape.row;
    }

    __device__ void load(const Params& p, int stage, const Cursor& at) {
        copy(p, stage, at, rows_of(p, at));
    }
    __device__ void load_early(const Params& p, int stage, const Cursor& at) {
        copy(p, stage, at, rows_of(p, at) - has_last(p, at));
    }
    __device__ void load_late(const Params& p, int stage, const Cursor& at) {
        if (!has_last(p, at)) return;
        const int row = rows_of(p, at) - 1;
        const int64_t offset = offset_of(p, at) + row * p.head_dim;
        const T* key = static_cast<const T*>(p.key) + offset;
        const T* value = static_cast<const T*>(p.value) + offset;
        T* to_key = reinterpret_cast<T*>(keys(stage) + row * shape.row);
        T* to_value = reinterpret_cast<T*>(values(stage) + row * shape.row);
#pragma unroll 1
        for (int i = threadIdx.x; i < p.padded_dim; i += kScalarThreads) {
            const bool real = i < p.head_dim;
            const T k = real ? __ldcg(key + i) : from_float<T>(0.f);
            const T v = real ? __ldcg(value + i) : from_float<T>(0.f);
            to_key[i] = k;
            to_value[i] = v;
        }
    }

    // Of a tile in the caches.
    __device__ int64_t offset_of(const Params& p, const Cursor& at) const {
        return at.b * p.cache_batch + at.kv_head(p) * p.cache_head +
               (static_cast<int64_t>(at.see.first) + static_cast<int64_t>(at.tile) * p.columns) *
                   p.head_dim;
    }
    __device__ int rows_of(const Params& p, const Cursor& at) const {
        return min(at.see.columns - at.tile * p.columns, p.columns);
    }
    // Whether a tile has the last column that is seen.
    __device__ bool has_last(const Params& p, const Cursor& at) const {
        return at.tile + 1 == at.tiles && at.see.columns > 0;
    }

    // Seen columns only: the others are never looked at.
    __device__ void copy(const Params& p, int stage, const Cursor& at, int rows) {
        const int64_t offset = offset_of(p, at);
        copy_rows(p, keys(stage), static_cast<const T*>(p.key) + offset, rows);
        copy_rows(p, values(stage), static_cast<const T*>(p.value) + offset, rows);
    }

    // A row's padding becomes zeros.
    __device__ void copy_rows(const Params& p, unsigned char* to, const T* from, int rows) const {
        const int units = p.padded_dim * static_cast<int>(sizeof(T)) / p.unit;  // a row
        const int elements = p.unit / static_cast<int>(sizeof(T));              // a unit
        const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll 2
        for (int row = threadIdx.x / 32; row < rows; row += kScalarThreads / 32)
#pragma unroll 1
            for (int unit = threadIdx.x % 32; unit < units; unit += 32) {
                const int place = row * shape.row + unit * p.unit;
                const bool real = unit * elements < p.head_dim;
                const T* source = real ? from + row * p.head_dim + unit * elements : from;
                if (p.unit == 16)
                    copy_async<16>(base + place, source, real ? 16 : 0);
                else if (p.unit == 4)
                    copy_async<4>(base + place, source, real ? 4 : 0);
                else
                    *reinterpret_cast<T*>(to + place) = real ? *source : from_float<T>(0.f);
            }
    }

    __device__ void begin(const Params& p, const Cursor& at) {
        const T* from =
            static_cast<const T*>(p.query) + at.b * p.query_batch + at.head(p) * p.query_head;
        const int heads = at.heads(p);
#pragma unroll 1
        for (int i = threadIdx.x; i < kQueries * p.padded_dim; i += kScalarThreads) {
            const int q = i / p.padded_dim, element = i % p.padded_dim;
            queries[i] = q < heads && element < p.head_dim
                             ? to_float(from[q * p.query_head + element])
                             : 0.f;
        }
        if (threadIdx.x < kQueries) {
            most[threadIdx.x] = -INFINITY;
            sum[threadIdx.x] = 0.f;
        }
#pragma unroll
        for (int q = 0; q < kQueries; ++q) output[q] = {0.f, 0.f, 0.f, 0.f};
        __syncthreads();
    }

    __device__ void tile(const Params& p, int stage, const Cursor& at) {
        const int rows = min(at.see.columns - at.tile * p.columns, p.columns);
        write_scores(p, keys(stage), at, rows);
        __syncthreads();
        weigh(at.heads(p), rows);
        __syncthreads();
        const int quad = threadIdx.x % quads, first = threadIdx.x / quads;
        if (first >= lanes) return;
#pragma unroll
        for (int q = 0; q < kQueries; ++q) {
            const float factor = shrink[q];
            output[q].x *= factor;
            output[q].y *= factor;
            output[q].z *= factor;
            output[q].w *= factor;
        }
#pragma unroll kQueries < 16 ? 4 : 1
        for (int row = first; row < rows; row += lanes) {
            const float4 v =
                load_four(reinterpret_cast<const T*>(values(stage) + row * shape.row) + quad * 4);
#pragma unroll
            for (int q = 0; q < kQueries; ++q) {
                const float weight = scores[q * shape.score_stride() + row];
                output[q].x += weight * v.x;
                output[q].y += weight * v.y;
                output[q].z += weight * v.z;
                output[q].w += weight * v.w;
            }
        }
    }

    __device__ void write_scores(const Params& p, const unsigned char* from, const Cursor& at,
                                 int rows) {
        const int row = threadIdx.x % p.columns;
        const int heads = at.heads(p);
        if (row >= rows) return;
        const T* key = reinterpret_cast<const T*>(from + row * shape.row);
        for (int q = threadIdx.x / p.columns * kTogether; q < heads;
             q += kScalarThreads / p.columns * kTogether) {
            float4 x[kTogether] = {};
#pragma unroll kQueries < 16 ? 4 : 1
            for (int quad = 0; quad < quads; ++quad) {
                const float4 k = load_four(key + quad * 4);
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const float4 y = load_four(queries + (q + i) * p.padded_dim + quad * 4);
                    x[i].x += y.x * k.x;
                    x[i].y += y.y * k.y;
                    x[i].z += y.z * k.z;
                    x[i].w += y.w * k.w;
                }
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                if (q + i >= heads) break;
                const float slope = p.slopes ? p.slopes[at.head(p) + q + i] * kLog2e : 0.f;
                const int from_last = at.tile * p.columns + row - (at.see.columns - 1);
                scores[(q + i) * shape.score_stride() + row] =
                    score(p, (x[i].x + x[i].y) + (x[i].z + x[i].w), scale, slope, from_last, tanhf);
            }
        }
    }

    // Scores become weights; queries that are not there keep weights of 0.
    __device__ void weigh(int heads, int rows) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int q = warp; q < kQueries; q += kScalarThreads / 32) {
            float* at = scores + q * shape.score_stride();
            if (q >= heads) {
                for (int row = lane; row < rows; row += 32) at[row] = 0.f;
                if (lane == 0) shrink[q] = 0.f;
                continue;
            }
            const float before = most[q];
            float now = before;
            for (int row = lane; row < rows; row += 32) now = fmaxf(now, at[row]);
            now = warp_most(now);
            const float base = now == -INFINITY ? 0.f : now;
            float total = 0.f;
            for (int row = lane; row < rows; row += 32) {
                at[row] = exp2f(at[row] - base);
                total += at[row];
            }
            total = warp_sum(total);
            __syncwarp();  // all lanes have read what lane 0 replaces
            if (lane == 0) {
                const float factor = exp2f(before - base);
                most[q] = now;
                shrink[q] = factor;
                sum[q] = sum[q] * factor + total;
            }
        }
    }

    // Calls write(query of the item, first element, sums) in the threads that have the results.
    template <typename Write>
    __device__ void each(int heads, Write write) const {
#pragma unroll
        for (int q = 0; q < kQueries; ++q) {
            if (q >= heads) break;
            __syncthreads();
            exchange[threadIdx.x] = output[q];
            __syncthreads();
            if (static_cast<int>(threadIdx.x) < quads) {
                float4 all = exchange[threadIdx.x];
#pragma unroll 1
                for (int i = 1; i < lanes; ++i) {
                    const float4 x = exchange[i * quads + threadIdx.x];
                    all.x += x.x;
                    all.y += x.y;
                    all.z += x.z;
                    all.w += x.w;
                }
                write(q, static_cast<int>(threadIdx.x) * 4, all);
            }
        }
    }

    __device__ void store(const Params& p, const Cursor& at) const {
        const int own = threadIdx.x;
        __syncthreads();  // all are done with `shrink`
        if (own < at.heads(p))
            shrink[own] =
                normaliser(p, at.head(p) + own, at.see.first + at.see.columns, most[own], sum[own]);
        each(at.heads(p), [&](int q, int element, float4 x) {
            const float factor = shrink[q];
            store_output<T>(p, at.b, at.head(p) + q, element,
                            {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
        });
    }

    __device__ void store_part(const Params& p, const Cursor& at, int64_t slot) const {
        each(at.heads(p), [&](int q, int element, float4 x) {
            __stcg(reinterpret_cast<float4*>(p.sums + (slot * p.tile_heads + q) * p.padded_dim +
                                             element),
                   x);
        });
        if (static_cast<int>(threadIdx.x) < at.heads(p))
            __stcg(&p.stats[slot * p.tile_heads + threadIdx.x],
                   make_float2(most[threadIdx.x], sum[threadIdx.x]));
    }
};

}  // namespace decode
}  // namespace offload
