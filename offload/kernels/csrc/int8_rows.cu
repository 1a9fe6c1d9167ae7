// What stands around a product of the int8 matrix units. Ahead of it: a residual sum and its norm,
// where there are such, and the row as int8 with a scale of its own, while it lies in registers.
// Behind it: int32 sums to numbers, with bias, activation, gate and residual, in one pass.
#include "residual_norm.cuh"

namespace offload {
namespace {

constexpr float kLargestCode = 127.f;
// A row of less gets this one's scale, so that no scale is zero or has an infinite reciprocal.
constexpr float kLeastMagnitude = 1e-30f;
constexpr int kMostPacks = 8;  // of a thread

// The bits of |x|: among them the order is that of the numbers, infinity and then NaN at the end.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Over the threads of a row; `shared` has a place a warp that nothing else uses.
__device__ __forceinline__ uint32_t row_largest(uint32_t x, float* shared, int warps) {
    const auto of_warp = [](uint32_t y) {
#pragma unroll
        for (int step = 16; step > 0; step >>= 1)
            y = larger(y, __float_as_uint(__shfl_xor_sync(0xffffffffu, __uint_as_float(y), step)));
        return y;
    };
    x = of_warp(x);
    if (warps > 1) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) shared[threadIdx.x / 32] = __uint_as_float(x);
        __syncthreads();
        x = of_warp(lane < warps ? __float_as_uint(shared[lane]) : 0u);
    }
    return x;
}

struct RowCodes {
    float scale;   // of a code
    float factor;  // from a number to its code

    explicit __device__ __forceinline__ RowCodes(uint32_t largest) {
        const float least = kLeastMagnitude;
        const float most = __uint_as_float(larger(largest, __float_as_uint(least)));
        factor = kLargestCode / most;
        // Of a row with an infinity or NaN nothing is left but NaN.
        scale = most < INFINITY ? most / kLargestCode : __uint_as_float(0x7fc00000u);
    }

    // The nearest code, ties to even, in the lowest byte: that of x * factor + 1.5 * 2^23.
    __device__ __forceinline__ uint32_t operator()(float x) const {
        return __float_as_uint(fmaf(x, factor, 12582912.f)) & 0xffu;
    }

    template <int N>
    __device__ __forceinline__ void write(int8_t* to, const float* x) const {
        if constexpr (N == 1) {
            *to = static_cast<int8_t>((*this)(x[0]));
        } else {
            uint32_t words[N / 4];
#pragma unroll
            for (int w = 0; w < N / 4; ++w) {
                words[w] = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) words[w] |= (*this)(x[4 * w + i]) << (8 * i);
            }
            if constexpr (N == 8)
                *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
            else
                *reinterpret_cast<uint32_t*>(to) = words[0];
        }
    }
};

template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    quantize_in_registers(OffloadQuantizeRows a, int warps) {
    let_next_kernel_begin();
    __shared__ float shared[(kMostReductions + 1) * kMostWarps];
    RowSum row_sum = {shared, warps};
    RowPart<T, N, kPacks> part;
    part.place(threadIdx.x, 32 * warps, a.width);
    part.clear();
    wait_for_previous_kernel();

    const int64_t base = static_cast<int64_t>(blockIdx.x) * a.width;
    Pack<T, N> raw[2][kPacks];
    const void* const sources[2] = {a.branch, a.residual};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        if (sources[which]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                raw[which][p] =
                    load_once<T, N>(static_cast<const T*>(sources[which]) + base + part.columns[p]);
        }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        if (sources[which]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p) part.add(p, raw[which][p]);
        }
        if (which == 0) {
            if (a.bias) part.add_from(a.bias);
            if (a.branch_norm.kind) part.normalise(a.branch_norm, row_sum);
        }
    }
    if (a.sum) part.write_sum(static_cast<T*>(a.sum) + base, false);
    if (a.norm.kind) part.normalise(a.norm, row_sum);

    uint32_t largest = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        uint32_t of_pack = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) of_pack = larger(of_pack, magnitude(part.x[p][i]));
        // Beyond the row's end its last pack was read, perhaps when the sum stood there already.
        if (part.inside[p]) largest = larger(largest, of_pack);
    }
    const RowCodes codes(row_largest(largest, row_sum.shared, warps));
    if (threadIdx.x == 0) a.scales[blockIdx.x] = codes.scale;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
        if (part.inside[p]) codes.write<N>(a.codes + base + part.columns[p], part.x[p]);
}

// Rows too wide for registers, or of an odd width: read twice.
template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads) quantize_in_passes(OffloadQuantizeRows a) {
    let_next_kernel_begin();
    __shared__ float shared[kMostWarps];
    wait_for_previous_kernel();
    const int64_t base = static_cast<int64_t>(blockIdx.x) * a.width;
    const T* row = static_cast<const T*>(a.residual) + base;
    const int step = blockDim.x * N;
    uint32_t largest = 0;
    for (int column = threadIdx.x * N; column < a.width; column += step) {
        float x[N];
        to_floats(load<T, N>(row + column), x);
#pragma unroll
        for (int i = 0; i < N; ++i) largest = larger(largest, magnitude(x[i]));
    }
    const RowCodes codes(row_largest(largest, shared, blockDim.x / 32));
    if (threadIdx.x == 0) a.scales[blockIdx.x] = codes.scale;
    for (int column = threadIdx.x * N; column < a.width; column += step) {
        float x[N];
        to_floats(load<T, N>(row + column), x);
        codes.write<N>(a.codes + base + column, x);
    }
}

template <typename T, int N>
int launch_quantize(const OffloadQuantizeRows& a, int multiprocessors, void* stream) {
    const int packs = a.width / N;
    const dim3 blocks(static_cast<unsigned>(a.rows));
    // Few rows: as many threads a row as there are. Else two packs a thread, or what it takes.
    int each = a.rows < 2 * multiprocessors ? 1 : 2;
    while (each < kMostPacks && packs > each * kMostThreads) each *= 2;
    const bool fits = packs <= each * kMostThreads;
    if (!fits && (a.branch || a.sum || a.norm.kind))
        return refuse("quantize_rows: rows of %d are too wide for sums and norms", a.width);
    const int warps = (packs + 32 * each - 1) / (32 * each);
    if (!fits)
        return launch("quantize_rows", quantize_in_passes<T, N>, blocks, dim3(kMostThreads), 0,
                      stream, a.launch_early, a);
    const auto run = [&](auto kernel) {
        return launch("quantize_rows", kernel, blocks, dim3(32 * warps), 0, stream, a.launch_early,
                      a, warps);
    };
    switch (each) {
        case 1:
            return run(quantize_in_registers<T, N, 1>);
        case 2:
            return run(quantize_in_registers<T, N, 2>);
        case 4:
            return run(quantize_in_registers<T, N, 4>);
        default:
            return run(quantize_in_registers<T, N, kMostPacks>);
    }
}

template <typename S, int N>
__device__ __forceinline__ void read_floats(const void* from, int64_t at, float* x) {
    constexpr int kStep = N * sizeof(S) > 16 ? 16 / sizeof(S) : N;
#pragma unroll
    for (int i = 0; i < N; i += kStep)
        to_floats(load<S, kStep>(static_cast<const S*>(from) + at + i), x + i);
}

// N columns' scales, or the one of all of them.
template <int N>
__device__ __forceinline__ void read_scales(const OffloadScaleSums& a, int64_t column, float* x) {
    const auto read = [&](auto element) {
        using S = decltype(element);
        if (a.one_scale) {
            const float all = to_float(*static_cast<const S*>(a.scales));
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = all;
        } else {
            read_floats<S, N>(a.scales, column, x);
        }
    };
    if (a.scale_dtype == OFFLOAD_F32)
        read(float{});
    else if (a.scale_dtype == OFFLOAD_F16)
        read(__half{});
    else
        read(__nv_bfloat16{});
}

template <int N>
struct Sums {
    static constexpr int kStep = N > 4 ? 4 : N;
    Pack<float, kStep> packs[N / kStep];  // the bits of int32

    __device__ __forceinline__ void read(const int32_t* from) {
#pragma unroll
        for (int i = 0; i < N / kStep; ++i)
            packs[i] = load_once<float, kStep>(reinterpret_cast<const float*>(from) + kStep * i);
    }

    __device__ __forceinline__ void numbers(float* x) const {
#pragma unroll
        for (int i = 0; i < N / kStep; ++i) {
            to_floats(packs[i], x + kStep * i);
#pragma unroll
            for (int j = 0; j < kStep; ++j)
                x[kStep * i + j] =
                    static_cast<float>(static_cast<int32_t>(__float_as_uint(x[kStep * i + j])));
        }
    }
};

template <typename T, int N, bool kGated>
__global__ void __launch_bounds__(kColumnThreads)
    scale_sums_kernel(OffloadScaleSums a, int column_blocks, int rows_per_block) {
    let_next_kernel_begin();
    const int column = (blockIdx.x % column_blocks * kColumnThreads + threadIdx.x) * N;
    const int64_t first = static_cast<int64_t>(blockIdx.x / column_blocks) * rows_per_block;
    if (column >= a.width) return;
    constexpr int kHalves = kGated ? 2 : 1;
    float scales[kHalves][N], bias[kHalves][N];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        const int64_t at = column + static_cast<int64_t>(half) * a.width;
        read_scales<N>(a, at, scales[half]);
#pragma unroll
        for (int i = 0; i < N; ++i) bias[half][i] = 0.f;
        if (a.bias) read_floats<T, N>(a.bias, at, bias[half]);
    }
    wait_for_previous_kernel();

    const int32_t* sums = a.sums + first * a.width * kHalves + column;
    const int rows =
        static_cast<int>(a.rows - first < rows_per_block ? a.rows - first : rows_per_block);
    Sums<N> found[kThreadRows][kHalves];
    float row_scales[kThreadRows];
    Pack<T, N> residual[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
        if (r < rows) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                found[r][half].read(sums + (static_cast<int64_t>(r) * kHalves + half) * a.width);
            row_scales[r] = a.row_scales[first + r];
            if (a.residual)
                residual[r] = load_once<T, N>(static_cast<const T*>(a.residual) +
                                              (first + r) * a.width + column);
        }
    }
    by_activation(a.activation, [&](auto kind) {
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            if (r < rows) {
                float x[kHalves][N], y[N];
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    found[r][half].numbers(x[half]);
#pragma unroll
                    for (int i = 0; i < N; ++i)
                        x[half][i] =
                            fmaf(x[half][i] * row_scales[r], scales[half][i], bias[half][i]);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    y[i] = activate_as<T, decltype(kind)::value>(x[0][i]);
                    if (kGated) y[i] *= x[kHalves - 1][i];
                }
                if (a.residual) {
                    float added[N];
                    to_floats(residual[r], added);
#pragma unroll
                    for (int i = 0; i < N; ++i) y[i] += added[i];
                }
                store(static_cast<T*>(a.output) + (first + r) * a.width + column,
                      from_floats<T, N>(y));
            }
        }
    });
}

template <typename T, int N>
int launch_scale_sums(const OffloadScaleSums& a, int multiprocessors, void* stream) {
    auto kernel = a.gated ? scale_sums_kernel<T, N, true> : scale_sums_kernel<T, N, false>;
    return launch_by_columns("scale_sums", kernel, a, N, multiprocessors, stream);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_quantize_rows(const OffloadQuantizeRows* arguments, void* stream) {
    using namespace offload;
    const OffloadQuantizeRows& a = *arguments;
    if (a.rows < 0 || a.rows > INT32_MAX || a.width < 1 || a.width > INT32_MAX / 2)
        return refuse("quantize_rows: no input has %lld rows of %d elements",
                      static_cast<long long>(a.rows), a.width);
    if (!known_norm(a.norm) || !known_norm(a.branch_norm))
        return refuse("quantize_rows: no norm has the number %d or %d", a.norm.kind,
                      a.branch_norm.kind);
    if (a.rows == 0) return 0;
    if (!a.residual || !a.codes || !a.scales)
        return refuse("quantize_rows: residual, codes or scales is null");
    if (!a.branch && (a.bias || a.branch_norm.kind))
        return refuse("quantize_rows: there is no branch for its bias or norm");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("quantize_rows", a.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int N = 16 / sizeof(T);
        bool wide = a.width % N == 0 && reinterpret_cast<uintptr_t>(a.codes) % N == 0;
        for (const void* p : {a.residual, a.branch, a.bias, static_cast<const void*>(a.sum),
                              a.norm.weight, a.norm.bias, a.branch_norm.weight, a.branch_norm.bias})
            wide = wide && aligned<T, N>(p);
        return wide ? launch_quantize<T, N>(a, device.multiprocessors, stream)
                    : launch_quantize<T, 1>(a, device.multiprocessors, stream);
    });
}

OFFLOAD_API int offload_scale_sums(const OffloadScaleSums* arguments, void* stream) {
    using namespace offload;
    const OffloadScaleSums& a = *arguments;
    if (a.rows < 0 || a.width < 1 || a.width > INT32_MAX / 4)
        return refuse("scale_sums: no sums have %lld rows of %d elements",
                      static_cast<long long>(a.rows), a.width);
    if (a.activation < OFFLOAD_IDENTITY || a.activation > OFFLOAD_SILU)
        return refuse("scale_sums: no activation has the number %d", a.activation);
    if (a.scale_dtype < OFFLOAD_F32 || a.scale_dtype > OFFLOAD_BF16)
        return refuse("scale_sums: no scales have the dtype %d", a.scale_dtype);
    if (a.rows == 0) return 0;
    if (!a.sums || !a.row_scales || !a.scales || !a.output)
        return refuse("scale_sums: sums, row_scales, scales or output is null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("scale_sums", a.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int N = 16 / sizeof(T);
        const bool wide = a.width % N == 0 && aligned16(a.sums) &&
                          (a.one_scale || aligned16(a.scales)) && aligned<T, N>(a.bias) &&
                          aligned<T, N>(a.residual) && aligned<T, N>(a.output);
        return wide ? launch_scale_sums<T, N>(a, device.multiprocessors, stream)
                    : launch_scale_sums<T, 1>(a, device.multiprocessors, stream);
    });
}
