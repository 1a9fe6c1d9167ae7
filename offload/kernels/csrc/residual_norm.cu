// Residual sums and the norms behind them. A row lies in the registers of one block (or of one
// warp, where it is narrow), so that every byte is read once and the variance is taken around a
// mean that is known: LayerNorm holds its accuracy where the mean is large. Rows that are too wide,
// of an odd width, or not aligned take several passes over memory instead, by the same arithmetic.
#include "elementwise.cuh"

namespace offload {
namespace {

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

struct Moments {
    float mean;      // 0 for RMS
    float variance;  // around that mean
};

// A norm's parameters at one pack.
template <typename T, int N>
struct Parameters {
    Pack<T, N> weight, bias;

    __device__ __forceinline__ void read(const OffloadNorm& norm, int column) {
        if (norm.weight) weight = load<T, N>(static_cast<const T*>(norm.weight) + column);
        if (norm.bias) bias = load<T, N>(static_cast<const T*>(norm.bias) + column);
    }

    __device__ __forceinline__ void apply(const OffloadNorm& norm, float mean, float scale,
                                          const float* x, float* y) const {
        float w[N], b[N];
        if (norm.weight) to_floats(weight, w);
        if (norm.bias) to_floats(bias, b);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            y[i] = (x[i] - mean) * scale;
            if (norm.weight) y[i] *= w[i] + norm.weight_offset;
            if (norm.bias) y[i] += b[i];
        }
    }
};

__device__ __forceinline__ float scale_of(const Moments& moments, const OffloadNorm& norm) {
    return __frsqrt_rn(moments.variance + norm.eps);
}

template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_registers(OffloadResidualNorm a, int warps_per_row) {
    let_next_kernel_begin();
    __shared__ float shared[kMostReductions * kMostWarps];
    RowSum row_sum = {shared, warps_per_row};
    const bool one_warp = warps_per_row == 1;
    const int threads = 32 * warps_per_row;
    const int thread = one_warp ? threadIdx.x % 32 : threadIdx.x;
    const int64_t row =
        one_warp ? static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32
                 : blockIdx.x;
    const int packs = a.width / N;
    const float width = static_cast<float>(a.width);

    // With one pack a thread, which is how few rows are done, the parameters are read before the
    // wait: no kernel writes them, and they come from further away than the rows do.
    constexpr bool kReadAhead = kPacks == 1;
    Parameters<T, N> ahead;
    Pack<T, N> bias_ahead;
    if (kReadAhead && thread < packs) {
        ahead.read(a.norm, thread * N);
        if (a.bias[0]) bias_ahead = load<T, N>(static_cast<const T*>(a.bias[0]) + thread * N);
    }
    wait_for_previous_kernel();
    if (row >= a.rows) return;  // a whole warp, of a block that has no barriers

    const int64_t base = row * a.width;
    const T* residual = static_cast<const T*>(a.residual);
    const T* branches[2] = {static_cast<const T*>(a.branch[0]), static_cast<const T*>(a.branch[1])};
    Pack<T, N> raw[3][kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const int pack = p * threads + thread;
        const int64_t at = base + static_cast<int64_t>(pack) * N;
        if (pack < packs) {
            if (residual) raw[0][p] = load_once<T, N>(residual + at);
            if (branches[0]) raw[1][p] = load_once<T, N>(branches[0] + at);
            if (branches[1]) raw[2][p] = load_once<T, N>(branches[1] + at);
        }
    }

    float x[kPacks][N];  // zeros beyond the row's end
    const auto moments = [&](int kind) {
        Moments m = {0.f, 0.f};
        if (kind == OFFLOAD_NORM_LAYER) {
            float sum = 0.f;
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
#pragma unroll
                for (int i = 0; i < N; ++i) sum += x[p][i];
            m.mean = row_sum(sum) / width;
        }
        float squares = 0.f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            if (p * threads + thread < packs) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float d = x[p][i] - m.mean;
                    squares = fmaf(d, d, squares);
                }
            }
        }
        m.variance = row_sum(squares) / width;
        return m;
    };
    const auto add_bias = [&](float* to, const void* bias, int pack) {
        float b[N];
        to_floats(load<T, N>(static_cast<const T*>(bias) + pack * N), b);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] += b[i];
    };

#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[p][i] = 0.f;
        const int pack = p * threads + thread;
        if (pack < packs && branches[0]) {
            to_floats(raw[1][p], x[p]);
            if (a.bias[0]) {
                if (kReadAhead) {
                    float b[N];
                    to_floats(bias_ahead, b);
#pragma unroll
                    for (int i = 0; i < N; ++i) x[p][i] += b[i];
                } else {
                    add_bias(x[p], a.bias[0], pack);
                }
            }
        }
    }
    if (a.branch_norm.kind) {
        const Moments m = moments(a.branch_norm.kind);
        const float scale = scale_of(m, a.branch_norm);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            const int pack = p * threads + thread;
            if (pack < packs) {
                Parameters<T, N> parameters;
                parameters.read(a.branch_norm, pack * N);
                parameters.apply(a.branch_norm, m.mean, scale, x[p], x[p]);
            }
        }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const int pack = p * threads + thread;
        if (pack < packs) {
            float other[N];
            if (residual) {
                to_floats(raw[0][p], other);
#pragma unroll
                for (int i = 0; i < N; ++i) x[p][i] += other[i];
            }
            if (branches[1]) {
                to_floats(raw[2][p], other);
                if (a.bias[1]) add_bias(other, a.bias[1], pack);
#pragma unroll
                for (int i = 0; i < N; ++i) x[p][i] += other[i];
            }
            if (a.sum)
                store(static_cast<T*>(a.sum) + base + static_cast<int64_t>(pack) * N,
                      from_floats<T, N>(x[p]));
        }
    }

    Moments m = {0.f, 0.f};
    const auto write = [&](void* output, const OffloadNorm& norm, bool is_first) {
        if (norm.kind && (is_first || norm.kind != a.norm.kind || !a.output))
            m = moments(norm.kind);
        const float scale = scale_of(m, norm);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            const int pack = p * threads + thread;
            if (pack < packs) {
                float y[N];
                if (norm.kind) {
                    Parameters<T, N> parameters;
                    if (kReadAhead && is_first)
                        parameters = ahead;
                    else
                        parameters.read(norm, pack * N);
                    parameters.apply(norm, m.mean, scale, x[p], y);
                } else {
#pragma unroll
                    for (int i = 0; i < N; ++i) y[i] = x[p][i];
                }
                store(static_cast<T*>(output) + base + static_cast<int64_t>(pack) * N,
                      from_floats<T, N>(y));
            }
        }
    };
    if (a.output) write(a.output, a.norm, true);
    if (a.output2) write(a.output2, a.norm2, false);
}

// One block a row, any width, N elements at a time. Nothing is written before the last pass, in
// which a thread reads an element before it writes there: outputs may lie on inputs here too.
template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads) rows_in_passes(OffloadResidualNorm a) {
    let_next_kernel_begin();
    __shared__ float shared[kMostReductions * kMostWarps];
    RowSum row_sum = {shared, static_cast<int>(blockDim.x / 32)};
    wait_for_previous_kernel();

    const int64_t base = static_cast<int64_t>(blockIdx.x) * a.width;
    const float width = static_cast<float>(a.width);
    const int step = blockDim.x * N;
    const auto add = [&](float* x, const void* from, int64_t at) {
        float other[N];
        to_floats(load<T, N>(static_cast<const T*>(from) + at), other);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] += other[i];
    };
    const auto branch = [&](float* x, int which, int column) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = 0.f;
        if (a.branch[which]) {
            add(x, a.branch[which], base + column);
            if (a.bias[which]) add(x, a.bias[which], column);
        }
    };
    // Both passes of a norm's statistics over what `value(x, column)` gives.
    const auto moments = [&](int kind, auto value) {
        Moments m = {0.f, 0.f};
        if (kind == OFFLOAD_NORM_LAYER) {
            float sum = 0.f;
            for (int column = threadIdx.x * N; column < a.width; column += step) {
                float x[N];
                value(x, column);
#pragma unroll
                for (int i = 0; i < N; ++i) sum += x[i];
            }
            m.mean = row_sum(sum) / width;
        }
        float squares = 0.f;
        for (int column = threadIdx.x * N; column < a.width; column += step) {
            float x[N];
            value(x, column);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float d = x[i] - m.mean;
                squares = fmaf(d, d, squares);
            }
        }
        m.variance = row_sum(squares) / width;
        return m;
    };

    Moments of_branch = {0.f, 0.f};
    if (a.branch_norm.kind)
        of_branch =
            moments(a.branch_norm.kind, [&](float* x, int column) { branch(x, 0, column); });
    const float branch_scale = scale_of(of_branch, a.branch_norm);
    const auto total = [&](float* x, int column) {
        branch(x, 0, column);
        if (a.branch_norm.kind) {
            Parameters<T, N> parameters;
            parameters.read(a.branch_norm, column);
            parameters.apply(a.branch_norm, of_branch.mean, branch_scale, x, x);
        }
        if (a.residual) add(x, a.residual, base + column);
        if (a.branch[1]) {
            float other[N];
            branch(other, 1, column);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] += other[i];
        }
    };
    Moments first = {0.f, 0.f}, second = {0.f, 0.f};
    if (a.output && a.norm.kind) first = moments(a.norm.kind, total);
    if (a.output2 && a.norm2.kind)
        second = a.output && a.norm2.kind == a.norm.kind ? first : moments(a.norm2.kind, total);
    const float first_scale = scale_of(first, a.norm), second_scale = scale_of(second, a.norm2);

    for (int column = threadIdx.x * N; column < a.width; column += step) {
        float x[N];
        total(x, column);
        const auto write = [&](void* output, const OffloadNorm& norm, const Moments& m,
                               float scale) {
            float y[N];
            if (norm.kind) {
                Parameters<T, N> parameters;
                parameters.read(norm, column);
                parameters.apply(norm, m.mean, scale, x, y);
            } else {
#pragma unroll
                for (int i = 0; i < N; ++i) y[i] = x[i];
            }
            store(static_cast<T*>(output) + base + column, from_floats<T, N>(y));
        };
        if (a.sum) store(static_cast<T*>(a.sum) + base + column, from_floats<T, N>(x));
        if (a.output) write(a.output, a.norm, first, first_scale);
        if (a.output2) write(a.output2, a.norm2, second, second_scale);
    }
}

template <typename T, int N, int kPacks>
int launch_registers(const OffloadResidualNorm& a, int warps, bool few, void* stream) {
    const int rows_per_block = warps == 1 && !few ? kNarrowRows : 1;
    const int64_t blocks = (a.rows + rows_per_block - 1) / rows_per_block;
    return launch("residual_norm", rows_in_registers<T, N, kPacks>,
                  dim3(static_cast<unsigned>(blocks)), dim3(32 * warps * rows_per_block), 0, stream,
                  a.launch_early, a, warps);
}

template <typename T, int N>
int launch_passes(const OffloadResidualNorm& a, void* stream) {
    const int packs = a.width / N;
    const int threads = packs < kMostThreads ? (packs + 31) / 32 * 32 : kMostThreads;
    return launch("residual_norm", rows_in_passes<T, N>, dim3(static_cast<unsigned>(a.rows)),
                  dim3(threads), 0, stream, a.launch_early, a);
}

template <typename T>
int launch_rows(const OffloadResidualNorm& a, int multiprocessors, void* stream) {
    constexpr int N = 16 / sizeof(T);
    bool wide = a.width % N == 0;
    for (const void* p :
         {a.residual, a.branch[0], a.branch[1], a.bias[0], a.bias[1],
          static_cast<const void*>(a.sum), static_cast<const void*>(a.output),
          static_cast<const void*>(a.output2), a.branch_norm.weight, a.branch_norm.bias,
          a.norm.weight, a.norm.bias, a.norm2.weight, a.norm2.bias})
        wide = wide && aligned<T, N>(p);
    if (!wide) return launch_passes<T, 1>(a, stream);
    const int packs = a.width / N;
    // Few rows: as many threads a row as there are, each done sooner. Many: more bytes under way a
    // thread, and fewer threads that wait for each other.
    const bool few = a.rows < 2 * multiprocessors;
    int per_thread = a.packs_per_thread ? a.packs_per_thread : few ? 1 : packs <= 64 ? 2 : 4;
    while (per_thread < 4 && packs > per_thread * kMostThreads) per_thread *= 2;
    const int warps = (packs + 32 * per_thread - 1) / (32 * per_thread);
    if (warps > kMostWarps) return launch_passes<T, N>(a, stream);
    if (per_thread == 1) return launch_registers<T, N, 1>(a, warps, few, stream);
    if (per_thread == 2) return launch_registers<T, N, 2>(a, warps, few, stream);
    return launch_registers<T, N, 4>(a, warps, few, stream);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_residual_norm(const OffloadResidualNorm* arguments, void* stream) {
    using namespace offload;
    const OffloadResidualNorm& a = *arguments;
    // Columns are counted in 32 bits, a block's step beyond the last one included.
    if (a.rows < 0 || a.rows > INT32_MAX || a.width < 1 || a.width > INT32_MAX / 2)
        return refuse("residual_norm: no input has %lld rows of %d elements",
                      static_cast<long long>(a.rows), a.width);
    if (!known_norm(a.branch_norm) || !known_norm(a.norm) || !known_norm(a.norm2))
        return refuse("residual_norm: no norm has the number %d, %d or %d", a.branch_norm.kind,
                      a.norm.kind, a.norm2.kind);
    const int packs = a.packs_per_thread;
    if (packs != 0 && packs != 1 && packs != 2 && packs != 4)
        return refuse("residual_norm: packs_per_thread is 1, 2, 4, or 0, not %d", packs);
    if (a.rows == 0) return 0;
    if (!a.residual && !a.branch[0] && !a.branch[1])
        return refuse("residual_norm: residual and branches are all null");
    if (!a.sum && !a.output && !a.output2)
        return refuse("residual_norm: sum, output and output2 are all null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("residual_norm", a.dtype, [&](auto element) {
        return launch_rows<decltype(element)>(a, device.multiprocessors, stream);
    });
}
