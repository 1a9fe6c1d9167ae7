// The variants of the product, the kernel of each, and which of them a call is run with.
#pragma once
#include "skinny_gemm_staged.cuh"
#include "skinny_gemm_stream_k.cuh"

namespace offload {

using GemmKernel = void (*)(OffloadSkinnyGemm, GemmPlan, float*);

enum class GemmWay { kFma, kStaged };  // each warp alone, or all of a block together

struct GemmVariant {
    GemmWay way;
    int tile;         // weight rows of a warp; of a block at most, if staged
    int warps;        // of a block; staged: at least
    int chunk_bytes;  // of a row in a stage: a power of two
    int stages;       // at most, if staged
    bool bulk;
    bool turned;  // blocks begin at different depths
};

constexpr GemmVariant kVariants[] = {
    {GemmWay::kStaged, 64, 8, 512, 6, false, false},
    {GemmWay::kStaged, 128, 8, 512, 6, false, false},
    {GemmWay::kStaged, 32, 8, 1024, 6, false, false},
    {GemmWay::kStaged, 128, 8, 512, 6, false, true},
    {GemmWay::kStaged, 64, 8, 1024, 6, false, true},  // without a norm
    {GemmWay::kFma, 16, 4, 512, 3, true, false},      // 101 KB, as the next two
    {GemmWay::kFma, 8, 4, 1024, 3, true, false},
    {GemmWay::kFma, 4, 4, 512, 12, true, false},
    {GemmWay::kFma, 16, 4, 512, 3, false, false},  // by cp.async, as those below
    {GemmWay::kFma, 8, 4, 512, 6, false, false},
    {GemmWay::kFma, 4, 4, 512, 8, false, false},
};
constexpr int kVariantCount = static_cast<int>(sizeof kVariants / sizeof *kVariants);

struct GemmChoice {
    GemmKernel kernel = nullptr;
    int index = 0;  // of the kernel, for what must be told to CUDA once
    int threads = 0;
    int block = 0;  // elements of the depth at once
    int parts = 0;  // of a staged block's chunk
};

template <class Math>
GemmChoice choice(int index) {
    return {skinny_gemm_kernel<Math>, index, Math::kThreads, Math::kBlock, 0};
}

template <typename T, int kColumns, int kTile, int kChunkBytes, bool kNormed>
GemmChoice staged(int index) {
    using Shape = StagedShape<kColumns, kTile, kChunkBytes, kNormed>;
    return {staged_gemm_kernel<T, kColumns, kTile, kChunkBytes, kNormed>, index, Shape::kThreads,
            kChunkBytes / static_cast<int>(sizeof(T)), Shape::kParts};
}

constexpr int kKernelCount = 40;

template <typename T, int kColumns, bool kNormed>
GemmChoice staged_kernel(const GemmVariant& v, int base) {
    if (v.tile == 32) return staged<T, kColumns, 32, 1024, kNormed>(base);
    if (v.tile == 128) return staged<T, kColumns, 128, 512, kNormed>(base + 1);
    if (v.chunk_bytes == 512) return staged<T, kColumns, 64, 512, kNormed>(base + 2);
    if constexpr (kNormed)
        return {};
    else
        return staged<T, kColumns, 64, 1024, false>(base + 3);
}

// The kernel for a variant on `columns` rows and what of a norm lies beside them, or none.
template <typename T>
GemmChoice half_kernel(const GemmVariant& v, int columns, bool normed, int base) {
    if (v.way != GemmWay::kStaged) return {};
    if (columns <= 8)
        return normed ? staged_kernel<T, 1, true>(v, base)
                      : staged_kernel<T, 1, false>(v, base + 4);
    return normed ? staged_kernel<T, 2, true>(v, base + 8)
                  : staged_kernel<T, 2, false>(v, base + 12);
}

inline GemmChoice float_kernel(const GemmVariant& v, int rows) {
    if (v.way != GemmWay::kFma) return {};
    if (v.tile == 16 && rows <= 4) {
        if (rows == 1) return choice<Fma<1, 16>>(0);
        return rows == 2 ? choice<Fma<2, 16>>(1) : choice<Fma<4, 16>>(2);
    }
    if (v.tile == 8 && rows > 4 && rows <= 8) return choice<Fma<8, 8>>(3);
    if (v.tile == 4 && rows > 8) return choice<Fma<16, 4>>(4);
    return {};
}

inline int64_t element_bytes(const OffloadSkinnyGemm& a) { return a.dtype == OFFLOAD_F32 ? 4 : 2; }

// Whether 16-byte loads reach everything; a null pointer counts as aligned.
inline bool is_wide(const OffloadSkinnyGemm& a) {
    const int64_t width = 16 / element_bytes(a);
    return a.depth % width == 0 && a.weight_stride % width == 0 && aligned16(a.weight);
}

inline bool input_is_wide(const OffloadSkinnyGemm& a) {
    const int64_t width = 16 / element_bytes(a);
    return (a.rows == 1 || a.input_stride % width == 0) && aligned16(a.input);
}

// Whether the staged form can take the norm along; d + d * weight has only one kind of offset.
inline bool takes_norm(const OffloadSkinnyGemm& a) {
    const bool offset = a.norm.weight_offset != 0.f;
    return a.norm.kind != OFFLOAD_NORM_NONE && input_is_wide(a) && aligned16(a.norm.weight) &&
           aligned16(a.norm.bias) &&
           (!offset || (a.norm.weight_offset == 1.f && a.norm.kind == OFFLOAD_NORM_RMS)) &&
           (a.norm.kind == OFFLOAD_NORM_LAYER ? a.rows <= kMostRows - 2 : !a.norm.bias);
}

// Rows, and a layer norm's weight and bias where they are multiplied beside them.
inline int columns_of(const OffloadSkinnyGemm& a) {
    return a.rows + (takes_norm(a) && a.norm.kind == OFFLOAD_NORM_LAYER ? 2 : 0);
}

inline int fma_ring_bytes(const GemmVariant& v) {
    return v.warps * v.stages * v.tile * (v.chunk_bytes + 16);
}

inline GemmChoice kernel_of(const GemmVariant& v, const OffloadSkinnyGemm& a,
                            const Device& device) {
    GemmChoice found;
    if (v.bulk && device.major < 9) return found;
    if (a.dtype == OFFLOAD_F32) found = float_kernel(v, a.rows);
    if (a.dtype == OFFLOAD_F16) found = half_kernel<__half>(v, columns_of(a), takes_norm(a), 8);
    if (a.dtype == OFFLOAD_BF16)
        found = half_kernel<__nv_bfloat16>(v, columns_of(a), takes_norm(a), 24);
    if (found.kernel &&
        (v.warps * 32 > found.threads || v.chunk_bytes % (found.block * element_bytes(a)) != 0))
        found.kernel = nullptr;
    if (v.way == GemmWay::kFma && kBarrierBytes + fma_ring_bytes(v) > device.shared_per_block)
        found.kernel = nullptr;
    return found;
}

// Weight rows that a multiprocessor has to multiply.
inline int64_t rows_of_block(const OffloadSkinnyGemm& a, const Device& device) {
    return ((a.gated ? 2ll : 1ll) * a.outputs - 1) / device.multiprocessors + 1;
}

// Whether two blocks should have twice the outputs and half of the depth each. Many activations
// beside few weight rows cost L2 too much; up to 32 of these a tile of 32 is quicker all the same.
inline bool shares_depth(const OffloadSkinnyGemm& a, const Device& device) {
    const int64_t rows = rows_of_block(a, device);
    return device.major >= 9 && a.rows > 8 && rows > 32 && rows <= 48;
}

// Where nothing was measured. 16 bits: the smallest tile that holds all of a block's outputs keeps
// most warps busy; where several must follow each other, the largest, at depths that differ from
// block to block. Long pieces of few rows, where three stages of them fit. float32: the first that
// can run.
inline int default_variant(const OffloadSkinnyGemm& a, const Device& device) {
    const int64_t rows = rows_of_block(a, device) * (shares_depth(a, device) ? 2 : 1);
    const int tile = rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
    const bool longer =
        rows <= 48 && a.rows <= 8 && !takes_norm(a) && device.shared_per_block >= 3 * 64 * 1024;
    const int chunk_bytes = tile == 32 || (tile == 64 && longer) ? 1024 : 512;
    const bool turned =
        rows > 128 || shares_depth(a, device) || (tile == 64 && chunk_bytes == 1024);
    for (int i = 0; i < kVariantCount; ++i) {
        const GemmVariant& v = kVariants[i];
        if (v.way == GemmWay::kStaged &&
            (v.tile != tile || v.chunk_bytes != chunk_bytes || v.turned != turned))
            continue;
        if (kernel_of(v, a, device).kernel) return i;
    }
    return -1;
}

inline int variant_count(const OffloadSkinnyGemm& a, const Device& device) {
    int count = 0;
    for (const GemmVariant& v : kVariants) count += kernel_of(v, a, device).kernel != nullptr;
    return count;
}

// The table's index of the n-th (from 1) variant that can run these arguments.
inline int nth_variant(const OffloadSkinnyGemm& a, const Device& device, int n) {
    for (int i = 0; i < kVariantCount; ++i)
        if (kernel_of(kVariants[i], a, device).kernel && --n == 0) return i;
    return -1;
}

}  // namespace offload
