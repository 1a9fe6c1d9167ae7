// Which products with quantised weights quant_gemm_wide.cu takes, on GPUs that have what it needs.
#pragma once
#include "common.cuh"

namespace offload {

// Of more rows all are taken there; of so many those that should be quicker there.
constexpr int kFewRows = 8;

// Issues the product, whose arguments have been checked, where it takes it, and says so in `taken`.
// `time`: how long the other form should take, in us, where there are few rows.
int wide_quant_gemm(const OffloadQuantGemm& a, const Device& device, double time, void* stream,
                    bool& taken);

}  // namespace offload
