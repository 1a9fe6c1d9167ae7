// Products with quantised weights: which kernel of quant_gemm.cuh runs, and how it is launched.
#include <atomic>

#include "quant_gemm.cuh"

namespace offload {
namespace {

constexpr int kMostRows = 64;
constexpr int kMostSize = 1 << 29;

using QuantKernel = void (*)(OffloadQuantGemm, QuantPlan);

struct QuantChoice {
    QuantKernel kernel = nullptr;
    int index = 0;  // of the kernel, for what must be told to CUDA once
    int tile = 0, depth = 0, threads = 0, blocks = 0, shared = 0, columns = 0;
};

template <typename T, int kBits, int kColumns, int kTile, int kChunkBytes, int kStages,
          int kThreads, int kBlocks>
QuantChoice choose_kernel(int index) {
    using Shape = QuantShape<kBits, kColumns, kTile, kChunkBytes, kThreads>;
    return {quant_gemm_kernel<T, kBits, kColumns, kTile, kChunkBytes, kStages, kThreads, kBlocks>,
            index,
            kTile,
            Shape::kDepth,
            kThreads,
            kBlocks,
            kStages * Shape::kStageBytes + Shape::kSumBytes,
            kColumns};
}

constexpr int kQuantKernels = 28;

// Variants 1 to 3: large chunks of 128 rows, small ones of 256, and two blocks an SM. With more
// than 16 rows the activations of a tile take so much room that only the second is left.
template <typename T, int kBits>
QuantChoice kernel_of(int rows, int variant, int base) {
    if (rows > 16)
        return variant == 1 ? choose_kernel<T, kBits, 8, 256, 128, 3, 256, 1>(base) : QuantChoice();
    const bool few = rows <= 8;
    switch (variant) {
        case 1:
            return few ? choose_kernel<T, kBits, 1, 128, 256, 5, 512, 1>(base + 1)
                       : choose_kernel<T, kBits, 2, 128, 256, 4, 512, 1>(base + 2);
        case 2:
            return few ? choose_kernel<T, kBits, 1, 256, 128, 5, 512, 1>(base + 3)
                       : choose_kernel<T, kBits, 2, 256, 128, 5, 512, 1>(base + 4);
        case 3:
            return few ? choose_kernel<T, kBits, 1, 128, 128, 4, 256, 2>(base + 5)
                       : choose_kernel<T, kBits, 2, 128, 128, 4, 256, 2>(base + 6);
        default:
            return {};
    }
}

QuantChoice kernel_of(const OffloadQuantGemm& a, const Device& device, int variant) {
    QuantChoice found;
    if (a.dtype == OFFLOAD_F16)
        found = a.bits == 4 ? kernel_of<__half, 4>(a.rows, variant, 0)
                            : kernel_of<__half, 8>(a.rows, variant, 7);
    else
        found = a.bits == 4 ? kernel_of<__nv_bfloat16, 4>(a.rows, variant, 14)
                            : kernel_of<__nv_bfloat16, 8>(a.rows, variant, 21);
    if (found.shared > device.shared_per_block) found.kernel = nullptr;
    return found;
}

int variant_count(const OffloadQuantGemm& a, const Device& device) {
    int count = 0;
    while (kernel_of(a, device, count + 1).kernel) ++count;
    return count;
}

int check_arguments(const OffloadQuantGemm& a) {
    if (a.dtype != OFFLOAD_F16 && a.dtype != OFFLOAD_BF16)
        return refuse("quant_gemm: dtype %d is neither float16 nor bfloat16", a.dtype);
    if (a.bits != 4 && a.bits != 8)
        return refuse("quant_gemm: bits must be 4 or 8, not %d", a.bits);
    if (a.rows < 0 || a.rows > kMostRows)
        return refuse("quant_gemm: rows must be 0 to %d, not %d", kMostRows, a.rows);
    if (a.outputs < 1 || a.depth < 1 || a.outputs > kMostSize || a.depth > kMostSize)
        return refuse("quant_gemm: outputs and depth must be 1 to %d, not %d and %d", kMostSize,
                      a.outputs, a.depth);
    const int lane_depth = 128 / a.bits;  // codes in 16 bytes
    if (a.depth % lane_depth)
        return refuse("quant_gemm: the depth must be a multiple of %d, not %d", lane_depth,
                      a.depth);
    const bool power = a.group > 0 && (a.group & (a.group - 1)) == 0;
    if (a.group != a.depth && !(power && a.group >= 32 && a.depth % a.group == 0))
        return refuse(
            "quant_gemm: group must be the depth, or a power of 2 from 32 on that "
            "divides it, not %d (depth %d)",
            a.group, a.depth);
    if (a.rows > 1 && (a.input_stride < a.depth || a.input_stride % 8))
        return refuse(
            "quant_gemm: the input's stride must be a multiple of 8 of at least the "
            "depth, not %lld",
            static_cast<long long>(a.input_stride));
    if (a.rows > 1 &&
        (a.output_stride < a.outputs || (a.residual && a.residual_stride < a.outputs)))
        return refuse("quant_gemm: strides of output and residual must be at least outputs, %d",
                      a.outputs);
    if (a.activation < OFFLOAD_IDENTITY || a.activation > OFFLOAD_SILU)
        return refuse("quant_gemm: activation %d is unknown", a.activation);
    if (!aligned16(a.input) || !aligned16(a.codes))
        return refuse("quant_gemm: input and codes must lie at multiples of 16 bytes");
    const int64_t products = static_cast<int64_t>(a.outputs) * (a.gated ? 2 : 1);
    if (products * (a.depth / a.group) > INT32_MAX)
        return refuse("quant_gemm: a weight of %lld x %d has too many groups",
                      static_cast<long long>(products), a.depth);
    return 0;
}

struct QuantCall {
    QuantChoice choice;
    QuantPlan plan;
    int64_t workspace_bytes, counters;
};

int make_call(const OffloadQuantGemm& a, const Device& device, QuantCall& call) {
    if (int status = check_arguments(a)) return status;
    const int count = variant_count(a, device);
    if (count == 0) return refuse("quant_gemm: this device has too little shared memory");
    if (a.variant < 0 || a.variant > count)
        return refuse("quant_gemm: variant must be 0 to %d here, not %d", count, a.variant);
    call.choice = kernel_of(a, device, a.variant ? a.variant : 1);
    const QuantChoice& c = call.choice;
    QuantPlan& p = call.plan;
    const int tile_outputs = a.gated ? c.tile / 2 : c.tile;
    const int64_t tiles = (a.outputs - 1ll) / tile_outputs + 1;
    const int64_t chunks = (a.depth - 1ll) / c.depth + 1;
    if (tiles * chunks > INT32_MAX)
        return refuse("quant_gemm: a weight of %d x %d is too large", a.outputs, a.depth);
    p.tiles = static_cast<uint32_t>(tiles);
    p.chunks = static_cast<uint32_t>(chunks);
    p.units = p.tiles * p.chunks;
    p.row_bytes = static_cast<int32_t>(static_cast<int64_t>(a.depth) * a.bits / 8);
    p.groups = a.depth / a.group;
    p.group_shift = 31;
    if (a.group != a.depth)
        for (p.group_shift = 0; 1 << p.group_shift < a.group;) ++p.group_shift;
    // As many units for all as for the busiest: then fewer blocks share a tile.
    const uint32_t room =
        static_cast<uint32_t>(device.multiprocessors) * static_cast<uint32_t>(c.blocks);
    const uint32_t most = (p.units - 1) / room + 1;
    p.blocks = (p.units - 1) / most + 1;
    const bool apart = p.units % p.blocks == 0 && p.units / p.blocks % p.chunks == 0;
    call.counters = apart ? 0 : tiles;
    call.workspace_bytes =
        apart ? 0 : static_cast<int64_t>(p.blocks) * 2 * c.tile * c.columns * 8 * sizeof(float);
    return 0;
}

// Tells CUDA once a device that the kernel may use so much shared memory.
int allow_shared(const QuantChoice& c, const Device& device) {
    static std::atomic<uint64_t> told[kQuantKernels];
    const uint64_t bit = 1ull << device.index;
    if (told[c.index].load(std::memory_order_relaxed) & bit) return 0;
    if (int status = cuda_status(
            "quant_gemm",
            cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, c.shared)))
        return status;
    if (int status = cuda_status(
            "quant_gemm",
            cudaFuncSetAttribute(c.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared)))
        return status;
    told[c.index].fetch_or(bit, std::memory_order_relaxed);
    return 0;
}

template <typename F>
int64_t answer(const OffloadQuantGemm* arguments, F f) {
    const Device& device = current_device();
    if (device.index < 0) return -1;
    QuantCall call;
    if (make_call(*arguments, device, call)) return -1;
    return f(call, device);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_quant_gemm(const OffloadQuantGemm* arguments, void* stream) {
    using namespace offload;
    const OffloadQuantGemm& a = *arguments;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    QuantCall call;
    if (int status = make_call(a, device, call)) return status;
    if (a.rows == 0) return 0;
    if (!a.input || !a.codes || !a.scale || !a.output)
        return refuse("quant_gemm: input, codes, scale and output must not be null");
    if (call.workspace_bytes && (!a.workspace || a.workspace_bytes < call.workspace_bytes))
        return refuse("quant_gemm: %lld bytes of workspace are needed, %lld are given",
                      static_cast<long long>(call.workspace_bytes),
                      static_cast<long long>(a.workspace ? a.workspace_bytes : 0));
    if (call.counters && !a.counters)
        return refuse("quant_gemm: %lld counters are needed",
                      static_cast<long long>(call.counters));
    if (int status = allow_shared(call.choice, device)) return status;
    return launch("quant_gemm", call.choice.kernel, dim3(call.plan.blocks),
                  dim3(static_cast<unsigned>(call.choice.threads)),
                  static_cast<size_t>(call.choice.shared), stream, a.launch_early, a, call.plan);
}

OFFLOAD_API int64_t offload_quant_gemm_workspace(const OffloadQuantGemm* arguments) {
    return offload::answer(arguments, [](const offload::QuantCall& call, const offload::Device&) {
        return call.workspace_bytes;
    });
}

OFFLOAD_API int64_t offload_quant_gemm_counters(const OffloadQuantGemm* arguments) {
    return offload::answer(arguments, [](const offload::QuantCall& call, const offload::Device&) {
        return call.counters;
    });
}

OFFLOAD_API int32_t offload_quant_gemm_variants(const OffloadQuantGemm* arguments) {
    return static_cast<int32_t>(
        offload::answer(arguments, [&](const offload::QuantCall&, const offload::Device& device) {
            return static_cast<int64_t>(offload::variant_count(*arguments, device));
        }));
}
