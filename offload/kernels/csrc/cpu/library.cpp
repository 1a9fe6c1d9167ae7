// The C interface: which path runs, jobs, and starting them.
#include <stdlib.h>
#include <string.h>

#include "pool.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace offload_host {
namespace {

using Run = void (*)(Job& job, int worker);

#if defined(__x86_64__)
constexpr Run kRuns[OFFLOAD_HOST_PATHS] = {nullptr,    run_portable,    run_avx2,
                                           run_avx512, run_avx512_bf16, run_amx};

bool has_f16c() {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

// Tiles of bf16 and int8; the system keeps what they hold only for processes that ask for it.
bool has_tiles() {
    constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    unsigned a, b, c, d = 0;
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted &&
           syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

int32_t supported() {
    __builtin_cpu_init();
    int32_t paths = 1 << OFFLOAD_HOST_PORTABLE;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return paths;
    paths |= 1 << OFFLOAD_HOST_AVX2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return paths;
    paths |= 1 << OFFLOAD_HOST_AVX512;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni"))
        return paths;
    paths |= 1 << OFFLOAD_HOST_AVX512_BF16;
    if (has_tiles()) paths |= 1 << OFFLOAD_HOST_AMX;
    return paths;
}
#else
constexpr Run kRuns[OFFLOAD_HOST_PATHS] = {nullptr, run_portable};

int32_t supported() { return 1 << OFFLOAD_HOST_PORTABLE; }
#endif

// Processors' own prefetching follows plain reads, but not keys and values that have turns of
// arithmetic between them. Measured on Emerald Rapids and on Zen 4.
void choose_prefetch(OffloadHostAttention& call) {
    constexpr int32_t kDistance = 32768;
    if (call.prefetch < 0) call.prefetch = OFFLOAD_HOST_PREFETCH_L2;
    if (call.prefetch_distance == 0) call.prefetch_distance = kDistance;
}

int choose(Job& job) {
    const int32_t paths = offload_host_paths();
    int32_t path = job.call.path;
    if (path < 0 || path >= OFFLOAD_HOST_PATHS)
        return refuse("path must be 0 to %d, not %d", OFFLOAD_HOST_PATHS - 1, path);
    if (path == OFFLOAD_HOST_AUTO)
        for (int32_t p = 1; p < OFFLOAD_HOST_PATHS; p++)
            if (paths >> p & 1) path = p;
    if (!(paths >> path & 1)) return refuse("this CPU cannot run path %d", path);
    job.run = kRuns[path];
    return 0;
}

}  // namespace
}  // namespace offload_host

using namespace offload_host;

int32_t offload_host_abi(void) { return OFFLOAD_HOST_ABI; }

int64_t offload_host_struct_size(void) { return sizeof(OffloadHostAttention); }

int32_t offload_host_paths(void) {
    static const int32_t paths = supported();
    return paths;
}

OffloadHostJob* offload_host_job_create(void) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignof(OffloadHostJob), sizeof(OffloadHostJob)) != 0) {
        refuse("no memory for a job");
        return nullptr;
    }
    const OffloadHostJob empty;
    memcpy(memory, &empty, sizeof empty);
    return static_cast<OffloadHostJob*>(memory);
}

void offload_host_job_destroy(OffloadHostJob* job) {
    if (job == nullptr) return;
    free(job->memory);
    free(job);
}

int offload_host_start(OffloadHostPool* pool, OffloadHostJob* job,
                       const OffloadHostAttention* arguments) {
    if (pool == nullptr || job == nullptr || arguments == nullptr)
        return refuse("pool, job and arguments must not be null");
    if (pool_is_foreign(*pool))
        return refuse(
            "the pool's threads did not come along when this process was forked; make a "
            "new pool");
    if (!offload_host_is_done(job)) return refuse("the job is still running; wait for it first");
    job->pool = nullptr;  // nothing to wait for, should it be refused
    job->call = *arguments;
    choose_prefetch(job->call);
    if (choose(*job) || plan(*job, pool_threads(*pool))) return -1;
    if (!pool_submit(*pool, *job)) return refuse("the pool is closed");
    job->pool = pool;
    return 0;
}

int offload_host_wait(OffloadHostJob* job) {
    if (job == nullptr) return refuse("job must not be null");
    if (job->pool == nullptr) return 0;
    if (pool_is_foreign(*job->pool))
        return refuse("the job was started before this process was forked, and runs in the other");
    pool_wait(*job->pool, job->ticket);
    job->pool = nullptr;
    return 0;
}

int offload_host_is_done(const OffloadHostJob* job) {
    return job->pool == nullptr || pool_is_foreign(*job->pool) ||
           pool_is_done(*job->pool, job->ticket);
}

double offload_host_seconds(const OffloadHostJob* job) {
    return double(job->last_end - job->first_begin) * 1e-9;
}

uint64_t offload_host_checksum(const OffloadHostJob* job) { return job->checksum; }

int64_t offload_host_bytes_read(const OffloadHostJob* job) { return job->bytes_read; }
