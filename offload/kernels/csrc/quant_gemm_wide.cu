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

struct WideForm {
    WideKernel kernel;
    int bundles, threads, chunk_depth, shared;  // bundles that a block has room for
    // The time of 128 of the depth, and what each further 64 outputs add up to `most`; measured on
    // an H200, in us.
    double base, each;
    int most;
};

template <typename T, int kBits, bool kZeros, typename Shape>
WideForm form_of(double base, double each, int most) {
    return {wide_gemm_kernel<T, kBits, kZeros, Shape>,
            Shape::kSlots / 2,
            Shape::kThreads,
            Shape::kChunkDepth,
            Shape::kShared,
            base,
            each,
            most};
}

// The quickest that were measured.
template <typename T, int kBits, int kHalves, bool kZeros>
WideForm form_of(int rows) {
    if (rows <= 32)
        return form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 4, 2, 16, 2, 5> >(0.3, 0.26, 4);
    return form_of<T, kBits, kZeros, WideShape<kBits, kHalves, 8, 4, 8, 2, 4> >(1.2, 0.14, 8);
}

template <typename T, bool kZeros>
WideForm form_of(const OffloadQuantGemm& a) {
    if (a.bits == 8) return form_of<T, 8, 1, kZeros>(a.rows);
    return a.group < 64 ? form_of<T, 4, 2, kZeros>(a.rows) : form_of<T, 4, 1, kZeros>(a.rows);
}

WideForm form_of(const OffloadQuantGemm& a) {
    if (a.rows <= kFewRows)
        return form_of<__nv_bfloat16, 4, false, WideShape<4, 1, 2, 2, 16, 4, 3> >(0.15, 0.235, 4);
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
void lay_out(const OffloadQuantGemm& a, int cluster, int at_once, WideCall& call) {
    WidePlan& p = call.plan;
    p.cluster = cluster;
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

// How long it should take, in us: beside the depth, blocks begin and end, and those of a cluster
// wait for each other.
double time_of(const OffloadQuantGemm& a, const WideCall& call, int cluster_bits) {
    constexpr double kEnds[] = {2., 4.5, 5.7, 11.5};
    const WidePlan& p = call.plan;
    const int outputs = ceil_div(p.bundles + (p.longer_clusters > 0), 2);
    const double of_128 = call.form.base + call.form.each * std::min(outputs, call.form.most);
    return call.waves * (kEnds[cluster_bits] + a.depth / 128. / p.cluster * of_128);
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
        lay_out(a, cluster, at_once, tried);
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
