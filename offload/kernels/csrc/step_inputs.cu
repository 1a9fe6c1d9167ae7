// A decode step's arguments in one launch: three small copies and a check of the mask cost the host
// more in launches than the GPU in work, and the GPU waits for them.
#include "common.cuh"

namespace offload {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;
constexpr int kAThread = 4;  // elements of the mask, where there are blocks enough

template <typename Bits>
__global__ void __launch_bounds__(kThreads) step_inputs_kernel(OffloadStepInputs a, int blocks) {
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    const int threads = blocks * kThreads;
    for (int b = thread; b < a.batch; b += threads) {
        a.ids_out[b] = a.ids[b * a.ids_stride];
        a.positions_out[b] = a.positions ? a.positions[b * a.positions_stride] : a.past;
    }
    if (!a.mask) return;
    const Bits* mask = static_cast<const Bits*>(a.mask);
    const Bits sign = a.mask_floating ? static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1)) : 0;
    const int64_t elements = static_cast<int64_t>(a.batch) * a.columns;
    bool wrong = false;
    for (int64_t i = thread; i < elements; i += threads) {
        const int64_t row = i / a.columns, column = i % a.columns;
        const Bits bits = mask[row * a.mask_row_stride + column * a.mask_column_stride];
        const bool seen = (bits & static_cast<Bits>(~sign)) != 0;
        wrong |= seen != (!a.start || column >= a.start[row]);
    }
    if (wrong) *a.as_expected = 0;  // whoever finds it: all write the same
}

template <typename Bits>
int launch_step_inputs(const OffloadStepInputs& a, void* stream) {
    const int64_t elements = static_cast<int64_t>(a.batch) * (a.mask ? a.columns : 1);
    const int64_t wanted = (elements + kThreads * kAThread - 1) / (kThreads * kAThread);
    const int blocks = static_cast<int>(wanted < kMostBlocks ? wanted : kMostBlocks);
    return launch("step_inputs", step_inputs_kernel<Bits>, dim3(blocks), dim3(kThreads), 0, stream,
                  false, a, blocks);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_step_inputs(const OffloadStepInputs* arguments, void* stream) {
    using namespace offload;
    const OffloadStepInputs& a = *arguments;
    if (a.batch < 1 || (a.mask && a.columns < 1))
        return refuse("step_inputs: no step has %d rows and a mask of %d columns", a.batch,
                      a.columns);
    if (!a.ids || !a.ids_out || !a.positions_out || (a.mask && !a.as_expected))
        return refuse("step_inputs: ids, an output or as_expected is null");
    if (!a.mask) return launch_step_inputs<uint64_t>(a, stream);
    switch (a.mask_bytes) {
        case 1:
            return launch_step_inputs<uint8_t>(a, stream);
        case 2:
            return launch_step_inputs<uint16_t>(a, stream);
        case 4:
            return launch_step_inputs<uint32_t>(a, stream);
        case 8:
            return launch_step_inputs<uint64_t>(a, stream);
        default:
            return refuse("step_inputs: no mask has elements of %d bytes", a.mask_bytes);
    }
}
