// A row of a residual sum and its norms, a few packs a thread: what the kernels that hold a row in
// registers share.
#pragma once
#include "elementwise.cuh"

namespace offload {

constexpr int kMostWarps = 16;
constexpr int kMostThreads = 32 * kMostWarps;
constexpr int kMostReductions = 6;  // a mean and a variance for each of three norms
constexpr int kNarrowRows = 4;      // of one block, a warp each

// Sums over the threads of a row. Each has a place of its own in shared memory, so that one barrier
// a sum is enough.
struct RowSum {
    float* shared;  // [kMostReductions][kMostWarps]; unused where a row is one warp
    int warps;

    __device__ __forceinline__ float operator()(float x) {
        x = warp_sum(x);
        if (warps > 1) {
            const int lane = threadIdx.x % 32;
            if (lane == 0) shared[threadIdx.x / 32] = x;
            __syncthreads();
            x = warp_sum(lane < warps ? shared[lane] : 0.f);
            shared += kMostWarps;
        }
        return x;
    }
};

// How many rows are done: a block a row, or a warp a row where `warps` is 1.
struct RowsPlan {
    int warps;  // of a row
    int ahead;  // a block asks for the rows of the block so many after it; 0: for none
    bool once;  // what is written leaves L2 first

    __device__ __forceinline__ int rows_per_block() const {
        return warps == 1 ? blockDim.x / 32 : 1;
    }
    __device__ __forceinline__ int64_t row() const {
        return warps == 1 ? static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32
                          : blockIdx.x;
    }
    __device__ __forceinline__ int thread() const {
        return warps == 1 ? threadIdx.x % 32 : threadIdx.x;
    }

    // Asks for what the block `ahead` of this one reads of `count` inputs.
    template <typename T>
    __device__ __forceinline__ void ask(const void* const* inputs, int count, int64_t rows,
                                        int width) const {
        if (!ahead || threadIdx.x != 0) return;
        const int64_t first = (static_cast<int64_t>(blockIdx.x) + ahead) * rows_per_block();
        if (first >= rows) return;
        const int64_t left = rows - first;
        const int wanted = rows_per_block();
        const int bytes =
            (left < wanted ? static_cast<int>(left) : wanted) * width * static_cast<int>(sizeof(T));
        for (int i = 0; i < count; ++i)
            if (inputs[i]) prefetch_bulk(static_cast<const T*>(inputs[i]) + first * width, bytes);
    }
};

struct Moments {
    float mean;      // 0 for RMS
    float variance;  // around that mean
};

// A norm's parameters at one pack: ones and zeros where there are none, so that nothing branches
// where they are used.
template <typename T, int N>
struct Parameters {
    Pack<T, N> weight, bias;
    float offset;

    __device__ __forceinline__ void read(const OffloadNorm& norm, int column) {
        read(norm.weight, norm.bias, norm.weight_offset, column);
    }

    __device__ __forceinline__ void read(const void* weights, const void* biases, float added,
                                         int column) {
        weight = read(weights, 1.f, column);
        bias = read(biases, 0.f, column);
        offset = weights ? added : 0.f;
    }

    __device__ __forceinline__ void apply(float mean, float scale, const float* x, float* y) const {
        float w[N], b[N];
        to_floats(weight, w);
        to_floats(bias, b);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = fmaf((x[i] - mean) * scale, w[i] + offset, b[i]);
    }

  private:
    __device__ __forceinline__ static Pack<T, N> read(const void* from, float otherwise,
                                                      int column) {
        if (from) return load<T, N>(static_cast<const T*>(from) + column);
        float same[N];
#pragma unroll
        for (int i = 0; i < N; ++i) same[i] = otherwise;
        return from_floats<T, N>(same);
    }
};

__device__ __forceinline__ float scale_of(const Moments& moments, const OffloadNorm& norm) {
    return __frsqrt_rn(moments.variance + norm.eps);
}

// A thread's packs of one row, in float32.
template <typename T, int N, int kPacks>
struct RowPart {
    float x[kPacks][N];
    // Beyond the row's end the last pack's column, so that no load has a branch of its own; nothing
    // comes of it.
    int columns[kPacks];
    bool inside[kPacks];
    float width;

    __device__ __forceinline__ void place(int thread, int threads, int row_width) {
        const int last = row_width / N - 1;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            const int pack = p * threads + thread;
            inside[p] = pack <= last;
            columns[p] = (inside[p] ? pack : last) * N;
        }
        width = static_cast<float>(row_width);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int p = 0; p < kPacks; ++p)
#pragma unroll
            for (int i = 0; i < N; ++i) x[p][i] = 0.f;
    }

    __device__ __forceinline__ void add(int p, const Pack<T, N>& pack) {
        float other[N];
        to_floats(pack, other);
#pragma unroll
        for (int i = 0; i < N; ++i) x[p][i] += other[i];
    }

    __device__ __forceinline__ void add_from(const void* row) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p)
            add(p, load<T, N>(static_cast<const T*>(row) + columns[p]));
    }

    __device__ __forceinline__ void normalise(const OffloadNorm& norm, RowSum& row_sum) {
        Parameters<T, N> parameters;
        if constexpr (kPacks == 1) parameters.read(norm, columns[0]);  // see rows_in_registers
        const Moments m = moments(norm.kind, row_sum);
        const float scale = scale_of(m, norm);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            if constexpr (kPacks > 1) parameters.read(norm, columns[p]);
            parameters.apply(m.mean, scale, x[p], x[p]);
        }
    }

    __device__ __forceinline__ Moments moments(int kind, RowSum& row_sum) const {
        Moments m = {0.f, 0.f};
        if (kind == OFFLOAD_NORM_LAYER) {
            float sum = 0.f;
#pragma unroll
            for (int p = 0; p < kPacks; ++p) {
                float of_pack = 0.f;
#pragma unroll
                for (int i = 0; i < N; ++i) of_pack += x[p][i];
                sum += inside[p] ? of_pack : 0.f;
            }
            m.mean = row_sum(sum) / width;
        }
        float squares = 0.f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            float of_pack = 0.f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float d = x[p][i] - m.mean;
                of_pack = fmaf(d, d, of_pack);
            }
            squares += inside[p] ? of_pack : 0.f;
        }
        m.variance = row_sum(squares) / width;
        return m;
    }

    __device__ __forceinline__ void write_sum(void* row, bool once) const {
#pragma unroll
        for (int p = 0; p < kPacks; ++p)
            if (inside[p])
                store<T, N>(static_cast<T*>(row) + columns[p], from_floats<T, N>(x[p]), once);
    }

    // parameters(p): those of pack p.
    template <typename F>
    __device__ __forceinline__ void write(void* row, const OffloadNorm& norm, const Moments& m,
                                          F parameters, bool once) const {
        const float mean = norm.kind ? m.mean : 0.f;
        const float scale = norm.kind ? scale_of(m, norm) : 1.f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            float y[N];
            parameters(p).apply(mean, scale, x[p], y);
            if (inside[p])
                store<T, N>(static_cast<T*>(row) + columns[p], from_floats<T, N>(y), once);
        }
    }
};

}  // namespace offload
