// Products with quantised weights: which kernel of quant_gemm.cuh runs, and how it is launched.
#include <algorithm>
#include <atomic>

#include "quant_gemm.cuh"

namespace offload {
namespace {

constexpr int kMostRows = 64;
constexpr int kMostAtOnce = 16;  // rows; of more the weight is read several times
constexpr int kFewRows = 8;
constexpr int kMostSize = 1 << 29;

using QuantKernel = void (*)(OffloadQuantGemm, QuantPlan);

struct QuantChoice {
    QuantKernel kernel = nullptr;
    int index = 0;  // of the kernel, for what must be told to CUDA once
    bool scale_weights = false;
    int threads = 0, blocks = 0;  // of a multiprocessor
    int tile_rows = 0, chunk_bytes = 0, chunk_steps = 0, step_depth = 0;
    int half_sums = 0, parts_bytes = 0;
};

template <typename T, int kBits, int kColumns, int kWarps, int kTiles, int kGroups, int kSteps,
          bool kScaleWeights>
QuantChoice choose_kernel(int index) {
    using Shape = QuantShape<kBits, kColumns, kWarps, kTiles, kGroups, kSteps>;
    return {quant_gemm_kernel<T, kBits, kColumns, kWarps, kTiles, kGroups, kSteps, kScaleWeights>,
            index,
            kScaleWeights,
            Shape::kThreads,
            kQuantWarps / kWarps,
            Shape::kTileRows,
            Shape::kChunkBytes,
            Shape::kChunkSteps,
            Shape::kStepDepth,
            kScaleWeights ? 0 : Shape::kHalfSums,
            Shape::kPartsBytes};
}

constexpr int kQuantKernels = 12;

// Sums are scaled where 32 bytes of codes share a scale.
template <typename T, int kBits, bool kScaleWeights>
QuantChoice kernel_of(int rows, int base) {
    return rows <= kFewRows ? choose_kernel<T, kBits, 1, 8, 1, 2, 2, kScaleWeights>(base)
                            : choose_kernel<T, kBits, 2, 16, 1, 2, 2, kScaleWeights>(base + 1);
}

template <typename T>
QuantChoice kernel_of(const OffloadQuantGemm& a, int base) {
    if (a.bits == 8) return kernel_of<T, 8, false>(a.rows, base);
    return a.group < 64 ? kernel_of<T, 4, true>(a.rows, base + 2)
                        : kernel_of<T, 4, false>(a.rows, base + 4);
}

QuantChoice kernel_of(const OffloadQuantGemm& a) {
    return a.dtype == OFFLOAD_F16 ? kernel_of<__half>(a, 0) : kernel_of<__nv_bfloat16>(a, 6);
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
    if (products * (a.depth / a.group) > INT32_MAX || products * a.depth / lane_depth > INT32_MAX)
        return refuse("quant_gemm: a weight of %lld x %d is too large",
                      static_cast<long long>(products), a.depth);
    return 0;
}

struct QuantCall {
    QuantChoice choice;
    QuantPlan plan;
    int blocks, shared;
};

// What a block may have; CUDA takes 1 KiB of every block's share.
int shared_room(const QuantChoice& c, const Device& device) {
    return (device.shared_per_block + 1024) / c.blocks - 1024;
}

int ceil_div(int a, int b) { return (a - 1) / b + 1; }

// Where everything lies in shared memory if there are as many passes; false where there is no room.
bool lay_out(const OffloadQuantGemm& a, const QuantChoice& c, int room, int passes,
             QuantCall& call) {
    constexpr int kLeastStages = 3, kMostStages = 6;
    QuantPlan& p = call.plan;
    p.pass_chunks = ceil_div(p.chunks, passes);
    const int pass_steps = p.pass_chunks * c.chunk_steps;
    const int64_t steps = std::min(pass_steps, p.steps);
    const int64_t pitch = steps * c.step_depth * 2 + 64;
    const int64_t inputs = pitch * a.rows, sums = steps * 2 * c.half_sums;
    const int64_t earlier = passes == 1 ? 0 : int64_t{p.tiles} * c.tile_rows * a.rows * 4;
    const int64_t rest = inputs + sums + c.parts_bytes + earlier;
    const int stage_bytes = c.tile_rows * c.chunk_bytes;
    if (rest + kLeastStages * stage_bytes > room) return false;
    p.stages = static_cast<int>(std::min<int64_t>((room - rest) / stage_bytes, kMostStages));
    p.input_pitch = static_cast<int>(pitch);
    p.inputs_at = p.stages * stage_bytes;
    p.input_sums_at = p.inputs_at + static_cast<int>(inputs);
    p.parts_at = p.input_sums_at + static_cast<int>(sums);
    p.passes_at = p.parts_at + c.parts_bytes;
    call.shared = p.passes_at + static_cast<int>(earlier);
    return true;
}

int make_call(const OffloadQuantGemm& a, const Device& device, QuantCall& call) {
    if (int status = check_arguments(a)) return status;
    if (a.variant < 0 || a.variant > 1)
        return refuse("quant_gemm: variant must be 0 or 1, not %d", a.variant);
    call.choice = kernel_of(a);
    const QuantChoice& c = call.choice;
    QuantPlan& p = call.plan;
    p.row_bytes = static_cast<int32_t>(static_cast<int64_t>(a.depth) * a.bits / 8);
    p.chunks = ceil_div(p.row_bytes, c.chunk_bytes);
    p.steps = ceil_div(p.row_bytes, kStepBytes);
    p.groups = a.depth / a.group;
    p.group_shift = 31;
    if (a.group != a.depth)
        for (p.group_shift = 0; 1 << p.group_shift < a.group;) ++p.group_shift;
    const bool even = p.groups % 2 == 0 && reinterpret_cast<uintptr_t>(a.scale) % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(a.zero) % 8 == 0;
    p.step_scales = a.group >= c.step_depth                                   ? kScalesShared
                    : even && a.group * 2 == c.step_depth && !c.scale_weights ? kScalesPaired
                                                                              : kScalesApart;
    // More blocks than run at once, where one has no room for the sums of all of its outputs.
    constexpr int kMostWaves = 64;
    const int tile_outputs = a.gated ? c.tile_rows / 2 : c.tile_rows;
    for (int waves = 1; waves <= kMostWaves; waves *= 2) {
        call.blocks = std::min(device.multiprocessors * c.blocks * waves, ceil_div(a.outputs, 8));
        const int most = ceil_div(a.outputs, call.blocks);
        p.block_outputs = a.outputs / call.blocks;
        p.longer_blocks = a.outputs % call.blocks;
        p.tiles = ceil_div(most, tile_outputs);
        p.tile_outputs = ceil_div(most, p.tiles);
        for (int passes = 1; passes <= p.chunks; ++passes)
            if (lay_out(a, c, shared_room(c, device), passes, call)) return 0;
    }
    return refuse("quant_gemm: this device has too little shared memory for %d rows and %d outputs",
                  a.rows, a.outputs);
}

// How many rows a launch takes: fewer where a device has too little shared memory for more.
int rows_at_once(const OffloadQuantGemm& a, const Device& device) {
    if (a.rows <= kFewRows) return kFewRows;
    OffloadQuantGemm part = a;
    part.rows = std::min(kMostAtOnce, a.rows);
    QuantCall call;
    return make_call(part, device, call) == 0 ? kMostAtOnce : kFewRows;
}

// Tells CUDA once a device that the kernel may use so much shared memory.
int allow_shared(const QuantChoice& c, const Device& device) {
    static std::atomic<uint64_t> told[kQuantKernels];
    const uint64_t bit = 1ull << device.index;
    if (told[c.index].load(std::memory_order_relaxed) & bit) return 0;
    if (int status =
            cuda_status("quant_gemm",
                        cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             device.shared_per_block)))
        return status;
    if (int status = cuda_status(
            "quant_gemm",
            cudaFuncSetAttribute(c.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared)))
        return status;
    told[c.index].fetch_or(bit, std::memory_order_relaxed);
    return 0;
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_quant_gemm(const OffloadQuantGemm* arguments, void* stream) {
    using namespace offload;
    const OffloadQuantGemm& a = *arguments;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    QuantCall call;
    if (int status = check_arguments(a)) return status;
    if (a.rows == 0) return 0;
    if (!a.input || !a.codes || !a.scale || !a.output)
        return refuse("quant_gemm: input, codes, scale and output must not be null");
    const int at_once = rows_at_once(a, device);
    for (int first = 0; first < a.rows; first += at_once) {
        OffloadQuantGemm part = a;
        part.rows = std::min(at_once, a.rows - first);
        part.input = static_cast<const uint16_t*>(a.input) + first * a.input_stride;
        part.output = static_cast<uint16_t*>(a.output) + first * a.output_stride;
        if (a.residual)
            part.residual = static_cast<const uint16_t*>(a.residual) + first * a.residual_stride;
        if (int status = make_call(part, device, call)) return status;
        if (int status = allow_shared(call.choice, device)) return status;
        if (int status =
                launch("quant_gemm", call.choice.kernel, dim3(static_cast<unsigned>(call.blocks)),
                       dim3(static_cast<unsigned>(call.choice.threads)),
                       static_cast<size_t>(call.shared), stream, a.launch_early, part, call.plan))
            return status;
    }
    return 0;
}

// No block needs another's sums.
OFFLOAD_API int64_t offload_quant_gemm_workspace(const OffloadQuantGemm* arguments) {
    return offload::check_arguments(*arguments) ? -1 : 0;
}

OFFLOAD_API int64_t offload_quant_gemm_counters(const OffloadQuantGemm* arguments) {
    return offload::check_arguments(*arguments) ? -1 : 0;
}

OFFLOAD_API int32_t offload_quant_gemm_variants(const OffloadQuantGemm* arguments) {
    return offload::check_arguments(*arguments) ? -1 : 1;
}
