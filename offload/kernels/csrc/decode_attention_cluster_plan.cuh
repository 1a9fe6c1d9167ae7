// Which launches decode_attention_clusters.cuh serves, and in which shape.
#pragma once
#include <limits.h>

#include <map>
#include <mutex>
#include <tuple>

#include "cluster_launch.cuh"
#include "decode_attention_kernels.cuh"
#include "decode_attention_pieces.cuh"

namespace offload {
namespace decode {

struct Plan {
    Kernel kernel;
    int threads, shared, grid;
    int cluster;  // CTAs; 0: the launch has no clusters
    Params params;
    int64_t workspace_bytes;
};

inline int divided(int a, int b) { return (a - 1) / b + 1; }

inline void share_heads(Plan* plan, int most) {
    Params& p = plan->params;
    p.head_tiles = divided(p.group, most);
    p.tile_heads = divided(p.group, p.head_tiles);
}

// A caller's choice: cluster + 100 * warps + 10000 * stages.
struct ClusterShape {
    int cluster, warps, stages;
};
constexpr int kNoClusters = 1;  // of OffloadDecodeAttention::variant
// Of a warp: what makes another cluster for an item, and so a merge through global memory (2 us),
// worth it.
constexpr int kLeastStrips = 8;
constexpr int kFewStrips = 4, kManyStrips = 16;  // of a warp, where a CTA has four
constexpr int kLongStrips = 48;                  // of a multiprocessor
constexpr int kCrowdedStrips = 144;              // of a multiprocessor, if all rows were longest
constexpr int kMergedAtOnce = 8;                 // clusters of an item
constexpr int kManyParts = 4;                    // CTAs of an item
constexpr int kManyTurns = 12;                   // items of a multiprocessor
constexpr int64_t kBytesUnderWay = 128 << 10;    // of a multiprocessor, at least
constexpr int kMostFewRows = 32;                 // sequences of few items: more were not measured

// How many clusters run at once; 0 where one does not fit. Worked out once a kernel, device and
// size.
inline int clusters_at_once(const Plan& plan, const Device& device, int* clusters) {
    static std::mutex mutex;
    static std::map<std::tuple<int, Kernel, int, int, int>, int> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto key =
        std::make_tuple(device.index, plan.kernel, plan.threads, plan.shared, plan.cluster);
    const auto found = known.find(key);
    if (found != known.end()) {
        *clusters = found->second;
        return 0;
    }
    *clusters = 0;
    const void* function = reinterpret_cast<const void*>(plan.kernel);
    cudaFuncAttributes attributes;
    if (int status = cuda_status("decode_attention", cudaFuncGetAttributes(&attributes, function)))
        return status;
    const int most = device.shared_per_block - static_cast<int>(attributes.sharedSizeBytes);
    if (plan.shared <= most) {
        const std::pair<cudaFuncAttribute, int> wanted[] = {
            {cudaFuncAttributeMaxDynamicSharedMemorySize, most},
            {cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared},
            {cudaFuncAttributeNonPortableClusterSizeAllowed, 1}};
        for (const auto& one : wanted) {
            if (int status = cuda_status("decode_attention",
                                         cudaFuncSetAttribute(function, one.first, one.second)))
                return status;
        }
        if (plan.cluster == 1) {
            if (int status = cuda_status("decode_attention",
                                         cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                                             clusters, plan.kernel, plan.threads, plan.shared)))
                return status;
            *clusters *= device.multiprocessors;
        } else {
            cudaLaunchConfig_t config = {};
            cudaLaunchAttribute attribute = cluster_attribute(plan.cluster);
            config.gridDim = dim3(plan.cluster);
            config.blockDim = dim3(plan.threads);
            config.dynamicSmemBytes = plan.shared;
            config.attrs = &attribute;
            config.numAttrs = 1;
            if (int status = cuda_status("decode_attention", cudaOccupancyMaxActiveClusters(
                                                                 clusters, plan.kernel, &config)))
                return status;
        }
    }
    known.emplace(key, *clusters);
    return 0;
}

// For more items than multiprocessors, of even lengths: a CTA an item. Where these take many turns,
// shorter rings for more CTAs at once; where few CTAs would have too little under way, more warps.
inline ClusterShape shape_of_many(int64_t items, int strips, int64_t strip_bytes,
                                  const Device& device) {
    if (items >= static_cast<int64_t>(device.multiprocessors) * kManyTurns)
        return {1, 4, min(2, divided(strips, 4))};
    const bool little =
        items * 4 * 3 * strip_bytes < device.multiprocessors * kBytesUnderWay && strips >= 64;
    const int warps = little ? 8 : 4;
    return {1, warps, min(3, divided(strips, warps))};
}

// The quickest shapes that were measured (on an H200: 132 multiprocessors) for few `items` of so
// many strips and queries. Where all multiprocessors have much to read: a CTA on each, in clusters
// as small as leave an item no more of them than are merged at once, and a cluster an item where
// two CTAs are what it gets. These read as much at once as there is room for; where an item has
// many parts, 128 KB by as few warps as can, since these too are merged. Elsewhere: about a CTA a
// multiprocessor, and no second round of them; with more warps where there is more to merge.
inline ClusterShape cluster_shape(int64_t items, int strips, int head_dim, int queries,
                                  const Device& device) {
    const int most = device.multiprocessors;
    if (items * strips >= static_cast<int64_t>(most) * kLongStrips) {
        int cluster = most / items == 2 ? 2 : 1;
        while (cluster < kMostCluster && most / cluster / items > kMergedAtOnce) cluster *= 2;
        const bool many_parts = cluster > 1 || most / items > kManyParts;
        if (many_parts && head_dim <= 64) return {cluster, 8, 4};
        if (cluster > 1 && head_dim == 128) return {cluster, 4, 4};
        return {cluster, head_dim > 128 ? 4 : 8, 3};
    }
    ClusterShape shape = {8, 4, 3};
    while (shape.cluster > 2 && items * shape.cluster * 2 >= most * 3) shape.cluster /= 2;
    const int a_warp = divided(strips, shape.cluster * shape.warps);
    const bool alone = items * shape.cluster <= most && head_dim <= 128;
    if (queries > 8 && head_dim <= 64 && a_warp >= kFewStrips) return {shape.cluster, 8, 2};
    if (alone && a_warp > kFewStrips && a_warp <= kManyStrips) shape.warps = 8;
    if (a_warp > kManyStrips) shape.stages = 2;  // for more CTAs a multiprocessor
    shape.stages = min(shape.stages, divided(strips, shape.cluster * shape.warps));
    return shape;
}

// The most clusters that a launch may cut items for: the parts' statistics take the rings' place,
// and every CTA has a counter.
inline int room_for(const ClusterShape& shape, const ClusterKernel& k) {
    return min(shape.warps * k.ring_bytes(shape.stages) / (k.heads * 8),
               OFFLOAD_DECODE_ATTENTION_COUNTERS / shape.cluster);
}

// Whether long rows can be cut as far as evens out the CTAs' work: half as many parts more as
// items.
inline bool cuts_enough(int64_t clusters, int64_t items) { return clusters * 2 >= items * 3; }

// Whether few items are so many, and so long, that a CTA a multiprocessor cuts too little of them.
inline bool crowded(int64_t items, int strips, int queries, const Device& device) {
    return queries <= 8 && items * 3 > device.multiprocessors &&
           items * strips >= static_cast<int64_t>(device.multiprocessors) * kCrowdedStrips;
}

// For items that fill the GPU, where rows may be of very different lengths, as measured (on an
// H200): CTAs among which long rows are cut, in two rounds, so that whichever ends early has more
// to do, or in one where that makes two of every item; where these would be too few to cut much,
// two CTAs an item, as where items share what they read. Cluster 0: shares are quicker, or it was
// not measured.
inline ClusterShape shape_of_ragged(int64_t items, int head_dim, const Params& p,
                                    const ClusterKernel& k, const Device& device) {
    if (p.head_tiles > 1 && head_dim <= 64) return {2, 4, 2};
    if (p.tile_heads > 8) return {0, 0, 0};
    const ClusterShape cut = {1, 4, head_dim > 64 ? 2 : 3};
    const int a_round =
        device.multiprocessors * (device.shared_per_block / (cut.warps * k.ring_bytes(cut.stages)));
    if (cuts_enough(min(2 * a_round, room_for(cut, k)), items)) return cut;
    if (head_dim > 128) return {0, 0, 0};
    return {2, 4, 2};
}

// Shapes the launch for clusters where it is one for them; else leaves plan->cluster 0. Call it
// where the tensor cores take the call's head size and addresses.
inline int plan_clusters(const OffloadDecodeAttention& a, const Device& device, bool in_l2,
                         Plan* plan) {
    Params& p = plan->params;
    const bool chosen = a.variant > kNoClusters;
    const int strips = divided(a.max_length, kStrip);  // at most, of an item
    ClusterShape shape = {a.variant % 100, a.variant / 100 % 100, a.variant / 10000};
    if (a.variant == kNoClusters || a.batch < 1 || (!chosen && a.splits > 0)) return 0;
    const ClusterKernel k = cluster_kernel(a.dtype, a.head_dim, p.group);
    share_heads(plan, k.heads);
    const int64_t pieces = static_cast<int64_t>(a.batch) * a.kv_heads * p.head_tiles;
    const bool many = pieces > device.multiprocessors;
    const bool ragged = !a.even && (many || crowded(pieces, strips, p.tile_heads, device));
    if (!chosen) {
        // Enough items of even lengths fill the GPU by themselves. Others are cut, which takes few
        // rows; elsewhere shares of a line of all columns fill it evenly. Large groups of large
        // heads are read once for all of their queries, unless L2 has what is read.
        if (device.major < 9 || (!many && !ragged && a.batch > kMostFewRows)) return 0;
        if (ragged && a.batch > kMostClusterRows) return 0;
        if (p.head_tiles > 1 && a.head_dim > 64 && !in_l2) return 0;
        shape = ragged ? shape_of_ragged(pieces, a.head_dim, p, k, device)
                : many ? shape_of_many(pieces, strips, k.strip_bytes(), device)
                       : cluster_shape(pieces, strips, a.head_dim, p.tile_heads, device);
        if (shape.cluster == 0) return 0;
    }
    const bool known_cluster = shape.cluster >= 1 && shape.cluster <= kMostCluster &&
                               (shape.cluster & (shape.cluster - 1)) == 0;
    if (!known_cluster || (shape.warps != 4 && shape.warps != 8) || shape.stages < 1 ||
        shape.stages > 4 || device.major < 9 || pieces * shape.cluster > INT_MAX)
        return refuse("decode_attention: variant %d is none of this GPU's", a.variant);

    const int warps = shape.cluster * shape.warps;
    plan->kernel = k.kernel;
    plan->threads = 32 * shape.warps;
    int at_once = 0;
    for (; shape.stages > 0; --shape.stages) {
        plan->cluster = shape.cluster;
        plan->shared = k.shared_bytes(shape.warps, shape.stages, shape.cluster);
        if (int status = clusters_at_once(*plan, device, &at_once)) return status;
        const bool enough = at_once >= (many ? 1 : pieces);
        if (enough || chosen || (shape.stages == 1 && at_once > 0)) break;
    }
    if (at_once == 0) {
        plan->cluster = 0;
        return chosen ? refuse("decode_attention: variant %d does not fit this GPU", a.variant) : 0;
    }
    p.items = a.kv_heads * p.head_tiles;
    p.cluster = shape.cluster;
    p.stages = shape.stages;
    const bool counted = chosen && a.splits > 0;
    p.least_strips = warps * (counted ? 1 : kLeastStrips);
    const int parts = divided(strips, p.least_strips);
    const bool again = !chosen && ragged && at_once < 2 * pieces;
    const int wanted = counted ? a.splits : again ? 2 * at_once : at_once;
    const int64_t most = min(wanted, room_for(shape, k));
    const int64_t useful = a.batch > kMostClusterRows ? pieces : pieces * parts;
    plan->grid = static_cast<int>(max(min(most, useful), pieces) * shape.cluster);
    plan->workspace_bytes = static_cast<int64_t>(plan->grid) * k.slot(shape.cluster) * 4;
    return 0;
}

}  // namespace decode
}  // namespace offload
