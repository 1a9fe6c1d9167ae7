// Normed heads that are rotated as a whole: a lane has a pack of a head's first half and the pack
// of its second half that is rotated with it. So nothing but the sum of squares crosses lanes, and
// that for twice as many elements; a lane's angles and norm weights, as four factors, are read once
// for a few heads. Half of the instructions of whole packs (rotary_append_packs.cuh), of which a
// norm makes more than HBM's rate leaves.
#pragma once
#include "rotary_append_plan.cuh"

namespace offload {

constexpr int kPairHeads = 2;  // of one thread, at most: the factors take registers enough

// Whether launch_append_pairs() serves arguments that are in_packs().
template <typename T>
bool in_pairs(const OffloadRotaryAppend& x) {
    const int lanes = x.head_dim / 2 / (16 / static_cast<int>(sizeof(T)));
    if (!has_norm(x) || x.bias || x.interleaved || x.rotary_dim != x.head_dim) return false;
    for (const OffloadNorm& norm : {x.q_norm, x.k_norm})
        if (norm.kind == OFFLOAD_NORM_LAYER || (norm.kind && norm.bias)) return false;
    return lanes > 0 && (lanes & (lanes - 1)) == 0 &&
           x.head_dim * static_cast<int>(sizeof(T)) == lanes * 32;
}

template <typename T>
__global__ void __launch_bounds__(32 * kAppendWarps, 5)
    rotary_append_pairs(OffloadRotaryAppend x, AppendPlan plan) {
    constexpr int N = 16 / sizeof(T);
    let_next_kernel_begin();
    const int warp_index = append_warp();
    if (warp_index >= plan.all_warps) return;  // there are no barriers
    const WarpsHeads warp(plan, warp_index);
    const int kind = warp.kind;
    const HeadsOfKind& heads = plan.kinds[kind];
    const int lane_of_warp = threadIdx.x % 32;
    const int group = plan.lanes(lane_of_warp);
    const int first = warp.first + group, last = heads.count - 1;
    const int at = (lane_of_warp - group * plan.lanes.by) * N, half = x.head_dim / 2;
    const OffloadNorm& norm = kind ? x.k_norm : x.q_norm;
    const bool weighed = kind < 2 && norm.kind && norm.weight;
    Pack<T, N> weight[2] = {};
    if (weighed) {
        const T* const of_norm = static_cast<const T*>(norm.weight) + at;
        weight[0] = load<T, N>(of_norm);
        weight[1] = load<T, N>(of_norm + half);
    }
    wait_for_previous_kernel();

    // Beyond the last head it is read again, so that no load has a branch of its own.
    const T* const row =
        static_cast<const T*>(x.qkv) + static_cast<int64_t>(warp.row) * x.row_stride + at;
    Pack<T, N> raw[kPairHeads][2];
#pragma unroll
    for (int i = 0; i < kPairHeads; ++i)
        if (i < heads.per_thread) {
            const T* const from =
                row + source_of(x, plan, kind, min(first + i * plan.groups, last));
            raw[i][0] = load_once<T, N>(from);
            raw[i][1] = load_once<T, N>(from + half);
        }
    const int first_column = first_column_of(x, plan, warp, lane_of_warp);
    ask_for_row_ahead(x, plan, warp, lane_of_warp, row);

    // (a, b), of the two halves, becomes (a * own[0] + b * other[0], b * own[1] + a * other[1]).
    float own[2][N], other[2][N];
    if (kind < 2) {
        const int64_t angles =
            warp.batch * x.rotary_batch_stride + static_cast<int64_t>(warp.token) * half + at;
        float c[N], s[N];
#pragma unroll
        for (int j = 0; j < N; j += 4) {
            to_floats(load<float, 4>(x.cos + angles + j), c + j);
            to_floats(load<float, 4>(x.sin + angles + j), s + j);
        }
        float by[2][N];
        to_floats(weight[0], by[0]);
        to_floats(weight[1], by[1]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float a = weighed ? by[0][j] + norm.weight_offset : 1.f;
            const float b = weighed ? by[1][j] + norm.weight_offset : 1.f;
            own[0][j] = c[j] * a;
            other[0][j] = -s[j] * b;
            own[1][j] = c[j] * b;
            other[1][j] = s[j] * a;
        }
    }
    // Behind what is read with the rows: this waits for the column.
    const Targets<T> targets(x, plan, warp, first_column);
    T* to = targets.first + first * targets.stride + at;
    const auto write = [&](int i, const Pack<T, N>& a, const Pack<T, N>& b) {
        if (first + i * plan.groups <= targets.last) {
            store<T, N>(to, a, plan.once);
            store<T, N>(to + half, b, plan.once);
        }
        to += targets.stride * plan.groups;
    };

#pragma unroll
    for (int i = 0; i < kPairHeads; ++i) {
        if (i >= heads.per_thread) break;
        if (kind == 2) {
            write(i, raw[i][0], raw[i][1]);
            continue;
        }
        float a[N], b[N], sums[2] = {0.f, 0.f};
        to_floats(raw[i][0], a);
        to_floats(raw[i][1], b);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sums[0] = fmaf(a[j], a[j], sums[0]);
            sums[1] = fmaf(b[j], b[j], sums[1]);
        }
        const float squares = sum_of_head(sums[0] + sums[1], plan.lanes.by) * plan.share;
        const float scale = norm.kind ? inverse_root(squares + norm.eps) : 1.f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float x0 = a[j] * scale, x1 = b[j] * scale;
            a[j] = fmaf(x1, other[0][j], x0 * own[0][j]);
            b[j] = fmaf(x0, other[1][j], x1 * own[1][j]);
        }
        write(i, from_floats<T, N>(a), from_floats<T, N>(b));
    }
}

// For arguments that are in_packs() and in_pairs().
template <typename T>
int launch_append_pairs(const OffloadRotaryAppend& x, const Device& device, void* stream) {
    const int lanes = x.head_dim * static_cast<int>(sizeof(T)) / 32;
    AppendPlan plan;
    if (int status = plan_append<T>(x, device, lanes, kPairHeads, kPairHeads, &plan)) return status;
    return launch_append(rotary_append_pairs<T>, x, plan, stream);
}

}  // namespace offload
