// The tensor cores' product of a warpgroup, four warps in a row (sm_90a): 64 x 16 elements of A in
// registers times 16 x N of B in shared memory. It runs in the background.
//
// A warp has 16 of the 64 rows, and its lanes hold of A and of each 8 columns of C what they hold
// of tensor_core.cuh's product. B lies in pieces of 8 columns by 8 of the depth, 128 bytes: the
// depth's 8 elements of one column after those of the other.
#pragma once
#include "common.cuh"

namespace offload {

// Of B at `address` (a multiple of 128) in shared memory: from a piece to the next of the depth,
// and to the next of the columns, in bytes.
__device__ __forceinline__ uint64_t describe_pieces(uint32_t address, uint32_t depth_step,
                                                    uint32_t column_step) {
    return static_cast<uint64_t>(address / 16 & 0x3fff) |
           static_cast<uint64_t>(depth_step / 16) << 16 |
           static_cast<uint64_t>(column_step / 16) << 32;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OFFLOAD_HAS_WARPGROUPS 1

// What registers hold is seen by the products that follow.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products.
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most `kPending` of the latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A warpgroup gives registers back, or takes those that others gave.
template <int kCount>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Orders what was computed into registers before what follows.
__device__ __forceinline__ void settle(uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

#define OFFLOAD_PRODUCTS(type, dtype)                                                            \
    /* c += a * b */                                                                             \
    __device__ __forceinline__ void multiply_group(float (&c)[1][4], const uint32_t (&a)[4],     \
                                                   uint64_t b, type) {                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." dtype "." dtype                \
                     " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"                      \
                     : OFFLOAD_SUMS(0)                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
    }                                                                                            \
    __device__ __forceinline__ void multiply_group(float (&c)[2][4], const uint32_t (&a)[4],     \
                                                   uint64_t b, type) {                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." dtype "." dtype               \
                     " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"   \
                     : OFFLOAD_SUMS(0), OFFLOAD_SUMS(1)                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
    }                                                                                            \
    __device__ __forceinline__ void multiply_group(float (&c)[4][4], const uint32_t (&a)[4],     \
                                                   uint64_t b, type) {                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." dtype "." dtype               \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
                     "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"                                    \
                     : OFFLOAD_SUMS(0), OFFLOAD_SUMS(1), OFFLOAD_SUMS(2), OFFLOAD_SUMS(3)        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
    }                                                                                            \
    __device__ __forceinline__ void multiply_group(float (&c)[8][4], const uint32_t (&a)[4],     \
                                                   uint64_t b, type) {                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." dtype "." dtype               \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "  \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "    \
                     "%30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"                         \
                     : OFFLOAD_SUMS(0), OFFLOAD_SUMS(1), OFFLOAD_SUMS(2), OFFLOAD_SUMS(3),       \
                       OFFLOAD_SUMS(4), OFFLOAD_SUMS(5), OFFLOAD_SUMS(6), OFFLOAD_SUMS(7)        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
    }
#define OFFLOAD_SUMS(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
OFFLOAD_PRODUCTS(__nv_bfloat16, "bf16")
OFFLOAD_PRODUCTS(__half, "f16")
#undef OFFLOAD_PRODUCTS
#undef OFFLOAD_SUMS
#endif

}  // namespace offload
