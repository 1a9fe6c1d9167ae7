// Which products with quantised weights quant_gemm_wide.cu takes, on GPUs that have what it needs.
#pragma once
#include "common.cuh"

namespace offload {

// Of more rows all are taken there; of so many those that should be quicker there.
constexpr int kFewRows = 8;

// `time`: how long the other form should take, in us, where there are few rows.
bool takes_wide_quant_gemm(const OffloadQuantGemm& a, const Device& device, double time);
// Issues it; its arguments have been checked.
int wide_quant_gemm(const OffloadQuantGemm& a, const Device& device, void* stream);

}  // namespace offload
