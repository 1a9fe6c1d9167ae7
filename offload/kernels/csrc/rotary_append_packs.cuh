// Whole packs: a lane has one place in the head, N elements, and goes through a few heads at that
// place, so that its angles and its norm's weights are read once; all its loads are under way
// before the first is used. A warp reads and writes whole heads next to each other, and what an
// element is rotated with comes from another lane. See rotary_append_pairs.cuh for what needs no
// other lane, and rotary_append_columns.cuh for heads that are rotated in part.
#pragma once
#include "rotary_append_plan.cuh"

namespace offload {

constexpr int kPackHeads = 8;  // of one thread, at most

// kNormed comes with kBiased: what is both is written once. At HBM's rate a warp has some 216
// instructions for what a lane holds of one head (of 16 bits, on an H200).
template <typename T, bool kNormed, bool kBiased>
__global__ void __launch_bounds__(32 * kAppendWarps, 5)
    rotary_append_packs(OffloadRotaryAppend x, AppendPlan plan) {
    constexpr int N = 16 / sizeof(T), kQuads = N / 4, kWords = Pack<T, N>::kWords;
    let_next_kernel_begin();
    const int warp_index = append_warp();
    if (warp_index >= plan.all_warps) return;  // there are no barriers
    const WarpsHeads warp(plan, warp_index);
    const int kind = warp.kind;
    const HeadsOfKind& heads = plan.kinds[kind];
    const int lane_of_warp = threadIdx.x % 32;
    const int group = plan.lanes(lane_of_warp), lane = lane_of_warp - group * plan.lanes.by;
    const int first = warp.first + min(group, plan.groups - 1);
    const bool inside = group < plan.groups && lane < plan.packs;
    const int at = min(lane, plan.packs - 1) * N;
    const T* const bias = static_cast<const T*>(x.bias);

    // Beyond the last head (or with lanes beyond the last group) a head is read again, so that no
    // load has a branch of its own; it is not written.
    int sources[kPackHeads];
    const int last = heads.count - 1;
#pragma unroll
    for (int i = 0; i < kPackHeads; ++i)
        sources[i] = heads.offset + at + min(first + i * plan.groups, last) * heads.stride;
    if (kind == 0 && plan.per_group.by > 1) {
#pragma unroll
        for (int i = 0; i < kPackHeads; ++i)
            sources[i] = at + source_of(x, plan, kind, min(first + i * plan.groups, last));
    }
    if (kBiased && bias && gridDim.x <= 256) {  // else L1 and L2 have it
#pragma unroll
        for (int i = 0; i < kPackHeads; ++i) prefetch(bias + sources[i]);
    }
    wait_for_previous_kernel();

    const T* const row =
        static_cast<const T*>(x.qkv) + static_cast<int64_t>(warp.row) * x.row_stride;
    Pack<T, N> raw[kPackHeads];
#pragma unroll
    for (int i = 0; i < kPackHeads; ++i)
        if (i < heads.per_thread) raw[i] = load_once<T, N>(row + sources[i]);
    const int first_column = first_column_of(x, plan, warp, lane_of_warp);
    ask_for_row_ahead(x, plan, warp, lane_of_warp, row);

    // Four neighbours are rotated as one: by which angles, and with whose. `crossed`: a lane's
    // first four with another's second. An element becomes own * itself + others * its partner,
    // which have the norm's weights in them, + added, of the norm's bias.
    const int half = x.rotary_dim / 2;
    const bool turns = at < x.rotary_dim, crossed = kQuads == 2 && half / 4 % 2;
    float own[N], others[N], added[kNormed ? N : 1];
    int partner[kQuads] = {};  // a lane
    int partner_at[kQuads];    // a column
#pragma unroll
    for (int j = 0; j < N; ++j) {
        own[j] = 1.f;
        others[j] = 0.f;
    }
    if (half && kind < 2) {
        const int64_t angles =
            warp.batch * x.rotary_batch_stride + static_cast<int64_t>(warp.token) * half;
        if (x.interleaved) {
            if (turns) {
                float c[N / 2], s[N / 2];
                to_floats(load<float, N / 2>(x.cos + angles + at / 2), c);
                to_floats(load<float, N / 2>(x.sin + angles + at / 2), s);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    own[j] = c[j / 2];
                    others[j] = j % 2 ? s[j / 2] : -s[j / 2];
                }
            }
        } else {
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                const int i = at + 4 * q;
                const bool is_second = i >= half;
                partner_at[q] = !turns ? i : is_second ? i - half : i + half;
                partner[q] = group * plan.lanes.by + partner_at[q] / N;
                if (!turns) continue;
                const int angle = is_second ? partner_at[q] : i;
                to_floats(load<float, 4>(x.cos + angles + angle), own + 4 * q);
                to_floats(load<float, 4>(x.sin + angles + angle), others + 4 * q);
#pragma unroll
                for (int j = 4 * q; j < 4 * q + 4; ++j)
                    others[j] = is_second ? others[j] : -others[j];
            }
        }
    }
    const OffloadNorm& norm = kind ? x.k_norm : x.q_norm;
    if constexpr (kNormed) {
        // f(own column's, partner's) of what the norm has for each column.
        const auto of_columns = [&](const void* from, auto f) {
            const T* const of_norm = static_cast<const T*>(from);
            float mine[N], theirs[N];
            to_floats(load<T, N>(of_norm + at), mine);
            if (half && !x.interleaved) {
#pragma unroll
                for (int q = 0; q < kQuads; ++q)
                    to_floats(load<T, 4>(of_norm + partner_at[q]), theirs + 4 * q);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) theirs[j] = mine[j ^ 1];
            }
#pragma unroll
            for (int j = 0; j < N; ++j) f(j, mine[j], theirs[j]);
        };
#pragma unroll
        for (int j = 0; j < N; ++j) added[j] = 0.f;
        if (kind < 2 && norm.kind && norm.bias)
            of_columns(norm.bias, [&](int j, float mine, float theirs) {
                added[j] = own[j] * mine + (turns ? others[j] * theirs : 0.f);
            });
        if (kind < 2 && norm.kind && norm.weight)
            of_columns(norm.weight, [&](int j, float mine, float theirs) {
                own[j] *= mine + norm.weight_offset;
                others[j] *= theirs + norm.weight_offset;
            });
    }
    // Behind what is read with the rows: this waits for the column.
    const Targets<T> targets(x, plan, warp, first_column);
    const int last_written = inside ? targets.last : -1;
    T* to = targets.first + first * targets.stride + at;
    const int64_t stride = targets.stride * plan.groups;
    const auto write = [&](int i, const Pack<T, N>& pack) {
        if (first + i * plan.groups <= last_written) store<T, N>(to, pack, plan.once);
        to += stride;
    };
    const auto biased = [&](int i, float* v) {
        to_floats(raw[i], v);
        if (kBiased && bias) add_to<T, N>(v, bias + sources[i]);
    };

    if (kind == 2) {
#pragma unroll
        for (int i = 0; i < kPackHeads; ++i) {
            if (i >= heads.per_thread) break;
            if (kBiased) {
                float v[N];
                biased(i, v);
                raw[i] = from_floats<T, N>(v);
            }
            write(i, raw[i]);
        }
        return;
    }

    const bool any_centred =
        kNormed && (x.q_norm.kind == OFFLOAD_NORM_LAYER || x.k_norm.kind == OFFLOAD_NORM_LAYER);

#pragma unroll
    for (int i = 0; i < kPackHeads; ++i) {
        if (i >= heads.per_thread) break;
        float v[N], with[N], y[N];
        biased(i, v);
        const auto mean_of = [&](auto of_value) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < N; ++j) sum = of_value(v[j], sum);
            return sum_of_head(lane < plan.packs ? sum : 0.f, plan.lanes.by) * plan.share;
        };
        if (any_centred) {
            const float mean = mean_of([](float y, float sum) { return sum + y; });
#pragma unroll
            for (int j = 0; j < N; ++j) v[j] -= norm.kind == OFFLOAD_NORM_LAYER ? mean : 0.f;
        }
        const auto exchange = [&](int cross) {
            if constexpr (!kBiased) {  // as they came: half the shuffles where words are two
                                       // elements
                constexpr int kPerWord = N / kWords;
                Pack<T, N> theirs;
#pragma unroll
                for (int j = 0; j < kWords; ++j)
                    theirs.words[j] = __shfl_sync(0xffffffffu, raw[i].words[j ^ cross / kPerWord],
                                                  partner[j * kPerWord / 4]);
                to_floats(theirs, with);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j)
                    with[j] = __shfl_sync(0xffffffffu, v[j ^ cross], partner[j / 4]);
            }
        };
        if (half && !x.interleaved) {
            if (crossed)
                exchange(4);
            else
                exchange(0);
        }
        float scale = 1.f;
        if constexpr (kNormed) {
            const float squares = mean_of([](float y, float sum) { return fmaf(y, y, sum); });
            if (norm.kind) scale = inverse_root(squares + norm.eps);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] = v[j] * own[j];
        if (turns) {
            if (x.interleaved) {
#pragma unroll
                for (int j = 0; j < N; ++j) y[j] = fmaf(v[j ^ 1], others[j], y[j]);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) y[j] = fmaf(with[j], others[j], y[j]);
            }
        }
        if constexpr (kNormed) {
#pragma unroll
            for (int j = 0; j < N; ++j) y[j] = fmaf(y[j], scale, added[j]);
        }
        write(i, from_floats<T, N>(y));
    }
}

// For arguments that are in_packs().
template <typename T>
int launch_append_packs(const OffloadRotaryAppend& x, const Device& device, void* stream) {
    constexpr int N = 16 / sizeof(T);
    const int packs = x.head_dim / N;
    int lanes = packs;
    if (has_norm(x))
        for (lanes = 1; lanes < packs;) lanes *= 2;
    // More heads are worth their registers where each of them begins with a norm's weights.
    const int usual = has_norm(x) && exceeds_l2<T>(x, device) ? kPackHeads : kPackHeads / 2;
    AppendPlan plan;
    if (int status = plan_append<T>(x, device, lanes, usual, kPackHeads, &plan)) return status;
    const auto kernel = has_norm(x) ? rotary_append_packs<T, true, true>
                        : x.bias    ? rotary_append_packs<T, false, true>
                                    : rotary_append_packs<T, false, false>;
    return launch_append(kernel, x, plan, stream);
}

}  // namespace offload
