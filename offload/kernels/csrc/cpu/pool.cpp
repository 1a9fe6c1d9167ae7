// Threads pinned to cores: they spin for a while between jobs, then sleep on a futex.
#include "pool.hpp"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace offload_host {
namespace {

constexpr uint32_t kQueue = 64;  // jobs that may wait; a power of two

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

uint32_t load(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

// Tickets are numbers that wrap.
bool reached(uint32_t count, uint32_t ticket) { return int32_t(count - ticket) >= 0; }

// Returns when the count has reached `ticket`.
void await(const uint32_t& count, uint32_t ticket, int64_t spin_ns) {
    if (reached(load(count), ticket)) return;
    for (const int64_t until = now() + spin_ns; now() < until;)
        for (int i = 0; i < 32; i++) {
            if (reached(load(count), ticket)) return;
            relax();
        }
    for (;;) {
        const uint32_t seen = load(count);
        if (reached(seen, ticket)) return;
        syscall(SYS_futex, &count, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
}

void advance(uint32_t& count, uint32_t ticket) {
    __atomic_store_n(&count, ticket, __ATOMIC_RELEASE);
    syscall(SYS_futex, &count, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

}  // namespace
}  // namespace offload_host

struct Worker {
    OffloadHostPool* pool;
    pthread_t thread;
    int index;
    int cpu;
    uint32_t passed;  // the last job that it is done with, or has no part in
};

// What a thread without a part in a job sees of it: the job itself may be gone by then.
struct Place {
    OffloadHostJob* job;  // null: end
    int first;            // thread that has a part, as all behind it have
};

struct OffloadHostPool {
    pid_t process;
    int threads;
    int64_t spin_ns;
    Worker* workers;
    pthread_mutex_t submitting;
    bool closed;  // guarded by `submitting`
    Place queue[offload_host::kQueue];
    alignas(64) uint32_t submitted;  // tickets begin with 1
    alignas(64) uint32_t completed;
};

namespace offload_host {
namespace {

void record(Job& job, int64_t begin, int64_t end) {
    int64_t seen = __atomic_load_n(&job.first_begin, __ATOMIC_RELAXED);
    while ((seen == 0 || begin < seen) &&
           !__atomic_compare_exchange_n(&job.first_begin, &seen, begin, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    seen = __atomic_load_n(&job.last_end, __ATOMIC_RELAXED);
    while (end > seen && !__atomic_compare_exchange_n(&job.last_end, &seen, end, true,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void* work(void* argument) {
    Worker& me = *static_cast<Worker*>(argument);
    OffloadHostPool& pool = *me.pool;
    for (uint32_t ticket = 1;; ticket++) {
        await(pool.submitted, ticket, pool.spin_ns);
        const Place place = pool.queue[ticket % kQueue];
        __atomic_store_n(&me.passed, ticket, __ATOMIC_RELEASE);
        if (me.index < place.first) continue;
        await(pool.completed, ticket - 1, pool.spin_ns);
        Job* const job = place.job;
        if (job == nullptr) return nullptr;
        const int64_t begin = now();
        job->run(*job, me.index - place.first);
        record(*job, begin, now());
        // The job may be gone as soon as the last thread has said that it is done.
        if (__atomic_sub_fetch(&job->working, 1, __ATOMIC_ACQ_REL) == 0)
            advance(pool.completed, ticket);
    }
}

// Until all threads have seen a job, its place in the queue is taken. They wake up for it, so that
// the loop has a turn only where one of them was kept from its CPU for many jobs.
void await_place(OffloadHostPool& pool, uint32_t ticket) {
    await(pool.completed, ticket, pool.spin_ns);
    for (int i = 0; i < pool.threads; i++)
        while (!reached(load(pool.workers[i].passed), ticket)) sched_yield();
}

// Null ends the threads. False where they have ended already.
bool submit(OffloadHostPool& pool, Job* job) {
    pthread_mutex_lock(&pool.submitting);
    const bool open = !pool.closed;
    if (open) {
        const uint32_t ticket = pool.submitted + 1;
        await_place(pool, ticket - kQueue);
        if (job != nullptr) job->ticket = ticket;
        pool.queue[ticket % kQueue] = {job, job == nullptr ? 0 : pool.threads - job->threads};
        pool.closed = job == nullptr;
        advance(pool.submitted, ticket);
    }
    pthread_mutex_unlock(&pool.submitting);
    return open;
}

// Starts the pool's thread `index`; 0 or an errno.
int begin(OffloadHostPool& pool, int index) {
    Worker& worker = pool.workers[index];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    cpu_set_t* set = CPU_ALLOC(worker.cpu + 1);
    const size_t bytes = CPU_ALLOC_SIZE(worker.cpu + 1);
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(worker.cpu, bytes, set);
    int error = pthread_attr_setaffinity_np(&attributes, bytes, set);
    if (error == 0) error = pthread_create(&worker.thread, &attributes, work, &worker);
    CPU_FREE(set);
    pthread_attr_destroy(&attributes);
    return error;
}

}  // namespace

int pool_threads(const OffloadHostPool& pool) { return pool.threads; }

bool pool_is_foreign(const OffloadHostPool& pool) { return pool.process != getpid(); }

bool pool_submit(OffloadHostPool& pool, Job& job) {
    job.working = job.threads;
    job.first_begin = job.last_end = 0;
    return submit(pool, &job);
}

bool pool_is_done(OffloadHostPool& pool, uint32_t ticket) {
    return reached(load(pool.completed), ticket);
}

void pool_wait(OffloadHostPool& pool, uint32_t ticket) {
    await(pool.completed, ticket, pool.spin_ns);
}

}  // namespace offload_host

OffloadHostPool* offload_host_pool_create(const int32_t* cpus, int32_t count, int32_t spin_us) {
    using namespace offload_host;
    if (cpus == nullptr || count < 1 || count > 1024) {
        refuse("a pool needs 1 to 1024 CPUs, not %d", count);
        return nullptr;
    }
    if (spin_us < 0) {
        refuse("spin_us must be 0 or more, not %d", spin_us);
        return nullptr;
    }
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, sizeof(OffloadHostPool)) != 0) {
        refuse("no memory for a pool");
        return nullptr;
    }
    memset(memory, 0, sizeof(OffloadHostPool));
    OffloadHostPool* const pool = static_cast<OffloadHostPool*>(memory);
    pool->workers = static_cast<Worker*>(calloc(size_t(count), sizeof(Worker)));
    if (pool->workers == nullptr) {
        free(pool);
        refuse("no memory for %d threads", count);
        return nullptr;
    }
    pool->process = getpid();
    pool->spin_ns = int64_t(spin_us) * 1000;
    pthread_mutex_init(&pool->submitting, nullptr);
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    for (int i = 0; i < count && error == 0; i++) {
        pool->workers[i] = {pool, pthread_t(), i, cpus[i], 0};
        error = cpus[i] < 0 ? EINVAL : begin(*pool, i);
        if (error == 0)
            pool->threads++;
        else
            refuse("a thread on CPU %d cannot be started: %s", cpus[i], strerror(error));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error == 0) return pool;
    offload_host_pool_destroy(pool);
    return nullptr;
}

void offload_host_pool_close(OffloadHostPool* pool) {
    using namespace offload_host;
    if (pool == nullptr || pool_is_foreign(*pool) || !submit(*pool, nullptr)) return;
    for (int i = 0; i < pool->threads; i++) pthread_join(pool->workers[i].thread, nullptr);
}

void offload_host_pool_destroy(OffloadHostPool* pool) {
    if (pool == nullptr) return;
    offload_host_pool_close(pool);
    free(pool->workers);
    free(pool);
}
