// Decode attention where few items must fill the GPU: few sequences, or short ones. What counts is
// how many steps follow each other, not bytes. And where items are many: a cluster each where they
// are of even lengths, several for the long ones where rows are few and ragged.
//
// An item (one KV head of one sequence, with up to 16 of its queries) belongs to one or more
// clusters of CTAs. Its columns go in strips of 16 to all warps of these, each of which reads,
// weighs and sums its own strips alone, without a barrier. Then three merges, each in a fixed
// order: the warps of a CTA through its shared memory; the CTAs of a cluster by writing into each
// other's, each CTA having a slice of the results; and, where an item has several clusters, their
// CTAs of one slice through the workspace, by the last of them (by a counter). For sm_90 and later.
//
// Clusters of one CTA are launched without clusters, where the instructions of clusters are illegal
// ones; their CTA has nothing to send. All of it in fours of results a thread, so that a CTA's are
// read in one go: each of these steps costs a latency.
#pragma once
#include "decode_attention_strips.cuh"

namespace offload {
namespace decode {

constexpr int kMostStripWarps = 8;  // of a CTA

__device__ __forceinline__ void add_scaled(float4& x, const float4& y, float weight) {
    x.x += y.x * weight;
    x.y += y.y * weight;
    x.z += y.z * weight;
    x.w += y.w * weight;
}

// Adds `count` parts of some results: of part i, at(i) is the maximum and the sum of weights,
// load(j, i) fetches the results and add(j, weight) adds them, j being i % kTogether. Returns the
// maximum and the sum of all.
template <int kTogether, typename At, typename Load, typename Add>
__device__ __forceinline__ float2 merge(int count, At at, Load load, Add add) {
    float most = -INFINITY, sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether)
#pragma unroll
        for (int j = 0; j < kTogether; ++j) most = fmaxf(most, at(min(first + j, count - 1)).x);
    const float base = most == -INFINITY ? 0.f : most;
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
        float2 one[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            one[j] = at(min(first + j, count - 1));
            load(j, min(first + j, count - 1));
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const float weight = exp2_approximately(one[j].x - base);
            if (first + j >= count) break;
            sum += one[j].y * weight;
            add(j, weight);
        }
    }
    return make_float2(most, sum);
}

template <typename T, int kDim, int kQueries>
__global__ void __launch_bounds__(32 * kMostStripWarps, kQueries == 1 && kDim <= 128 ? 2 : 1)
    decode_attention_clusters_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    using Shape = StripShape<kDim, kQueries>;
    extern __shared__ __align__(128) unsigned char shared[];
    let_next_kernel_begin();
    const int cluster = p.cluster, threads = blockDim.x, warps = threads / 32;
    const int cta = blockIdx.x, rank = cta % cluster, warp = threadIdx.x / 32;
    Piece piece;
    if (!find_piece(p, cta / cluster, gridDim.x / cluster, &piece)) return;
    // See StripShape.
    const int ring_bytes = Shape::ring_bytes(p.stages);
    unsigned char* const ring = shared + warp * ring_bytes;
    StripMath<T, kDim, kQueries> math(p, piece,
                                      static_cast<uint32_t>(__cvta_generic_to_shared(ring)));
    float2* const stats = reinterpret_cast<float2*>(shared + warps * ring_bytes);
    float2* const sent_stats = stats + warps * Shape::kHeads;  // [cluster, kHeads]
    float4* const sent = reinterpret_cast<float4*>(sent_stats + cluster * Shape::kHeads);
    uint64_t* const inbox = reinterpret_cast<uint64_t*>(sent + cluster * Shape::slice(cluster));
    // Fours of the item's results, of a CTA's slice of them, and of this one's.
    const int heads = piece.heads(p), all = heads * Shape::kQuads;
    const int slice = (all - 1) / cluster + 1, own = max(min(slice, all - rank * slice), 0);
    const bool alone = cluster == 1;
    if (!alone) {
        if (threadIdx.x == 0) open_inbox(inbox, cluster * (own * 16 + heads * 8));
        __syncwarp();
        inbox_is_open();
    }

    const int step = cluster * warps;
    int32_t ahead = piece.begin + rank * warps + warp, at = ahead, late = -1;
    int late_stage = 0;
    for (int stage = 0; stage < p.stages; ++stage) {
        if (ahead < piece.end) {
            const int last = math.last_row(ahead);
            if (last < kStrip) {
                late = ahead;
                late_stage = stage;
            }
            math.copy(p, stage, ahead, last);
            ahead += step;
        }
        end_copies();
    }
    __syncwarp();  // copies of the last strip are not the same for all lanes
    if (!alone) inboxes_are_open();
    wait_for_previous_kernel();
    math.read_late(p, late, late_stage);
    for (int stage = 0; at < piece.end; at += step) {
        wait_for_copies(p.stages - 1);
        __syncwarp();  // the strip is here for all lanes
        math.add(p, stage, at);
        __syncwarp();  // all lanes are done with it
        if (ahead < piece.end) {
            math.copy(p, stage, ahead, kStrip);
            ahead += step;
        }
        end_copies();
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }

    // Fours from `begin` on are this CTA's, as the first of `own`.
    const int begin = rank * slice;
    const int first_head = piece.head(p), end = piece.see.first + piece.see.columns;
    T* const output = static_cast<T*>(p.output) +
                      (static_cast<int64_t>(piece.b) * p.heads + first_head) * p.head_dim;
    const auto store = [&](int i, float2 merged, float4 x) {
        const int head = (begin + i) / Shape::kQuads, element = (begin + i) % Shape::kQuads * 4;
        if (element >= p.head_dim) return;  // which is a multiple of 8
        const float by = normaliser(p, first_head + head, end, merged.x, merged.y);
        T* const to = output + head * p.head_dim + element;
        to[0] = from_float<T>(x.x * by);
        to[1] = from_float<T>(x.y * by);
        to[2] = from_float<T>(x.z * by);
        to[3] = from_float<T>(x.w * by);
    };
    const int slot_floats = Shape::slot(cluster), slot_stats = Shape::slice(cluster) * 4;
    const auto slot_of_part = [&](int part) {
        return p.sums + (static_cast<int64_t>(piece.first + part) * cluster + rank) * slot_floats;
    };
    float* const slot = p.sums + static_cast<int64_t>(cta) * slot_floats;
    const auto finish = [&](int i, float2 merged, float4 x) {
        if (piece.parts == 1) {
            store(i, merged, x);
            return;
        }
        __stcg(reinterpret_cast<float4*>(slot) + i, x);
        if (i == 0 || (begin + i) % Shape::kQuads == 0)
            __stcg(reinterpret_cast<float2*>(slot + slot_stats) + (begin + i) / Shape::kQuads,
                   merged);
    };

    // The CTA's warps, each thread some fours of the item's results; these go to the CTA whose
    // slice they are in, and the statistics to all.
    math.write(reinterpret_cast<float*>(ring), stats + warp * Shape::kHeads);
    __syncthreads();
    constexpr int kTogether = 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += threads) {
        const int head = i / Shape::kQuads, quad = i % Shape::kQuads;
        float4 x = {0.f, 0.f, 0.f, 0.f}, y[kTogether];
        const float2 merged = merge<kTogether>(
            warps, [&](int w) { return stats[w * Shape::kHeads + head]; },
            [&](int j, int w) {
                y[j] = *reinterpret_cast<const float4*>(shared + w * ring_bytes +
                                                        (head * Shape::kSums + quad * 4) * 4);
            },
            [&](int j, float weight) { add_scaled(x, y[j], weight); });
        if (alone) {
            finish(i, merged, x);
            continue;
        }
        const int to = i / slice;
        send(sent + (rank * slice + i - to * slice), inbox, to, x);
        if (quad < cluster) send(sent_stats + rank * Shape::kHeads + head, inbox, quad, merged);
    }

    // The cluster's CTAs.
    if (!alone) {
        wait_for_inbox(inbox);
#pragma unroll 1
        for (int i = threadIdx.x; i < own; i += threads) {
            const int head = (begin + i) / Shape::kQuads;
            float4 x = {0.f, 0.f, 0.f, 0.f}, y[kTogether];
            const float2 merged = merge<kTogether>(
                cluster, [&](int c) { return sent_stats[c * Shape::kHeads + head]; },
                [&](int j, int c) { y[j] = sent[c * slice + i]; },
                [&](int j, float weight) { add_scaled(x, y[j], weight); });
            finish(i, merged, x);
        }
    }
    if (piece.parts == 1 || own == 0) return;

    // The item's clusters.
    bool* const is_last = reinterpret_cast<bool*>(stats);
    __syncthreads();  // the release below covers what all threads wrote
    if (threadIdx.x == 0) {
        uint32_t* const counter = p.counters + piece.first * cluster + rank;
        *is_last = count_and_see(counter) == static_cast<uint32_t>(piece.parts) - 1;
        if (*is_last) *counter = 0;
    }
    __syncthreads();
    if (!*is_last) return;
    float2* const parts_stats = reinterpret_cast<float2*>(shared);  // [parts, heads]
    for (int i = threadIdx.x; i < piece.parts * heads; i += threads) {
        const int part = i / heads, head = i % heads;
        if (head < begin / Shape::kQuads || head > (begin + own - 1) / Shape::kQuads) continue;
        parts_stats[i] = __ldcg(reinterpret_cast<float2*>(slot_of_part(part) + slot_stats) + head);
    }
    constexpr int kLoads = 8;
    const int rounds = (own - 1) / threads + 1;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const int i = min(round * threads + static_cast<int>(threadIdx.x), own - 1);
        const int head = (begin + i) / Shape::kQuads;
        float4 x = {0.f, 0.f, 0.f, 0.f}, y[kLoads];
        const auto load = [&](int j, int part) {
            y[j] = __ldcg(reinterpret_cast<const float4*>(slot_of_part(part)) + i);
        };
#pragma unroll
        for (int j = 0; j < kLoads; ++j) load(j, min(j, piece.parts - 1));
        if (round == 0) __syncthreads();  // the statistics are there
        const float2 merged = merge<kLoads>(
            piece.parts, [&](int part) { return parts_stats[part * heads + head]; },
            [&](int j, int part) {
                if (part >= kLoads) load(j, part);
            },
            [&](int j, float weight) { add_scaled(x, y[j], weight); });
        if (round * threads + static_cast<int>(threadIdx.x) < own) store(i, merged, x);
    }
#endif
}

}  // namespace decode
}  // namespace offload
