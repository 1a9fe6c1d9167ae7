// Heads that are rotated in part, of many rows: a thread has one pack of a few rows, so that its
// place and its bias are worked out once, and a warp's lanes follow each other whatever a head's
// size is. A head's columns in the cache follow each other too, so that rows of a block fill lines
// together that one of them does not. (An H200 copies rows of 64 heads of 96 at 0.97 of its best
// rate by one to four rows a thread, at 0.95 by eight, at 0.84 by sixteen.) Where all of a head is
// rotated, angles would be read once a row and pack: there a thread keeps them for a few heads.
#pragma once
#include "rotary_append_plan.cuh"

namespace offload {

constexpr int kColumnRows = 4;  // of a thread

struct ColumnPlan {
    Divisor packs;    // of a head
    Divisor members;  // heads of a group; with the queries apart, its queries
    Divisor tokens;   // of a sequence
    Divisor blocks;   // of a row
    int all_packs;    // of a row
    int rows;         // of all sequences
    int ahead;        // rows that are asked for so many rows ahead; 0: none
    int row_bytes;    // of a row that is asked for
    bool grouped;     // a row is groups, each its queries, key and value
};

// Where a thread's pack is: of which head, and where in the row that begins.
struct PackPlace {
    int kind, head, source;  // kind 0: queries, 1: keys, 2: values

    __device__ __forceinline__ PackPlace(const OffloadRotaryAppend& x, const ColumnPlan& plan,
                                         int index) {
        const int per_group = plan.grouped ? plan.members.by - 2 : plan.members.by;
        int group, member;
        if (plan.grouped) {
            group = plan.members(index);
            member = index - group * plan.members.by;
            kind = member < per_group ? 0 : member - per_group + 1;
        } else {
            kind = (index >= x.heads) + (index >= x.heads + x.kv_heads);
            group = kind == 0 ? plan.members(index) : index - x.heads - (kind - 1) * x.kv_heads;
            member = index - group * per_group;
        }
        head = kind ? group : group * per_group + member;
        // A row has less than 2^30 elements.
        const int stride = static_cast<int>(kind ? x.kv_group_stride : x.q_group_stride);
        source = static_cast<int>(kind == 0   ? x.q_offset
                                  : kind == 1 ? x.k_offset
                                              : x.v_offset) +
                 group * stride + (kind ? 0 : member * x.head_dim);
    }
};

// Whether launch_append_columns() serves arguments that are in_packs(): all that is rotated
// together must lie in one warp.
template <typename T>
bool in_columns(const OffloadRotaryAppend& x, const Device& device) {
    const int N = 16 / static_cast<int>(sizeof(T));
    const int packs = x.head_dim / N, rotated = (x.rotary_dim - 1) / N + 1;
    if (has_norm(x) || x.interleaved || x.rotary_dim == 0 || x.rotary_dim == x.head_dim)
        return false;
    for (int head = 0; head < 32; ++head)
        if (head * packs % 32 + rotated > 32) return false;
    return exceeds_l2<T>(x, device);
}

template <typename T>
__global__ void __launch_bounds__(32 * kAppendWarps, 6)
    rotary_append_columns(OffloadRotaryAppend x, ColumnPlan plan) {
    constexpr int N = 16 / sizeof(T), kQuads = N / 4, kWords = Pack<T, N>::kWords;
    let_next_kernel_begin();
    const int row_block = plan.blocks(blockIdx.x), block = blockIdx.x - row_block * plan.blocks.by;
    const int pack = block * 32 * kAppendWarps + static_cast<int>(threadIdx.x);
    const int last_pack = min(pack, plan.all_packs - 1);
    const int index = plan.packs(last_pack), at = (last_pack - index * plan.packs.by) * N;
    const PackPlace place(x, plan, index);
    const int first_row = row_block * kColumnRows, rows = min(kColumnRows, plan.rows - first_row);
    wait_for_previous_kernel();

    // Beyond the last row that one is read again, so that no load has a branch of its own.
    const T* from = static_cast<const T*>(x.qkv) + first_row * x.row_stride + place.source + at;
    Pack<T, N> raw[kColumnRows], bias = {};
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
        raw[r] = load_once<T, N>(from);
        if (r + 1 < rows) from += x.row_stride;
    }
    if (x.bias) bias = load<T, N>(static_cast<const T*>(x.bias) + place.source + at);
    const int asked = first_row + plan.ahead + static_cast<int>(threadIdx.x);
    if (plan.ahead && threadIdx.x < kColumnRows && asked < plan.rows) {
        constexpr int kBytes = 32 * kAppendWarps * 16;
        const int skip = block * kBytes;
        prefetch_bulk(static_cast<const T*>(x.qkv) + asked * x.row_stride +
                          skip / static_cast<int>(sizeof(T)),
                      min(kBytes, plan.row_bytes - skip));
    }

    // Four neighbours are rotated as one: by which angles, and with whose.
    const int lane = threadIdx.x % 32, half = x.rotary_dim / 2;
    const bool turns = place.kind < 2 && at < x.rotary_dim;
    const bool crossed = kQuads == 2 && half / 4 % 2;  // first four with second four
    int angle[kQuads], partner[kQuads];                // partner: a lane
    bool is_second[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
        const int i = at + 4 * q;
        is_second[q] = i >= half;
        angle[q] = is_second[q] ? i - half : i;
        const int other = is_second[q] ? i - half : i + half;
        partner[q] = turns ? lane + other / N - at / N : lane;
    }
    const auto of_partner = [&](const Pack<T, N>& mine) {
        Pack<T, N> theirs;
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const uint32_t word = crossed ? mine.words[j ^ kWords / 2] : mine.words[j];
            theirs.words[j] = __shfl_sync(0xffffffffu, word, partner[j * kQuads / kWords]);
        }
        return theirs;
    };
    const Pack<T, N> partners_bias = of_partner(bias);

    int batch = plan.tokens(first_row), token = first_row - batch * plan.tokens.by;
    T* const to = static_cast<T*>(place.kind == 0   ? x.query
                                  : place.kind == 1 ? x.key_cache
                                                    : x.value_cache) +
                  place.head * (place.kind ? x.cache_head_stride : x.query_head_stride) + at;
    const int64_t batch_stride = place.kind ? x.cache_batch_stride : x.query_batch_stride;
    const int64_t token_stride = place.kind ? x.head_dim : x.query_token_stride;
    const int capacity = pack >= plan.all_packs ? 0 : place.kind ? x.cache_capacity : x.tokens;
    const auto first_column = [&] {
        return place.kind ? x.column[static_cast<int64_t>(batch) * x.column_stride] : 0;
    };
    int column = first_column();
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
        const Pack<T, N> theirs = of_partner(raw[r]);
        float v[N], of_bias[N];
        to_floats(raw[r], v);
        to_floats(bias, of_bias);
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] += of_bias[j];
        if (turns) {
            float with[N];
            to_floats(theirs, with);
            to_floats(partners_bias, of_bias);
            const int64_t angles =
                batch * x.rotary_batch_stride + static_cast<int64_t>(token) * half;
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                float c[4], s[4];
                to_floats(load<float, 4>(x.cos + angles + angle[q]), c);
                to_floats(load<float, 4>(x.sin + angles + angle[q]), s);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int j = 4 * q + i;
                    const float y = with[j] + of_bias[j];
                    v[j] = fmaf(is_second[q] ? y : -y, s[i], v[j] * c[i]);
                }
            }
        }
        // Without a sign: what is before the cache is far beyond it.
        const uint32_t there = static_cast<uint32_t>(column) + static_cast<uint32_t>(token);
        if (r < rows && there < static_cast<uint32_t>(capacity))
            store_once<T, N>(to + batch * batch_stride + there * token_stride,
                             from_floats<T, N>(v));
        if (r + 1 < rows && ++token == plan.tokens.by) {
            token = 0;
            ++batch;
            column = first_column();
        }
    }
}

// For arguments that are in_packs() and in_columns().
template <typename T>
int launch_append_columns(const OffloadRotaryAppend& x, const Device& device, void* stream) {
    const int N = 16 / static_cast<int>(sizeof(T)), per_group = x.heads / x.kv_heads;
    ColumnPlan plan = {};
    plan.grouped = x.q_group_stride == (per_group + 2) * static_cast<int64_t>(x.head_dim) &&
                   x.kv_group_stride == x.q_group_stride;
    plan.packs = Divisor(x.head_dim / N);
    plan.members = Divisor(plan.grouped ? per_group + 2 : per_group);
    plan.tokens = Divisor(x.tokens);
    const int64_t all_packs = (x.heads + 2 * static_cast<int64_t>(x.kv_heads)) * (x.head_dim / N);
    const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
    const int64_t blocks = (all_packs - 1) / (32 * kAppendWarps) + 1;
    const int64_t row_blocks = (rows - 1) / kColumnRows + 1;
    if (rows > INT32_MAX - kColumnRows || blocks * row_blocks > INT32_MAX)
        return refuse("rotary_append: %lld rows of %d heads are too many for one launch",
                      static_cast<long long>(rows), x.heads);
    plan.blocks = Divisor(static_cast<int>(blocks));
    plan.all_packs = static_cast<int>(all_packs);
    plan.rows = static_cast<int>(rows);
    plan.row_bytes = static_cast<int>(used_width(x) * sizeof(T));
    const int64_t ahead = bytes_ahead(device) / plan.row_bytes;
    plan.ahead = static_cast<int>((ahead + kColumnRows - 1) / kColumnRows * kColumnRows);
    return launch("rotary_append", rotary_append_columns<T>,
                  dim3(static_cast<unsigned>(blocks * row_blocks)), dim3(32 * kAppendWarps), 0,
                  stream, x.launch_early, x, plan);
}

}  // namespace offload
