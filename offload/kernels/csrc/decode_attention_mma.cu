// Decode attention's kernels of shares by tensor cores, and the sizes that each serves.
#include "decode_attention_kernels.cuh"
#include "decode_attention_mma.cuh"

namespace offload {
namespace decode {
namespace {

template <typename T, int kDim, int kQueries>
MmaKernel mma() {
    using Shape = MmaShape<kDim, kQueries>;
    return {decode_attention_kernel<MmaMath<T, kDim, kQueries>>, Shape::kMostTeams,
            Shape::queries(1), Shape::stage_bytes, Shape::shared_bytes};
}

// Sizes between these are padded to the next. What few models have, a large group beside a large
// head or one of 80 or 96, shares another size's kernel: every kernel costs seconds to compile.
template <typename T>
MmaKernel mma(int head_dim, int queries) {
    if (queries <= 8) {
        if (head_dim <= 64) return mma<T, 64, 1>();
        if (head_dim <= 96) return mma<T, 96, 1>();
        if (head_dim <= 128) return mma<T, 128, 1>();
        return mma<T, 256, 1>();
    }
    if (queries <= 16 && head_dim <= 128)
        return head_dim <= 64 ? mma<T, 64, 2>() : mma<T, 128, 2>();
    if (head_dim <= 64) return mma<T, 64, 4>();
    if (head_dim <= 128) return mma<T, 128, 4>();
    return mma<T, 256, 4>();
}

}  // namespace

MmaKernel mma_kernel(int dtype, int head_dim, int queries) {
    return dtype == OFFLOAD_F16 ? mma<__half>(head_dim, queries)
                                : mma<__nv_bfloat16>(head_dim, queries);
}

}  // namespace decode
}  // namespace offload
