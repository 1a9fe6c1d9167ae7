// Products with quantised weights: which kernel of quant_gemm.cuh runs, and how it is launched.
#include <algorithm>
#include <limits>

#include "cluster_launch.cuh"
#include "quant_gemm.cuh"
#include "quant_gemm_forms.cuh"

namespace offload {
namespace {

constexpr int kMostRows = 64;
constexpr int kMostAtOnce = 16;  // rows; of more the weight is read several times
constexpr int kMostSize = 1 << 29;
constexpr int kMostBlocks = 1 << 13;
constexpr int kMostCluster = 8;

using QuantKernel = void (*)(OffloadQuantGemm, QuantPlan);

struct QuantForm {
    QuantKernel kernel;
    int tiles, warps, chunk_depth;
    int starts;        // bytes of what sums of a chunk's products start from
    int rings;         // bytes of all warps' rings with their barriers
    int (*sums)(int);  // bytes of a warp and bundle's sums of so many rows
};

template <typename T, int kBits, typename Shape>
QuantForm form_of() {
    return {quant_gemm_kernel<T, kBits, Shape>,
            Shape::kTiles,
            Shape::kWarps,
            Shape::kChunkDepth,
            Shape::kSummedUp ? Shape::kHalves * Shape::kColumns * 64 : 0,
            Shape::kWarps * (Shape::kRingBytes + Shape::kStages * 8),
            QuantSums<Shape>::bytes};
}

// The quickest that were measured on an H200.
template <typename T, int kBits, int kHalves>
QuantForm form_of(int rows) {
    return rows <= 8 ? form_of<T, kBits, QuantShape<kBits, kHalves, 1, 2, 16, 2, 2>>()
                     : form_of<T, kBits, QuantShape<kBits, kHalves, 2, 2, 16, 2, 2>>();
}

template <typename T>
QuantForm form_of(const OffloadQuantGemm& a) {
    if (a.bits == 8) return form_of<T, 8, 1>(a.rows);
    return a.group < 64 ? form_of<T, 4, 2>(a.rows) : form_of<T, 4, 1>(a.rows);
}

QuantForm form_of(const OffloadQuantGemm& a) {
    return a.dtype == OFFLOAD_F16 ? form_of<__half>(a) : form_of<__nv_bfloat16>(a);
}

int check_arguments(const OffloadQuantGemm& a) {
    if (a.dtype != OFFLOAD_F16 && a.dtype != OFFLOAD_BF16)
        return refuse("quant_gemm: dtype %d is neither float16 nor bfloat16", a.dtype);
    if (a.bits != 4 && a.bits != 8)
        return refuse("quant_gemm: bits must be 4 or 8, not %d", a.bits);
    if (a.rows < 0 || a.rows > kMostRows)
        return refuse("quant_gemm: rows must be 0 to %d, not %d", kMostRows, a.rows);
    if (a.outputs < 16 || a.outputs > kMostSize || a.outputs % 16)
        return refuse("quant_gemm: outputs must be a multiple of 16 of 16 to %d, not %d", kMostSize,
                      a.outputs);
    const int chunk_depth = 256 / a.bits;
    if (a.depth < 1 || a.depth > kMostSize || a.depth % chunk_depth)
        return refuse("quant_gemm: the depth must be a multiple of %d, not %d", chunk_depth,
                      a.depth);
    const bool power = a.group > 0 && (a.group & (a.group - 1)) == 0;
    if (a.group != a.depth && !(power && a.group >= 32 && a.depth % a.group == 0))
        return refuse(
            "quant_gemm: group must be the depth, or a power of 2 from 32 on that "
            "divides it, not %d (depth %d)",
            a.group, a.depth);
    if (a.rows > 1 && (a.input_stride < a.depth || a.input_stride % 8))
        return refuse(
            "quant_gemm: the input's stride must be a multiple of 8 of at least the "
            "depth, not %lld",
            static_cast<long long>(a.input_stride));
    if (a.rows > 1 &&
        (a.output_stride < a.outputs || (a.residual && a.residual_stride < a.outputs)))
        return refuse("quant_gemm: strides of output and residual must be at least outputs, %d",
                      a.outputs);
    if (a.activation < OFFLOAD_IDENTITY || a.activation > OFFLOAD_SILU)
        return refuse("quant_gemm: activation %d is unknown", a.activation);
    if (!aligned16(a.input) || !aligned16(a.codes))
        return refuse("quant_gemm: input and codes must lie at multiples of 16 bytes");
    if (reinterpret_cast<uintptr_t>(a.scale) % 4 || reinterpret_cast<uintptr_t>(a.zero) % 2)
        return refuse("quant_gemm: scales must lie at multiples of 4 bytes, zeros of 2");
    return 0;
}

int ceil_div(int a, int b) { return (a - 1) / b + 1; }

struct QuantCall {
    QuantForm form;
    QuantPlan plan;
    int blocks, shared;
    double time;
};

// How long a call takes, in us, as measured on an H200 at up to 8 rows: what it is never below, and
// a MB of codes, once, and once more by how few multiprocessors are busy with them.
struct QuantTimes {
    double least, of_codes, of_busy;
};
constexpr QuantTimes kInt4 = {2.3, 0.105, 0.134}, kInt4Zeros = {2.5, 0.04, 0.22},
                     kInt8 = {1.6, 0.092, 0.135};
// A MB of activations on their way from L2; a row of the sums of a block's bundle; blocks of a
// cluster, which wait for each other and read such a row again.
constexpr double kInputs = 0.113, kSums = 0.015, kFirstDoubling = 1.15, kDoubling = 0.46,
                 kClusterSums = 0.009;

double time_of(const OffloadQuantGemm& a, const Device& device, const QuantCall& call,
               int at_once) {
    const QuantPlan& p = call.plan;
    const QuantTimes& t = a.bits == 8 ? kInt8 : a.zero ? kInt4Zeros : kInt4;
    const double codes = 1e-6 * a.outputs * (a.gated ? 2 : 1) * a.depth * a.bits / 8;
    const double inputs = 2e-6 * a.rows * a.depth * call.blocks / p.cluster;
    const int longest =
        (p.bundles + (p.longer_clusters > 0)) * ceil_div(call.blocks, at_once * p.cluster);
    const int bundles = a.gated ? p.tiles : ceil_div(p.tiles, call.form.tiles);
    const double busy = static_cast<double>(bundles) * p.cluster /
                        (static_cast<double>(longest) * device.multiprocessors);
    double time = t.least + t.of_codes * codes + t.of_busy * codes / busy + kInputs * inputs +
                  kSums * a.rows * longest;
    if (p.cluster > 1) time += kFirstDoubling + kClusterSums * a.rows * longest;
    for (int cluster = 4; cluster <= p.cluster; cluster *= 2) time += kDoubling;
    return time;
}

// Where everything lies if `clusters` of `cluster` blocks share out the work; false where there is
// no room.
bool lay_out(const OffloadQuantGemm& a, const Device& device, int cluster, int clusters,
             QuantCall& call) {
    const QuantForm& form = call.form;
    QuantPlan& p = call.plan;
    p.cluster = cluster;
    p.chunks = a.depth / form.chunk_depth;
    if (p.chunks < cluster) return false;
    p.block_chunks = p.chunks / cluster;
    p.longer_blocks = p.chunks % cluster;
    p.tiles = a.outputs / 16;
    const int bundles = a.gated ? p.tiles : ceil_div(p.tiles, form.tiles);
    clusters = std::min(clusters, bundles);
    p.bundles = bundles / clusters;
    p.longer_clusters = bundles % clusters;
    p.groups = a.depth / a.group;
    p.group_shift = 31;  // one group
    if (a.group != a.depth)
        for (p.group_shift = 0; form.chunk_depth << p.group_shift < a.group;) ++p.group_shift;
    call.blocks = clusters * cluster;

    const int64_t most_chunks = p.block_chunks + (p.longer_blocks > 0);
    const int64_t row_bytes = most_chunks * form.chunk_depth * 2;
    const auto aligned = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    const int64_t pitch = aligned(row_bytes) + 64;  // two rows' pieces meet no bank twice
    const int64_t most_bundles = p.bundles + (p.longer_clusters > 0);
    const int64_t barrier_at = pitch * a.rows;
    const int64_t warps_at = barrier_at + 8;
    const int64_t starts_at = aligned(warps_at + most_bundles * 4);
    const int64_t rings_at = aligned(starts_at + form.starts * most_chunks);
    const int64_t sums_at = aligned(rings_at + form.rings);
    const int64_t shared = sums_at + (form.warps + most_bundles - 1) * form.sums(a.rows);
    if (shared > device.shared_per_block) return false;
    p.input_pitch = static_cast<int>(pitch);
    p.barrier_at = static_cast<int>(barrier_at);
    p.warps_at = static_cast<int>(warps_at);
    p.starts_at = static_cast<int>(starts_at);
    p.rings_at = static_cast<int>(rings_at);
    p.sums_at = static_cast<int>(sums_at);
    call.shared = static_cast<int>(shared);
    return true;
}

// The size of cluster that should be quickest; `found` where there is one with room.
int make_call(const OffloadQuantGemm& a, const Device& device, QuantCall& call, bool& found) {
    QuantCall tried;
    tried.form = form_of(a);
    found = false;
    const int most = device.major >= 9 ? kMostCluster : 1;
    for (int cluster = 1; cluster <= most; cluster *= 2) {
        int clusters = 0;
        if (int status = count_clusters("quant_gemm", tried.form.kernel, tried.form.warps * 32,
                                        device.shared_per_block, device, cluster, &clusters))
            return status;
        if (clusters == 0) continue;
        // More than run at once, where one has no room for the sums of all of its outputs.
        for (int waves = 1; clusters * waves * cluster <= kMostBlocks; waves *= 2) {
            if (!lay_out(a, device, cluster, clusters * waves, tried)) continue;
            tried.time = time_of(a, device, tried, clusters);
            if (!found || tried.time < call.time) call = tried;
            found = true;
            break;
        }
    }
    return 0;
}

int launch_call(const QuantCall& call, const OffloadQuantGemm& a, void* stream) {
    return launch_clusters("quant_gemm", call.form.kernel, call.blocks, call.form.warps * 32,
                           call.shared, call.plan.cluster, a.launch_early, stream, a, call.plan);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_quant_gemm(const OffloadQuantGemm* arguments, void* stream) {
    using namespace offload;
    const OffloadQuantGemm& a = *arguments;
    const Device& device = current_device();
    if (device.index < 0) return -1;
    if (int status = check_arguments(a)) return status;
    if (a.rows == 0) return 0;
    if (!a.input || !a.codes || !a.scale || !a.output)
        return refuse("quant_gemm: input, codes, scale and output must not be null");
    QuantCall few;
    bool has_room = false;
    if (a.rows <= kFewRows)
        if (int status = make_call(a, device, few, has_room)) return status;
    const double time = has_room ? few.time : std::numeric_limits<double>::infinity();
    bool taken = false;
    const int status = wide_quant_gemm(a, device, time, stream, taken);
    if (taken) return status;
    if (has_room) return launch_call(few, a, stream);
    for (int first = 0; first < a.rows;) {
        OffloadQuantGemm part = a;
        part.rows = std::min(a.rows - first, kMostAtOnce);
        QuantCall call;
        for (bool found = false; !found;) {
            if (int status = make_call(part, device, call, found)) return status;
            if (found) break;
            if (part.rows == 1)
                return refuse("quant_gemm: this device has too little shared memory for depth %d",
                              a.depth);
            part.rows = ceil_div(part.rows, 2);  // fewer at once where more have no room
        }
        part.input = static_cast<const uint16_t*>(a.input) + first * a.input_stride;
        part.output = static_cast<uint16_t*>(a.output) + first * a.output_stride;
        if (a.residual)
            part.residual = static_cast<const uint16_t*>(a.residual) + first * a.residual_stride;
        if (first > 0) part.launch_early = 1;  // behind one of this library
        first += part.rows;
        if (int status = launch_call(call, part, stream)) return status;
    }
    return 0;
}
