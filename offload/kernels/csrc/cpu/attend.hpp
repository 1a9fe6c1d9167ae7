// The attention of one work item, over the vectors of `Simd` (one of the simd_*.hpp).
//
// Each path includes this once. All of it has internal linkage and uses nothing of the C++ library,
// so that no path's instructions end in another's code.
//
// An item's keys are read from end to end, then its values, each once for all queries of the group:
// two plain streams, which is what memory gives most for. Lines ahead are asked for across the
// seams between the two and between items, where the hardware would have to learn the stream anew.
#pragma once
#include <math.h>

#include "convert.hpp"
#include "floats.hpp"

namespace {

using offload_host::part_floats;

template <class Cache>
void load_rows(const Job& job, const Item& item, float* queries) {
    const OffloadHostAttention& c = job.call;
    for (int g = 0; g < job.group; g++) {
        const auto* const from = static_cast<const typename Cache::T*>(c.query) +
                                 first_query(job, item) + g * c.query_head_stride;
        float* const query = queries + int64_t(g) * job.padded_dim;
        int d = 0;
        for (; d + kLanes <= c.head_dim; d += kLanes) store(query + d, Cache::load(from + d));
        if (d < c.head_dim) {
            store(query + d, load_some<Cache>(from + d, c.head_dim - d));
            d += kLanes;
        }
        for (; d < job.padded_dim; d += kLanes) store(query + d, V{});
    }
}

// [group, padded_dim], zeros behind head_dim
void load_queries(const Job& job, const Item& item, float* queries) {
    if (job.call.query_dtype == OFFLOAD_HOST_F32) return load_rows<F32>(job, item, queries);
    if (job.call.query_dtype == OFFLOAD_HOST_F16) return load_rows<F16>(job, item, queries);
    load_rows<BF16>(job, item, queries);
}

void store_output(const Job& job, const Item& item, int query, const float* sums, float factor) {
    const OffloadHostAttention& c = job.call;
    const int64_t head = int64_t(item.head) * job.group + query;
    const int64_t to = (int64_t(item.row) * c.heads + head) * c.head_dim;
    float* const floats = static_cast<float*>(c.output) + to;
    uint16_t* const halves = static_cast<uint16_t*>(c.output) + to;
    if (c.query_dtype == OFFLOAD_HOST_F32)
        for (int d = 0; d < c.head_dim; d++) floats[d] = sums[d] * factor;
    else if (c.query_dtype == OFFLOAD_HOST_F16)
        for (int d = 0; d < c.head_dim; d++) halves[d] = f16_of_float(sums[d] * factor);
    else
        for (int d = 0; d < c.head_dim; d++) halves[d] = bf16_of_float(sums[d] * factor);
}

// Products of the query become weights of the values, tops and totals; code_scales become the
// largest weights where values have scales.
void weigh(const Job& job, const Item& item, const Work& w, const float* key_scales, Ahead& ahead) {
    const OffloadHostAttention& c = job.call;
    const int columns = item.end - item.begin;
    const int64_t padded = (int64_t(columns) + kLanes - 1) / kLanes * kLanes;
    const float last = float(job.end[item.row] - 1 - item.begin);
    V lane;
    for (int i = 0; i < kLanes; i++) lane[i] = float(i);
    for (int g = 0; g < w.group; g++) {
        float* const scores = w.scores + g * w.padded_columns;
        const float slope = c.slopes == nullptr ? 0 : c.slopes[item.head * w.group + g];
        const float scale = c.scale * w.code_scales[g];
        V top = all(-INFINITY);
        for (int64_t t = 0; t < padded; t += kLanes) {
            V score = Simd::load(scores + t) * scale;
            const int some = t + kLanes <= columns ? kLanes : int(columns - t);
            if (key_scales != nullptr)
                score *= some == kLanes ? Simd::load(key_scales + t)
                                        : load_some<F32>(key_scales + t, some);
            if (c.softcap > 0) score = tangent(score / c.softcap) * c.softcap;
            // Less what the last column would add: far out, float32 has no digits for both.
            if (slope != 0) score += slope * (lane + (float(t) - last));
            if (some < kLanes) score = lane < float(some) ? score : all(-INFINITY);
            top = score > top ? score : top;
            store(scores + t, score);
        }
        float most = -INFINITY;
        for (int i = 0; i < kLanes; i++) most = top[i] > most ? top[i] : most;
        const float zero = most == -INFINITY ? 0 : most;
        V total = {};
        I largest = {};
        for (int64_t t = 0; t < padded; t += kLanes) {
            if (t % 16 == 0) ahead.pass(w.weights_time);
            V weight = exponential(Simd::load(scores + t) - zero);
            total += weight;
            if (item.value_scales != nullptr) {
                weight *= t + kLanes <= columns
                              ? Simd::load(item.value_scales + t)
                              : load_some<F32>(item.value_scales + t, int(columns - t));
                largest = larger(largest, weight);
            }
            store(scores + t, weight);
        }
        w.tops()[g] = most;
        w.totals()[g] = Simd::sum(total);
        w.code_scales[g] = largest_of(largest);
    }
}

#if defined(OFFLOAD_HOST_EXP2)
// The largest score of a query, lane by lane; scores of keys with scales are multiplied with them.
inline V largest_score(const Work& w, int g, int columns) {
    float* const scores = w.scores + g * w.padded_columns;
    V lane;
    for (int i = 0; i < kLanes; i++) lane[i] = float(i);
    V top = all(-INFINITY);
    for (int t = 0; t < columns; t += kLanes) {
        V score = Simd::load(scores + t);
        const int some = columns - t < kLanes ? columns - t : kLanes;
        if (w.key_scales != nullptr) {
            score *= some == kLanes ? Simd::load(w.key_scales + t)
                                    : load_some<F32>(w.key_scales + t, some);
            store(scores + t, score);
        }
        if (some < kLanes) score = lane < float(some) ? score : all(-INFINITY);
        top = score > top ? score : top;
    }
    return top;
}

// The same where nothing but a scale stands between products and scores, and queries have sixteen
// bits: weights to 2^-22 of them.
template <class Kind>
void weigh_plainly(const Job& job, const Item& item, const Work& w, Ahead& ahead) {
    const int columns = item.end - item.begin;
    V lane;
    for (int i = 0; i < kLanes; i++) lane[i] = float(i);
    const auto scale_of = [&](const float* scales, int t) {
        return t + kLanes <= columns ? Simd::load(scales + t)
                                     : load_some<F32>(scales + t, columns - t);
    };
    for (int g = 0; g < w.group; g++) {
        float* const scores = w.scores + g * w.padded_columns;
        const float scale = job.call.scale * w.code_scales[g], to_exponent = scale * 1.44269504f;
        V top;
        if constexpr (Kind::finds_largest)
            top = Simd::load(w.largest + g * kLanes);
        else
            top = largest_score(w, g, columns);
        float most = -INFINITY;
        for (int i = 0; i < kLanes; i++) most = top[i] > most ? top[i] : most;
        const float zero = most == -INFINITY ? 0 : most * to_exponent;
        V total = {};
        I largest = {};
        for (int t = 0; t < columns; t += kLanes) {
            ahead.pass(w.weights_time);
            V weight = Simd::exp2_of(Simd::load(scores + t) * to_exponent - zero);
            if (t + kLanes > columns) weight = lane < float(columns - t) ? weight : V{};
            total += weight;
            if (item.value_scales != nullptr) {
                weight *= scale_of(item.value_scales, t);
                largest = larger(largest, weight);
            }
            store(scores + t, weight);
        }
        w.tops()[g] = most * scale;
        w.totals()[g] = Simd::sum(total);
        w.code_scales[g] = largest_of(largest);
    }
}
#endif

// The output of the item's queries from all parts of their sequence, in the parts' order.
void merge(const Job& job, const Item& item, const Work& w, const float* parts) {
    const OffloadHostAttention& c = job.call;
    const int64_t stride = part_floats(job), tops = int64_t(w.group) * w.padded_dim;
    const float last = float(job.end[item.row] - 1);
    for (int g = 0; g < w.group; g++) {
        const int head = item.head * w.group + g;
        const float slope = c.slopes == nullptr ? 0 : c.slopes[head];
        const float sink = c.sinks == nullptr ? -INFINITY : c.sinks[head] - slope * last;
        float top = sink;
        for (int p = 0; p < item.parts; p++) {
            const float other = parts[p * stride + tops + g];
            top = other > top ? other : top;
        }
        const float zero = top == -INFINITY ? 0 : top;
        float total = c.sinks == nullptr ? 0 : exponential_of(sink - zero);
        float* const sums = w.sums + int64_t(g) * w.padded_dim;
        for (int p = 0; p < item.parts; p++) {
            const float* const part = parts + p * stride;
            const float other = part[tops + g];
            const float factor = other == zero ? 1 : exponential_of(other - zero);
            total += factor * part[tops + w.group + g];
            const float* const from = part + int64_t(g) * w.padded_dim;
            for (int d = 0; d < w.padded_dim; d += kLanes) {
                const V sum = Simd::load(from + d) * factor;
                store(sums + d, p == 0 ? sum : Simd::load(sums + d) + sum);
            }
        }
        // Nothing is seen: all sums are zero. NaN stays.
        store_output(job, item, g, sums, total == 0 ? 1.0f : 1.0f / total);
    }
}

template <class Kind>
void attend(Job& job, int worker) {
    typedef const typename Kind::T* Rows;
    const OffloadHostAttention& c = job.call;
    Work w;
    w.lay_out(job.group, c.head_dim, job.chunk, job.scratch + worker * job.scratch_floats);
    float* const own_sums = w.sums;
    const int64_t floats = part_floats(job);
    const int64_t row_bytes = int64_t(w.dim) * sizeof(typename Kind::T);
    w.key_time = row_bytes * Kind::costs.key * Kind::turns(w);
    w.value_time = row_bytes * Kind::costs.value * Kind::turns(w);
    w.weights_time = Kind::costs.weights;

    Kind::begin();
    Ahead ahead(job);
    Item item, next;
    for (bool any = take(job, &item); any; item = next) {
        const int columns = item.end - item.begin;
        ahead.enter(item, columns * w.key_time,
                    columns * (w.key_time + w.value_time) +
                        w.group * ((columns + 15) / 16) * w.weights_time);
        float* const parts = job.partials + (item.index - item.part) * floats;
        w.sums = item.parts == 1 ? own_sums : parts + item.part * floats;
        w.key_scales = item.key_scales;
        append(job, item);
        load_queries(job, item, w.queries);
        Kind::prepare(w);
        Kind::read_keys(w, reinterpret_cast<Rows>(item.keys), columns, ahead);
        // The next item is taken as late as the lines ahead allow, so that no thread sits on one.
        any = take(job, &next);
        if (any) ahead.follow(next);
#if defined(OFFLOAD_HOST_EXP2)
        if (c.query_dtype != OFFLOAD_HOST_F32 && c.softcap == 0 && c.slopes == nullptr &&
            c.scale > 0)
            weigh_plainly<Kind>(job, item, w, ahead);
        else
#endif
            weigh(job, item, w, Kind::finds_largest ? nullptr : w.key_scales, ahead);
        Kind::begin_values(w, columns);
        Kind::read_values(w, reinterpret_cast<Rows>(item.values), columns, ahead);
        Kind::end_values(w, columns);
        if (!last_part(job, item)) continue;
        const float* const from = item.parts == 1 ? own_sums : parts;
        w.sums = own_sums;
        merge(job, item, w, from);
    }
    Kind::end();
}

}  // namespace
