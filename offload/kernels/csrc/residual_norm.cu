// Residual sums and the norms behind them. A row lies in the registers of one block (or of one
// warp, where it is narrow), so that every byte is read once and the variance is taken around a
// mean that is known: LayerNorm holds its accuracy where the mean is large. Rows that are too wide,
// of an odd width, or not aligned take several passes over memory instead, by the same arithmetic.
#include "residual_norm.cuh"
#include "residual_norm_plain.cuh"
#include "residual_norm_ring.cuh"

namespace offload {
namespace {

template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_registers(OffloadResidualNorm a, int warps_per_row, int ahead, bool once) {
    let_next_kernel_begin();
    __shared__ float shared[kMostReductions * kMostWarps];
    RowSum row_sum = {shared, warps_per_row};
    const bool one_warp = warps_per_row == 1;
    const int threads = 32 * warps_per_row;
    const int thread = one_warp ? threadIdx.x % 32 : threadIdx.x;
    const int64_t row =
        one_warp ? static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32
                 : blockIdx.x;
    RowPart<T, N, kPacks> part;
    part.place(thread, threads, a.width);
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
    if (ahead && thread == 0 && row + ahead < a.rows) {
        for (const void* source : sources)
            if (source)
                prefetch_bulk(static_cast<const T*>(source) + (row + ahead) * a.width,
                              a.width * static_cast<int>(sizeof(T)));
    }

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
    if (a.sum) part.write_sum(static_cast<T*>(a.sum) + base, once);

    Moments m = {0.f, 0.f};
    if (a.output) {
        if (a.norm.kind) m = part.moments(a.norm.kind, row_sum);
        const auto of_pack = [&](int p) {
            if constexpr (!kReadAhead) parameters.read(a.norm, columns[p]);
            return parameters;
        };
        part.write(static_cast<T*>(a.output) + base, a.norm, m, of_pack, once);
    }
    if (a.output2) {
        if (a.norm2.kind && !(a.output && a.norm2.kind == a.norm.kind))
            m = part.moments(a.norm2.kind, row_sum);
        const auto of_pack = [&](int p) {
            parameters.read(a.norm2, columns[p]);
            return parameters;
        };
        part.write(static_cast<T*>(a.output2) + base, a.norm2, m, of_pack, once);
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

// One block a row, or a warp where rows are narrow. With many rows, a block asks for the row of the
// block that will come `waves` after it here.
template <typename Rows>
int launch_blocks(void (*kernel)(Rows, int, int, bool), const Rows& a, int warps, bool few,
                  int waves, bool once, bool early, const Device& device, void* stream) {
    const int rows_per_block = warps == 1 && !few ? kNarrowRows : 1;
    const int threads = 32 * warps * rows_per_block;
    const int64_t blocks = (a.rows + rows_per_block - 1) / rows_per_block;
    int resident = 0;
    if (waves) {
        if (int status = cuda_status("residual_norm", cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                                                          &resident, kernel, threads, 0)))
            return status;
    }
    const int ahead = waves * resident * device.multiprocessors * rows_per_block;
    return launch("residual_norm", kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), 0,
                  stream, early, a, warps, ahead, once);
}

template <typename T, int N, int kPacks>
int launch_registers(const OffloadResidualNorm& a, int warps, bool few, int waves, bool once,
                     const Device& device, void* stream) {
    if constexpr (kPacks > 1) {
        PlainRows plain = {};
        const int inputs = few ? 0 : plain_inputs(a, &plain);
        if (inputs)
            return launch_blocks(
                inputs == 1 ? plain_rows<T, N, kPacks, 1> : plain_rows<T, N, kPacks, 2>, plain,
                warps, few, waves, once, a.launch_early, device, stream);
    }
    return launch_blocks(rows_in_registers<T, N, kPacks>, a, warps, few, waves, once,
                         a.launch_early, device, stream);
}

template <typename T, int N>
int launch_passes(const OffloadResidualNorm& a, void* stream) {
    const int packs = a.width / N;
    const int threads = packs < kMostThreads ? (packs + 31) / 32 * 32 : kMostThreads;
    return launch("residual_norm", rows_in_passes<T, N>, dim3(static_cast<unsigned>(a.rows)),
                  dim3(threads), 0, stream, a.launch_early, a);
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
    // Few rows: as many threads a row as there are, each done sooner. Many: more bytes under way a
    // thread, and fewer threads that wait for each other.
    const bool few = a.rows < 2 * device.multiprocessors;
    const int stages = a.packs_per_thread / 10 % 10;
    const int extra = a.packs_per_thread ? a.packs_per_thread / 100 : !few;
    int per_thread = a.packs_per_thread % 10;
    if (!per_thread) per_thread = few ? 1 : a.branch[1] || a.branch_norm.kind || a.output2 ? 2 : 4;
    while (per_thread < 4 && packs > per_thread * kMostThreads) per_thread *= 2;
    const int warps = (packs + 32 * per_thread - 1) / (32 * per_thread);
    if (warps > kMostWarps) return launch_passes<T, N>(a, stream);
    const auto launch_packs = [&](auto count) {
        constexpr int kPacks = decltype(count)::value;
        if (stages) {
            bool fits;
            const int run = extra ? 2 << extra : 0;
            const int status =
                launch_ring<T, N, kPacks>(a, warps, stages, run, device, stream, &fits);
            if (fits) return status;
        }
        return launch_registers<T, N, kPacks>(a, warps, few, extra % 4, extra >= 4, device, stream);
    };
    if (per_thread == 1) return launch_packs(std::integral_constant<int, 1>{});
    if (per_thread == 2) return launch_packs(std::integral_constant<int, 2>{});
    return launch_packs(std::integral_constant<int, 4>{});
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
    const int packs = a.packs_per_thread;
    if (packs != 0 && ((packs % 10 != 1 && packs % 10 != 2 && packs % 10 != 4) || packs < 0 ||
                       packs / 10 % 10 == 1 || packs / 10 % 10 > 4 || packs > 799))
        return refuse(
            "residual_norm: packs_per_thread is 0, or 1, 2 or 4, ten for each of the 2 to 4 rows "
            "of a ring, and hundreds up to 7, not %d",
            packs);
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
