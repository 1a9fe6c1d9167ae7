// What decode_attention.cu needs of a GPU beyond host_cuda.hpp: dynamic shared memory, poisoned
// before each block, its intrinsics, and what decode_attention_ptx.cuh has instructions for. Stands
// for that header, and is force-included before the file.
//
// A copy into shared memory is done either when it is asked for, which shows a stage that is filled
// while it is read, or when it is waited for, which shows one that is read before it is full.
#pragma once
#include <algorithm>
#include <deque>
#include <set>

#include "host_shared.hpp"

#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__

using std::max;
using std::min;

namespace host_cuda {

// What the kernels ahead write: not there when a block begins, there once it has waited for them.
struct Late {
    void* to;
    const void* from;
    int64_t bytes;
};

struct Copy {
    uint32_t to;
    const void* from;
    int bytes, seen;
};

constexpr int kMostThreads = 4096;  // of a cluster
constexpr int kSharedOfMultiprocessor = 233472, kReserved = 1024, kStatic = 512;
inline int multiprocessors = 4, shared_of_block = 232448;
inline bool copies_are_late = false;
inline std::set<uint64_t*> inboxes;  // of the cluster that runs
inline std::vector<Late> late;
inline std::vector<bool> under_way(kMostCluster* kSharedOfBlock);  // by a copy's first byte
inline std::deque<std::vector<Copy>> copies[kMostThreads];  // of a thread; the last group is open

// What is there before a block begins.
inline const bool blocks_begin_clean = [] {
    at_block = [] {
        for (const Late& x : late) memset(x.to, 0xff, x.bytes);
        for (auto& groups : copies) {
            for (const auto& group : groups) require(group.empty(), "copies that nobody awaited");
            groups.clear();
        }
        under_way.assign(under_way.size(), false);
    };
    return true;
}();

inline int rank_in_cluster() { return current / static_cast<int>(blockDim.x); }
inline size_t byte_of(uint32_t at) { return rank_in_cluster() * size_t{kSharedOfBlock} + at; }

// All threads do first what a cluster may do before it waits.
inline void previous_kernel_ends() {
    arrive_at_cluster();
    wait_for_cluster();
    for (const Late& x : late) memcpy(x.to, x.from, x.bytes);
    arrive_at_cluster();
    wait_for_cluster();
}

// Clusters one after another, the blocks of each at once.
inline void run_clusters(int clusters, int size, int count) {
    gridDim = dim3(clusters * size);
    blockDim = dim3(count);
    in_cluster = true;
    for (int i = 0; i < clusters; ++i) {
        const int cluster = last_block_first ? clusters - 1 - i : i;
        memset(cluster_memory, 0xff, size_t{kSharedOfBlock} * size);
        at_block();
        run_blocks(cluster * size, size,
                   [](int rank) { shared_memory = cluster_memory + rank * kSharedOfBlock; });
        for (const uint64_t* inbox : inboxes)
            require(*inbox == 0, "less sent than an inbox is for");
        inboxes.clear();
    }
    in_cluster = false;
    shared_memory = cluster_memory;
}

// Puts words on the warp's table and returns it when all lanes have.
struct Words {
    uint64_t at[6];
};
inline const Words* trade(const Words& words) {
    static Words tables[2][kMostThreads];
    Words* table = tables[self().warp_barriers % 2];
    table[current] = words;
    warp_barrier();
    return table + current / 32 * 32;
}

template <typename T>
T shuffle(T x, int lane) {
    Words words = {};
    memcpy(words.at, &x, sizeof x);
    memcpy(&x, trade(words)[lane].at, sizeof x);
    return x;
}

inline void copy(const Copy& c) {
    unsigned char* to = shared_memory + c.to;
    memset(to, 0, c.bytes);
    if (c.seen) memcpy(to, c.from, c.seen);
}

inline void queue(const Copy& c) {
    require(c.to % c.bytes == 0 && (!c.seen || reinterpret_cast<uintptr_t>(c.from) % c.bytes == 0),
            "a copy that is not aligned");
    require(c.to + c.bytes <= shared_bytes, "a copy beyond shared memory");
    auto& groups = copies[current];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(c);
    require(!under_way[byte_of(c.to)], "two copies to one place, in no order");
    under_way[byte_of(c.to)] = true;
    if (!copies_are_late) copy(c);
}

inline int cluster_size(const cudaLaunchConfig_t* config) {
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            return static_cast<int>(config->attrs[i].val.clusterDim.x);
    return 1;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_attention(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                             Arguments... arguments) {
    if (static_cast<int>(config->dynamicSmemBytes) > shared_of_block - kStatic ||
        config->blockDim.x % 32)
        return cudaErrorInvalidConfiguration;
    shared_bytes = static_cast<uint32_t>(config->dynamicSmemBytes);
    ++launches;
    const int size = cluster_size(config);
    if (size == 1) return host_launch(config, kernel, arguments...);
    const int blocks = static_cast<int>(config->gridDim.x);
    if (size > kMostCluster || blocks % size || size * config->blockDim.x > kMostThreads)
        return cudaErrorInvalidConfiguration;
    auto call = [&] { kernel(arguments...); };
    body = [](void* f) { (*static_cast<decltype(call)*>(f))(); };
    body_arguments = &call;
    run_clusters(blocks / size, size, static_cast<int>(config->blockDim.x));
    return cudaSuccess;
}

inline cudaError_t function_attributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->sharedSizeBytes = kStatic;
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t occupancy(int* blocks, Kernel, int threads, size_t shared) {
    *blocks = min(2048 / threads,
                  kSharedOfMultiprocessor / (static_cast<int>(shared) + kStatic + kReserved));
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t occupancy_of_clusters(int* clusters, Kernel kernel, const cudaLaunchConfig_t* config) {
    int blocks = 0;
    occupancy(&blocks, kernel, static_cast<int>(config->blockDim.x), config->dynamicSmemBytes);
    const int all = blocks * multiprocessors / cluster_size(config);
    *clusters = blocks > 0 ? max(all, 1) : 0;  // GPUs are larger than a cluster
    return cudaSuccess;
}

}  // namespace host_cuda

// Which GPU the host stands for, and in which order what happens there happens.
extern "C" __attribute__((visibility("default"))) void host_settings(int multiprocessors,
                                                                     int shared_of_block,
                                                                     int last_block_first,
                                                                     int copies_are_late) {
    host_cuda::multiprocessors = multiprocessors;
    host_cuda::shared_of_block = shared_of_block;
    host_cuda::last_block_first = last_block_first;
    host_cuda::copies_are_late = copies_are_late;
}

// What comes late in the launches from now on; `from` stays the caller's.
extern "C" __attribute__((visibility("default"))) void host_late(const host_cuda::Late* late,
                                                                 int count) {
    host_cuda::late.assign(late, late + count);
}

#undef cudaLaunchKernelEx
#define cudaLaunchKernelEx host_cuda::launch_attention
#undef cudaFuncGetAttributes
#define cudaFuncGetAttributes host_cuda::function_attributes
#define cudaFuncSetAttribute(kernel, attribute, value) ((void)(kernel), cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor host_cuda::occupancy
#define cudaOccupancyMaxActiveClusters host_cuda::occupancy_of_clusters

inline void __syncwarp() { host_cuda::warp_barrier(); }
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
    return host_cuda::shuffle(x, lane);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int by) {
    const int lane = host_cuda::current % 32;
    return host_cuda::shuffle(x, lane < by ? lane : lane - by);
}
inline int __shfl_xor_sync(unsigned, int x, int mask) {
    return host_cuda::shuffle(x, host_cuda::current % 32 ^ mask);
}
inline int64_t __shfl_xor_sync(unsigned, int64_t x, int mask) {
    return host_cuda::shuffle(x, host_cuda::current % 32 ^ mask);
}
inline bool __any_sync(unsigned, bool x) {
    host_cuda::Words words = {};
    words.at[0] = x;
    const host_cuda::Words* table = host_cuda::trade(words);
    for (int i = 0; i < 32; ++i)
        if (table[i].at[0]) return true;
    return false;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    host_cuda::Words words = {};
    words.at[0] = x;
    const host_cuda::Words* table = host_cuda::trade(words);
    unsigned ballot = 0;
    for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(table[i].at[0]) << i;
    return ballot;
}
template <typename Combine>
int reduce(int x, Combine combine) {
    const host_cuda::Words* table = host_cuda::trade({{static_cast<uint32_t>(x)}});
    int all = static_cast<int>(table[0].at[0]);
    for (int i = 1; i < 32; ++i) all = combine(all, static_cast<int>(table[i].at[0]));
    return all;
}
inline int __reduce_add_sync(unsigned, int x) {
    return reduce(x, [](int a, int b) { return a + b; });
}
inline int __reduce_max_sync(unsigned, int x) {
    return reduce(x, [](int a, int b) { return max(a, b); });
}
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
void __stcg(T* at, T x) {
    *at = x;
}
template <typename T>
T __ldcg(const T* at) {
    return *at;
}
#define __cvta_generic_to_shared(p) \
    (reinterpret_cast<const unsigned char*>(p) - host_cuda::shared_memory)

#include "common.cuh"
#define wait_for_previous_kernel host_cuda::previous_kernel_ends

namespace offload {

// In place of library.cu's, whose device never changes.
const Device& current_device() {
    static Device device;
    // A device of its own for every size, since what fits is remembered by its number.
    const int index = host_cuda::shared_of_block * 256 + host_cuda::multiprocessors;
    device = {index, host_cuda::multiprocessors, 9, host_cuda::shared_of_block};
    return device;
}

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
    snprintf(last_error, sizeof last_error, "%s: CUDA error %d", what, static_cast<int>(error));
    return static_cast<int>(error);
}

namespace decode {

inline float exp2_approximately(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.f : y;
}

template <int kBytes>
void copy_async(uint32_t to, const void* from, int seen) {
    host_cuda::queue({to, from, kBytes, seen});
}
inline void copy_async_once(uint32_t to, const void* from, int seen, uint64_t) {
    host_cuda::queue({to, from, 16, seen});
}
inline uint64_t l2_policy(bool) { return 0; }
inline void store_shared(uint32_t to, uint4 x) {
    host_cuda::require(to % 16 == 0 && to + 16 <= host_cuda::shared_bytes, "a store out of place");
    host_cuda::require(!host_cuda::under_way[host_cuda::byte_of(to)],
                       "a store and a copy to one place, in no order");
    memcpy(host_cuda::shared_memory + to, &x, 16);
}
// A launch without clusters has none of these instructions: on a GPU they are illegal there.
inline void needs_cluster() {
    host_cuda::require(host_cuda::in_cluster, "a cluster's instruction in a launch without");
}
inline void open_inbox(uint64_t* inbox, uint32_t bytes) {
    needs_cluster();
    host_cuda::require(bytes > 0 && bytes < 1u << 20, "more bytes than a barrier counts");
    host_cuda::require(host_cuda::inboxes.insert(inbox).second, "an inbox that is opened twice");
    *inbox = bytes;
}
inline void inbox_is_open() {
    needs_cluster();
    host_cuda::arrive_at_cluster();
}
inline void inboxes_are_open() {
    needs_cluster();
    host_cuda::wait_for_cluster();
}
inline void wait_for_inbox(uint64_t* inbox) {
    needs_cluster();
    while (*static_cast<volatile uint64_t*>(inbox) > 0) host_cuda::change_over();
}
// Where this block's `own` is in block `rank`.
template <typename T>
T* place_in(T* own, int rank, size_t bytes) {
    const auto at = reinterpret_cast<unsigned char*>(own) - host_cuda::shared_memory;
    host_cuda::require(at >= 0 && at + bytes <= host_cuda::shared_bytes, "sent out of place");
    host_cuda::require(rank >= 0 && rank * blockDim.x < host_cuda::threads.size(), "sent nowhere");
    return reinterpret_cast<T*>(host_cuda::cluster_memory +
                                rank * size_t{host_cuda::kSharedOfBlock} + at);
}
template <typename T>
void send(T* to, uint64_t* inbox, int rank, T x) {
    memcpy(place_in(to, rank, sizeof x), &x, sizeof x);
    uint64_t* const there = place_in(inbox, rank, sizeof *inbox);
    needs_cluster();
    host_cuda::require(host_cuda::inboxes.count(there), "sent to an inbox that is not open");
    host_cuda::require(!host_cuda::threads[rank * blockDim.x].done, "sent to who has ended");
    host_cuda::require(*there >= sizeof x && *there < 1u << 30, "sent more than the inbox is for");
    *there -= sizeof x;
}
inline float tanh_approximately(float x) { return 1.f - 2.f / (1.f + exp2f(x * 2.885390082f)); }
inline void expect_in_l2(const void*) {}
inline uint32_t count_and_see(uint32_t* counter) { return (*counter)++; }

inline void end_copies() {
    auto& groups = host_cuda::copies[host_cuda::current];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}
inline void wait_for_copies(int running) {
    host_cuda::require(running >= 0 && running <= 3, "a wait that there is no instruction for");
    auto& groups = host_cuda::copies[host_cuda::current];
    while (static_cast<int>(groups.size()) > running + 1) {
        for (const auto& c : groups.front()) {
            host_cuda::under_way[host_cuda::byte_of(c.to)] = false;
            if (host_cuda::copies_are_late) host_cuda::copy(c);
        }
        groups.pop_front();
    }
}

// Half `which` of a pair.
template <typename T>
float half_of(uint64_t pair, int which) {
    const uint16_t bits = static_cast<uint16_t>(pair >> 16 * which);
    T x;
    memcpy(&x, &bits, sizeof x);
    return to_float(x);
}

// mma.m16n8k16: lane 4 g + t has of A rows g and g + 8, columns 2 t, 2 t + 1 and these + 8; of B
// these rows of column g; of C rows g and g + 8, columns 2 t and 2 t + 1.
template <typename T>
void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const host_cuda::Words* table = host_cuda::trade({{a[0], a[1], a[2], a[3], b0, b1}});
    const int lane = host_cuda::current % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const int quad = k % 8 / 2, upper = k / 8;
            sum += static_cast<double>(
                       half_of<T>(table[row * 4 + quad].at[i / 2 + 2 * upper], k % 2)) *
                   half_of<T>(table[column * 4 + quad].at[4 + upper], k % 2);
        }
        c[i] = static_cast<float>(sum);
    }
}

// ldmatrix: row r of matrix j lies at the address that lane 8 j + r gives.
template <int kMatrices>
void load(uint32_t (&to)[kMatrices], uint32_t address, bool transposed) {
    const host_cuda::Words* table = host_cuda::trade({{address}});
    const int lane = host_cuda::current % 32;
    for (int j = 0; j < kMatrices; ++j) {
        uint16_t pair[2];
        for (int which = 0; which < 2; ++which) {
            const int row = transposed ? lane % 4 * 2 + which : lane / 4;
            const int column = transposed ? lane / 4 : lane % 4 * 2 + which;
            const uint32_t at = static_cast<uint32_t>(table[j * 8 + row].at[0]);
            host_cuda::require(at % 16 == 0 && at + 16 <= host_cuda::shared_bytes,
                               "a matrix beyond shared memory");
            memcpy(&pair[which], host_cuda::shared_memory + at + column * 2, 2);
        }
        to[j] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
}
inline void load_matrices(uint32_t (&to)[4], uint32_t address) { load(to, address, false); }
inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
    load(to, address, true);
}
inline uint32_t transpose_matrix(uint32_t pair) {
    const host_cuda::Words* table = host_cuda::trade({{pair}});
    const int lane = host_cuda::current % 32;
    uint32_t transposed = 0;
    for (int which = 0; which < 2; ++which) {
        const int row = lane % 4 * 2 + which, column = lane / 4;
        const uint64_t word = table[row * 4 + column / 2].at[0];
        transposed |= static_cast<uint32_t>(word >> 16 * (column % 2) & 0xffff) << 16 * which;
    }
    return transposed;
}
inline void load_matrix_pair(uint32_t (&to)[2], uint32_t address) { load(to, address, false); }

template <typename T>
uint32_t pack(float low, float high) {
    const T pair[2] = {from_float<T>(low), from_float<T>(high)};
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return bits;
}

}  // namespace decode
}  // namespace offload

OFFLOAD_API const char* offload_last_error(void) { return offload::last_error; }
