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

// A norm's parameters at a thread's packs: ones and zeros where there are none, so that nothing
// branches where they are used.
template <typename T, int N, int kPacks>
struct Parameters {
    Pack<T, N> weight[kPacks], bias[kPacks];
    float offset;

    __device__ __forceinline__ void read(const OffloadNorm& norm, const int (&columns)[kPacks]) {
        read(weight, norm.weight, 1.f, columns);
        read(bias, norm.bias, 0.f, columns);
        offset = norm.weight ? norm.weight_offset : 0.f;
    }

    __device__ __forceinline__ void apply(int pack, float mean, float scale, const float* x,
                                          float* y) const {
        float w[N], b[N];
        to_floats(weight[pack], w);
        to_floats(bias[pack], b);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = fmaf((x[i] - mean) * scale, w[i] + offset, b[i]);
    }

  private:
    __device__ __forceinline__ static void read(Pack<T, N> (&packs)[kPacks], const void* from,
                                                float otherwise, const int (&columns)[kPacks]) {
        if (from) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                packs[p] = load<T, N>(static_cast<const T*>(from) + columns[p]);
        } else {
            float same[N];
#pragma unroll
            for (int i = 0; i < N; ++i) same[i] = otherwise;
#pragma unroll
            for (int p = 0; p < kPacks; ++p) packs[p] = from_floats<T, N>(same);
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
    const float width = static_cast<float>(a.width);
    // Beyond the row's end the last pack is read again, so that no load has a branch of its own;
    // nothing comes of it.
    int columns[kPacks];
    bool inside[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const int pack = p * threads + thread, last = a.width / N - 1;
        inside[p] = pack <= last;
        columns[p] = (inside[p] ? pack : last) * N;
    }

    // With one pack a thread, which is how few rows are done, the parameters are read before the
    // wait: no kernel writes them, and they come from further away than the rows do. Else they are
    // asked for once the inputs' registers are free, and before the sums that they wait for.
    constexpr bool kReadAhead = kPacks == 1;
    Parameters<T, N, kPacks> parameters;
    Pack<T, N> bias[kPacks];
    const auto read_bias = [&] {
        if (a.bias[0]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                bias[p] = load<T, N>(static_cast<const T*>(a.bias[0]) + columns[p]);
        }
    };
    if (kReadAhead) {
        read_bias();
        parameters.read(a.norm, columns);
    }
    wait_for_previous_kernel();
    if (row >= a.rows) return;  // a whole warp, of a block that has no barriers

    const int64_t base = row * a.width;
    Pack<T, N> raw[3][kPacks];
    const void* const sources[3] = {a.branch[0], a.residual, a.branch[1]};
#pragma unroll
    for (int which = 0; which < 3; ++which) {
        if (sources[which]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                raw[which][p] =
                    load_once<T, N>(static_cast<const T*>(sources[which]) + base + columns[p]);
        }
    }
    if (!kReadAhead) read_bias();

    float x[kPacks][N] = {};
    const auto add = [&](const Pack<T, N>& pack, float* to) {
        float other[N];
        to_floats(pack, other);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] += other[i];
    };
    const auto moments = [&](int kind) {
        Moments m = {0.f, 0.f};
        if (kind == OFFLOAD_NORM_LAYER) {
            float sum = 0.f;
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
#pragma unroll
                for (int i = 0; i < N; ++i) sum += inside[p] ? x[p][i] : 0.f;
            m.mean = row_sum(sum) / width;
        }
        float squares = 0.f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float d = inside[p] ? x[p][i] - m.mean : 0.f;
                squares = fmaf(d, d, squares);
            }
        }
        m.variance = row_sum(squares) / width;
        return m;
    };

    if (sources[0]) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) to_floats(raw[0][p], x[p]);
        if (a.bias[0]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p) add(bias[p], x[p]);
        }
    }
    if (a.branch_norm.kind) {
        Parameters<T, N, kPacks> of_branch;
        of_branch.read(a.branch_norm, columns);
        const Moments m = moments(a.branch_norm.kind);
        const float scale = scale_of(m, a.branch_norm);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) of_branch.apply(p, m.mean, scale, x[p], x[p]);
    }
    if (sources[1]) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) add(raw[1][p], x[p]);
    }
    if (sources[2]) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) add(raw[2][p], x[p]);
        if (a.bias[1]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                add(load<T, N>(static_cast<const T*>(a.bias[1]) + columns[p]), x[p]);
        }
    }
    if (!kReadAhead) parameters.read(a.norm, columns);
    if (a.sum) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p)
            if (inside[p])
                store(static_cast<T*>(a.sum) + base + columns[p], from_floats<T, N>(x[p]));
    }

    Moments m = {0.f, 0.f};
    const auto write = [&](void* output, const OffloadNorm& norm, bool has_moments) {
        if (norm.kind && !has_moments) m = moments(norm.kind);
        const float mean = norm.kind ? m.mean : 0.f;
        const float scale = norm.kind ? scale_of(m, norm) : 1.f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            float y[N];
            parameters.apply(p, mean, scale, x[p], y);
            if (inside[p]) store(static_cast<T*>(output) + base + columns[p], from_floats<T, N>(y));
        }
    };
    if (a.output) write(a.output, a.norm, false);
    if (a.output2) {
        parameters.read(a.norm2, columns);
        write(a.output2, a.norm2, a.output && a.norm2.kind == a.norm.kind);
    }
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
            Parameters<T, N, 1> parameters;
            parameters.read(a.branch_norm, {column});
            parameters.apply(0, of_branch.mean, branch_scale, x, x);
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
            Parameters<T, N, 1> parameters;
            parameters.read(norm, {column});
            parameters.apply(0, norm.kind ? m.mean : 0.f, norm.kind ? scale : 1.f, x, y);
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
