// Threads pinned to cores that do one job after another.
#pragma once
#include "job.hpp"

namespace offload_host {

int pool_threads(const OffloadHostPool& pool);
bool pool_is_foreign(const OffloadHostPool& pool);  // made before this process was forked
// Sets job.ticket. False: the pool is closed.
bool pool_submit(OffloadHostPool& pool, Job& job);
bool pool_is_done(OffloadHostPool& pool, uint32_t ticket);
void pool_wait(OffloadHostPool& pool, uint32_t ticket);

}  // namespace offload_host
