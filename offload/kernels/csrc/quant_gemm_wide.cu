// Products with quantised weights on warpgroups: which kernel of quant_gemm_wide.cuh runs, and how
// it is launched.
//
// Compiled for compute capability 9.0 alone (sm_90a), with OFFLOAD_SM90A defined. Where the
// compiler does not know that, there is nothing in here to be run.
#include <algorithm>

#include "cluster_launch.cuh"
#include "quant_gemm_forms.cuh"
#include "quant_gemm_wide.cuh"

namespace offload {

#ifndef OFFLOAD_SM90A
int wide_quant_gemm(const OffloadQuantGemm&, const Device&, double, void*, bool& taken) {
    taken = false;
    return 0;
}
#else
namespace {

constexpr int kMostClusterBits = 3;

using WideKernel = void (*)(OffloadQuantGemm, WidePlan);

// How long a call takes, in us, as measured on an H200: its ends, by log2 of the blocks of a
// cluster, which wait for each other; and 128 of the depth. Both have a part for each 64 outputs of
// a block. It is never less than `least`, and a MB of codes more.
struct WideTimes {
    double ends[kMostClusterBits + 1], ends_each, of_128, of_128_each, least, least_of_mb;
};
constexpr WideTimes kTo8Rows = {{0.7, 1.9, 0.4, 0.1}, 0.67, 0.28, 0.059, 5.1, 0.23};
constexpr WideTimes kTo16Rows = {{1.1, 1.65, 0.4, 0.}, 0.79, 0.254, 0.066, 5.1, 0.23};
constexpr WideTimes kTo16RowsInt8 = {{2.1, 3.1, 1.2, 0.}, 0.64, 0.40, 0.119, 4.6, 0.216};
constexpr WideTimes kTo32Rows = {{0., 0.3, 2.3, 2.8}, 0.46, 0.43, 0.132, 0., 0.};
constexpr WideTimes kTo64Rows = {{0., 1.6, 2.8, 4.2}, 0.64, 0.40, 0.169, 0., 0.};
// Codes of 4 bits that become halves, or have zero points, take longer to be converted.
constexpr double kHalfOf128Each = 0.032, kHalfLeast = 1.3, kHalfLeastOfMb = 0.02;
constexpr double kZerosOf128Each = 0.022, kZerosLeast = 1.2, kZerosLeastOfMb = 0.007;
// What it costs to change from one form's code to the other's between a layer's products.
constexpr double kChange = 0.4;

struct WideForm {
    WideKernel kernel;
    WideTimes times;
    int columns, bundles, threads;  // bundles that a block has registers for
    int warpgroups, chunk_depth, stage_chunks, most_stages;
    int input_bytes, slot_bytes, piece_bytes;  // of a stage, and of what is summed up
    int barriers_at;                           // with many rows; else 0
};

template <typename T, int kBits, bool kZeros, typename Shape>
WideForm form_of(const WideTimes& times) {
    return {wide_gemm_kernel<T, kBits, kZeros, Shape>,
            times,
            Shape::kColumns,
            Shape::kSlots / 2,
            Shape::kThreads,
            Shape::kWarpgroups,
            Shape::kChunkDepth,
            Shape::kStageChunks,
            Shape::kMostStages,
            Shape::kInputBytes,
            Shape::kSlotBytes,
            Shape::kPieceFloats * 4,
            Shape::kMany ? Shape::kBarriersAt : 0};
}

// The quickest that were measured.
template <typename T, int kBits, int kHalves, bool kZeros>
WideForm form_of(int rows) {
    if (rows <= 16) {
        WideTimes times = kBits == 8 ? kTo16RowsInt8 : rows <= 8 ? kTo8Rows : kTo16Rows;
        if (kBits == 4) {
            const int half = std::is_same_v<T, __half>;
            times.of_128_each += half * kHalfOf128Each + kZeros * kZerosOf128Each;
            times.least += half * kHalfLeast + kZeros * kZerosLeast;
            times.least_of_mb += half * kHalfLeastOfMb + kZeros * kZerosLeastOfMb;
        }
        return rows <= 8
                   ? form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 1, 2, 16, 4> >(times)
                   : form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 2, 2, 16, 4> >(times);
    }
    if (rows <= 32)
        return form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 4, 2, 16, 2> >(kTo32Rows);
    return form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 8, 4, 8, 2> >(kTo64Rows);
}

template <typename T, bool kZeros>
WideForm form_of(const OffloadQuantGemm& a) {
    if (a.bits == 8) return form_of<T, 8, 1, kZeros>(a.rows);
    return a.group < 64 ? form_of<T, 4, 2, kZeros>(a.rows) : form_of<T, 4, 1, kZeros>(a.rows);
}

WideForm form_of(const OffloadQuantGemm& a) {
    if (a.dtype == OFFLOAD_F16)
        return a.zero ? form_of<__half, true>(a) : form_of<__half, false>(a);
    return a.zero ? form_of<__nv_bfloat16, true>(a) : form_of<__nv_bfloat16, false>(a);
}

struct WideCall {
    WideForm form;
    WidePlan plan;
    int blocks, waves;
    double time;
};

int ceil_div(int a, int b) { return (a - 1) / b + 1; }

// Shares out the work among clusters of which `at_once` run at once.
void share_out(const OffloadQuantGemm& a, int cluster_bits, int at_once, WideCall& call) {
    WidePlan& p = call.plan;
    const int cluster = 1 << cluster_bits;
    p.cluster = cluster;
    p.cluster_bits = cluster_bits;
    p.chunks = a.depth / call.form.chunk_depth;
    p.block_chunks = p.chunks / cluster;
    p.longer_blocks = p.chunks % cluster;
    p.tiles = a.outputs / 16;
    const int bundles = a.gated ? p.tiles : ceil_div(p.tiles, 2);
    call.waves = ceil_div(ceil_div(bundles, call.form.bundles), at_once);
    const int clusters = std::min(call.waves * at_once, bundles);
    p.bundles = bundles / clusters;
    p.longer_clusters = bundles % clusters;
    p.groups = a.depth / a.group;
    p.group_shift = 31;  // one group
    if (a.group != a.depth)
        for (p.group_shift = 0; call.form.chunk_depth << p.group_shift < a.group;) ++p.group_shift;
    call.blocks = clusters * cluster;
}

// Where everything lies in shared memory, of which each block gets all. What fits into a block's
// registers has room.
void lay_out(const OffloadQuantGemm& a, const Device& device, WideCall& call) {
    const WideForm& form = call.form;
    WidePlan& p = call.plan;
    if (form.barriers_at > 0) {  // all of it is known to the kernel
        p.stages = p.stage_bytes = p.parts_at = 0;
        p.barriers_at = form.barriers_at;
        return;
    }
    const int most = p.bundles + (p.longer_clusters > 0), slots = most * 2;
    // As in WidePlaces; of fours that pairs share there are second ones.
    const int slots_of_unit = a.gated ? 2 : 1;
    bool paired = false;
    for (int bundles : {p.bundles, most}) {
        const int left = ceil_div(bundles, 2) % form.warpgroups;
        paired = paired || (left > 0 && left * 2 <= form.warpgroups);
    }
    int places = ceil_div(slots / slots_of_unit * form.columns, p.cluster);
    if (paired)
        places += ceil_div(form.warpgroups * 2 / slots_of_unit * form.columns, p.cluster) + 1;
    const int parts = places * p.cluster * slots_of_unit * form.piece_bytes;

    const int room = device.shared_per_block - (2 * form.most_stages + 1) * 8;
    const int all = ceil_div(p.block_chunks + (p.longer_blocks > 0), form.stage_chunks);
    p.stage_bytes = form.input_bytes + slots * form.slot_bytes;
    const int most_stages = std::min(form.most_stages, all);
    p.stages = std::min((room - parts) / p.stage_bytes, most_stages);
    if (p.stages >= std::min(3, all)) {
        p.parts_at = p.stages * p.stage_bytes;
        p.barriers_at = p.parts_at + parts;
    } else {
        p.stages = std::min(room / p.stage_bytes, most_stages);
        p.parts_at = 0;
        p.barriers_at = std::max(p.stages * p.stage_bytes, parts);
    }
}

double time_of(const OffloadQuantGemm& a, const WideCall& call) {
    const WidePlan& p = call.plan;
    const WideTimes& t = call.form.times;
    const int each = ceil_div(p.bundles + (p.longer_clusters > 0), 2);
    return call.waves * (t.ends[p.cluster_bits] + t.ends_each * each +
                         a.depth / 128. / p.cluster * (t.of_128 + t.of_128_each * each));
}

// Below that no call was, whatever its clusters.
double least_time_of(const OffloadQuantGemm& a, const WideTimes& t) {
    return t.least + t.least_of_mb * 1e-6 * a.outputs * (a.gated ? 2 : 1) * a.depth * a.bits / 8;
}

// In the clusters that should be quickest.
int make_call(const OffloadQuantGemm& a, const Device& device, WideCall& call) {
    WideCall tried;
    tried.form = form_of(a);
    bool found = false;
    for (int bits = 0; bits <= kMostClusterBits; ++bits) {
        const int cluster = 1 << bits;
        int at_once = 0;
        if (int status = count_clusters("quant_gemm", tried.form.kernel, tried.form.threads,
                                        device.shared_per_block, device, cluster, &at_once))
            return status;
        if (at_once == 0 || a.depth / tried.form.chunk_depth < cluster) continue;
        share_out(a, bits, at_once, tried);
        tried.time = time_of(a, tried);
        if (!found || tried.time < call.time) call = tried;
        found = true;
    }
    if (!found) return refuse("quant_gemm: this device runs no block of the form for many rows");
    lay_out(a, device, call);
    return 0;
}

}  // namespace

int wide_quant_gemm(const OffloadQuantGemm& a, const Device& device, double time, void* stream,
                    bool& taken) {
    taken = false;
    if (device.major != 9 || device.minor != 0) return 0;
    WideCall call;
    const int status = make_call(a, device, call);
    taken =
        a.rows > kFewRows ||
        (status == 0 && std::max(call.time, least_time_of(a, call.form.times)) + kChange < time);
    if (status || !taken) return status;
    return launch_clusters("quant_gemm", call.form.kernel, call.blocks, call.form.threads,
                           device.shared_per_block, call.plan.cluster, a.launch_early, stream, a,
                           call.plan);
}
#endif

}  // namespace offload
