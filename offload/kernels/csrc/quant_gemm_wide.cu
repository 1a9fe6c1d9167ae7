// Products of many rows with quantised weights on warpgroups: which kernel of quant_gemm_wide.cuh
// runs, and how it is launched.
//
// Compiled for compute capability 9.0 alone (sm_90a), with OFFLOAD_SM90A defined. Where the
// compiler does not know that, there is nothing in here to be run.
#include <algorithm>

#include "cluster_launch.cuh"
#include "quant_gemm_forms.cuh"
#include "quant_gemm_wide.cuh"

namespace offload {

#ifndef OFFLOAD_SM90A
bool takes_wide_quant_gemm(const OffloadQuantGemm&, const Device&) { return false; }

int wide_quant_gemm(const OffloadQuantGemm&, const Device&, void*) {
    return refuse("quant_gemm: compiled without warpgroups");
}
#else
namespace {

constexpr int kMostClusterBits = 3;

using WideKernel = void (*)(OffloadQuantGemm, WidePlan);

// How long a call takes, in us, as measured on an H200: its ends, by log2 of the blocks of a
// cluster, which wait for each other; and 128 of the depth. Both have a part for each 64 outputs of
// a block.
struct WideTimes {
    double ends[kMostClusterBits + 1], ends_each, of_128, of_128_each;
};
constexpr WideTimes kTo16Rows = {{0., 0.6, 2.2, 3.1}, 0.38, 0.26, 0.103};
constexpr WideTimes kTo32Rows = {{0., 0.3, 2.3, 2.8}, 0.46, 0.43, 0.132};
constexpr WideTimes kTo64Rows = {{0., 1.6, 2.8, 4.2}, 0.64, 0.40, 0.169};

struct WideForm {
    WideKernel kernel;
    WideTimes times;
    int bundles, threads, chunk_depth, shared;  // bundles that a block has room for
};

template <typename T, int kBits, bool kZeros, typename Shape>
WideForm form_of(const WideTimes& times) {
    return {wide_gemm_kernel<T, kBits, kZeros, Shape>,
            times,
            Shape::kSlots / 2,
            Shape::kThreads,
            Shape::kChunkDepth,
            Shape::kShared};
}

// The quickest that were measured.
template <typename T, int kBits, int kHalves, bool kZeros>
WideForm form_of(int rows) {
    if (rows <= 32)
        return form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 4, 2, 16, 2, 5> >(kTo32Rows);
    return form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 8, 4, 8, 2, 4> >(kTo64Rows);
}

template <typename T, bool kZeros>
WideForm form_of(const OffloadQuantGemm& a) {
    if (a.bits == 8) return form_of<T, 8, 1, kZeros>(a.rows);
    return a.group < 64 ? form_of<T, 4, 2, kZeros>(a.rows) : form_of<T, 4, 1, kZeros>(a.rows);
}

WideForm form_of(const OffloadQuantGemm& a) {
    if (a.rows <= kFewRows)
        return form_of<__nv_bfloat16, 4, false, WideShape<4, 1, 2, 2, 16, 4, 3> >(kTo16Rows);
    if (a.dtype == OFFLOAD_F16)
        return a.zero ? form_of<__half, true>(a) : form_of<__half, false>(a);
    return a.zero ? form_of<__nv_bfloat16, true>(a) : form_of<__nv_bfloat16, false>(a);
}

struct WideCall {
    WideForm form;
    WidePlan plan;
    int blocks, waves;
};

int ceil_div(int a, int b) { return (a - 1) / b + 1; }

// Shares out the work among clusters of which `at_once` run at once.
void lay_out(const OffloadQuantGemm& a, int cluster_bits, int at_once, WideCall& call) {
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

double time_of(const OffloadQuantGemm& a, const WideCall& call, int cluster_bits) {
    const WidePlan& p = call.plan;
    const WideTimes& t = call.form.times;
    const int each = ceil_div(p.bundles + (p.longer_clusters > 0), 2);
    return call.waves * (t.ends[cluster_bits] + t.ends_each * each +
                         a.depth / 128. / p.cluster * (t.of_128 + t.of_128_each * each));
}

}  // namespace

bool takes_wide_quant_gemm(const OffloadQuantGemm& a, const Device& device) {
    if (device.major != 9 || device.minor != 0) return false;
    if (a.rows > kFewRows) return true;
    const int64_t codes = int64_t{a.outputs} * (a.gated ? 2 : 1) * a.depth / 2;
    return a.rows > 8 && a.dtype == OFFLOAD_BF16 && a.bits == 4 && a.group >= 64 && !a.zero &&
           codes >= kLargeWeight;
}

int wide_quant_gemm(const OffloadQuantGemm& a, const Device& device, void* stream) {
    WideCall call, tried;
    tried.form = form_of(a);
    double best = 0.;
    for (int bits = 0; bits <= kMostClusterBits; ++bits) {
        const int cluster = 1 << bits;
        int at_once = 0;
        if (int status = count_clusters("quant_gemm", tried.form.kernel, tried.form.threads,
                                        tried.form.shared, device, cluster, &at_once))
            return status;
        if (at_once == 0 || a.depth / tried.form.chunk_depth < cluster) continue;
        lay_out(a, bits, at_once, tried);
        const double time = time_of(a, tried, bits);
        if (bits > 0 && time >= best) continue;
        best = time;
        call = tried;
    }
    return launch_clusters("quant_gemm", call.form.kernel, call.blocks, call.form.threads,
                           call.form.shared, call.plan.cluster, a.launch_early, stream, a,
                           call.plan);
}
#endif

}  // namespace offload
