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
    int tile_rows = 0, parts = 0, threads = 0, blocks = 0, step_depth = 0, sum_bytes = 0;
};

template <typename T, int kBits, int kColumns, int kTiles, int kGroups, int kParts, int kSlots,
          int kBlocks>
QuantChoice choose_kernel(int index) {
    using Shape = QuantShape<kBits, kColumns, kTiles, kGroups, kParts>;
    return {quant_gemm_kernel<T, kBits, kColumns, kTiles, kGroups, kParts, kSlots, kBlocks>,
            index,
            Shape::kTileRows,
            kParts,
            Shape::kThreads,
            kBlocks,
            Shape::kStepDepth,
            Shape::kSumBytes};
}

constexpr int kQuantKernels = 12;

template <typename T, int kBits>
QuantChoice kernel_of(int rows, int base) {
    if (rows <= 8) return choose_kernel<T, kBits, 1, 1, 1, 8, 4, 2>(base);
    if (rows <= 16) return choose_kernel<T, kBits, 2, 1, 1, 8, 4, 2>(base + 1);
    return choose_kernel<T, kBits, 8, 2, 4, 2, 2, 1>(base + 2);
}

QuantChoice kernel_of(const OffloadQuantGemm& a) {
    if (a.dtype == OFFLOAD_F16)
        return a.bits == 4 ? kernel_of<__half, 4>(a.rows, 0) : kernel_of<__half, 8>(a.rows, 3);
    return a.bits == 4 ? kernel_of<__nv_bfloat16, 4>(a.rows, 6)
                       : kernel_of<__nv_bfloat16, 8>(a.rows, 9);
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
    if (products * (a.depth / a.group) > INT32_MAX || products * a.depth / lane_depth > UINT32_MAX)
        return refuse("quant_gemm: a weight of %lld x %d is too large",
                      static_cast<long long>(products), a.depth);
    return 0;
}

struct QuantCall {
    QuantChoice choice;
    QuantPlan plan;
    int shared;
    int64_t workspace_bytes, counters;
};

int input_pitch(const QuantChoice& c, uint32_t steps) {
    return static_cast<int>(steps) * c.step_depth * 2 + 64;
}

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a - 1) / b + 1; }

// Into how many parts the depth goes: as few as leave room for a part's activations, and more where
// the tiles do not go evenly into the blocks. A block's time, in bytes that it reads.
uint32_t choose_splits(const OffloadQuantGemm& a, const QuantChoice& c, const QuantPlan& p,
                       uint32_t room, uint32_t blocks) {
    constexpr double kJoin = 24e3;  // what it takes to add the parts' sums
    uint32_t best = 0;
    double least = 0;
    const uint32_t most = p.steps < blocks ? p.steps : blocks;
    for (uint32_t splits = 1; splits <= most; ++splits) {
        const uint32_t steps = ceil_div(p.steps, splits);
        if (static_cast<int64_t>(a.rows) * input_pitch(c, steps) > room) continue;
        if (best && splits > 16 && splits > 2 * best) break;
        const uint32_t parts = static_cast<uint32_t>(c.parts);
        const uint32_t tiles = ceil_div(p.tiles, blocks / splits);
        const double codes =
            static_cast<double>(tiles) * c.tile_rows * ceil_div(steps, parts) * parts * kStepBytes;
        const double inputs = static_cast<double>(a.rows) * steps * c.step_depth * 2;
        const double sums = static_cast<double>(a.rows) * tiles * c.tile_rows * 8;
        const double time = codes + inputs / 2 + (splits > 1 ? sums + kJoin : 0.0);
        if (!best || time < least) {
            best = splits;
            least = time;
        }
    }
    return best;
}

int make_call(const OffloadQuantGemm& a, const Device& device, QuantCall& call) {
    if (int status = check_arguments(a)) return status;
    if (a.variant < 0 || a.variant > 1)
        return refuse("quant_gemm: variant must be 0 or 1 here, not %d", a.variant);
    call.choice = kernel_of(a);
    const QuantChoice& c = call.choice;
    QuantPlan& p = call.plan;
    const int tile_outputs = a.gated ? c.tile_rows / 2 : c.tile_rows;
    p.tiles = ceil_div(a.outputs, tile_outputs);
    p.steps = ceil_div(a.depth, c.step_depth);
    p.row_pieces = static_cast<uint32_t>(static_cast<int64_t>(a.depth) * a.bits / 128);
    p.groups = a.depth / a.group;
    p.group_shift = 31;
    if (a.group != a.depth)
        for (p.group_shift = 0; 1 << p.group_shift < a.group;) ++p.group_shift;
    // A block leaves 1 KiB of its share to CUDA.
    const int share = (device.shared_per_block + 1024) / c.blocks - 1024;
    const uint32_t blocks =
        static_cast<uint32_t>(device.multiprocessors) * static_cast<uint32_t>(c.blocks);
    p.splits = choose_splits(a, c, p, static_cast<uint32_t>(share - c.sum_bytes), blocks);
    if (p.splits == 0)
        return refuse("quant_gemm: a depth of %d is too much for %d rows", a.depth, a.rows);
    // As many tiles for all as for the busiest: then fewer blocks do.
    const uint32_t tiles = ceil_div(p.tiles, blocks / p.splits);
    p.ranges = ceil_div(p.tiles, tiles);
    p.input_pitch = input_pitch(c, ceil_div(p.steps, p.splits));
    call.shared = a.rows * p.input_pitch + c.sum_bytes;
    call.counters = p.splits == 1 ? 0 : p.ranges;
    call.workspace_bytes = p.splits == 1 ? 0
                                         : static_cast<int64_t>(p.splits) * a.rows * p.tiles *
                                               c.tile_rows * static_cast<int64_t>(sizeof(float));
    return 0;
}

// Tells CUDA once a device that the kernel may use so much shared memory.
int allow_shared(const QuantChoice& c, const Device& device) {
    static std::atomic<uint64_t> told[kQuantKernels];
    const uint64_t bit = 1ull << device.index;
    if (told[c.index].load(std::memory_order_relaxed) & bit) return 0;
    if (int status =
            cuda_status("quant_gemm",
                        cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (device.shared_per_block + 1024) / c.blocks - 1024)))
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
    return launch("quant_gemm", call.choice.kernel, dim3(call.plan.ranges * call.plan.splits),
                  dim3(static_cast<unsigned>(call.choice.threads)),
                  static_cast<size_t>(call.shared), stream, a.launch_early, a, call.plan);
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
    return static_cast<int32_t>(offload::answer(
        arguments,
        [](const offload::QuantCall&, const offload::Device&) { return static_cast<int64_t>(1); }));
}
