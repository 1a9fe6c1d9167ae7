// Stands for warpgroup.cuh where kernels run on the host. Products are done either when they are
// committed or, where HOST_COPIES=late, when they are waited for: this shows activations that are
// overwritten too soon, the other ones that are read before they are there.
#pragma once
#include <stdlib.h>

#include <deque>
#include <vector>

#include "host_async_copy.hpp"
#include "host_tensor_core.hpp"

#define OFFLOAD_HAS_WARPGROUPS 1

namespace offload {

struct HostProduct {
    void (*run)(const HostProduct&);
    float* c;
    uint32_t a[4];
    uint64_t b;
};
inline std::deque<std::vector<HostProduct>> host_products[8192];

inline uint64_t describe_pieces(uint32_t address, uint32_t depth_step, uint32_t column_step) {
    host_cuda::require(address % 128 == 0 && depth_step % 16 == 0 && column_step % 16 == 0,
                       "operands that are not aligned");
    return (address / 16 & 0x3fff) | uint64_t{depth_step / 16} << 16 |
           uint64_t{column_step / 16} << 32;
}

template <int kColumns, typename T>
void run_product(const HostProduct& product) {
    const int thread = host_cuda::current, first = thread / 32 * 32;
    const int g = thread % 32 / 4, t = thread % 4;
    Operands* table = operand_table[host_cuda::self().warp_barriers % 2];
    memcpy(table[thread].a, product.a, sizeof product.a);
    host_cuda::warp_barrier();
    const unsigned char* const at = host_cuda::shared_memory + (product.b & 0x3fff) * 16;
    const uint32_t depth_step = (product.b >> 16 & 0x3fff) * 16;
    const uint32_t column_step = (product.b >> 32 & 0x3fff) * 16;
    for (int column = 0; column < kColumns; ++column)
        for (int i = 0; i < 4; ++i) {
            float sum = 0.f;
            for (int k = 0; k < 16; ++k) {
                const uint32_t a = table[first + g * 4 + k % 8 / 2].a[k / 8 * 2 + i / 2];
                uint16_t b;
                memcpy(&b,
                       at + k / 8 * depth_step + column * column_step + (2 * t + i % 2) * 16 +
                           k % 8 * 2,
                       2);
                sum += element(a, k % 2, T()) * element(b, 0, T());
            }
            product.c[column * 4 + i] += sum;
        }
}

inline std::deque<std::vector<HostProduct>>& products_of_thread() {
    auto& groups = host_products[host_cuda::current];
    if (groups.empty()) groups.emplace_back();
    return groups;
}

inline void begin_products() {}

template <int kColumns, typename T>
void multiply_group(float (&c)[kColumns][4], const uint32_t (&a)[4], uint64_t b, T) {
    products_of_thread().back().push_back(
        {run_product<kColumns, T>, c[0], {a[0], a[1], a[2], a[3]}, b});
}

inline void finish_products(size_t pending) {
    auto& groups = products_of_thread();
    while (groups.size() > pending + 1) {
        for (const HostProduct& product : groups.front()) product.run(product);
        groups.pop_front();
    }
}

inline void commit_products() {
    products_of_thread().emplace_back();  // the last one is open
    if (!copies_are_late()) finish_products(0);
}

template <int kPending>
void wait_for_products() {
    finish_products(kPending);
}

// Takes the place of what copies in the background to other blocks (cluster.cuh).
inline void send_to_cluster(uint32_t there, float4 x, uint32_t barrier) {
    host_cuda::require(there / host_cuda::kSharedOfBlock == barrier / host_cuda::kSharedOfBlock,
                       "a store and its barrier of different blocks");
    host_cuda::require(
        there % 16 == 0 && there % host_cuda::kSharedOfBlock + 16 <= host_cuda::shared_bytes,
        "a store out of place");
    HostBarrier& b = barrier_at(barrier);
    memcpy(host_cuda::cluster_memory + there, &x, sizeof x);
    b.arrived += sizeof x;
    b.look();
}

inline void settle(uint32_t (&)[4]) {}
template <int>
void keep_registers() {}
template <int>
void take_registers() {}

}  // namespace offload

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
    const uint64_t both = uint64_t{y} << 32 | x;
    uint32_t z = 0;
    for (int i = 0; i < 4; ++i)
        z |= static_cast<uint32_t>(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return z;
}
