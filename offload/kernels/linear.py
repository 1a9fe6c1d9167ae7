"""A product of any number of rows with a weight, on whichever kernel is quickest here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch

from offload.kernels import reference, tuning
from offload.kernels.activation import Activation, Kind
from offload.kernels.call import CompositeCall, on_stream
from offload.kernels.choices import CUBLAS, PIECES, SKINNY, Choice, Key, bucket, dtype_name
from offload.kernels.cublas_product import CublasProduct
from offload.kernels.gemm import MOST_ROWS, SkinnyGemm, check_linear
from offload.kernels.norm import Norm
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.workspace import Workspace

OP = "linear"
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)  # float32; 16-bit weights are cut in 2 at most
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Arguments:
    """What a Linear was asked for."""

    input: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm: Norm | None
    activation: str | None
    gated: bool
    transposed: bool
    early: bool

    @property
    def rows(self) -> int:
        return self.input.numel() // self.input.shape[-1]

    def on_cpu(self, stream: int) -> None:
        """By the reference."""
        result = reference.linear(
            self.input,
            self.weight.t() if self.transposed else self.weight,
            bias=self.bias,
            residual=self.residual,
            norm=self.norm,
            activation=self.activation,
            gated=self.gated,
        )
        self.out.copy_(result)


class Linear(CompositeCall):
    """out = act(norm(input) @ weight.T + bias) + residual, with a gate act(gate) * up + residual,
    for any number of rows; arguments as SkinnyGemm has them.

    `transposed`: the weight is [depth, outputs] (or 2 * outputs), as GPT-2 stores it. Up to 16 rows
    the way is looked up in a table that is measured on this machine when a shape is first seen
    (tens of milliseconds, and scratch of three times L2; not while a graph is captured); `choice`
    forces it. More rows go to cuBLAS, whole or in pieces as `CublasProduct` finds out, with the
    rest in kernels around it. On a CPU the reference runs. `launch(stream)` issues it, like a
    `Call`. Calls that share a workspace share what lies between their kernels, so they run one
    after another.

    Raises ValueError or TypeError for arguments that do not fit.
    """

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
        transposed: bool = False,
        workspace: Workspace | None = None,
        early: bool = False,
        choice: Choice | None = None,
    ) -> None:
        check_linear(
            OP, input, weight, out, bias, residual, norm, activation, gated, transposed=transposed
        )
        self._arguments = asked = _Arguments(
            input, weight, out, bias, residual, norm, activation, gated, transposed, early
        )
        self.choice = choice
        if input.device.type != "cuda" or not asked.rows:
            self._launches = (asked.on_cpu,)  # it does not refer to this call: no cycle
            return
        workspace = workspace or Workspace(input.device)
        if choice is None:
            self.choice = choice = choose(asked)
        elif choice.way in SKINNY and (transposed or asked.rows > MOST_ROWS):
            raise ValueError(
                f"{OP}: only cublas multiplies a transposed weight or more than {MOST_ROWS} rows, "
                f"not {choice.way!r}"
            )
        self._launches = _launches(asked, choice, workspace)

    @property
    def own(self) -> bool:
        """Whether its last kernel is one of this package."""
        return self.choice is not None and self.choice.way in SKINNY


def choose(asked: _Arguments) -> Choice:
    """The table's way to compute `asked`, measured now where it is not there."""
    if asked.transposed or asked.rows > MOST_ROWS:
        return CUBLAS
    rows = bucket(asked.rows)
    key = Key(
        dtype=dtype_name(asked.input.dtype),
        outputs=asked.out.shape[-1],
        depth=asked.input.shape[-1],
        rows=rows,
        gated=asked.gated,
        norm=asked.norm.kind if asked.norm else "",
        activation=asked.activation is not None,
        residual=asked.residual is not None,
        early=asked.early,
    )
    return tuning.choose(
        key,
        asked.input.device,
        weight_bytes=asked.weight.nbytes,
        copies=lambda count: [_like(asked, rows) for _ in range(count)],
        candidates=_candidates,
        launches=_launches,
        refine=partial(_refine, asked.weight.dtype),
    )


def _like(asked: _Arguments, rows: int) -> _Arguments:
    """The same product on other tensors: the given ones may not be filled yet, and must stay."""
    like = asked.input

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=like.device, dtype=torch.float32).to(like.dtype)

    weight = torch.empty(asked.weight.shape, dtype=like.dtype, device=like.device).normal_()
    depth, outputs = like.shape[-1], asked.out.shape[-1]
    norm = asked.norm
    return _Arguments(
        input=new(rows, depth),
        weight=weight,
        out=new(rows, outputs),
        bias=None if asked.bias is None else new(weight.shape[0]),
        residual=None if asked.residual is None else new(rows, outputs),
        norm=norm
        and Norm(
            norm.kind,
            None if norm.weight is None else new(depth),
            None if norm.bias is None else new(depth),
            norm.eps,
            norm.weight_offset,
        ),
        activation=asked.activation,
        gated=asked.gated,
        transposed=False,
        early=asked.early,
    )


def _candidates(asked: _Arguments) -> tuple[Choice, ...]:
    given = asked.input, asked.weight, asked.out
    count = SkinnyGemm(*given, norm=asked.norm, gated=asked.gated).variants
    ways: tuple[Literal["own", "apart"], ...] = ("own",)
    if asked.norm is not None:
        ways = ("own", "apart")
    own = tuple(Choice(way, variant) for way in ways for variant in range(1, count + 1))
    return (CUBLAS, *own)


def _refine(dtype: torch.dtype, choice: Choice) -> tuple[Choice, ...]:
    """The same kernel with the depth cut in more pieces."""
    if choice.way == "cublas":
        return ()
    splits = SPLITS if dtype == torch.float32 else SPLITS[:2]
    return tuple(Choice(choice.way, choice.variant, count) for count in splits)


def _launches(
    asked: _Arguments, choice: Choice, workspace: Workspace
) -> tuple[Callable[[int], Any], ...]:
    """The kernels of `choice`, each a function of the stream."""
    if choice.way not in SKINNY:
        return _cublas(asked, choice if choice.way in PIECES else None, workspace)
    before: list[Callable[[int], Any]] = []
    input, norm, early = asked.input, asked.norm, asked.early
    if choice.way == "apart" and norm is not None:
        # A buffer of its own: the workspace's is where the product keeps its partial sums.
        normalised = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        before.append(_norm(input, norm, normalised, early))
        input, norm, early = normalised, None, True
    call = SkinnyGemm(
        input,
        asked.weight,
        asked.out,
        bias=asked.bias,
        residual=asked.residual,
        norm=norm,
        activation=asked.activation,
        gated=asked.gated,
        variant=choice.variant,
        splits=choice.splits,
        workspace=workspace,
        early=early,
    )
    return (*before, call.launch)


def _norm(input: torch.Tensor, norm: Norm, out: torch.Tensor, early: bool) -> Callable[[int], None]:
    if input.is_contiguous():
        return ResidualNorm(residual=input, norm=norm, out=out, early=early).launch
    flat = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    call = ResidualNorm(residual=flat, norm=norm, out=out)

    def launch(stream: int) -> None:
        with on_stream(input.device, stream):
            flat.copy_(input)
        call.launch(stream)

    return launch


def _parts(
    workspace: Workspace, like: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Parts of a workspace, one behind another, for what lies between the kernels. All are asked
    for at once, since every call of a workspace gets the same memory.
    """
    if not shapes:
        return {}
    size = like.element_size()
    lengths = [-(-torch.Size(shape).numel() * size // _ALIGNMENT) for shape in shapes.values()]
    memory = workspace.partials(sum(lengths) * _ALIGNMENT).view(torch.uint8)
    parts = {}
    begin = 0
    for (name, shape), length in zip(shapes.items(), lengths, strict=True):
        part = memory[begin : begin + torch.Size(shape).numel() * size]
        parts[name] = part.view(like.dtype).view(shape)
        begin += length * _ALIGNMENT
    return parts


def _cublas(
    asked: _Arguments, choice: Choice | None, workspace: Workspace
) -> tuple[Callable[[int], Any], ...]:
    """torch's product, in the pieces of `choice`; a norm before it and what stands behind it in
    kernels of their own.

    A bias goes with the product where nothing else follows; a residual sum that `out` already holds
    is what the product adds to.
    """
    input, out, bias, residual = asked.input, asked.out, asked.bias, asked.residual
    rows, outputs = asked.rows, out.shape[-1]
    acts = asked.activation is not None or asked.gated
    in_place = residual is not None and residual.data_ptr() == out.data_ptr()
    simple = not acts and (residual is None or (in_place and bias is None))
    shapes: dict[str, tuple[int, ...]] = {}
    if asked.norm is not None:
        shapes["normed"] = rows, input.shape[-1]
    if not simple:
        shapes["product"] = rows, (2 if asked.gated else 1) * outputs
        if acts and residual is not None:
            shapes["activated"] = rows, outputs
        if not out.is_contiguous():  # as kernels behind the product want their tensors
            shapes["end"] = rows, outputs
    parts = _parts(workspace, input, shapes)
    launches: list[Callable[[int], Any]] = []

    x = _rows(input)
    if asked.norm is not None:
        x = parts["normed"]
        launches.append(_norm(input, asked.norm, x.view(input.shape), asked.early))
    w = asked.weight if asked.transposed else asked.weight.t()
    if simple:
        flat_out = _rows(out)
        added = bias if residual is None else flat_out
        return (*launches, CublasProduct(x, w, flat_out, added, choice).launch)
    product = CublasProduct(x, w, parts["product"], choice=choice)
    return (*launches, product.launch, *_behind(asked, parts))


def _behind(asked: _Arguments, parts: Mapping[str, torch.Tensor]) -> list[Callable[[int], Any]]:
    """The kernels that make `out` of the product: bias, activation and gate, the residual sum."""
    launches: list[Callable[[int], Any]] = []
    flat_out = _rows(asked.out)
    end = parts.get("end", flat_out)
    branch, bias = parts["product"], asked.bias
    if asked.activation is not None or asked.gated:
        target = parts.get("activated", end)
        kind = cast("Kind | None", asked.activation)
        call = Activation(branch, target, kind=kind, bias=bias, gated=asked.gated)
        launches.append(call.launch)
        branch, bias = target, None
    if asked.residual is not None:
        flat = _rows(asked.residual)
        if not flat.is_contiguous():
            flat = torch.empty_like(flat, memory_format=torch.contiguous_format)
            launches.append(_copy(flat, _rows(asked.residual)))
        launches.append(ResidualNorm(branch=branch, residual=flat, bias=bias, sum_out=end).launch)
    if end is not flat_out:
        launches.append(_copy(flat_out, end))
    return launches


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as [rows, columns]; its rows lie at one stride."""
    return tensor.view(-1, tensor.shape[-1])


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[int], None]:
    def launch(stream: int) -> None:
        with on_stream(target.device, stream):
            target.copy_(source)

    return launch
