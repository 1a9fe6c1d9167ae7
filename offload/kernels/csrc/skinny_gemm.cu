// SBI-GeMM: a few rows of activations times a whole weight, limited by the rate of reading it.
//
// For 16-bit elements the warps of a block work together: skinny_gemm_staged.cuh. For float32 every
// warp works alone: skinny_gemm_stream_k.cuh. What no 16-byte loads can reach (an odd depth or
// stride) is computed by a plain kernel. A norm that the staged form cannot take along is a kernel
// before the product.
#include <algorithm>
#include <atomic>

#include "skinny_gemm_call.cuh"
#include "skinny_gemm_normalize.cuh"
#include "skinny_gemm_plain.cuh"

namespace offload {
namespace {

constexpr int kMostSize = 1 << 29;  // of depth and outputs: what they add up to stays an int

int check_sizes(const OffloadSkinnyGemm& a) {
    if (a.dtype < OFFLOAD_F32 || a.dtype > OFFLOAD_BF16)
        return refuse("skinny_gemm: dtype %d is unknown", a.dtype);
    if (a.rows < 0 || a.rows > kMostRows)
        return refuse("skinny_gemm: rows must be 0 to %d, not %d", kMostRows, a.rows);
    if (a.outputs < 1 || a.depth < 1 || a.outputs > kMostSize || a.depth > kMostSize)
        return refuse("skinny_gemm: outputs and depth must be 1 to %d, not %d and %d", kMostSize,
                      a.outputs, a.depth);
    if (a.weight_stride < a.depth || (a.rows > 1 && a.input_stride < a.depth))
        return refuse("skinny_gemm: strides of input and weight must be at least the depth, %d",
                      a.depth);
    if (a.rows > 1 &&
        (a.output_stride < a.outputs || (a.residual && a.residual_stride < a.outputs)))
        return refuse("skinny_gemm: strides of output and residual must be at least outputs, %d",
                      a.outputs);
    if (a.activation < OFFLOAD_IDENTITY || a.activation > OFFLOAD_SILU)
        return refuse("skinny_gemm: activation %d is unknown", a.activation);
    if (a.norm.kind < OFFLOAD_NORM_NONE || a.norm.kind > OFFLOAD_NORM_RMS)
        return refuse("skinny_gemm: norm kind %d is unknown", a.norm.kind);
    if (a.variant < 0 || a.splits < 0)
        return refuse("skinny_gemm: variant and splits must not be negative, got %d and %d",
                      a.variant, a.splits);
    return 0;
}

// Tells CUDA once a kernel and device how much shared memory the kernel may have.
int prepare(const GemmChoice& choice, const Device& device) {
    static std::atomic<uint64_t> prepared[kKernelCount];
    const uint64_t bit = 1ull << device.index;
    if (prepared[choice.index].load(std::memory_order_acquire) & bit) return 0;
    const void* kernel = reinterpret_cast<const void*>(choice.kernel);
    if (int status =
            cuda_status("skinny_gemm: cudaFuncSetAttribute",
                        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             device.shared_per_block)))
        return status;
    // All of it, so that the next kernel's blocks find room beside this one's.
    if (int status =
            cuda_status("skinny_gemm: cudaFuncSetAttribute",
                        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared)))
        return status;
    prepared[choice.index].fetch_or(bit, std::memory_order_release);
    return 0;
}

template <typename T>
int launch_norm(const OffloadSkinnyGemm& a, int64_t pitch, void* stream) {
    return launch("skinny_gemm: norm", normalize_rows_kernel<T>, dim3(a.rows), dim3(kNormThreads),
                  0, stream, a.launch_early, a, reinterpret_cast<T*>(a.workspace), pitch);
}

template <typename T>
int launch_plain(const OffloadSkinnyGemm& a, void* stream) {
    constexpr int kWarps = 8;
    return launch("skinny_gemm: plain", plain_gemm_kernel<T>,
                  dim3((a.outputs + kWarps - 1) / kWarps), dim3(kWarps * 32), 0, stream,
                  a.launch_early, a);
}

int launch_staged(const OffloadSkinnyGemm& a, const GemmCall& call, const Device& device,
                  void* stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(call.plan.blocks);
    config.blockDim = dim3(call.choice.threads);
    config.dynamicSmemBytes = call.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    // Older devices refuse both.
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (a.launch_early && device.major >= 9) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (call.plan.splits > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = call.plan.splits;
        attributes[config.numAttrs].val.clusterDim.y = 1;
        attributes[config.numAttrs++].val.clusterDim.z = 1;
    }
    return cuda_status("skinny_gemm", cudaLaunchKernelEx(&config, call.choice.kernel, a, call.plan,
                                                         static_cast<float*>(nullptr)));
}

int run(const OffloadSkinnyGemm& arguments, void* stream) {
    OffloadSkinnyGemm a = arguments;
    if (int status = check_sizes(a)) return status;
    if (a.rows == 0) return 0;
    if (!a.input || !a.weight || !a.output)
        return refuse("skinny_gemm: input, weight and output must not be null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    GemmCall call;
    if (int status = make_call(a, device, call)) return status;
    const int64_t needed = call.norm_apart ? call.total_bytes
                           : call.counters ? call.total_bytes
                                           : 0;
    if (needed > a.workspace_bytes || (needed && (!a.workspace || !aligned16(a.workspace))))
        return refuse("skinny_gemm: needs %lld bytes of workspace at a multiple of 16, got %lld",
                      static_cast<long long>(needed), static_cast<long long>(a.workspace_bytes));
    if (call.counters && !a.counters) return refuse("skinny_gemm: counters must not be null");

    float* partials = a.workspace ? a.workspace + call.norm_bytes / 4 : nullptr;
    if (call.norm_apart) {
        const int64_t pitch = round_up(a.depth, 16 / element_bytes(a));
        int status = 0;
        if (a.dtype == OFFLOAD_F32) status = launch_norm<float>(a, pitch, stream);
        if (a.dtype == OFFLOAD_F16) status = launch_norm<__half>(a, pitch, stream);
        if (a.dtype == OFFLOAD_BF16) status = launch_norm<__nv_bfloat16>(a, pitch, stream);
        if (status) return status;
        a.input = a.workspace;
        a.input_stride = pitch;
        a.norm = {};
        a.launch_early = 1;  // behind the norm
    }
    if (!call.variant) {
        if (a.dtype == OFFLOAD_F32) return launch_plain<float>(a, stream);
        if (a.dtype == OFFLOAD_F16) return launch_plain<__half>(a, stream);
        return launch_plain<__nv_bfloat16>(a, stream);
    }
    if (int status = prepare(call.choice, device)) return status;
    if (call.variant->way == GemmWay::kStaged) return launch_staged(a, call, device, stream);
    return launch("skinny_gemm", call.choice.kernel, dim3(call.plan.blocks),
                  dim3(call.variant->warps * 32), call.shared, stream, a.launch_early, a, call.plan,
                  partials);
}

// The sizes of a call whose pointers may all be null.
int size_call(const OffloadSkinnyGemm& a, GemmCall& call) {
    if (int status = check_sizes(a)) return status;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    call = {};
    return a.rows ? make_call(a, device, call) : 0;
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_skinny_gemm(const OffloadSkinnyGemm* arguments, void* stream) {
    return offload::run(*arguments, stream);
}

OFFLOAD_API int64_t offload_skinny_gemm_workspace(const OffloadSkinnyGemm* arguments) {
    offload::GemmCall call;
    return offload::size_call(*arguments, call) ? -1 : call.total_bytes;
}

OFFLOAD_API int64_t offload_skinny_gemm_counters(const OffloadSkinnyGemm* arguments) {
    offload::GemmCall call;
    return offload::size_call(*arguments, call) ? -1 : call.counters;
}

OFFLOAD_API int32_t offload_skinny_gemm_variants(const OffloadSkinnyGemm* arguments) {
    using namespace offload;
    if (check_sizes(*arguments)) return -1;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    const bool wide = is_wide(*arguments) &&
                      (arguments->norm.kind != OFFLOAD_NORM_NONE || input_is_wide(*arguments));
    return wide ? std::max(1, variant_count(*arguments, device)) : 1;
}
