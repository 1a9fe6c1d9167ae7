// The library's C interface: one argument struct and one launcher an op.
//
// A launcher checks what it can see on the host, launches on `stream` (a cudaStream_t) and returns
// 0; below zero is a refused argument, above zero a CUDA error, and offload_last_error() has the
// words for either. Nothing synchronises, allocates or reads device memory on the host, so every
// launch may be captured in a graph. Pointers are device memory; a null pointer means "without".
// Rows lie contiguous unless a stride says otherwise; strides count elements.
//
// The structs hold 8-byte fields first and are mirrored by offload/kernels/structs.py;
// offload_struct_size() lets the mirror check itself when it loads the library.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OFFLOAD_KERNELS_ABI 1

enum OffloadDtype { OFFLOAD_F32 = 0, OFFLOAD_F16 = 1, OFFLOAD_BF16 = 2 };
enum OffloadNormKind { OFFLOAD_NORM_NONE = 0, OFFLOAD_NORM_LAYER = 1, OFFLOAD_NORM_RMS = 2 };
enum OffloadActivationKind {
    OFFLOAD_IDENTITY = 0,
    OFFLOAD_RELU = 1,
    OFFLOAD_GELU = 2,       // x * Phi(x), by erf
    OFFLOAD_GELU_TANH = 3,  // its tanh approximation ("gelu_new", "gelu_pytorch_tanh")
    OFFLOAD_SILU = 4
};

// y = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, or without mean and bias
// (RMS).
typedef struct {
    const void* weight;  // [width]; null: ones
    const void* bias;    // [width]; null: zeros
    float eps;
    float weight_offset;  // 1 where a checkpoint stores weight - 1 (Gemma), else 0
    int32_t kind;         // OffloadNormKind
    int32_t reserved;
} OffloadNorm;

// sum = residual + branch_norm(branch[0] + bias[0]) + (branch[1] + bias[1]); output = norm(sum);
// output2 = norm2(sum). All of it in float32, rounded where it is written; `sum` may be `residual`
// itself.
typedef struct {
    const void* residual;   // [rows, width]
    const void* branch[2];  // [rows, width] each
    const void* bias[2];    // [width] each
    void* sum;              // [rows, width]; null: not kept
    void* output;           // [rows, width]; null: not wanted
    void* output2;          // [rows, width]; null: not wanted
    OffloadNorm branch_norm;
    OffloadNorm norm;
    OffloadNorm norm2;
    int64_t rows;
    int32_t width;
    int32_t dtype;
    int32_t launch_early;  // programmatic dependent launch: only behind a kernel of this library on
                           // the same stream
    int32_t packs_per_thread;  // of 16 bytes, 1 to 4; 0: chosen by the library
} OffloadResidualNorm;

// Splits rows of QKV products, adds their bias, normalises heads (q_norm, k_norm: over head_dim),
// rotates the first rotary_dim of each head, writes queries to `query` and keys and values into the
// cache, in one pass. Head h of kv group g = h / (heads / kv_heads): its query begins at q_offset +
// g * group_stride + (h % (heads / kv_heads)) * head_dim of the row, the group's key at k_offset +
// g * group_stride (values likewise) for interleaved layouts; where queries, keys and values lie
// apart, group strides differ: q_group_stride, kv_group_stride.
typedef struct {
    const void* qkv;   // [batch * tokens, row_stride]
    const void* bias;  // laid out as a row of qkv; null
    void* query;  // element (b, t, h, 0) at b * query_batch_stride + t * query_token_stride + h *
                  // query_head_stride
    void* key_cache;  // element (b, g, column, 0) at b * cache_batch_stride + g * cache_head_stride
                      // + column * head_dim
    void* value_cache;
    const float* cos;  // [batch, tokens, rotary_dim / 2], row b at b * rotary_batch_stride; null:
                       // no rotation
    const float* sin;
    const int32_t*
        column;  // where row b's first token goes in the cache: column[b * column_stride]
    OffloadNorm q_norm;
    OffloadNorm k_norm;
    int64_t row_stride;
    int64_t q_offset, k_offset, v_offset;
    int64_t q_group_stride, kv_group_stride;
    int64_t query_batch_stride, query_token_stride, query_head_stride;
    int64_t cache_batch_stride, cache_head_stride;
    int64_t rotary_batch_stride;
    int32_t column_stride;   // 0: all rows share column[0]
    int32_t cache_capacity;  // columns; a token beyond them is not written
    int32_t batch, tokens, heads, kv_heads, head_dim;
    int32_t rotary_dim;
    int32_t interleaved;  // 1: pairs (2i, 2i + 1), as GPT-J; 0: halves (i, i + rotary_dim / 2)
    int32_t dtype;
    int32_t launch_early;
    int32_t variant;  // the most heads of a thread, 1 to 8, if it has several of a row; 0: chosen
                      // by the library
} OffloadRotaryAppend;

// output = act(input + bias), or with a gate act(gate + bias) * (up + bias), where a row of input
// is [gate, up].
typedef struct {
    const void* input;  // [rows, width] or [rows, 2 * width]
    const void* bias;   // [width] or [2 * width]; null
    void* output;       // [rows, width]
    int64_t rows;
    int64_t input_stride;
    int32_t width;
    int32_t activation;  // OffloadActivationKind
    int32_t gated;
    int32_t dtype;
    int32_t launch_early;
    int32_t reserved;
} OffloadActivation;

// The most CTAs that share a call's work, and the counters that they use.
#define OFFLOAD_DECODE_ATTENTION_SHARES 1024
#define OFFLOAD_DECODE_ATTENTION_COUNTERS (3 * OFFLOAD_DECODE_ATTENTION_SHARES)

// One query a sequence against its cache. Column j of row b is seen if start[b] <= j < length[b]
// and, with a window, j >= length[b] - window. score = softcap(scale * q.k) + slope * j; a sink
// adds exp(sink) to the sum of the softmax. A row that sees nothing gives zeros.
typedef struct {
    const void* query;  // element (b, h, 0) at b * query_batch_stride + h * query_head_stride
    const void* key_cache;
    const void* value_cache;
    void* output;           // [batch, heads, head_dim]
    const int32_t* start;   // [batch]; null: 0
    const int32_t* length;  // [batch]
    const float* slopes;    // [heads], ALiBi; null
    const float* sinks;     // [heads]; null
    float* workspace;       // partial results of the splits
    uint32_t*
        counters;  // [OFFLOAD_DECODE_ATTENTION_COUNTERS], zero before the first call; left zero
    int64_t workspace_bytes;
    int64_t query_batch_stride, query_head_stride;
    int64_t cache_batch_stride, cache_head_stride;
    float scale;
    float softcap;  // 0: none
    int32_t batch, heads, kv_heads, head_dim;
    int32_t max_length;  // columns beyond it are not looked at
    int32_t window;      // 0: none
    int32_t splits;      // most shares of the batch's columns, one a CTA, at most
                         // OFFLOAD_DECODE_ATTENTION_SHARES; 0: chosen by the library
    int32_t dtype;
    int32_t launch_early;  // reads ahead of time: lengths, starts and every row's visible columns
                           // but its last were written before the stream's latest launch that was
                           // not early; queries and last columns may come from it or a later one
    int32_t variant;  // 0: chosen by the library; 1: shares of all columns; else clusters of CTAs
                      // an item: cluster + 100 * warps a CTA + 10000 * strips in flight a warp,
                      // with clusters of 1, 2, 4, 8 or 16, warps 4 or 8, strips 1 to 4, and at most
                      // `splits` clusters unless there are more items
    int32_t even;     // whether rows are known to see about as many columns each: a hint
    int32_t reserved;
} OffloadDecodeAttention;

// output = act(norm(input) @ weight.T + bias) + residual for a few rows; with a gate the weight has
// 2 * outputs rows, gate first: output = act(gate) * up + residual. Partial sums are float32, added
// in a fixed order.
typedef struct {
    const void* input;     // [rows, depth] at input_stride
    const void* weight;    // [outputs or 2 * outputs, depth] at weight_stride
    const void* bias;      // [outputs or 2 * outputs]; null
    const void* residual;  // [rows, outputs] at residual_stride; null
    void* output;          // [rows, outputs] at output_stride; may be `residual`
    float* workspace;      // partial sums where the depth is split
    uint32_t*
        counters;  // offload_skinny_gemm_counters() of them, zero before the first call; left zero
    int64_t workspace_bytes;
    int64_t input_stride, weight_stride, residual_stride, output_stride;
    OffloadNorm norm;  // of the input's rows
    int32_t rows, outputs, depth;
    int32_t activation;  // OffloadActivationKind
    int32_t gated;
    int32_t variant;  // 0: chosen by the library; else 1 + index of a configuration
                      // (offload_skinny_gemm_variants)
    int32_t splits;   // of the depth, for 16 bits at most 2; 0: chosen by the library
    int32_t dtype;
    int32_t launch_early;
    int32_t reserved;
} OffloadSkinnyGemm;

// How a code becomes a number: unsigned integers of 4 or 8 bits, int8, float8 e4m3fn, and e2m1 (a
// sign, two bits of exponent, one of mantissa).
enum OffloadCode {
    OFFLOAD_UINT4 = 0,
    OFFLOAD_UINT8 = 1,
    OFFLOAD_INT8 = 2,
    OFFLOAD_E4M3 = 3,
    OFFLOAD_E2M1 = 4
};
// How codes lie, the lowest bits first.
enum OffloadCodeOrder {
    OFFLOAD_ALONG_DEPTH = 0,  // a row's codes next to each other: [rows, depth]
    OFFLOAD_DEPTH_WORDS = 1,  // int32 words of neighbours along the depth: [depth / codes, rows]
    OFFLOAD_ROW_WORDS = 2,    // words of neighbouring rows: [depth, rows / 8]; the 4 bits at 4 i
                              // belong to row (0, 2, 4, 6, 1, 3, 5, 7)[i] of the 8
    OFFLOAD_PANELS = 3  // [rows / 16, depth / (256 / bits), 512] bytes, see panels.cuh; scales
                        // of 16 bits, [rows / 16, groups, 8, 2], of the rows i and 8 + i
};
enum OffloadZeroKind {
    OFFLOAD_ZERO_VALUE = 0,      // zero_value, everywhere
    OFFLOAD_ZERO_WORDS = 1,      // int32 words of neighbouring rows
    OFFLOAD_ZERO_ROW_WORDS = 2,  // the same in the order of OFFLOAD_ROW_WORDS
    OFFLOAD_ZERO_BYTES = 3,      // int8
    OFFLOAD_ZERO_PANELS = 4      // bytes as OFFLOAD_PANELS' scales; two of 4 bits in one
};
// A scale that is a power of two, 2^(byte - 127); beside the values of OffloadDtype.
#define OFFLOAD_E8M0 3

// output[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] in float32, rounded once, to the nearest
// (ties to even); g = group_index ? group_index[k] : k / group.
typedef struct {
    const void* codes;
    const void* scale;           // element (n, g) at n / scale_rows * scale_row_stride + g *
                                 // scale_group_stride
    const void* zero;            // bytes likewise; words: row n is in that at n / (32 / bits) *
                                 // zero_row_stride + g * zero_group_stride
    const int32_t* group_index;  // [depth]; null
    void* output;                // [rows, depth] at output_stride
    int64_t code_stride;         // bytes, from row to row of the codes' own layout
    int64_t scale_row_stride, scale_group_stride;
    int64_t zero_row_stride, zero_group_stride;
    int64_t output_stride;
    int32_t rows, depth;
    int32_t scale_rows;  // rows that share a scale
    int32_t group;       // columns that share a scale
    int32_t code, order, zero_kind;
    int32_t zero_value;   // what stands for zero; with words: what is added to those stored, modulo
                          // 2^bits
    int32_t scale_dtype;  // OffloadDtype, or OFFLOAD_E8M0
    int32_t dtype;        // of the output
    int32_t launch_early;  // the stored tensors must be in place before the kernel ahead ends
    int32_t variant;       // 0: chosen by the library; for codes along the depth 1: by units of 8;
                           // 2: by strips of 256 where there are such
} OffloadDequantize;

// output = act(input @ weight.T + bias) + residual for up to 64 rows, with a gate as in
// OffloadSkinnyGemm; weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], g = k / group. The
// weight lies in panels (panels.cuh), gate rows first; sums are float32, added in a fixed order.
typedef struct {
    const void* input;     // [rows, depth] at input_stride
    const void* codes;     // unsigned, of `bits` bits, in panels of the weight's rows
    const void* scale;     // [rows of the weight / 16, groups, 8, 2], of the dtype
    const void* zero;      // bytes likewise, two of 4 bits in one; null: 2^(bits - 1)
    const void* bias;      // [outputs or 2 * outputs]; null
    const void* residual;  // [rows, outputs] at residual_stride; null
    void* output;          // [rows, outputs] at output_stride; may be `residual`
    int64_t input_stride, residual_stride, output_stride;
    int32_t rows, outputs, depth;
    int32_t group;       // columns that share a scale: 32, 64, 128 ..., or the depth
    int32_t bits;        // 4 or 8
    int32_t activation;  // OffloadActivationKind
    int32_t gated;
    int32_t dtype;         // OFFLOAD_F16 or OFFLOAD_BF16
    int32_t launch_early;  // the weight must be in place before the kernel ahead ends
    int32_t reserved;
} OffloadQuantGemm;

// A decode step's arguments, taken to places that stay, and its mask held against what is expected:
// nonzero from start[b] on, and zero before.
typedef struct {
    const int64_t* ids;        // row b's at b * ids_stride
    const int64_t* positions;  // row b's at b * positions_stride; null: `past` for all rows
    const void* mask;  // element (b, j) at b * mask_row_stride + j * mask_column_stride; null: not
                       // looked at
    const int32_t* start;    // [batch]; null: 0
    int64_t* ids_out;        // [batch]
    int64_t* positions_out;  // [batch]
    uint8_t* as_expected;    // set to 0 where the mask is not, else left alone; host memory that
                             // the device sees will do
    int64_t past;
    int64_t ids_stride, positions_stride, mask_row_stride, mask_column_stride;
    int32_t batch, columns;
    int32_t mask_bytes;     // of an element: 1, 2, 4 or 8
    int32_t mask_floating;  // whether a sign alone is zero
} OffloadStepInputs;

// Rows as int8, each with a scale of its own: those of norm(residual + branch_norm(branch + bias)),
// which is computed in float32 and not rounded before. scale = largest magnitude / 127, and
// code = the integer next to x / scale; a row with an infinity or NaN has the scale NaN.
typedef struct {
    const void* residual;  // [rows, width]
    const void* branch;    // [rows, width]; null
    const void* bias;      // [width]; null
    void* sum;             // [rows, width]: the sum, rounded; may be `residual`; null
    int8_t* codes;         // [rows, width]
    float* scales;         // [rows]
    OffloadNorm branch_norm, norm;
    int64_t rows;
    int32_t width;
    int32_t dtype;
    int32_t launch_early;
    int32_t reserved;
} OffloadQuantizeRows;

// output = act(sums * row_scale * scale + bias) + residual, or with a gate act(gate) * up +
// residual, where a row of sums is [gate, up].
typedef struct {
    const int32_t* sums;      // [rows, width] or [rows, 2 * width]
    const float* row_scales;  // [rows]
    const void* scales;       // [width or 2 * width], or [1]
    const void* bias;         // [width or 2 * width]; null
    const void* residual;     // [rows, width]; null
    void* output;             // [rows, width]; may be `residual`
    int64_t rows;
    int32_t width;
    int32_t one_scale;    // for all columns
    int32_t scale_dtype;  // OffloadDtype
    int32_t activation;   // OffloadActivationKind
    int32_t gated;
    int32_t dtype;
    int32_t launch_early;
    int32_t reserved;
} OffloadScaleSums;

// panels = the codes of a weight in the order of panels.cuh; nothing else may lie in their memory.
typedef struct {
    const void* codes;  // unsigned, of `bits` bits, in words without a gap
    void* panels;       // [rows / 16, depth / (256 / bits), 512] bytes
    int32_t rows, depth;
    int32_t bits;   // 4 or 8
    int32_t order;  // OffloadCodeOrder; words of rows: of 4 bits
} OffloadArrange;

int offload_residual_norm(const OffloadResidualNorm* arguments, void* stream);
int offload_rotary_append(const OffloadRotaryAppend* arguments, void* stream);
int offload_activation(const OffloadActivation* arguments, void* stream);
int offload_decode_attention(const OffloadDecodeAttention* arguments, void* stream);
int offload_skinny_gemm(const OffloadSkinnyGemm* arguments, void* stream);
int offload_dequantize(const OffloadDequantize* arguments, void* stream);
int offload_quant_gemm(const OffloadQuantGemm* arguments, void* stream);
int offload_step_inputs(const OffloadStepInputs* arguments, void* stream);
int offload_quantize_rows(const OffloadQuantizeRows* arguments, void* stream);
int offload_scale_sums(const OffloadScaleSums* arguments, void* stream);
int offload_arrange(const OffloadArrange* arguments, void* stream);

// Bytes of workspace that a call with these arguments uses (of its pointers, only the alignment of
// the tensors counts); below zero: refused.
int64_t offload_decode_attention_workspace(const OffloadDecodeAttention* arguments);
int64_t offload_skinny_gemm_workspace(const OffloadSkinnyGemm* arguments);
int64_t offload_skinny_gemm_counters(const OffloadSkinnyGemm* arguments);
int32_t offload_skinny_gemm_variants(const OffloadSkinnyGemm* arguments);

// What went wrong in this thread's latest call that did not return 0.
const char* offload_last_error(void);
int32_t offload_kernels_abi(void);
// sizeof of the structs above, in their order; 0 beyond the last.
int64_t offload_struct_size(int32_t index);
// 0 if device `index` can run this library's code; else as a launcher.
int offload_device_supported(int32_t index);

#ifdef __cplusplus
}
#endif
