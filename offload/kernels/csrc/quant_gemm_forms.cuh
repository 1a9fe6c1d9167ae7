// Which products with quantised weights quant_gemm_wide.cu takes, on GPUs that have what it needs.
#pragma once
#include "common.cuh"

namespace offload {

// Up to so many rows, from 9 on, weights of so many bytes are quicker there, measured in bfloat16
// with int4 codes without zero points (no smaller one was measured); with more rows, of which the
// other form reads the weight several times, all are.
constexpr int kFewRows = 16;
constexpr int64_t kLargeWeight = 8'000'000;

bool takes_wide_quant_gemm(const OffloadQuantGemm& a, const Device& device);
// Issues it; its arguments have been checked.
int wide_quant_gemm(const OffloadQuantGemm& a, const Device& device, void* stream);

}  // namespace offload
