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
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
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

// All of its members come, or end, before any goes on.
struct Barrier {
    int members = 0, came = 0, ended = 0;
    int64_t phase = 0;

    void look() {
        if (!came || came + ended < members) return;
        came = 0;
        ++phase;
    }
    void arrive() {
        ++came;
        look();
    }
    void end() {
        ++ended;
        look();
    }
};

// A thread's fiber lasts from one launch to the next. It is left and entered by _setjmp and
// _longjmp: swapcontext asks the kernel for the signal mask each time.
struct Thread {
    std::unique_ptr<char[]> stack;
    jmp_buf left_at;
    const Barrier* barrier = nullptr;  // waits there for the phase
    int64_t phase = 0;
    bool done = false;
    int64_t warp_barriers = 0, cluster_barriers = 0;
    float exchange[2] = {};
};

inline std::vector<Thread> threads;
inline std::vector<Barrier> of_blocks, of_warps;
inline Barrier of_cluster;
inline jmp_buf scheduler;
inline int current = 0;
inline void (*body)(void*);
inline void* body_arguments;
inline bool last_block_first = false;

inline Thread& self() { return threads[current]; }
inline Barrier& own_block() { return of_blocks[current / blockDim.x]; }
inline Barrier& own_warp() { return of_warps[current / 32]; }

inline void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "on the host: %s (block %u, thread %d)\n", what, blockIdx.x, current);
    abort();
}

[[gnu::noinline]] inline void change_over() {
    if (!_setjmp(self().left_at)) _longjmp(scheduler, 1);
}

inline void wait_for(const Barrier& barrier, int64_t phase) {
    self().barrier = &barrier;
    self().phase = phase;
    while (barrier.phase < phase) change_over();
}

inline void pass(Barrier& barrier) {
    const int64_t next = barrier.phase + 1;
    barrier.arrive();
    wait_for(barrier, next);
}

inline void block_barrier() { pass(own_block()); }
inline void warp_barrier() {
    ++self().warp_barriers;
    pass(own_warp());
}
inline void arrive_at_cluster() {
    require(of_cluster.phase == self().cluster_barriers++, "arrives twice, and never waits");
    of_cluster.arrive();
}
inline void wait_for_cluster() { wait_for(of_cluster, self().cluster_barriers); }

inline float shuffle_xor(float x, int mask) {
    const int side = self().warp_barriers % 2;
    self().exchange[side] = x;
    warp_barrier();
    return threads[current ^ mask].exchange[side];
}

inline void run_thread() {
    for (;;) {
        body(body_arguments);
        self().done = true;
        own_block().end();
        own_warp().end();
        of_cluster.end();
        change_over();
    }
}

// The current thread, until it waits.
[[gnu::noinline]] inline void resume() {
    constexpr size_t kStack = 128 << 10;
    if (_setjmp(scheduler)) return;
    if (self().stack) _longjmp(self().left_at, 1);
    self().stack.reset(new char[kStack]);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = self().stack.get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

// Runs blocks from `first` on, side by side, until all their threads have ended; before_each: is
// told of the block whose thread is next.
template <typename BeforeEach>
void run_blocks(unsigned first, unsigned blocks, BeforeEach before_each) {
    const int size = blockDim.x, count = blocks * size;
    threads.resize(count);
    of_blocks.assign(blocks, {size});
    of_warps.clear();
    for (int i = 0; i < count; i += 32) of_warps.push_back({count - i < 32 ? count - i : 32});
    of_cluster = {count};
    for (Thread& thread : threads) {
        thread.barrier = nullptr;
        thread.done = false;
        thread.warp_barriers = thread.cluster_barriers = 0;
    }
    for (bool left = true, moved; left;) {
        left = moved = false;
        for (current = 0; current < count; ++current) {
            if (self().done) continue;
            left = true;
            if (self().barrier && self().barrier->phase < self().phase) continue;
            threadIdx = {static_cast<unsigned>(current % size), 0, 0};
            blockIdx.x = first + current / size;
            before_each(current / size);
            resume();
            moved = true;
        }
        require(moved || !left, "every thread waits at a barrier");
    }
}

inline void run_grid(dim3 grid, dim3 block) {
    gridDim = grid;
    blockDim = block;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = {0, y, 0};
            run_blocks(last_block_first ? grid.x - 1 - x : x, 1, [](int) {});
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
