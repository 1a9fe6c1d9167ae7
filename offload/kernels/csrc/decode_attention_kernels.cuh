// The kernels that decode attention's launcher chooses among. Each kind is compiled in a file of
// its own, so that files are compiled side by side.
#pragma once
#include "common.cuh"

namespace offload {
namespace decode {

struct Params;
using Kernel = void (*)(Params);

// Shares of all columns by tensor cores; an item has up to most_teams * queries_a_team queries.
struct MmaKernel {
    Kernel kernel;
    int most_teams, queries_a_team;
    int (*stage_bytes)(int teams);
    int (*shared_bytes)(int teams, int stages);
};
// Of float16 or bfloat16 heads of up to 256 elements; `queries` are an item's, or fewer.
MmaKernel mma_kernel(int dtype, int head_dim, int queries);

// The same by any multiprocessor's float32; an item has up to as many queries.
struct ScalarKernel {
    Kernel kernel;
    int queries;
};
ScalarKernel scalar_kernel(int dtype, int queries);

// Clusters of CTAs by tensor cores (sm_90); an item has up to `heads` queries.
struct ClusterKernel {
    Kernel kernel;
    int heads;
    int (*ring_bytes)(int stages);
    int (*strip_bytes)();
    int (*shared_bytes)(int warps, int stages, int cluster);
    int (*slot)(int cluster);
};
ClusterKernel cluster_kernel(int dtype, int head_dim, int queries);

}  // namespace decode
}  // namespace offload
