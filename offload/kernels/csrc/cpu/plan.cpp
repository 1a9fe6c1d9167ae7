// What of a call does not depend on the CPU's instructions: checks, the plan, single rows.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.hpp"
#include "job.hpp"
#include "work.hpp"

namespace offload_host {
namespace {

thread_local char last_error[256];

constexpr int32_t kMostHeadDim = 512;
// Of the widest vectors: what lies in scratch memory is padded to it.
constexpr int32_t kLanes = 16;
constexpr int32_t kUnit = 64;  // columns that are multiplied together
// What an item takes beyond its columns is worth about forty of them, and threads end half an item
// apart: of C columns, T threads take least time with items of sqrt(80 C / T). Sixteen threads
// stand for any, as results must not depend on how many there are. Scores of an item stay in a
// core's own cache.
constexpr double kColumnsOfItems = 5;
constexpr int32_t kLeastChunk = 64;
constexpr int32_t kMostChunk = 2048;
constexpr int32_t kMostScores = 16384;

int32_t clamp(int64_t value, int32_t least, int32_t most) {
    return value < least ? least : value > most ? most : int32_t(value);
}

int check_shapes(const OffloadHostAttention& c) {
    if (c.batch < 0) return refuse("batch must be 0 or more, not %d", c.batch);
    if (c.kv_heads < 1 || c.heads < 1 || c.heads % c.kv_heads != 0)
        return refuse("heads must be a multiple of kv_heads; they are %d and %d", c.heads,
                      c.kv_heads);
    if (c.head_dim < 1 || c.head_dim > kMostHeadDim)
        return refuse("head_dim must be 1 to %d, not %d", kMostHeadDim, c.head_dim);
    if (c.query_dtype < OFFLOAD_HOST_F32 || c.query_dtype > OFFLOAD_HOST_BF16)
        return refuse("query_dtype must be 0 to 2, not %d", c.query_dtype);
    if (c.cache_dtype < OFFLOAD_HOST_F32 || c.cache_dtype > OFFLOAD_HOST_I8)
        return refuse("cache_dtype must be 0 to 3, not %d", c.cache_dtype);
    if (c.window < 0) return refuse("window must be 0 (none) or more, not %d", c.window);
    if (!(c.softcap >= 0) || isinf(c.softcap))
        return refuse("softcap must be 0 (none) or more, not %g", double(c.softcap));
    if (c.chunk < 0) return refuse("chunk must be 0 (chosen) or more, not %d", c.chunk);
    if (c.threads < 0) return refuse("threads must be 0 (all) or more, not %d", c.threads);
    if (c.products < 0) return refuse("products must be 0 (none) or more, not %d", c.products);
    if (c.prefetch >= OFFLOAD_HOST_PREFETCHES)
        return refuse("prefetch must be below %d, not %d", OFFLOAD_HOST_PREFETCHES, c.prefetch);
    if (c.prefetch_distance < 0)
        return refuse("prefetch_distance must be 0 or more, not %d", c.prefetch_distance);
    return 0;
}

int check_pointers(const OffloadHostAttention& c) {
    const struct {
        const char* name;
        const void* pointer;
    } needed[] = {{"query", c.query},
                  {"output", c.output},
                  {"keys", c.keys},
                  {"values", c.values},
                  {"head_strides", c.head_strides},
                  {"capacities", c.capacities},
                  {"length", c.length}};
    for (const auto& argument : needed)
        if (argument.pointer == nullptr) return refuse("%s must not be null", argument.name);
    if ((c.new_key == nullptr) != (c.new_value == nullptr))
        return refuse("new_key and new_value go together: one of them is null");
    const bool scaled = c.key_scales != nullptr && c.value_scales != nullptr && c.scale_strides;
    const bool any = c.key_scales != nullptr || c.value_scales != nullptr;
    if (c.cache_dtype == OFFLOAD_HOST_I8 ? !scaled : any)
        return refuse(
            "key_scales, value_scales and scale_strides go with int8 caches, and with "
            "no others");
    for (int32_t b = 0; b < c.batch; b++) {
        if (c.capacities[b] < 0)
            return refuse("capacities[%d] is %d: it must be 0 or more", b, c.capacities[b]);
        if (c.length[b] < 0 || c.length[b] > c.capacities[b])
            return refuse("length[%d] is %d: it must be 0 to %d, the capacity of its cache", b,
                          c.length[b], c.capacities[b]);
        const bool missing =
            c.keys[b] == nullptr || c.values[b] == nullptr ||
            (scaled && (c.key_scales[b] == nullptr || c.value_scales[b] == nullptr));
        if (c.length[b] > 0 && missing)
            return refuse("sequence %d has %d columns and a null cache", b, c.length[b]);
    }
    return 0;
}

// Memory for the plan, kept from call to call. Its pieces begin at cache lines.
struct Pieces {
    char* memory;
    size_t bytes = 0;

    template <class T>
    T* take(int64_t count) {
        T* const piece = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + bytes);
        bytes += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

void lay_out(Job& job, int workers, Pieces& pieces) {
    const int64_t batch = job.call.batch;
    job.first_item = pieces.take<int64_t>(batch + 1);
    job.begin = pieces.take<int32_t>(batch);
    job.end = pieces.take<int32_t>(batch);
    job.parts_left = pieces.take<int32_t>(batch * job.call.kv_heads);
    job.partials = pieces.take<float>(job.items * part_floats(job));
    job.scratch = pieces.take<float>(workers * job.scratch_floats);
}

struct Visible {
    int32_t begin, end;
};

Visible visible(const OffloadHostAttention& c, int32_t row) {
    const int32_t end = c.length[row];
    int32_t begin = c.start != nullptr && c.start[row] > 0 ? c.start[row] : 0;
    if (c.window > 0 && end - c.window > begin) begin = end - c.window;
    return {begin < end ? begin : end, end};
}

int32_t parts_of(const Job& job, const Visible& seen) {
    const int64_t columns = seen.end - seen.begin;
    return columns <= job.chunk ? 1 : int32_t((columns + job.chunk - 1) / job.chunk);
}

float as_float(const void* data, int64_t index, int32_t dtype) {
    if (dtype == OFFLOAD_HOST_F32) return static_cast<const float*>(data)[index];
    const uint16_t half = static_cast<const uint16_t*>(data)[index];
    return dtype == OFFLOAD_HOST_F16 ? float_of_f16(half) : float_of_bf16(half);
}

void put_float(void* data, int64_t index, int32_t dtype, float value) {
    if (dtype == OFFLOAD_HOST_F32)
        static_cast<float*>(data)[index] = value;
    else
        static_cast<uint16_t*>(data)[index] =
            dtype == OFFLOAD_HOST_F16 ? f16_of_float(value) : bf16_of_float(value);
}

constexpr float kLeastLargest = 1e-30f;  // so that no scale is zero

// A row into a column of a cache. int8: symmetric, scale = largest magnitude / 127; the codes are
// those of quantize_rows on a GPU, bit for bit, since a prompt's come from there.
void put_row(const OffloadHostAttention& c, const void* from, int64_t index, void* cache,
             int64_t at, float* scale) {
    if (c.cache_dtype == c.query_dtype) {
        const size_t bytes = size_t(element_bytes(c.cache_dtype));
        memcpy(static_cast<char*>(cache) + size_t(at) * bytes,
               static_cast<const char*>(from) + size_t(index) * bytes, c.head_dim * bytes);
        return;
    }
    if (c.cache_dtype != OFFLOAD_HOST_I8) {
        for (int32_t d = 0; d < c.head_dim; d++)
            put_float(cache, at + d, c.cache_dtype, as_float(from, index + d, c.query_dtype));
        return;
    }
    float most = kLeastLargest;
    for (int32_t d = 0; d < c.head_dim; d++) {
        const float size = fabsf(as_float(from, index + d, c.query_dtype));
        if (!(size <= most)) most = size;  // NaN too
    }
    const bool finite = most < INFINITY;
    *scale = finite ? most / 127 : NAN;
    const double factor = finite ? 127 / most : 0;
    for (int32_t d = 0; d < c.head_dim; d++) {
        // The product is exact in double, and rounded to nearest, ties to even, by the last bit of
        // a large sum.
        const double value = as_float(from, index + d, c.query_dtype) * factor;
        const double rounded = (value + 6755399441055744.0) - 6755399441055744.0;
        static_cast<int8_t*>(cache)[at + d] = int8_t(rounded >= 127   ? 127
                                                     : rounded > -127 ? rounded
                                                                      : -127);
    }
}

}  // namespace

int refuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return -1;
}

int plan(Job& job, int workers) {
    const OffloadHostAttention& c = job.call;
    if (check_shapes(c) || (c.batch > 0 && check_pointers(c))) return -1;
    if (c.threads > 0 && c.threads < workers) workers = c.threads;
    job.threads = workers;
    job.group = c.heads / c.kv_heads;
    job.padded_dim = int32_t(Work::padded(c.head_dim, kLanes));
    int64_t columns = 0;
    for (int32_t b = 0; b < c.batch; b++) {
        const Visible seen = visible(c, b);
        columns += seen.end - seen.begin;
    }
    columns *= c.kv_heads;
    const int32_t most = clamp(kMostScores / job.group, kLeastChunk, kMostChunk);
    job.chunk = c.chunk;
    if (c.chunk == 0) {
        const int64_t chunk = int64_t(sqrt(kColumnsOfItems * double(columns)));
        job.chunk = int32_t(Work::padded(clamp(chunk, kLeastChunk, most), kUnit));
    }
    const int32_t row_bytes = c.head_dim * element_bytes(c.cache_dtype);
    job.bytes_read = 2 * columns * (row_bytes + (c.cache_dtype == OFFLOAD_HOST_I8 ? 4 : 0));
    job.items = 0;
    for (int32_t b = 0; b < c.batch; b++)
        job.items += int64_t(c.kv_heads) * parts_of(job, visible(c, b));
    // A few lines apart, so that no thread fetches the next one's.
    job.scratch_floats = Work{}.lay_out(job.group, c.head_dim, job.chunk, nullptr) + 64;

    Pieces sizes{nullptr};
    lay_out(job, workers, sizes);
    if (sizes.bytes > job.memory_bytes) {
        free(job.memory);
        job.memory_bytes = 0;
        if (posix_memalign(&job.memory, 64, sizes.bytes) != 0) {
            job.memory = nullptr;
            return refuse("no memory for the plan: %zu bytes", sizes.bytes);
        }
        job.memory_bytes = sizes.bytes;
    }
    Pieces pieces{static_cast<char*>(job.memory)};
    lay_out(job, workers, pieces);

    int64_t items = 0;
    for (int32_t b = 0; b < c.batch; b++) {
        const Visible seen = visible(c, b);
        const int32_t parts = parts_of(job, seen);
        job.begin[b] = seen.begin;
        job.end[b] = seen.end;
        job.first_item[b] = items;
        items += int64_t(c.kv_heads) * parts;
        for (int32_t h = 0; h < c.kv_heads; h++)
            job.parts_left[int64_t(b) * c.kv_heads + h] = parts;
    }
    job.first_item[c.batch] = items;
    job.next_item = 0;
    job.checksum = 0;
    return 0;
}

bool take(Job& job, Item* item) {
    const int64_t index = __atomic_fetch_add(&job.next_item, 1, __ATOMIC_RELAXED);
    if (index >= job.items) return false;
    const OffloadHostAttention& c = job.call;
    int32_t low = 0, high = c.batch;
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (job.first_item[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    const int64_t inside = index - job.first_item[low];
    item->index = index;
    item->row = low;
    item->parts = int32_t((job.first_item[low + 1] - job.first_item[low]) / c.kv_heads);
    item->head = int32_t(inside / item->parts);
    item->part = int32_t(inside % item->parts);
    const int64_t first = job.begin[low], columns = job.end[low] - first;
    // Whole units but for the last one; no item is longer than a chunk, which has whole ones too.
    const int64_t unit = job.chunk % kUnit == 0 ? kUnit : 1, units = (columns + unit - 1) / unit;
    const auto bound = [&](int64_t part) {
        const int64_t column = units * part / item->parts * unit;
        return int32_t(first + (column < columns ? column : columns));
    };
    item->begin = bound(item->part);
    item->end = bound(item->part + 1);
    const int64_t at = item->head * c.head_strides[low] + int64_t(item->begin) * c.head_dim;
    const int64_t bytes = at * element_bytes(c.cache_dtype);
    item->keys = static_cast<const char*>(c.keys[low]) + bytes;
    item->values = static_cast<const char*>(c.values[low]) + bytes;
    item->key_scales = item->value_scales = nullptr;
    if (c.cache_dtype == OFFLOAD_HOST_I8) {
        const int64_t scale = item->head * c.scale_strides[low] + item->begin;
        item->key_scales = c.key_scales[low] + scale;
        item->value_scales = c.value_scales[low] + scale;
    }
    return true;
}

bool last_part(Job& job, const Item& item) {
    int32_t& left = job.parts_left[int64_t(item.row) * job.call.kv_heads + item.head];
    return item.parts == 1 || __atomic_sub_fetch(&left, 1, __ATOMIC_ACQ_REL) == 0;
}

// The last column lies in the last part, and no other part reads it.
void append(const Job& job, const Item& item) {
    const OffloadHostAttention& c = job.call;
    const int32_t column = job.end[item.row] - 1;
    if (c.new_key == nullptr || item.part != item.parts - 1 || column < 0) return;
    const int32_t b = item.row;
    const int64_t from = b * c.new_batch_stride + item.head * c.new_head_stride;
    const int64_t at = item.head * c.head_strides[b] + int64_t(column) * c.head_dim;
    float* key_scale = nullptr;
    float* value_scale = nullptr;
    if (c.cache_dtype == OFFLOAD_HOST_I8) {
        const int64_t scale = item.head * c.scale_strides[b] + column;
        key_scale = c.key_scales[b] + scale;
        value_scale = c.value_scales[b] + scale;
    }
    put_row(c, c.new_key, from, c.keys[b], at, key_scale);
    put_row(c, c.new_value, from, c.values[b], at, value_scale);
}

void add_checksum(Job& job, uint64_t sum) {
    __atomic_fetch_add(&job.checksum, sum, __ATOMIC_RELAXED);
}

}  // namespace offload_host

const char* offload_host_last_error(void) { return offload_host::last_error; }
