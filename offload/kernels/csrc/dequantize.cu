// Stored weights -> weights at HBM's rate, for every layout of offload/kernels/weight_format.py:
// which form runs, and how it is launched.
//
// The unit of work is 8 neighbours along the depth: 4 or 8 bytes of codes, 16 bytes of a 16-bit
// output. Where codes lie along the depth, loads and stores are contiguous as they are: strips of
// 32 units, or units one by one. Words change their order in tiles; panels are read as they lie.
//
// All is computed in float32 as the reference does, so results are equal to the bit.
#include "dequantize_panels.cuh"
#include "dequantize_plain.cuh"
#include "dequantize_strips.cuh"
#include "dequantize_tile.cuh"
#include "dequantize_units.cuh"

namespace offload {
namespace {

int check_sizes(const OffloadDequantize& a) {
    if (a.rows < 0 || a.depth < 0)
        return refuse("dequantize: there are no %d rows of %d", a.rows, a.depth);
    if (a.code < OFFLOAD_UINT4 || a.code > OFFLOAD_E2M1)
        return refuse("dequantize: no code has the number %d", a.code);
    if (a.order < OFFLOAD_ALONG_DEPTH || a.order > OFFLOAD_PANELS)
        return refuse("dequantize: no order of codes has the number %d", a.order);
    const bool integer = a.code == OFFLOAD_UINT4 || a.code == OFFLOAD_UINT8;
    if (a.order != OFFLOAD_ALONG_DEPTH && !integer)
        return refuse("dequantize: code %d does not lie in words", a.code);
    if (a.order == OFFLOAD_ROW_WORDS && (a.code != OFFLOAD_UINT4 || a.rows % 8))
        return refuse("dequantize: words of rows hold 8 codes of 4 bits, not %d rows of code %d",
                      a.rows, a.code);
    if (a.order == OFFLOAD_DEPTH_WORDS && a.depth % (a.code == OFFLOAD_UINT4 ? 8 : 4))
        return refuse("dequantize: a depth of %d does not divide into words", a.depth);
    if (a.zero_kind < OFFLOAD_ZERO_VALUE || a.zero_kind > OFFLOAD_ZERO_PANELS)
        return refuse("dequantize: no kind of zero has the number %d", a.zero_kind);
    if (a.order == OFFLOAD_PANELS) {
        const int columns = a.code == OFFLOAD_UINT4 ? 64 : 32;
        if (a.rows % kPanelRows || a.depth % columns)
            return refuse("dequantize: %d rows of %d do not divide into panels of %d and %d",
                          a.rows, a.depth, kPanelRows, columns);
        if (a.group_index || a.scale_rows != 1 ||
            (a.group < a.depth && (a.group % 32 || a.depth % a.group)))
            return refuse(
                "dequantize: panels have a scale a row and group of 32 columns, or some times "
                "that, not of %d rows and %d columns",
                a.scale_rows, a.group);
        if (a.scale_dtype != OFFLOAD_F16 && a.scale_dtype != OFFLOAD_BF16)
            return refuse("dequantize: panels have no scales of dtype %d", a.scale_dtype);
    }
    if ((a.order == OFFLOAD_PANELS && a.zero_kind != OFFLOAD_ZERO_VALUE) !=
        (a.zero_kind == OFFLOAD_ZERO_PANELS))
        return refuse("dequantize: codes in the order %d have no zeros of the kind %d", a.order,
                      a.zero_kind);
    if (a.zero_kind == OFFLOAD_ZERO_WORDS && !integer)
        return refuse("dequantize: code %d has no zeros in words", a.code);
    if (a.zero_kind == OFFLOAD_ZERO_ROW_WORDS && a.code != OFFLOAD_UINT4)
        return refuse("dequantize: code %d has no zeros in words of rows", a.code);
    if (a.scale_dtype < OFFLOAD_F32 || a.scale_dtype > OFFLOAD_E8M0)
        return refuse("dequantize: no dtype of scales has the number %d", a.scale_dtype);
    if (a.scale_rows < 1 || a.group < 1)
        return refuse("dequantize: %d rows and %d columns share a scale", a.scale_rows, a.group);
    if (a.variant < 0 || a.variant > 2)
        return refuse("dequantize: variant must be 0 to 2, not %d", a.variant);
    if (a.output_stride < a.depth && a.rows > 1)
        return refuse("dequantize: the output's stride must be at least the depth, %d", a.depth);
    return 0;
}

template <typename T>
int launch_units(const OffloadDequantize& a, const Divisors& d, void* stream) {
    constexpr int kUnits = 4;
    const int64_t units = static_cast<int64_t>(a.rows) * (a.depth / kUnit);
    const int64_t blocks = (units - 1) / (kThreads * kUnits) + 1;
    return launch("dequantize", dequantize_units_kernel<T, kUnits>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a.launch_early, a,
                  d, units);
}

template <typename T, int kCode>
int launch_strips_of(const OffloadDequantize& a, const Strips& s, void* stream) {
    constexpr int kUnits = kCode == OFFLOAD_UINT4 || kCode == OFFLOAD_E2M1 ? 8 : 4;
    const int64_t blocks = (s.count - 1ll) / (kThreads / 32 * kUnits) + 1;
    return launch("dequantize", dequantize_strips_kernel<T, kCode, kUnits>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a.launch_early, a,
                  s);
}

template <typename T>
int launch_strips(const OffloadDequantize& a, const Divisors& d, int group_log2, void* stream) {
    Strips s;
    s.of_row = Divisor(a.depth / kStrip);
    s.scale_rows = d.scale_rows;
    s.group_log2 = group_log2;
    s.count = a.rows * (a.depth / kStrip);
    s.code_stride = static_cast<int>(a.code_stride);
    s.scale_row_stride = static_cast<int>(a.scale_row_stride);
    s.scale_group_stride = static_cast<int>(a.scale_group_stride);
    s.output_stride = static_cast<int>(a.output_stride);
    s.zero_row_stride = static_cast<int>(a.zero_row_stride);
    s.zero_group_stride = static_cast<int>(a.zero_group_stride);
    switch (a.code) {
        case OFFLOAD_UINT4:
            return launch_strips_of<T, OFFLOAD_UINT4>(a, s, stream);
        case OFFLOAD_UINT8:
            return launch_strips_of<T, OFFLOAD_UINT8>(a, s, stream);
        case OFFLOAD_INT8:
            return launch_strips_of<T, OFFLOAD_INT8>(a, s, stream);
        case OFFLOAD_E4M3:
            return launch_strips_of<T, OFFLOAD_E4M3>(a, s, stream);
        default:
            return launch_strips_of<T, OFFLOAD_E2M1>(a, s, stream);
    }
}

// Of a group's columns; 31 where a row is one group, -1 where they are no power of two.
int group_log2(const OffloadDequantize& a) {
    if (a.group >= a.depth) return 31;
    int log2 = 0;
    while ((1 << log2) < a.group) ++log2;
    return 1 << log2 == a.group ? log2 : -1;
}

template <typename T>
int launch_dequantize(const OffloadDequantize& a, void* stream) {
    constexpr int kWidth = 16 / sizeof(T);
    const int code_bytes = a.code == OFFLOAD_UINT4 || a.code == OFFLOAD_E2M1 ? 4 : 8;  // a unit
    const int64_t units = static_cast<int64_t>(a.rows) * (a.depth / kUnit);
    Divisors d;
    d.units = Divisor(a.depth / kUnit > 0 ? a.depth / kUnit : 1);
    d.scale_rows = Divisor(a.scale_rows);
    d.group = Divisor(a.group);
    d.whole_groups = !a.group_index && (a.group % kUnit == 0 || a.group >= a.depth);
    const bool wide_output = a.depth % kUnit == 0 && a.output_stride % kWidth == 0 &&
                             aligned<T, kWidth>(a.output) && units < INT32_MAX;
    int64_t widest = 0;
    for (int64_t stride : {a.code_stride, a.output_stride, a.scale_row_stride, a.scale_group_stride,
                           a.zero_row_stride, a.zero_group_stride})
        widest = stride > widest ? stride : widest;
    const uintptr_t codes = reinterpret_cast<uintptr_t>(a.codes) | a.code_stride;
    if (wide_output && a.order == OFFLOAD_PANELS && codes % 16 == 0 &&
        reinterpret_cast<uintptr_t>(a.scale) % 4 == 0) {
        const bool narrow = a.code == OFFLOAD_UINT4;
        d.units = Divisor(a.depth / (narrow ? 64 : 32));
        const int count = a.rows / kPanelRows * d.units.by;
        const int units = kThreads / 32 * (narrow ? kPanels4 : kPanels8);
        const auto kernel =
            narrow ? dequantize_panels_kernel<T, 4> : dequantize_panels_kernel<T, 8>;
        const int64_t blocks = (count - 1ll) / units + 1;
        return launch("dequantize", kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                      stream, a.launch_early, a, d, count);
    }
    if (wide_output && a.order == OFFLOAD_ALONG_DEPTH && codes % code_bytes == 0 &&
        d.whole_groups) {
        const int log2 = group_log2(a);
        if (a.variant != 1 && a.depth % kStrip == 0 && log2 >= 0 && widest <= INT32_MAX)
            return launch_strips<T>(a, d, log2, stream);
        return launch_units<T>(a, d, stream);
    }
    const bool word_zeros =
        a.zero_kind == OFFLOAD_ZERO_WORDS || a.zero_kind == OFFLOAD_ZERO_ROW_WORDS;
    const bool in_words = a.order == OFFLOAD_DEPTH_WORDS || a.order == OFFLOAD_ROW_WORDS;
    if (wide_output && in_words && codes % 4 == 0 && word_zeros && a.scale_rows == 1 &&
        a.scale_dtype != OFFLOAD_E8M0 &&
        (d.whole_groups || (a.order == OFFLOAD_DEPTH_WORDS && widest <= INT32_MAX &&
                            a.zero_kind == OFFLOAD_ZERO_WORDS))) {
        constexpr int kColumns = kRowBytes / sizeof(T);
        const int column_tiles = (a.depth - 1) / kColumns + 1;
        const int64_t blocks = ((a.rows - 1ll) / kTileRows + 1) * column_tiles;
        if (blocks <= INT32_MAX)
            return launch("dequantize", dequantize_tile_kernel<T>,
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                          a.launch_early, a, d, column_tiles);
    }
    const int64_t blocks = (static_cast<int64_t>(a.rows) * a.depth - 1) / kThreads + 1;
    if (blocks > INT32_MAX)
        return refuse("dequantize: %d rows of %d are too many for one launch", a.rows, a.depth);
    return launch("dequantize", dequantize_plain_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                  dim3(kThreads), 0, stream, a.launch_early, a, d);
}

}  // namespace
}  // namespace offload

OFFLOAD_API int offload_dequantize(const OffloadDequantize* arguments, void* stream) {
    using namespace offload;
    const OffloadDequantize& a = *arguments;
    if (int status = check_sizes(a)) return status;
    if (a.rows == 0 || a.depth == 0) return 0;
    if (!a.codes || !a.scale || !a.output || (a.zero_kind != OFFLOAD_ZERO_VALUE && !a.zero))
        return refuse("dequantize: codes, scale, zero or output is null");
    const Device& device = current_device();
    if (device.index < 0) return -1;
    return by_dtype("dequantize", a.dtype,
                    [&](auto element) { return launch_dequantize<decltype(element)>(a, stream); });
}
