// Decode attention's kernels of clusters, and the sizes that each serves.
#include "decode_attention_clusters.cuh"
#include "decode_attention_kernels.cuh"

namespace offload {
namespace decode {
namespace {

template <typename T, int kDim, int kQueries>
ClusterKernel clusters() {
    using Shape = StripShape<kDim, kQueries>;
    return {decode_attention_clusters_kernel<T, kDim, kQueries>,
            Shape::kHeads,
            Shape::ring_bytes,
            Shape::strip_bytes,
            Shape::shared_bytes,
            Shape::slot};
}

// Sizes between these are padded to the next.
template <typename T>
ClusterKernel clusters(int head_dim, int queries) {
    if (head_dim > 128) return clusters<T, 256, 1>();  // more queries are more than registers hold
    if (queries <= 8) return head_dim <= 64 ? clusters<T, 64, 1>() : clusters<T, 128, 1>();
    return head_dim <= 64 ? clusters<T, 64, 2>() : clusters<T, 128, 2>();
}

}  // namespace

ClusterKernel cluster_kernel(int dtype, int head_dim, int queries) {
    return dtype == OFFLOAD_F16 ? clusters<__half>(head_dim, queries)
                                : clusters<__nv_bfloat16>(head_dim, queries);
}

}  // namespace decode
}  // namespace offload
