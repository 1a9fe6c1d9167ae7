// A call as the pool's threads see it: its arguments, its plan, and the memory for what is between.
#pragma once
#include <stddef.h>

#include "offload_host.h"

struct OffloadHostPool;

// Chunks of a sequence's visible columns are work items, in the order sequence, KV head, chunk. The
// plan depends on shapes and lengths only, and chunks are merged in their order: results do not
// depend on how many threads there are, nor on which of them is first.
struct OffloadHostJob {
    OffloadHostAttention call = {};
    void (*run)(OffloadHostJob& job, int worker) = nullptr;
    OffloadHostPool* pool = nullptr;
    uint32_t ticket = 0;

    // The plan.
    int32_t group = 0;       // query heads of a KV head
    int32_t padded_dim = 0;  // floats between two queries in scratch memory
    int32_t chunk = 0;       // columns of an item at most
    int32_t threads = 0;     // that take part: they are the workers 0, 1, ...
    int64_t items = 0;
    int64_t* first_item = nullptr;  // [batch + 1]
    int32_t* begin = nullptr;       // [batch], visible columns
    int32_t* end = nullptr;
    int32_t* parts_left = nullptr;  // [batch * kv_heads], atomic
    float* partials = nullptr;      // [items][part_floats]
    float* scratch = nullptr;       // [workers][scratch_floats]
    int64_t scratch_floats = 0;

    // Progress; atomic, each on a cache line of its own.
    alignas(64) int64_t next_item = 0;
    alignas(64) int32_t working = 0;
    uint64_t checksum = 0;
    int64_t bytes_read = 0;
    int64_t first_begin = 0;  // nanoseconds
    int64_t last_end = 0;

    void* memory = nullptr;
    size_t memory_bytes = 0;
};

namespace offload_host {

using Job = OffloadHostJob;

// One work item: columns [begin, end) of KV head `head` of sequence `row`.
struct Item {
    int64_t index;
    int32_t row, head;
    int32_t part, parts;
    int32_t begin, end;
    const char* keys;  // of column `begin`
    const char* values;
    const float* key_scales;  // null unless int8
    const float* value_scales;
};

// A query's result over some columns: max of the scores, sum of exp(score - max), and head_dim
// sums of exp(score - max) * value; in memory [group] x (padded_dim) then max [group], sum [group].
inline int64_t part_floats(const Job& job) { return int64_t(job.group) * (job.padded_dim + 2); }

inline int element_bytes(int32_t dtype) {
    return dtype == OFFLOAD_HOST_F32 ? 4 : dtype == OFFLOAD_HOST_I8 ? 1 : 2;
}

// Elements from the first query to the first one of an item's group.
inline int64_t first_query(const Job& job, const Item& item) {
    const OffloadHostAttention& c = job.call;
    return item.row * c.query_batch_stride + int64_t(item.head) * job.group * c.query_head_stride;
}

// In plan.cpp, compiled for any CPU.
int plan(Job& job, int workers);  // `workers` are there; 0, or below zero with the error set
bool take(Job& job, Item* item);  // the next item that nobody has
bool last_part(Job& job, const Item& item);     // whether all other parts are done
void append(const Job& job, const Item& item);  // the new column, where the item has it
void add_checksum(Job& job, uint64_t sum);

int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// One a path, each compiled for its instructions.
void run_portable(Job& job, int worker);
void run_avx2(Job& job, int worker);
void run_avx512(Job& job, int worker);
void run_avx512_bf16(Job& job, int worker);
void run_amx(Job& job, int worker);

}  // namespace offload_host
