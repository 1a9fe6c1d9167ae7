// The host library's C interface: attention of decode steps on CPU cores.
//
// A pool owns threads pinned to cores. A job is one call's memory, used again and again: start()
// checks the arguments, plans the work and returns while the pool's threads do it; wait() returns
// when it is done. Jobs of one pool run one after another, in the order in which they were started,
// from whichever thread. Calls return 0, or below zero where something was refused;
// offload_host_last_error() has the words. Strides count elements.
//
// The struct is mirrored by offload/kernels/host_library.py, which checks its size and the ABI.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OFFLOAD_HOST_ABI 4

enum OffloadHostDtype {
    OFFLOAD_HOST_F32 = 0,
    OFFLOAD_HOST_F16 = 1,
    OFFLOAD_HOST_BF16 = 2,
    OFFLOAD_HOST_I8 = 3  // caches only: value = scale[column] * int
};
enum OffloadHostPath {
    OFFLOAD_HOST_AUTO = 0,  // the last that the CPU can run
    OFFLOAD_HOST_PORTABLE = 1,
    OFFLOAD_HOST_AVX2 = 2,  // with FMA and F16C
    OFFLOAD_HOST_AVX512 = 3,
    OFFLOAD_HOST_AVX512_BF16 = 4,  // with VNNI: products of bf16 pairs, of bytes
    OFFLOAD_HOST_AMX = 5,          // with these, and tiles where a group has many queries
    OFFLOAD_HOST_PATHS = 6
};
enum OffloadHostPrefetch {
    OFFLOAD_HOST_PREFETCH_NONE = 0,
    OFFLOAD_HOST_PREFETCH_L1 = 1,
    OFFLOAD_HOST_PREFETCH_L2 = 2,
    OFFLOAD_HOST_PREFETCH_NTA = 3,  // past the caches that others share
    OFFLOAD_HOST_PREFETCHES = 4
};

// One query a sequence. Row b sees column j if max(start[b], 0, length[b] - window) <= j <
// length[b]; score = softcap * tanh(scale * q.k / softcap), or scale * q.k without a softcap, +
// slopes[h] * j; sinks[h] adds exp(sinks[h]) to the softmax's sum. A row that sees nothing gives
// zeros. With new_key and new_value they become column length[b] - 1 first.
typedef struct {
    const void* query;             // [batch, heads, head_dim]
    void* output;                  // [batch, heads, head_dim], contiguous, query_dtype
    const void* new_key;           // [batch, kv_heads, head_dim], query_dtype; null: none
    const void* new_value;         // as new_key
    void* const* keys;             // [batch] of [kv_heads, capacities[b], head_dim], cache_dtype
    void* const* values;           // as keys
    float* const* key_scales;      // [batch] of [kv_heads, capacities[b]]; null unless I8
    float* const* value_scales;    // as key_scales
    const int64_t* head_strides;   // [batch]: from a KV head to the next, in keys and in values
    const int64_t* scale_strides;  // [batch]: the same in the scales; null unless I8
    const int32_t* capacities;     // [batch]
    const int32_t* length;         // [batch], read by start()
    const int32_t* start;          // [batch], read by start(); null: zeros
    const float* slopes;           // [heads]; null: none
    const float* sinks;            // [heads]; null: none
    int64_t query_batch_stride;
    int64_t query_head_stride;
    int64_t new_batch_stride;
    int64_t new_head_stride;
    float scale;
    float softcap;  // 0: none
    int32_t batch;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t window;  // 0: none
    int32_t query_dtype;
    int32_t cache_dtype;
    int32_t path;               // OffloadHostPath
    int32_t chunk;              // columns of a work item at most; 0: chosen from the lengths
    int32_t prefetch;           // OffloadHostPrefetch; below zero: the library's choice
    int32_t prefetch_distance;  // bytes; 0: the library's choice
    int32_t threads;            // of the pool's, its last ones, at most; 0: all
    int32_t read_only;          // 1: only add up the words of what would be read (see checksum)
    int32_t products;           // of vectors, that read_only makes for every 64 bytes, of nothing
} OffloadHostAttention;

typedef struct OffloadHostPool OffloadHostPool;
typedef struct OffloadHostJob OffloadHostJob;

#define OFFLOAD_HOST_API __attribute__((visibility("default")))

OFFLOAD_HOST_API const char* offload_host_last_error(void);  // of this thread
OFFLOAD_HOST_API int32_t offload_host_abi(void);
OFFLOAD_HOST_API int64_t offload_host_struct_size(void);
// Bit p is set where this CPU (and this build) can run OffloadHostPath p.
OFFLOAD_HOST_API int32_t offload_host_paths(void);

// `count` threads, thread i on CPU cpus[i] alone; they spin for `spin_us` before they sleep.
// Null where it fails.
OFFLOAD_HOST_API OffloadHostPool* offload_host_pool_create(const int32_t* cpus, int32_t count,
                                                           int32_t spin_us);
// Finishes what was started and ends the threads; the pool takes no more. It does nothing in a
// forked process, which has no such threads.
OFFLOAD_HOST_API void offload_host_pool_close(OffloadHostPool* pool);
// Closes it and frees its memory: no job that was started on it may still be waited for.
OFFLOAD_HOST_API void offload_host_pool_destroy(OffloadHostPool* pool);

OFFLOAD_HOST_API OffloadHostJob* offload_host_job_create(void);
// The job must not be running.
OFFLOAD_HOST_API void offload_host_job_destroy(OffloadHostJob* job);

// What the arguments point to must stay until the job is done, `length` and `start` aside.
OFFLOAD_HOST_API int offload_host_start(OffloadHostPool* pool, OffloadHostJob* job,
                                        const OffloadHostAttention* arguments);
OFFLOAD_HOST_API int offload_host_wait(OffloadHostJob* job);
OFFLOAD_HOST_API int offload_host_is_done(const OffloadHostJob* job);
// Of the latest call that is done: from its first thread's begin to its last one's end.
OFFLOAD_HOST_API double offload_host_seconds(const OffloadHostJob* job);
// Of the latest read_only call: the sum of all 8-byte words (a row's rest filled with zeros) of the
// keys and values that are seen, and of their bytes, modulo 2^64.
OFFLOAD_HOST_API uint64_t offload_host_checksum(const OffloadHostJob* job);
OFFLOAD_HOST_API int64_t offload_host_bytes_read(const OffloadHostJob* job);

#ifdef __cplusplus
}
#endif
