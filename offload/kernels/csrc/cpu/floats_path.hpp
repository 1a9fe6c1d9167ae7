// What each set of instructions has: attention in float32 for every kind of cache, and the plain
// read that it is measured against.
#pragma once
#include "attend.hpp"

namespace {

// Adds up the words of what attend() would read, in the same order and with the same prefetches.
// Products: with arithmetic beside it, of numbers that are there anyhow.
template <bool Products>
void read_only(Job& job) {
    const OffloadHostAttention& c = job.call;
    const int64_t row_bytes = int64_t(c.head_dim) * offload_host::element_bytes(c.cache_dtype);
    constexpr int64_t kStep = 8 * sizeof(Simd::W);
    Ahead ahead(job);
    Simd::W sums[8] = {};
    V made[8] = {};
    const V factor = all(0.5f), term = all(1);
    uint64_t rest = 0;
    const auto read = [&](const char* p, int64_t bytes) {
        const char* const end = p + bytes;
        for (; end - p >= kStep; p += kStep) {
            ahead.pass(kStep);
            for (int i = 0; i < 8; i++) {
                Simd::W words;
                __builtin_memcpy(&words, p + i * sizeof words, sizeof words);
                sums[i] += words;
            }
            if constexpr (Products)
                for (int64_t n = c.products * kStep / kLine; n > 0; n -= 8)
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) made[i] = made[i] * factor + term;
        }
        for (; p < end; p += 8) {
            uint64_t word = 0;
            __builtin_memcpy(&word, p, end - p < 8 ? size_t(end - p) : 8);
            rest += word;
        }
    };
    Item item, next;
    for (bool any = take(job, &item); any; item = next) {
        const int64_t bytes = (item.end - item.begin) * row_bytes;
        ahead.enter(item, bytes, 2 * bytes);
        read(item.keys, bytes);
        any = take(job, &next);
        if (any) ahead.follow(next);
        read(item.values, bytes);
    }
    if constexpr (Products) {
        V all_made = {};
        for (const V& some : made) all_made += some;
        __asm__ volatile("" : : "m"(all_made));  // compilers would leave them out
    }
    for (int i = 0; i < 8; i++)
        for (unsigned j = 0; j < sizeof(Simd::W) / 8; j++) rest += sums[i][j];
    offload_host::add_checksum(job, rest);
}

void run(Job& job, int worker) {
    if (job.call.read_only)
        return job.call.products > 0 ? read_only<true>(job) : read_only<false>(job);
    switch (job.call.cache_dtype) {
        case OFFLOAD_HOST_F32:
            return attend<Floats<F32>>(job, worker);
        case OFFLOAD_HOST_F16:
            return attend<Floats<F16>>(job, worker);
        case OFFLOAD_HOST_BF16:
            return attend<Floats<BF16>>(job, worker);
        default:
            return attend<Floats<I8>>(job, worker);
    }
}

}  // namespace
