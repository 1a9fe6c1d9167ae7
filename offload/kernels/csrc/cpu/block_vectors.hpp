// Keys of a block by vectors: its columns times eight queries, two columns at once.
#pragma once
#include "attend.hpp"
#include "block_rows.hpp"
#include "eights.hpp"

namespace {

// In float32.
template <class Cache_>
struct FloatProducts {
    typedef Cache_ Cache;
    static constexpr int kQueryBytes = kBlock * kPair * 4;  // of kPair elements

    static void prepare(const Job& job, const Item& item, const Work& w) {
        load_queries(job, item, w.queries);
        if (Cache::mixed) mix(w, w.queries, false);
        pack_eight(w, 0, reinterpret_cast<float*>(w.codes));
    }
    static inline void add(const uint16_t* a, const uint16_t* b, const char* queries,
                           V (&sums)[2 * kBlock]) {
        add_eight<Cache>(a, b, reinterpret_cast<const float*>(queries), sums);
    }
};

#if defined(OFFLOAD_HOST_PAIRS)
// Of bf16, two elements at once.
struct PairProducts {
    typedef BF16 Cache;
    static constexpr int kQueryBytes = kBlock * kPair * 2;

    static void prepare(const Job& job, const Item& item, const Work& w) {
        const OffloadHostAttention& c = job.call;
        const uint16_t* const queries =
            static_cast<const uint16_t*>(c.query) + first_query(job, item);
        uint16_t* to = w.codes;
        for (int d = 0; d < w.dim; d += kPair)
            for (int g = 0; g < kBlock; g++, to += kPair) {
                if (g < w.group)
                    __builtin_memcpy(to, queries + g * c.query_head_stride + d, kPair * 2);
                else
                    __builtin_memset(to, 0, kPair * 2);
            }
    }
    static inline void add(const uint16_t* a, const uint16_t* b, const char* queries,
                           V (&sums)[2 * kBlock]) {
        Simd::P x = Simd::load_pairs(a), y = Simd::load_pairs(b);
        Simd::hold(x);
        Simd::hold(y);
#pragma GCC unroll 8
        for (int g = 0; g < kBlock; g++) {
            const Simd::P query =
                Simd::load_pairs(reinterpret_cast<const uint16_t*>(queries) + g * kPair);
            sums[g] = Simd::add_pairs(sums[g], x, query);
            sums[kBlock + g] = Simd::add_pairs(sums[kBlock + g], y, query);
        }
    }
};
#endif

template <class Products>
struct VectorKeys {
    typedef typename Products::Cache Cache;
    static constexpr int kWithKeys = kLinesOfPair, kWithWeights = 0;

    // Fewer queries take less time in turns of their own than eight do.
    static bool serves(int group, int head_dim) { return group > 6 && head_dim % kPair == 0; }
    static void begin() {}
    static void end() {}
    static void prepare(const Job& job, const Item& item, const Work& w) {
        Products::prepare(job, item, w);
    }

    // Products of keys with queries, to w.tiles; all lines of keys are asked for meanwhile.
    template <int Prefetch>
    OFFLOAD_APART static void score(const Work& w, const Rows& keys, const char* ahead) {
        float* const scores = reinterpret_cast<float*>(w.tiles);
        for (int r = 0; r < keys.count; r += 2) {
            const uint16_t* const a = keys.rows + int64_t(r) * w.dim;
            const uint16_t* const b = r + 1 < keys.count ? a + w.dim : a;
            const char* queries = reinterpret_cast<const char*>(w.codes);
            V sums[2 * kBlock] = {};
            for (int d = 0; d < w.dim; d += kPair, queries += Products::kQueryBytes) {
                ask_for<Prefetch>(ahead);
                ask_for<Prefetch>(ahead + kLine);
                ahead += 2 * kLine;
                Products::add(a + d, b + d, queries, sums);
            }
            Simd::store_sums(sums, scores + r * kBlock);
        }
        const int lines = w.dim / kPair * kLinesOfPair,
                  asked = w.dim / kPair * ((keys.count + 1) / 2 * 2);
        ask_for_lines<Prefetch>(ahead, 0, lines - asked);
    }
    // Of those, columns c and c + 1, eight queries each.
    static V products(const Work& w, int c) {
        return Simd::load(reinterpret_cast<const float*>(w.tiles) + c * kBlock);
    }
};

}  // namespace
