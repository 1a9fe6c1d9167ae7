// Runs CUDA kernels on the host, for tests where there is no GPU: blocks one after another, the
// threads of a block as fibers that change over at barriers and shuffles.
//
// Force-included before a .cu file that g++ compiles as C++ with CUDA's headers. Enough for kernels
// of plain loads and stores, static shared memory, __syncthreads and __shfl_xor_sync over whole
// warps.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace host_cuda {

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    int64_t block_barriers = 0, warp_barriers = 0, cluster_barriers = 0;
    float exchange[2] = {};
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline int current = 0;
inline void (*body)(void*);
inline void* body_arguments;
inline bool last_block_first = false;

inline Thread& self() { return threads[current]; }
inline void change_over() { swapcontext(&self().context, &scheduler); }

inline void block_barrier() {
    const int64_t mine = ++self().block_barriers;
    const size_t first = current / blockDim.x * blockDim.x;
    for (size_t i = first; i < first + blockDim.x; ++i)
        while (!threads[i].done && threads[i].block_barriers < mine) change_over();
}

inline void warp_barrier() {
    const int64_t mine = ++self().warp_barriers;
    const size_t first = current / 32 * 32;
    for (size_t i = first; i < first + 32 && i < threads.size(); ++i)
        while (!threads[i].done && threads[i].warp_barriers < mine) change_over();
}

inline float shuffle_xor(float x, int mask) {
    const int side = self().warp_barriers % 2;
    self().exchange[side] = x;
    warp_barrier();
    return threads[current ^ mask].exchange[side];
}

inline void run_thread() {
    body(body_arguments);
    self().done = true;
    change_over();
}

inline void begin_thread(Thread& thread) {
    constexpr size_t kStack = 128 << 10;
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.done = false;
    thread.block_barriers = thread.warp_barriers = thread.cluster_barriers = 0;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
}

inline void run_grid(dim3 grid, dim3 block) {
    gridDim = grid;
    blockDim = block;
    const int count = block.x;
    threads.resize(count);
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = {last_block_first ? grid.x - 1 - x : x, y, 0};
            for (Thread& thread : threads) begin_thread(thread);
            for (bool left = true; left;) {
                left = false;
                for (current = 0; current < count; ++current) {
                    if (self().done) continue;
                    threadIdx = {static_cast<unsigned>(current), 0, 0};
                    swapcontext(&scheduler, &self().context);
                    left = true;
                }
            }
        }
    }
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::block_barrier(); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
    return host_cuda::shuffle_xor(x, mask);
}
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float __expf(float x) { return expf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, sizeof y);
    return y;
}

template <typename... Parameters, typename... Arguments>
cudaError_t host_launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        Arguments... arguments) {
    // A launch that the hardware would refuse.
    const dim3 grid = config->gridDim, block = config->blockDim;
    if (!grid.x || !grid.y || grid.y > 65535 || grid.x > INT32_MAX || !block.x || block.x > 1024 ||
        block.y != 1 || block.z != 1 || grid.z != 1)
        return cudaErrorInvalidConfiguration;
    auto call = [&] { kernel(arguments...); };
    host_cuda::body = [](void* f) { (*static_cast<decltype(call)*>(f))(); };
    host_cuda::body_arguments = &call;
    host_cuda::run_grid(grid, block);
    return cudaSuccess;
}

// What the library asks the runtime for, answered for a GPU of 4 multiprocessors: of compute
// capability 9.0, or a little more where HOST_DEVICE=1, or 8.0 where it is 2.
inline int host_device() {
    const char* device = getenv("HOST_DEVICE");
    return device ? atoi(device) : 0;
}
inline cudaError_t host_attribute(int* value, cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrMultiProcessorCount      ? 4
             : attribute == cudaDevAttrComputeCapabilityMajor ? (device == 2 ? 8 : 9)
             : attribute == cudaDevAttrComputeCapabilityMinor ? device % 2
                                                              : 232448;
    return cudaSuccess;
}
#define cudaLaunchKernelEx host_launch
#define cudaFuncGetAttributes(attributes, kernel) cudaSuccess
#define cudaGetDevice(index) (*(index) = host_device(), cudaSuccess)
#define cudaDeviceGetAttribute host_attribute
#define cudaGetDeviceCount(count) (*(count) = 1, cudaSuccess)
#define cudaSetDevice(index) cudaSuccess
#define cudaGetErrorString(error) "an error"
#define cudaGetLastError() cudaSuccess
