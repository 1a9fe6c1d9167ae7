// Many rows: blocks that stay, each with a ring of rows on their way to shared memory. A thread
// fetches what it will read itself, so that the ring needs no barriers, and the loads of the next
// rows run on while the sums over a row are exchanged.
#pragma once
#include "async_copy.cuh"
#include "residual_norm.cuh"

namespace offload {

// Where each of three comes among those that are not null, and how many there are.
struct Places {
    int before[3], count;

    __host__ __device__ explicit Places(const void* const (&all)[3]) : count(0) {
        for (int i = 0; i < 3; ++i) {
            before[i] = count;
            count += all[i] != nullptr;
        }
    }
};

template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_ring(OffloadResidualNorm a, int warps_per_row, int stages, int run) {
    static_assert(sizeof(Pack<T, N>) == 16, "copy_async16");
    let_next_kernel_begin();
    extern __shared__ __align__(128) unsigned char shared[];
    // Rows take turns with them: who passed the barrier of one row is done with the row before.
    __shared__ float sums[2][kMostReductions * kMostWarps];
    const bool one_warp = warps_per_row == 1;
    const int rows_per_block = one_warp ? blockDim.x / 32 : 1;
    // A block takes `run` rows behind each other, or every so many until the end.
    const int64_t step = run ? rows_per_block : static_cast<int64_t>(gridDim.x) * rows_per_block;
    int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block * (run ? run : 1);
    const int64_t end = run ? min64(a.rows, row + run * rows_per_block) : a.rows;
    if (one_warp) row += threadIdx.x / 32;

    RowPart<T, N, kPacks> part;
    part.place(one_warp ? threadIdx.x % 32 : threadIdx.x, 32 * warps_per_row, a.width);

    const void* const sources[3] = {a.branch[0], a.residual, a.branch[1]};
    const void* const held[3] = {a.norm.weight, a.norm.bias, a.bias[0]};
    // What a thread has of a row in the ring, and behind the ring of the parameters.
    const Places in_row(sources), in_parameters(held);
    const auto place = [&](int pack) { return shared + (pack * blockDim.x + threadIdx.x) * 16; };
    const auto at = [&](int stage, int which, int p) {
        return place((stage * in_row.count + in_row.before[which]) * kPacks + p);
    };
    const auto parameter = [&](int which, int p) {
        const int first = stages * in_row.count + in_parameters.before[which];
        return reinterpret_cast<T*>(place(first * kPacks + p));
    };
#pragma unroll
    for (int which = 0; which < 3; ++which) {  // no kernel writes them
        if (!held[which]) continue;
#pragma unroll
        for (int p = 0; p < kPacks; ++p)
            store(parameter(which, p),
                  load<T, N>(static_cast<const T*>(held[which]) + part.columns[p]));
    }
    wait_for_previous_kernel();

    const uint64_t policy = evict_first_policy();
    const auto fetch = [&](int stage, int64_t row) {
        if (row < end) {
#pragma unroll
            for (int which = 0; which < 3; ++which) {
                if (!sources[which]) continue;
                const T* from = static_cast<const T*>(sources[which]) + row * a.width;
#pragma unroll
                for (int p = 0; p < kPacks; ++p)
                    if (part.inside[p])
                        copy_async16(shared_address(at(stage, which, p)), from + part.columns[p],
                                     policy);
            }
        }
        commit_copies();
    };
    const auto add = [&](int stage, int which) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p)
            part.add(p, load<T, N>(reinterpret_cast<const T*>(at(stage, which, p))));
    };

    const auto of_pack = [&](int p) {
        Parameters<T, N> parameters;
        parameters.read(a.norm.weight ? parameter(0, p) : nullptr,
                        a.norm.bias ? parameter(1, p) : nullptr, a.norm.weight_offset, 0);
        return parameters;
    };
    const auto of_second = [&](int p) {
        Parameters<T, N> parameters;
        parameters.read(a.norm2, part.columns[p]);
        return parameters;
    };

    for (int ahead = 0; ahead < stages; ++ahead) fetch(ahead, row + ahead * step);
    for (int stage = 0, turn = 0; row < end; row += step, turn ^= 1) {
        RowSum row_sum = {sums[turn], warps_per_row};
        wait_for_copies(stages - 1);
        part.clear();
        if (sources[0]) {
            add(stage, 0);
            if (a.bias[0]) {
#pragma unroll
                for (int p = 0; p < kPacks; ++p) part.add(p, load<T, N>(parameter(2, p)));
            }
        }
        if (a.branch_norm.kind) part.normalise(a.branch_norm, row_sum);
        if (sources[1]) add(stage, 1);
        if (sources[2]) {
            add(stage, 2);
            if (a.bias[1]) part.add_from(a.bias[1]);
        }
        fetch(stage, row + stages * step);
        stage = stage + 1 == stages ? 0 : stage + 1;

        const int64_t base = row * a.width;
        if (a.sum) part.write_sum(static_cast<T*>(a.sum) + base, false);
        Moments m = {0.f, 0.f};
        if (a.output) {
            if (a.norm.kind) m = part.moments(a.norm.kind, row_sum);
            part.write(static_cast<T*>(a.output) + base, a.norm, m, of_pack, false);
        }
        if (a.output2) {
            if (a.norm2.kind && !(a.output && a.norm2.kind == a.norm.kind))
                m = part.moments(a.norm2.kind, row_sum);
            part.write(static_cast<T*>(a.output2) + base, a.norm2, m, of_second, false);
        }
    }
    wait_for_copies(0);
}

// Launches it with `stages` rows in the ring, or with fewer where shared memory does not hold them
// (0: as many as are good); `fits` is false where it holds no two, and nothing is launched.
template <typename T, int N, int kPacks>
int launch_ring(const OffloadResidualNorm& a, int warps, int stages, int run, const Device& device,
                void* stream, bool* fits) {
    const auto kernel = rows_in_ring<T, N, kPacks>;
    const int rows_per_block = warps == 1 ? kNarrowRows : 1;
    const int threads = 32 * warps * rows_per_block;
    const void* const sources[3] = {a.branch[0], a.residual, a.branch[1]};
    const void* const held[3] = {a.norm.weight, a.norm.bias, a.bias[0]};
    const int piece = kPacks * threads * 16;
    const int stage = Places(sources).count * piece, fixed = Places(held).count * piece;
    const int most = device.shared_per_block - 1024;  // less the sums
    *fits = 2 * stage + fixed <= most;
    if (!*fits) return 0;
    RingFit fit;
    if (int status = fit_ring("residual_norm", kernel, threads, stage, fixed, most, stages, &fit))
        return status;
    const int64_t blocks = (a.rows + rows_per_block - 1) / rows_per_block;
    const dim3 grid = run ? dim3(static_cast<unsigned>((blocks + run - 1) / run))
                          : blocks_that_stay(blocks, fit, device);
    return launch("residual_norm", kernel, grid, dim3(threads), fit.rows * stage + fixed, stream,
                  a.launch_early, a, warps, fit.rows, run);
}

}  // namespace offload
