// Decode attention's kernels for everything that the tensor cores do not take.
#include "decode_attention_kernels.cuh"
#include "decode_attention_scalar.cuh"

namespace offload {
namespace decode {

// Caches of 16 bits that come here are rare: of odd sizes, or at odd addresses.
ScalarKernel scalar_kernel(int dtype, int queries) {
    if (dtype == OFFLOAD_F16) return {decode_attention_kernel<ScalarMath<__half, 4>>, 4};
    if (dtype == OFFLOAD_BF16) return {decode_attention_kernel<ScalarMath<__nv_bfloat16, 4>>, 4};
    if (queries <= 4) return {decode_attention_kernel<ScalarMath<float, 4>>, 4};
    return {decode_attention_kernel<ScalarMath<float, 16>>, 16};
}

}  // namespace decode
}  // namespace offload
