// What the kernels share that read every element once: packs of elements, and fast activations.
// Where there is no GPU the tests run these kernels on the host, which is what the lines for no
// __CUDA_ARCH__ are for.
#pragma once
#include <type_traits>

#include "common.cuh"

namespace offload {

// N neighbours, moved by one instruction; the address must be a multiple of their size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    static_assert(N == 1 || (N * sizeof(T) == 8 || N * sizeof(T) == 16), "one element, or words");
    static constexpr int kWords = N == 1 ? 1 : N * sizeof(T) / 4;
    std::conditional_t<N == 1, T, uint32_t> words[kWords];
};

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}

// For what is read once: it leaves L1 to the weights, which every row reads. Volatile, so that it
// stays behind wait_for_previous_kernel().
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load_once(const T* from) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(Pack<T, N>) == 16) {
        Pack<T, N> x;
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
                     : "l"(from)
                     : "memory");
        return x;
    }
#endif
    return load<T, N>(from);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& x) {
    *reinterpret_cast<Pack<T, N>*>(to) = x;
}

template <typename T, int N>
__device__ __forceinline__ void to_floats(const Pack<T, N>& pack, float* x) {
    if constexpr (N == 1) {
        x[0] = to_float(pack.words[0]);
    } else {
#pragma unroll
        for (int i = 0; i < Pack<T, N>::kWords; ++i) {
            const uint32_t word = pack.words[i];
            if constexpr (std::is_same_v<T, float>) {
                x[i] = __uint_as_float(word);
            } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
                x[2 * i] = __uint_as_float(word << 16);
                x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
            } else {
                const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
                x[2 * i] = both.x;
                x[2 * i + 1] = both.y;
            }
        }
    }
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> from_floats(const float* x) {
    Pack<T, N> pack;
    if constexpr (N == 1) {
        pack.words[0] = from_float<T>(x[0]);
    } else {
#pragma unroll
        for (int i = 0; i < Pack<T, N>::kWords; ++i) {
            if constexpr (std::is_same_v<T, float>) {
                pack.words[i] = __float_as_uint(x[i]);
            } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
                const __nv_bfloat162 both = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
                pack.words[i] = *reinterpret_cast<const uint32_t*>(&both);
            } else {
                const __half2 both = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
                pack.words[i] = *reinterpret_cast<const uint32_t*>(&both);
            }
        }
    }
    return pack;
}

// For what is written once, and is not to push out of L2 what will be read.
template <typename T, int N>
__device__ __forceinline__ void store_once(T* to, const Pack<T, N>& x) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(Pack<T, N>) == 16) {
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.words[0]),
                     "r"(x.words[1]), "r"(x.words[2]), "r"(x.words[3])
                     : "memory");
        return;
    }
#endif
    store<T, N>(to, x);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& x, bool once) {
    if (once)
        store_once<T, N>(to, x);
    else
        store<T, N>(to, x);
}

// Whether packs of N elements may be moved at this address (null: nothing is moved).
template <typename T, int N>
inline bool aligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % (N * sizeof(T)) == 0;
}

template <typename T, int N>
__device__ __forceinline__ void add_to(float* x, const T* from) {
    float other[N];
    to_floats(load<T, N>(from), other);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += other[i];
}

// Over the lanes of a head, a power of two; every thread of the warp takes part.
__device__ __forceinline__ float sum_of_head(float x, int lanes) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        if (step < lanes) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Brings a line that is read after the wait for the previous kernel closer, at no register's cost.
__device__ __forceinline__ void prefetch(const void* from) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

// The same for `bytes` of it, one thread for all; address and bytes are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

__device__ __forceinline__ float fast_reciprocal(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.f / x;
#endif
}

// activate() for results of dtype T. At HBM's rate a 16-bit element has about 27 instructions,
// which erff and tanhf use up; these need 5 to 15, and their error is below a tenth of T's
// rounding. They hold in the negative tail too, where 1 + erf and 1 + tanh cancel. float keeps the
// exact functions.
template <typename T, int kKind>
__device__ __forceinline__ float activate_as(float x) {
    constexpr float kLog2E = 1.4426950408889634f;
    if constexpr (kKind == OFFLOAD_SILU && std::is_same_v<T, float>) {
        return x / (1.f + expf(-x));
    } else if constexpr (kKind == OFFLOAD_IDENTITY || kKind == OFFLOAD_RELU ||
                         std::is_same_v<T, float>) {
        return activate(x, kKind);
    } else if constexpr (kKind == OFFLOAD_SILU) {
        return x * fast_reciprocal(1.f + fast_exp2(-kLog2E * x));
    } else if constexpr (kKind == OFFLOAD_GELU_TANH) {
        // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
        constexpr float kLinear = -2.f * 0.79788456080286536f * kLog2E;
        const float power = x * fmaf(kLinear * 0.044715f * x, x, kLinear);
        return x * fast_reciprocal(1.f + fast_exp2(power));
    } else {
        // x * Phi(x) = max(x, 0) - |x| * Phi(-|x|), and Phi(-z) = exp(-z^2 / 2) * polynomial in
        // 1 / (1 + 0.54 * z / sqrt(2)): the form of Abramowitz and Stegun 7.1.26, fitted anew to a
        // relative error of 4e-5.
        const float z = fabsf(x);
        const float t = fast_reciprocal(fmaf(0.54f * 0.70710678118654752f, z, 1.f));
        float p = fmaf(-0.08930166f, t, 0.184053f);
        p = fmaf(p, t, 0.09541936f);
        p = fmaf(p, t, 0.15778641f);
        p = fmaf(p, t, 0.15202523f);
        const float tail = p * t * fast_exp2(-0.5f * kLog2E * x * x);
        const float y = fmaf(-z, tail, fmaxf(x, 0.f));
        return x > 20.f ? x : y;  // infinity * 0
    }
}

// 1 / sqrt(x) to two units in the last place: rounded as it should be, it is ten times as long.
__device__ __forceinline__ float inverse_root(float x) {
#ifdef __CUDA_ARCH__
    return rsqrtf(x);
#else
    return 1.f / sqrtf(x);
#endif
}

// f(std::integral_constant<int, kind>) for the kind that is known at run time only.
template <typename F>
__device__ __forceinline__ void by_activation(int kind, F f) {
    switch (kind) {
        case OFFLOAD_RELU:
            return f(std::integral_constant<int, OFFLOAD_RELU>{});
        case OFFLOAD_GELU:
            return f(std::integral_constant<int, OFFLOAD_GELU>{});
        case OFFLOAD_GELU_TANH:
            return f(std::integral_constant<int, OFFLOAD_GELU_TANH>{});
        case OFFLOAD_SILU:
            return f(std::integral_constant<int, OFFLOAD_SILU>{});
        default:
            return f(std::integral_constant<int, OFFLOAD_IDENTITY>{});
    }
}

// f(an element) for the dtype's type; refuses a number that is none.
template <typename F>
int by_dtype(const char* op, int dtype, F f) {
    switch (dtype) {
        case OFFLOAD_F32:
            return f(float{});
        case OFFLOAD_F16:
            return f(__half{});
        case OFFLOAD_BF16:
            return f(__nv_bfloat16{});
        default:
            return refuse("%s: no dtype has the number %d", op, dtype);
    }
}

// A division by what the host knows, of n below 2^31: a product instead of some twenty
// instructions.
struct Divisor {
    int by, shift;
    uint32_t factor;

    Divisor() : by(1), shift(0), factor(0) {}
    explicit Divisor(int by) : by(by), shift(0), factor(0) {
        if (by == 1) return;
        int log2 = 0;
        while ((1ll << log2) < by) ++log2;
        shift = log2 - 1;  // 2^(31 + log2) / by, rounded up, has 32 bits
        factor = static_cast<uint32_t>(((1ull << (31 + log2)) + by - 1) / by);
    }

    __device__ __forceinline__ int operator()(int n) const {
        const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor;
        return by == 1 ? n : static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
    }
};

inline bool known_norm(const OffloadNorm& norm) {
    return norm.kind == OFFLOAD_NORM_NONE || norm.kind == OFFLOAD_NORM_LAYER ||
           norm.kind == OFFLOAD_NORM_RMS;
}

// How far ahead of the rows that it reads a kernel asks L2 for rows, in bytes: 2/15 of L2, which
// covers HBM's latency several times over and stays there, beside what is written, until it is read
// (an H200, of whose L2 it is 8 MiB, at 4096 columns: 0.97 of a copy's rate, 0.92 with none, 0.82
// with 17 MB, 0.68 with 35).
inline int64_t bytes_ahead(const Device& device) { return device.l2_bytes / 15 * 2; }

constexpr int kColumnThreads = 128;
constexpr int kThreadRows = 4;  // of one thread

// Launches a kernel whose thread has `pack` columns of up to kThreadRows rows of a.rows x a.width:
// kernel(a, blocks of a row, rows of a block).
template <typename Arguments>
int launch_by_columns(const char* name, void (*kernel)(Arguments, int, int), const Arguments& a,
                      int pack, int multiprocessors, void* stream) {
    const int64_t column_blocks = (a.width / pack + kColumnThreads - 1) / kColumnThreads;
    // With few rows a block takes one: more blocks, each done sooner.
    const int rows_per_block = a.rows * column_blocks < 8 * multiprocessors ? 1 : kThreadRows;
    const int64_t blocks = column_blocks * ((a.rows + rows_per_block - 1) / rows_per_block);
    if (blocks > INT32_MAX)
        return refuse("%s: %lld rows of %d are too many for one launch", name,
                      static_cast<long long>(a.rows), a.width);
    return launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kColumnThreads), 0,
                  stream, a.launch_early, a, static_cast<int>(column_blocks), rows_per_block);
}

}  // namespace offload
