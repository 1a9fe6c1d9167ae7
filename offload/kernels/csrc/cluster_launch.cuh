// Launches in clusters of blocks (sm_90): how many run at once, and how they are asked for.
#pragma once
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "common.cuh"

namespace offload {

inline cudaLaunchAttribute cluster_attribute(int blocks) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

// How many clusters of so many blocks run at once, with `shared` bytes a block, one block a
// multiprocessor. Asked once for each; the first time the kernel is told that it may have that.
template <typename Kernel>
int count_clusters(const char* name, Kernel kernel, int threads, int shared, const Device& device,
                   int cluster, int* count) {
    static std::mutex mutex;
    static std::map<std::tuple<int, Kernel, int>, int> known;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_tuple(device.index, kernel, cluster);
    const auto found = known.find(key);
    if (found != known.end()) {
        *count = found->second;
        return 0;
    }
    const std::pair<cudaFuncAttribute, int> wanted[] = {
        {cudaFuncAttributeMaxDynamicSharedMemorySize, shared},
        {cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared}};
    for (const auto& [attribute, value] : wanted)
        if (int status = cuda_status(name, cudaFuncSetAttribute(kernel, attribute, value)))
            return status;
    *count = device.multiprocessors;
    if (cluster > 1) {
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute = cluster_attribute(cluster);
        config.gridDim = dim3(static_cast<unsigned>(cluster));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = static_cast<size_t>(shared);
        config.attrs = &attribute;
        config.numAttrs = 1;
        if (int status = cuda_status(name, cudaOccupancyMaxActiveClusters(count, kernel, &config)))
            return status;
    }
    known.emplace(key, *count);
    return 0;
}

// Issues `blocks` in clusters of `cluster`; with `early` they may begin before the kernel ahead has
// ended, where the GPU can do that.
template <typename... Parameters>
int launch_clusters(const char* name, void (*kernel)(Parameters...), int blocks, int threads,
                    int shared, int cluster, bool early, void* stream,
                    const Parameters&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[2] = {};
    if (early && current_device().major >= 9) {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    if (cluster > 1) attributes[config.numAttrs++] = cluster_attribute(cluster);
    config.attrs = attributes;
    return cuda_status(name, cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace offload
