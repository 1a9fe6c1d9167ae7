// Decode attention's launcher: which math a call takes, and with how many CTAs.
#include <map>
#include <mutex>
#include <tuple>

#include "decode_attention_cluster_plan.cuh"
#include "decode_attention_scalar.cuh"

namespace offload {
namespace decode {
namespace {

constexpr int kMostStages = 5;
// Caches of so many bytes stay in L2 while items that share a KV head read them one by one.
constexpr int64_t kBytesInL2 = 24 << 20;

// How many stages a kernel has in shared memory, and how many of its CTAs run on a multiprocessor;
// no CTAs where it does not fit at all.
struct Fit {
    int stages, ctas;
};

// Which fit is best: the one with the most bytes under way from HBM, among equals of two or more
// CTAs the one with the fewest, whose pieces are the longest. Where caches come from L2, the one
// with the most CTAs.
enum class Want { kBytes, kCtas };

bool better(const Fit& a, const Fit& b, Want want) {
    const int reach = a.ctas * (a.stages - 1), other = b.ctas * (b.stages - 1);
    if (want == Want::kCtas) return a.ctas > b.ctas || (a.ctas == b.ctas && reach > other);
    if (reach != other) return reach > other;
    return (a.ctas > 1) != (b.ctas > 1) ? a.ctas > 1 : a.ctas < b.ctas;
}

// Worked out once a kernel, device and size.
int find_fit(Kernel kernel, int threads, int stage_bytes, int fixed_bytes, const Device& device,
             Want want, Fit* fit) {
    static std::mutex mutex;
    static std::map<std::tuple<int, Kernel, int, int, int, Want>, Fit> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_tuple(device.index, kernel, threads, stage_bytes, fixed_bytes, want);
    const auto found = known.find(key);
    if (found != known.end()) {
        *fit = found->second;
        return 0;
    }
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes attributes;
    if (int status = cuda_status("decode_attention", cudaFuncGetAttributes(&attributes, function)))
        return status;
    const int most = device.shared_per_block - static_cast<int>(attributes.sharedSizeBytes);
    if (int status = cuda_status(
            "decode_attention",
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most)))
        return status;
    if (int status = cuda_status(
            "decode_attention",
            cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared)))
        return status;
    Fit best = {0, 0};
    for (int stages = kMostStages; stages >= 2; --stages) {
        const int shared = stages * stage_bytes + fixed_bytes;
        if (shared > most) continue;
        int ctas = 0;
        if (int status = cuda_status(
                "decode_attention",
                cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, shared)))
            return status;
        if (ctas > 0 && (best.ctas == 0 || better({stages, ctas}, best, want)))
            best = {stages, ctas};
    }
    known.emplace(key, best);
    *fit = best;
    return 0;
}

// Everything that the tensor cores' math reads 16 bytes of at once begins at a multiple of 16.
bool tensor_cores_take(const OffloadDecodeAttention& a) {
    return a.dtype != OFFLOAD_F32 && a.head_dim % 8 == 0 && a.head_dim <= 256 &&
           aligned16(a.query) && aligned16(a.key_cache) && aligned16(a.value_cache) &&
           a.query_batch_stride % 8 == 0 && a.query_head_stride % 8 == 0 &&
           a.cache_batch_stride % 8 == 0 && a.cache_head_stride % 8 == 0;
}

bool fits_l2(const OffloadDecodeAttention& a) {
    return static_cast<int64_t>(a.batch) * a.kv_heads * a.max_length * a.head_dim * 4 <= kBytesInL2;
}

int plan_mma(const OffloadDecodeAttention& a, const Device& device, Plan* plan, Fit* fit) {
    Params& p = plan->params;
    // Large groups are one item, so that HBM is read once; or several, with less to combine each,
    // where it is anyway. A caller that gives `splits` gets the former.
    const bool apart = p.group > 16 && fits_l2(a) && a.splits == 0;
    const int group = apart ? 16 : p.group;
    const MmaKernel m = mma_kernel(a.dtype, a.head_dim, group);
    for (int most_teams = m.most_teams; most_teams > 0; --most_teams) {
        share_heads(plan, most_teams * m.queries_a_team);
        const int teams = divided(p.tile_heads, m.queries_a_team);
        plan->kernel = m.kernel;
        plan->threads = 128 * teams;
        const int stage = m.stage_bytes(teams);
        if (int status = find_fit(m.kernel, plan->threads, stage, m.shared_bytes(teams, 0), device,
                                  apart ? Want::kCtas : Want::kBytes, fit))
            return status;
        if (fit->ctas == 0) continue;
        p.stages = fit->stages;
        plan->shared = m.shared_bytes(teams, fit->stages);
        return 0;
    }
    return 0;
}

int plan_scalar(const OffloadDecodeAttention& a, const Device& device, Plan* plan, Fit* fit) {
    Params& p = plan->params;
    const int element = a.dtype == OFFLOAD_F32 ? 4 : 2;
    const ScalarKernel s = scalar_kernel(a.dtype, p.group);
    share_heads(plan, s.queries);
    plan->kernel = s.kernel;
    plan->threads = kScalarThreads;
    const uintptr_t places = reinterpret_cast<uintptr_t>(a.key_cache) |
                             reinterpret_cast<uintptr_t>(a.value_cache) |
                             static_cast<uintptr_t>(a.cache_batch_stride * element) |
                             static_cast<uintptr_t>(a.cache_head_stride * element) |
                             static_cast<uintptr_t>(a.head_dim * element);
    p.unit = places % 16 == 0 ? 16 : places % 4 == 0 ? 4 : element;
    for (p.columns = 64; p.columns >= 4; p.columns /= 2) {
        const ScalarShape shape(p.padded_dim, element, p.columns, s.queries);
        if (p.columns > 8 && shape.stage_bytes() > 36 * 1024) continue;
        if (int status = find_fit(plan->kernel, plan->threads, shape.stage_bytes(),
                                  shape.shared_bytes(0), device, Want::kBytes, fit))
            return status;
        if (fit->ctas == 0) continue;
        p.stages = fit->stages;
        plan->shared = shape.shared_bytes(fit->stages);
        return 0;
    }
    return refuse("decode_attention: head_dim %d does not fit this GPU's shared memory",
                  a.head_dim);
}

int64_t slots_of(const Plan& plan) {
    return 2 * static_cast<int64_t>(plan.grid) * plan.params.tile_heads;
}

// Without looking at what only a launch needs.
int make_plan(const OffloadDecodeAttention& a, Plan* plan) {
    if (a.dtype != OFFLOAD_F32 && a.dtype != OFFLOAD_F16 && a.dtype != OFFLOAD_BF16)
        return refuse("decode_attention: dtype %d is not supported", a.dtype);
    if (a.batch < 0 || a.batch > (1 << 24))
        return refuse("decode_attention: batch %d must be 0 to %d", a.batch, 1 << 24);
    if (a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads)
        return refuse("decode_attention: %d heads must be a multiple of %d kv_heads", a.heads,
                      a.kv_heads);
    if (a.head_dim < 1 || a.head_dim > kMostDim)
        return refuse("decode_attention: head_dim %d must be 1 to %d", a.head_dim, kMostDim);
    if (a.max_length < 1)
        return refuse("decode_attention: max_length %d must be at least 1", a.max_length);
    if (a.window < 0) return refuse("decode_attention: window %d must not be negative", a.window);
    if (!(a.softcap >= 0.f))
        return refuse("decode_attention: softcap %g must not be negative", a.softcap);
    if (a.splits < 0 || a.splits > kMostShares)
        return refuse("decode_attention: splits %d must be 0 to %d", a.splits, kMostShares);
    if (a.variant < 0)
        return refuse("decode_attention: variant %d must not be negative", a.variant);
    const Device& device = current_device();
    if (device.index < 0) return static_cast<int>(cudaErrorInvalidDevice);

    *plan = {};
    Params& p = plan->params;
    p.query = a.query;
    p.key = a.key_cache;
    p.value = a.value_cache;
    p.output = a.output;
    p.start = a.start;
    p.length = a.length;
    p.slopes = a.slopes;
    p.sinks = a.sinks;
    p.counters = a.counters;
    p.query_batch = a.query_batch_stride;
    p.query_head = a.query_head_stride;
    p.cache_batch = a.cache_batch_stride;
    p.cache_head = a.cache_head_stride;
    p.scale = a.scale;
    p.softcap = a.softcap;
    p.batch = a.batch;
    p.heads = a.heads;
    p.head_dim = a.head_dim;
    p.padded_dim = divided(a.head_dim, 4) * 4;
    p.group = a.heads / a.kv_heads;
    p.max_length = a.max_length;
    p.window = a.window;

    Fit fit = {0, 0};
    if (tensor_cores_take(a)) {
        if (int status = plan_clusters(a, device, fits_l2(a), plan)) return status;
        if (plan->cluster > 0) return 0;
        if (int status = plan_mma(a, device, plan, &fit)) return status;
        p.columns = 64;
    }
    if (a.variant > kNoClusters && a.batch > 0)
        return refuse("decode_attention: variant %d is not for this dtype, head_dim or alignment",
                      a.variant);
    if (fit.ctas == 0)
        if (int status = plan_scalar(a, device, plan, &fit)) return status;
    p.items = a.kv_heads * p.head_tiles;
    p.room = plan->shared / static_cast<int>(sizeof(float2));
    const int64_t most = static_cast<int64_t>(a.batch) * p.items * divided(a.max_length, p.columns);
    const int64_t wanted = a.splits ? a.splits : fit.ctas * device.multiprocessors;
    plan->grid = static_cast<int>(min(min(wanted, static_cast<int64_t>(kMostShares)), most));
    plan->workspace_bytes = slots_of(*plan) * (p.padded_dim * sizeof(float) + sizeof(float2));
    return 0;
}

}  // namespace
}  // namespace decode
}  // namespace offload

OFFLOAD_API int64_t offload_decode_attention_workspace(const OffloadDecodeAttention* arguments) {
    using namespace offload;
    decode::Plan plan;
    if (int status = decode::make_plan(*arguments, &plan)) return status < 0 ? status : -status;
    return plan.workspace_bytes;
}

OFFLOAD_API int offload_decode_attention(const OffloadDecodeAttention* arguments, void* stream) {
    using namespace offload;
    const OffloadDecodeAttention& a = *arguments;
    decode::Plan plan;
    if (int status = decode::make_plan(a, &plan)) return status;
    if (a.batch == 0) return 0;
    if (!a.query || !a.key_cache || !a.value_cache || !a.output || !a.length)
        return refuse("decode_attention: query, caches, output and length must not be null");
    if (!a.counters) return refuse("decode_attention: counters must not be null");
    if (!a.workspace || !aligned16(a.workspace) || a.workspace_bytes < plan.workspace_bytes)
        return refuse(
            "decode_attention: workspace must be %lld bytes at a multiple of 16, not "
            "%lld at %p",
            static_cast<long long>(plan.workspace_bytes), static_cast<long long>(a.workspace_bytes),
            static_cast<const void*>(a.workspace));
    plan.params.sums = a.workspace;
    if (plan.cluster > 0)
        return launch_clusters("decode_attention", plan.kernel, plan.grid, plan.threads,
                               plan.shared, plan.cluster, a.launch_early != 0, stream, plan.params);
    plan.params.stats =
        reinterpret_cast<float2*>(a.workspace + decode::slots_of(plan) * plan.params.padded_dim);
    return launch("decode_attention", plan.kernel, dim3(plan.grid), dim3(plan.threads), plan.shared,
                  stream, a.launch_early != 0, plan.params);
}
