// Residual sums and the norms behind them. A row lies in the registers of one block (or of one
// warp, where it is narrow), so that every byte is read once and the variance is taken around a
// mean that is known: LayerNorm holds its accuracy where the mean is large. Rows that are too wide,
// of an odd width, or not aligned take several passes over memory instead, by the same arithmetic.
#include "residual_norm.cuh"
#include "residual_norm_plain.cuh"

namespace offload {
namespace {

template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_registers(OffloadResidualNorm a, RowsPlan plan) {
    let_next_kernel_begin();
    __shared__ float shared[kMostReductions * kMostWarps];
    RowSum row_sum = {shared, plan.warps};
    const int64_t row = plan.row();
    RowPart<T, N, kPacks> part;
    part.place(plan.thread(), 32 * plan.warps, a.width);
    part.clear();
    const int (&columns)[kPacks] = part.columns;

    // With one pack a thread, which is how few rows are done, the parameters are read before the
    // wait: no kernel writes them, and they come from further away than the rows do. Else L1 has
    // them, and registers are for rows under way.
    constexpr bool kReadAhead = kPacks == 1;
    Parameters<T, N> parameters;
    Pack<T, N> bias;
    if constexpr (kReadAhead) {
        if (a.bias[0]) bias = load<T, N>(static_cast<const T*>(a.bias[0]) + columns[0]);
        parameters.read(a.norm, columns[0]);
    }
    wait_for_previous_kernel();
    if (row >= a.rows) return;  // a whole warp, of a block that has no barriers

    const int64_t base = row * a.width;
    Pack<T, N> raw[3][kPacks];
    const void* const sources[3] = {a.branch[0], a.residual, a.branch[1]};
#pragma unroll
    for (int which = 0; which < 3; ++which) {
        if (sources[which]) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                raw[which][p] =
                    load_once<T, N>(static_cast<const T*>(sources[which]) + base + columns[p]);
        }
    }
    plan.ask<T>(sources, 3, a.rows, a.width);

    const auto add = [&](const Pack<T, N>(&packs)[kPacks]) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) part.add(p, packs[p]);
    };
    if (sources[0]) {
        add(raw[0]);
        if (a.bias[0]) {
            if constexpr (kReadAhead)
                part.add(0, bias);
            else
                part.add_from(a.bias[0]);
        }
    }
    if (a.branch_norm.kind) part.normalise(a.branch_norm, row_sum);
    if (sources[1]) add(raw[1]);
    if (sources[2]) {
        add(raw[2]);
        if (a.bias[1]) part.add_from(a.bias[1]);
    }
    if (a.sum) part.write_sum(static_cast<T*>(a.sum) + base, plan.once);

    Moments m = {0.f, 0.f};
    if (a.output) {
        if (a.norm.kind) m = part.moments(a.norm.kind, row_sum);
        const auto of_pack = [&](int p) {
            if constexpr (!kReadAhead) parameters.read(a.norm, columns[p]);
            return parameters;
        };
        part.write(static_cast<T*>(a.output) + base, a.norm, m, of_pack, plan.once);
    }
    if (a.output2) {
        if (a.norm2.kind && !(a.output && a.norm2.kind == a.norm.kind))
            m = part.moments(a.norm2.kind, row_sum);
        const auto of_pack = [&](int p) {
            parameters.read(a.norm2, columns[p]);
            return parameters;
        };
        part.write(static_cast<T*>(a.output2) + base, a.norm2, m, of_pack, plan.once);
    }
}

// One block a row, any width, N elements at a time. Nothing is written before the last pass, in
// which a thread reads an element before it writes there: outputs may lie on inputs here too.
template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads) rows_in_passes(OffloadResidualNorm a) {
    let_next_kernel_begin();
    __shared__ float shared[kMostReductions * kMostWarps];
    RowSum row_sum = {shared, static_cast<int>(blockDim.x / 32)};
    wait_for_previous_kernel();

    const int64_t base = static_cast<int64_t>(blockIdx.x) * a.width;
    const float width = static_cast<float>(a.width);
    const int step = blockDim.x * N;
    const auto add = [&](float* x, const void* from, int64_t at) {
        float other[N];
        to_floats(load<T, N>(static_cast<const T*>(from) + at), other);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] += other[i];
    };
    const auto branch = [&](float* x, int which, int column) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = 0.f;
        if (a.branch[which]) {
            add(x, a.branch[which], base + column);
            if (a.bias[which]) add(x, a.bias[which], column);
        }
    };
    // Both passes of a norm's statistics over what `value(x, column)` gives.
    const auto moments = [&](int kind, auto value) {
        Moments m = {0.f, 0.f};
        if (kind == OFFLOAD_NORM_LAYER) {
            float sum = 0.f;
            for (int column = threadIdx.x * N; column < a.width; column += step) {
                float x[N];
                value(x, column);
#pragma unroll
                for (int i = 0; i < N; ++i) sum += x[i];
            }
            m.mean = row_sum(sum) / width;
        }
        float squares = 0.f;
        for (int column = threadIdx.x * N; column < a.width; column += step) {
            float x[N];
            value(x, column);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float d = x[i] - m.mean;
                squares = fmaf(d, d, squares);
            }
        }
        m.variance = row_sum(squares) / width;
        return m;
    };

    Moments of_branch = {0.f, 0.f};
    if (a.branch_norm.kind)
        of_branch =
            moments(a.branch_norm.kind, [&](float* x, int column) { branch(x, 0, column); });
    const float branch_scale = scale_of(of_branch, a.branch_norm);
    const auto total = [&](float* x, int column) {
        branch(x, 0, column);
        if (a.branch_norm.kind) {
            Parameters<T, N> parameters;
            parameters.read(a.branch_norm, column);
            parameters.apply(of_branch.mean, branch_scale, x, x);
        }
        if (a.residual) add(x, a.residual, base + column);
        if (a.branch[1]) {
            float other[N];
            branch(other, 1, column);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] += other[i];
        }
    };
    Moments first = {0.f, 0.f}, second = {0.f, 0.f};
    if (a.output && a.norm.kind) first = moments(a.norm.kind, total);
    if (a.output2 && a.norm2.kind)
        second = a.output && a.norm2.kind == a.norm.kind ? first : moments(a.norm2.kind, total);
    const float first_scale = scale_of(first, a.norm), second_scale = scale_of(second, a.norm2);

    for (int column = threadIdx.x * N; column < a.width; column += step) {
        float x[N];
        total(x, column);
        const auto write = [&](void* output, const OffloadNorm& norm, const Moments& m,
                               float scale) {
            float y[N];
            Parameters<T, N> parameters;
            parameters.read(norm, column);
            parameters.apply(norm.kind ? m.mean : 0.f, norm.kind ? scale : 1.f, x, y);
            store(static_cast<T*>(output) + base + column, from_floats<T, N>(y));
        };
        if (a.sum) store(static_cast<T*>(a.sum) + base + column, from_floats<T, N>(x));
        if (a.output) write(a.output, a.norm, first, first_scale);
        if (a.output2) write(a.output2, a.norm2, second, second_scale);
    }
}

// How rows are done.
struct RowsWay {
    int packs;  // of a thread
    int64_t bytes_ahead;
    bool once;  // what is written leaves L2 first
};

// kPacks for `packs` ones.
template <typename F>
int by_packs(int packs, F f) {
    switch (packs) {
        case 1:
            return f(std::integral_constant<int, 1>{});
        case 2:
            return f(std::integral_constant<int, 2>{});
        case 3:
            return f(std::integral_constant<int, 3>{});
        default:
            return f(std::integral_constant<int, 4>{});
    }
}

template <typename T, int N>
int launch_registers(const OffloadResidualNorm& a, int warps, bool few, int64_t row_bytes,
                     const RowsWay& way, void* stream) {
    const int rows_per_block = warps == 1 && !few ? kNarrowRows : 1;
    const int64_t block_bytes = row_bytes * rows_per_block;
    const RowsPlan plan = {
        warps, static_cast<int>((way.bytes_ahead + block_bytes - 1) / block_bytes), way.once};
    const dim3 blocks(static_cast<unsigned>((a.rows + rows_per_block - 1) / rows_per_block));
    const dim3 threads(32 * warps * rows_per_block);
    return by_packs(way.packs, [&](auto count) {
        constexpr int kPacks = decltype(count)::value;
        if constexpr (kPacks > 1) {
            PlainRows plain = {};
            const int inputs = few ? 0 : plain_inputs(a, &plain);
            if (inputs)
                return launch(
                    "residual_norm",
                    inputs == 1 ? plain_rows<T, N, kPacks, 1> : plain_rows<T, N, kPacks, 2>, blocks,
                    threads, 0, stream, a.launch_early, plain, plan);
        }
        return launch("residual_norm", rows_in_registers<T, N, kPacks>, blocks, threads, 0, stream,
                      a.launch_early, a, plan);
    });
}

template <typename T, int N>
int launch_passes(const OffloadResidualNorm& a, void* stream) {
    const int packs = a.width / N;
    const int threads = packs < kMostThreads ? (packs + 31) / 32 * 32 : kMostThreads;
    return launch("residual_norm", rows_in_passes<T, N>, dim3(static_cast<unsigned>(a.rows)),
                  dim3(threads), 0, stream, a.launch_early, a);
}

// Few rows: as many threads a row as there are, each done sooner. Else as few bytes a thread as can
// be, two packs: the sums wait for fewer, and what is under way suffices with rows asked for ahead;
// but a row that fits a warp gets one, and one too wide for two packs a thread has enough under way
// by itself. Where four packs put all rows into the first wave, a second would not fill the device;
// and in one wave nothing is ahead. Rows that L2 can hold stay there for who reads them next.
inline RowsWay way_of(int packs, int inputs, const OffloadResidualNorm& a, int64_t row_bytes,
                      bool few, const Device& device) {
    const int64_t room = (inputs == 1 ? 1536 : 1024) * static_cast<int64_t>(device.multiprocessors);
    const auto in_one_wave = [&](int each) {
        return a.rows * ((packs + 32 * each - 1) / (32 * each)) * 32 <= room;
    };
    RowsWay way = {2, 0, a.rows * row_bytes > device.l2_bytes};
    if (a.packs_per_thread)
        way.packs = a.packs_per_thread;
    else if (few)
        way.packs = 1;
    else if (packs <= 32 * 4)
        way.packs = packs <= 32 ? 2 : (packs + 31) / 32;
    else if (!in_one_wave(2) && in_one_wave(4))
        way.packs = 4;
    const bool fits = packs <= way.packs * kMostThreads;
    while (way.packs < 4 && packs > way.packs * kMostThreads) way.packs += 1;
    if (fits && !in_one_wave(way.packs)) way.bytes_ahead = bytes_ahead(device);
    return way;
}

template <typename T>
int launch_rows(const OffloadResidualNorm& a, const Device& device, void* stream) {
    constexpr int N = 16 / sizeof(T);
    bool wide = a.width % N == 0;
    for (const void* p :
         {a.residual, a.branch[0], a.branch[1], a.bias[0], a.bias[1],
          static_cast<const void*>(a.sum), static_cast<const void*>(a.output),
          static_cast<const void*>(a.output2), a.branch_norm.weight, a.branch_norm.bias,
          a.norm.weight, a.norm.bias, a.norm2.weight, a.norm2.bias})
        wide = wide && aligned<T, N>(p);
    if (!wide) return launch_passes<T, 1>(a, stream);
    const int packs = a.width / N;
    int inputs = 0;
    for (const void* input : {a.branch[0], a.residual, a.branch[1]}) inputs += input != nullptr;
    const int64_t row_bytes = inputs * static_cast<int64_t>(a.width) * sizeof(T);
    const bool few = a.rows < 2 * device.multiprocessors;
    const RowsWay way = way_of(packs, inputs, a, row_bytes, few, device);
    const int warps = (packs + 32 * way.packs - 1) / (32 * way.packs);
    if (warps > kMostWarps) return launch_passes<T, N>(a, stream);
    return launch_registers<T, N>(a, warps, few, row_bytes, way, stream);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_residual_norm(const OffloadResidualNorm* arguments, void* stream) {
    using namespace offload;
    const OffloadResidualNorm& a = *arguments;
    // Columns are counted in 32 bits, a block's step beyond the last one included.
    if (a.rows < 0 || a.rows > INT32_MAX || a.width < 1 || a.width > INT32_MAX / 2)
        return refuse("residual_norm: no input has %lld rows of %d elements",
                      static_cast<long long>(a.rows), a.width);
    if (!known_norm(a.branch_norm) || !known_norm(a.norm) || !known_norm(a.norm2))
        return refuse("residual_norm: no norm has the number %d, %d or %d", a.branch_norm.kind,
                      a.norm.kind, a.norm2.kind);
    if (a.packs_per_thread < 0 || a.packs_per_thread > 4)
        return refuse("residual_norm: packs_per_thread is 0 to 4, not %d", a.packs_per_thread);
    if (a.rows == 0) return 0;
    if (!a.residual && !a.branch[0] && !a.branch[1])
        return refuse("residual_norm: residual and branches are all null");
    if (!a.sum && !a.output && !a.output2)
        return refuse("residual_norm: sum, output and output2 are all null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("residual_norm", a.dtype, [&](auto element) {
        return launch_rows<decltype(element)>(a, device, stream);
    });
}
