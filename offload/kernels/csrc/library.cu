// The library itself: its version, its errors, and the device it runs on.
#include <mutex>

#include "common.cuh"

namespace offload {
namespace {
thread_local char last_error[512];
}

int refuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return -1;
}

int cuda_status(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return 0;
    cudaGetLastError();  // it is reported here, and must not surface in somebody else's check
    snprintf(last_error, sizeof last_error, "%s: CUDA error %d (%s)", what, static_cast<int>(error),
             cudaGetErrorString(error));
    return static_cast<int>(error);
}

const Device& current_device() {
    constexpr int kMost = 64;
    static Device devices[kMost];
    static bool known[kMost];
    static std::mutex mutex;
    static const Device none = {-1, 0, 0, 0, 0, 0};
    int index = 0;
    if (cuda_status("cudaGetDevice", cudaGetDevice(&index))) return none;
    if (index >= kMost) {
        refuse("device %d: at most %d are supported", index, kMost);
        return none;
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (!known[index]) {
        Device d = {index, 0, 0, 0, 0, 0};
        if (cuda_status("cudaDeviceGetAttribute",
                        cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount,
                                               index)) ||
            cuda_status(
                "cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, index)) ||
            cuda_status(
                "cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&d.minor, cudaDevAttrComputeCapabilityMinor, index)) ||
            cuda_status("cudaDeviceGetAttribute",
                        cudaDeviceGetAttribute(&d.shared_per_block,
                                               cudaDevAttrMaxSharedMemoryPerBlockOptin, index)) ||
            cuda_status("cudaDeviceGetAttribute",
                        cudaDeviceGetAttribute(&d.l2_bytes, cudaDevAttrL2CacheSize, index)))
            return none;
        devices[index] = d;
        known[index] = true;
    }
    return devices[index];
}

__global__ void probe_kernel() {}

}  // namespace offload

OFFLOAD_API const char* offload_last_error(void) { return offload::last_error; }

OFFLOAD_API int32_t offload_kernels_abi(void) { return OFFLOAD_KERNELS_ABI; }

OFFLOAD_API int64_t offload_struct_size(int32_t index) {
    static const int64_t sizes[] = {
        sizeof(OffloadNorm),         sizeof(OffloadResidualNorm),    sizeof(OffloadRotaryAppend),
        sizeof(OffloadActivation),   sizeof(OffloadDecodeAttention), sizeof(OffloadSkinnyGemm),
        sizeof(OffloadDequantize),   sizeof(OffloadQuantGemm),       sizeof(OffloadStepInputs),
        sizeof(OffloadQuantizeRows), sizeof(OffloadScaleSums),       sizeof(OffloadArrange)};
    return index < 0 || index >= static_cast<int32_t>(sizeof sizes / sizeof *sizes) ? 0
                                                                                    : sizes[index];
}

OFFLOAD_API int offload_device_supported(int32_t index) {
    using namespace offload;
#ifdef OFFLOAD_CHECK_ONLY
    return refuse(
        "the kernels were compiled to be checked, not to be run: install again without "
        "OFFLOAD_CHECK_KERNELS");
#endif
    int count = 0, before = 0;
    if (int status = cuda_status("cudaGetDeviceCount", cudaGetDeviceCount(&count))) return status;
    if (index < 0 || index >= count) return refuse("device %d: there are %d", index, count);
    if (int status = cuda_status("cudaGetDevice", cudaGetDevice(&before))) return status;
    if (int status = cuda_status("cudaSetDevice", cudaSetDevice(index))) return status;
    cudaFuncAttributes attributes;
    const int status = cuda_status("this GPU runs none of the code that the library was built with",
                                   cudaFuncGetAttributes(&attributes, probe_kernel));
    cudaSetDevice(before);
    return status;
}
