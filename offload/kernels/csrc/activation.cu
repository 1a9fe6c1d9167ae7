// Bias, activation and gate in one pass. A thread keeps one column's bias in registers and goes
// through a few rows, whose loads are all under way before the first is used.
#include "elementwise.cuh"

namespace offload {
namespace {

template <typename T, int N, bool kGated>
__global__ void __launch_bounds__(kColumnThreads)
    activation_kernel(OffloadActivation a, int column_blocks, int rows_per_block) {
    let_next_kernel_begin();
    const int column = (blockIdx.x % column_blocks * kColumnThreads + threadIdx.x) * N;
    const int64_t first = static_cast<int64_t>(blockIdx.x / column_blocks) * rows_per_block;
    const bool inside = column < a.width;
    float bias[N] = {}, up_bias[N] = {};
    if (inside && a.bias) {
        const T* from = static_cast<const T*>(a.bias) + column;
        to_floats(load<T, N>(from), bias);
        if (kGated) to_floats(load<T, N>(from + a.width), up_bias);
    }
    wait_for_previous_kernel();
    if (!inside) return;

    const T* input = static_cast<const T*>(a.input) + first * a.input_stride + column;
    T* output = static_cast<T*>(a.output) + first * a.width + column;
    const int rows =
        static_cast<int>(a.rows - first < rows_per_block ? a.rows - first : rows_per_block);
    Pack<T, N> gates[kThreadRows], ups[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
        if (r < rows) {
            gates[r] = load_once<T, N>(input + r * a.input_stride);
            if (kGated) ups[r] = load_once<T, N>(input + r * a.input_stride + a.width);
        }
    }
    by_activation(a.activation, [&](auto kind) {
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            if (r < rows) {
                float x[N], up[N];
                to_floats(gates[r], x);
                if (kGated) to_floats(ups[r], up);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    x[i] = activate_as<T, decltype(kind)::value>(x[i] + bias[i]);
                    if (kGated) x[i] *= up[i] + up_bias[i];
                }
                store(output + static_cast<int64_t>(r) * a.width, from_floats<T, N>(x));
            }
        }
    });
}

template <typename T, int N>
int launch_activation(const OffloadActivation& a, int multiprocessors, void* stream) {
    auto kernel = a.gated ? activation_kernel<T, N, true> : activation_kernel<T, N, false>;
    return launch_by_columns("activation", kernel, a, N, multiprocessors, stream);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_activation(const OffloadActivation* arguments, void* stream) {
    using namespace offload;
    const OffloadActivation& a = *arguments;
    if (a.rows < 0 || a.width < 1 || a.width > INT32_MAX / 4)
        return refuse("activation: no input has %lld rows of %d elements",
                      static_cast<long long>(a.rows), a.width);
    if (a.activation < OFFLOAD_IDENTITY || a.activation > OFFLOAD_SILU)
        return refuse("activation: no activation has the number %d", a.activation);
    if (a.rows == 0) return 0;
    if (!a.input || !a.output) return refuse("activation: input or output is null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("activation", a.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int N = 16 / sizeof(T);
        const bool wide = a.width % N == 0 && a.input_stride % N == 0 && aligned<T, N>(a.input) &&
                          aligned<T, N>(a.bias) && aligned<T, N>(a.output);
        return wide ? launch_activation<T, N>(a, device.multiprocessors, stream)
                    : launch_activation<T, 1>(a, device.multiprocessors, stream);
    });
}
