"""A product of up to 16 rows with a whole weight, with what stands before and after it fused."""

from __future__ import annotations

import torch

from offload.kernels import reference, structs
from offload.kernels.activation import row_stride
from offload.kernels.call import Call, check, dtype_code, pointer
from offload.kernels.norm import Norm, norm_struct
from offload.kernels.workspace import Workspace

OP = "skinny_gemm"
MOST_ROWS = 16


class SkinnyGemm(Call):
    """out = act(norm(input) @ weight.T + bias) + residual for 1 to 16 rows; with a gate
    out = act(gate) * up + residual, where gate and up are the halves of what has a bias.

    input: [..., depth], at most 16 rows in all. weight: [outputs, depth], or [2 * outputs, depth]
    where `gated`, gate rows first; bias as long as the weight has rows. out, residual:
    [..., outputs]; `out` may be `residual` itself. Rows lie at one stride, the last dimension is
    contiguous; all of one dtype (float32, float16, bfloat16). Sums are float32 in a fixed order:
    results repeat bit for bit on one kind of GPU. activation: as in `Activation`; norm: of the
    input's rows, whose mean and scale are applied to the sums where the dtype has 16 bits: nothing
    waits for them.

    `variant` (1 to `variants`) and `splits` (parts that the depth is cut into at most; 16-bit
    weights: 1 or 2) force a way to run; 0 leaves it to the library. `workspace`: scratch shared by
    the calls of one stream; without it the call has its own. `early` is programmatic dependent
    launch: only behind another kernel of this package on the same stream, and only where the weight
    and the norm's weight and bias are in place before that one begins, since they are read before
    it ends.

    SBI-GeMM of DeepSpeed Inference (arXiv:2207.00032). Raises ValueError or TypeError for arguments
    that do not fit, KernelError where the library refuses them.
    """

    function = "offload_skinny_gemm"

    def __init__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        norm: Norm | None = None,
        activation: str | None = None,
        gated: bool = False,
        variant: int = 0,
        splits: int = 0,
        workspace: Workspace | None = None,
        early: bool = False,
    ) -> None:
        dtype = check_linear(
            OP, input, weight, out, bias, residual, norm, activation, gated, transposed=False
        )
        rows = input.numel() // input.shape[-1]
        if rows > MOST_ROWS:
            raise ValueError(
                f"{OP}: input must have at most {MOST_ROWS} rows, not {rows}; Linear takes any"
            )
        for name, number in (("variant", variant), ("splits", splits)):
            if number < 0:
                raise ValueError(f"{OP}: {name} must not be negative, got {number}")
        if workspace is not None and workspace.device != input.device:
            raise ValueError(
                f"{OP}: workspace must be on {input.device}, not on {workspace.device}"
            )

        self.arguments = structs.SkinnyGemmStruct(
            input=pointer(input),
            weight=pointer(weight),
            bias=pointer(bias),
            residual=pointer(residual),
            output=pointer(out),
            input_stride=row_stride(OP, "input", input),
            weight_stride=weight.stride(0) if weight.shape[0] > 1 else weight.shape[1],
            residual_stride=0 if residual is None else row_stride(OP, "residual", residual),
            output_stride=row_stride(OP, "out", out),
            norm=norm_struct(norm),
            rows=rows,
            outputs=out.shape[-1],
            depth=input.shape[-1],
            activation=structs.ACTIVATIONS[activation],
            gated=gated,
            variant=variant,
            splits=splits,
            dtype=dtype,
            launch_early=early,
        )
        self._input, self._weight, self._out = input, weight, out
        self._bias, self._residual, self._norm = bias, residual, norm
        self._activation, self._gated = activation, gated
        self._ready(input.device)
        self._reserve(workspace, input.device)

    def _reserve(self, workspace: Workspace | None, device: torch.device) -> None:
        """Give the call the scratch that the library asks for, where it runs on a GPU."""
        self._device = device
        if not self._on_gpu:
            return
        workspace = workspace or Workspace(device)
        nbytes, counters = self._ask("workspace"), self._ask("counters")
        self._scratch = (
            workspace.partials(nbytes),
            workspace.counters(counters),
        )
        self.arguments.workspace = self._scratch[0].data_ptr() if nbytes else None
        self.arguments.workspace_bytes = nbytes
        self.arguments.counters = self._scratch[1].data_ptr() if counters else None

    @property
    def variants(self) -> int:
        """How many ways the library has to run this call; 1 on a CPU."""
        return self._ask("variants") if self._on_gpu else 1

    def _ask(self, what: str) -> int:
        with torch.cuda.device(self._device):
            return self._library.ask(f"{self.function}_{what}", self.arguments)

    def _reference(self) -> None:
        result = reference.linear(
            self._input,
            self._weight,
            bias=self._bias,
            residual=self._residual,
            norm=self._norm,
            activation=self._activation,
            gated=self._gated,
        )
        self._out.copy_(result)


def check_linear(
    op: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm | None,
    activation: str | None,
    gated: bool,
    transposed: bool,
) -> int:
    """Refuse arguments of a product that do not fit together; returns the dtype's code.

    `transposed`: the weight is [depth, outputs].
    """
    if activation not in structs.ACTIVATIONS:
        names = ", ".join(map(repr, structs.ACTIVATIONS))
        raise ValueError(f"{op}: activation must be one of {names}, not {activation!r}")
    for name, tensor in (("input", input), ("weight", weight), ("out", out)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}")
    dtype = dtype_code(op, input)
    if input.dim() < 1 or input.shape[-1] < 1:
        raise ValueError(f"{op}: input must be [..., depth], not {list(input.shape)}")
    if out.dim() < 1 or out.shape[-1] < 1:
        raise ValueError(f"{op}: out must be [..., outputs], not {list(out.shape)}")
    depth, outputs = input.shape[-1], out.shape[-1]
    products = 2 * outputs if gated else outputs
    shape = (depth, products) if transposed else (products, depth)
    check(op, "input", input, tuple(input.shape), input, contiguous=False)
    check(op, "weight", weight, shape, input, contiguous=False)
    check(op, "out", out, (*input.shape[:-1], outputs), input, contiguous=False)
    if bias is not None:
        check(op, "bias", bias, (products,), input)
    if residual is not None:
        check(op, "residual", residual, tuple(out.shape), input, contiguous=False)
    if norm is not None:
        norm.check(op, "norm", depth, input)
    if weight.shape[0] > 1 and weight.stride(0) < weight.shape[1]:
        raise ValueError(
            f"{op}: rows of weight must not overlap; its shape is {list(weight.shape)} and its "
            f"strides are {list(weight.stride())}"
        )
    _check_apart(op, out, input, weight, residual)
    return dtype


def _check_apart(
    op: str,
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """Refuse an `out` that lies in what is still read, or whose own rows overlap."""
    rows = out.numel() // out.shape[-1]
    if rows > 1 and row_stride(op, "out", out) < out.shape[-1]:
        raise ValueError(f"{op}: rows of out must not overlap; its strides are {out.stride()}")
    begin, end = _span(op, "out", out)
    for name, tensor in (("input", input), ("weight", weight), ("residual", residual)):
        if tensor is None:
            continue
        other_begin, other_end = _span(op, name, tensor)
        if begin >= other_end or other_begin >= end:
            continue
        same = begin == other_begin and (
            rows == 1 or row_stride(op, name, tensor) == row_stride(op, "out", out)
        )
        if name != "residual" or not same:
            raise ValueError(f"{op}: out shares memory with {name}")


def _span(op: str, name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    rows = tensor.numel() // tensor.shape[-1]
    elements = (rows - 1) * row_stride(op, name, tensor) + tensor.shape[-1]
    return begin, begin + elements * tensor.element_size()
