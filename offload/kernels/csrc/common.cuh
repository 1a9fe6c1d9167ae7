// What every kernel shares: errors, dtypes, wide loads, reductions, and launching.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

#include "offload_kernels.h"

#define OFFLOAD_API extern "C" __attribute__((visibility("default")))

namespace offload {

// Words for offload_last_error(); returns -1, the status of a refused argument.
int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The same for a CUDA error, whose code is the status; 0 for cudaSuccess.
int cuda_status(const char* what, cudaError_t error);

template <typename T>
__device__ __forceinline__ float to_float(T x);
template <>
__device__ __forceinline__ float to_float(float x) {
    return x;
}
template <>
__device__ __forceinline__ float to_float(__half x) {
    return __half2float(x);
}
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
    return __float2bfloat16_rn(x);
}

// 16 bytes of T, moved by one instruction; the address must be a multiple of 16.
template <typename T>
struct alignas(16) Vector {
    static constexpr int kWidth = 16 / sizeof(T);
    T at[kWidth];
};

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ float activate(float x, int kind) {
    switch (kind) {
        case OFFLOAD_RELU:
            return x > 0.f ? x : (x != x ? x : 0.f);  // NaN stays NaN
        case OFFLOAD_GELU:
            return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
        case OFFLOAD_GELU_TANH:
            return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case OFFLOAD_SILU:
            return x / (1.f + __expf(-x));
        default:
            return x;
    }
}

// Programmatic dependent launch: waits until the kernels before this one are done and their writes
// are seen. Without the launch attribute, and before sm_90, it returns at once.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel on the stream begin; it still waits for this one's end before it reads what
// this one wrote.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

struct Device {
    int index;
    int multiprocessors;
    int major;             // compute capability
    int shared_per_block;  // bytes a block may ask for
    int l2_bytes;
    int minor;  // of the compute capability
};

// The current device's facts, asked for once a device; index < 0 where CUDA refuses
// (offload_last_error has why).
const Device& current_device();

template <typename... Parameters, typename... Arguments>
int launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
           void* stream, bool early, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    // Older devices refuse the attribute.
    config.numAttrs = early && current_device().major >= 9 ? 1 : 0;
    return cuda_status(name,
                       cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace offload
