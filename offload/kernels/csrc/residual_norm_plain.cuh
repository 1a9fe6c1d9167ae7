// Many rows of the common kind: one or two inputs, a bias, their sum and a norm of it. Less code
// and half of the registers of the general kernel, and so twice the bytes under way.
#pragma once
#include "residual_norm.cuh"

namespace offload {

struct PlainRows {
    const void* inputs[2];
    const void* bias;  // of two inputs' sum
    void *sum, *output;
    OffloadNorm norm;
    int64_t rows;
    int width;
};

// The number of its inputs where `a` is of this kind, else 0.
inline int plain_inputs(const OffloadResidualNorm& a, PlainRows* plain) {
    int inputs = 0;
    for (const void* input : {a.branch[0], a.residual, a.branch[1]}) {
        if (input && inputs < 2) plain->inputs[inputs] = input;
        inputs += input != nullptr;
    }
    plain->bias = a.bias[0] ? a.bias[0] : a.bias[1];
    plain->sum = a.sum;
    plain->output = a.output;
    plain->norm = a.norm;
    plain->rows = a.rows;
    plain->width = a.width;
    const bool too_many = inputs > 2 || (a.bias[0] && a.bias[1]) || (inputs == 1 && plain->bias);
    return too_many || a.branch_norm.kind || a.output2 ? 0 : inputs;
}

template <typename T, int N, int kPacks, int kInputs>
__global__ void __launch_bounds__(kMostThreads, kInputs == 1 ? 3 : 2)
    plain_rows(PlainRows a, RowsPlan plan) {
    let_next_kernel_begin();
    __shared__ float shared[2 * kMostWarps];
    RowSum row_sum = {shared, plan.warps};
    const int64_t row = plan.row();
    RowPart<T, N, kPacks> part;
    part.place(plan.thread(), 32 * plan.warps, a.width);
    wait_for_previous_kernel();
    if (row >= a.rows) return;  // a whole warp, of a block that has no barriers

    const int64_t base = row * a.width;
    Pack<T, N> raw[kInputs][kPacks];
#pragma unroll
    for (int which = 0; which < kInputs; ++which) {
        const T* const from = static_cast<const T*>(a.inputs[which]) + base;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) raw[which][p] = load_once<T, N>(from + part.columns[p]);
    }
    plan.ask<T>(a.inputs, kInputs, a.rows, a.width);
    if constexpr (kInputs == 2) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            to_floats(raw[0][p], part.x[p]);
            part.add(p, raw[1][p]);
        }
        if (a.bias) part.add_from(a.bias);
    }

    const bool centred = a.norm.kind == OFFLOAD_NORM_LAYER;
    float mean = 0.f;
    // Of pack p, less the mean once that is known. One input stays as it came: half the registers.
    const auto values = [&](int p, float* x) {
        if constexpr (kInputs == 1) {
            to_floats(raw[0][p], x);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = part.x[p][i];
        }
        if (centred) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] -= mean;
        }
    };
    const auto sum_of_row = [&](auto of_value) {
        float sum = 0.f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            float x[N], of_pack = 0.f;
            values(p, x);
#pragma unroll
            for (int i = 0; i < N; ++i) of_pack = of_value(x[i], of_pack);
            sum += part.inside[p] ? of_pack : 0.f;
        }
        return row_sum(sum) / part.width;
    };
    if (a.sum) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            float x[N];
            values(p, x);
            if (part.inside[p])
                store<T, N>(static_cast<T*>(a.sum) + base + part.columns[p], from_floats<T, N>(x),
                            plan.once);
        }
    }
    if (!a.output) return;
    float scale = 1.f;
    if (centred) mean = sum_of_row([](float x, float sum) { return sum + x; });
    if (a.norm.kind)
        scale = __frsqrt_rn(sum_of_row([](float x, float sum) { return fmaf(x, x, sum); }) +
                            a.norm.eps);
    const T* const weight = static_cast<const T*>(a.norm.weight);
    const T* const bias = static_cast<const T*>(a.norm.bias);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        float y[N];
        values(p, y);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= scale;
        if (weight) {
            float w[N];
            to_floats(load<T, N>(weight + part.columns[p]), w);
            if (a.norm.weight_offset != 0.f) {
#pragma unroll
                for (int i = 0; i < N; ++i) w[i] += a.norm.weight_offset;
            }
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= w[i];
        }
        if (bias) {
            float b[N];
            to_floats(load<T, N>(bias + part.columns[p]), b);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += b[i];
        }
        if (part.inside[p])
            store<T, N>(static_cast<T*>(a.output) + base + part.columns[p], from_floats<T, N>(y),
                        plan.once);
    }
}

}  // namespace offload
