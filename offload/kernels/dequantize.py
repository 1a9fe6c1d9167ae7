"""Stored weights -> weights, by `dequantise`, or by `dequantiser` for callers that do it often.

On a GPU the library's kernel runs; elsewhere, and for formats that it does not take, the reference
does. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from offload.kernels import structs
from offload.kernels.call import current_stream
from offload.kernels.dequantize_reference import dequantise_reference
from offload.kernels.dequantizer import Dequantize
from offload.kernels.library import why_not
from offload.kernels.weight_format import WeightFormat


def dequantise(
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight of `shape` that `stored` (by the ends of names, see `weight_format`) stands for.

    Computed in float32 and rounded once to `dtype`; `out`, where given, is filled and returned. All
    tensors are on one device, and work is issued on its current stream. Nothing is checked here:
    see `WeightFormat.check_stored`, and `check_values` for what scales and group indices hold.
    """
    if out is None:
        device = stored[form.scale_name].device
        out = torch.empty(shape, dtype=dtype, device=device)
    dequantiser(form, stored, out)(current_stream(out.device))
    return out


def dequantiser(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], out: torch.Tensor
) -> Callable[[int], None]:
    """A function that fills `out`, [N, K] (for `gpt_oss` [E, K, N]), on the stream that it is given
    (a number; it must be the current one). It keeps the tensors' addresses: they must not move, but
    what they hold may change.
    """
    if not by_kernel(stored, out):
        return partial(_by_reference, form, dict(stored), out)
    if form.layout != "gpt_oss":
        return Dequantize(form, stored, out).launch
    turned = out.transpose(1, 2)
    if turned.is_contiguous():
        return Dequantize(form, stored, turned).launch
    return partial(_turned, form, dict(stored), out)


def by_kernel(stored: Mapping[str, torch.Tensor], out: torch.Tensor) -> bool:
    """Whether the library can fill `out` where it lies."""
    return (
        out.device.type == "cuda"
        and out.dtype in structs.DTYPES
        and why_not(out.device.index) is None
        and (out.dim() == 3 or out.shape[-1] <= 1 or out.stride(-1) == 1)
        and all(tensor.is_contiguous() for tensor in stored.values())
    )


def _by_reference(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], out: torch.Tensor, stream: int
) -> None:
    dequantise_reference(form, stored, out)


def _turned(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], out: torch.Tensor, stream: int
) -> None:
    """The kernel writes experts along their inputs; here they lie along their outputs."""
    turned = torch.empty_like(out.transpose(1, 2), memory_format=torch.contiguous_format)
    Dequantize(form, stored, turned).launch(stream)
    out.copy_(turned.transpose(1, 2))


def check_values(form: WeightFormat, stored: Mapping[str, torch.Tensor], groups: int) -> None:
    """Raise ValueError, naming the tensor, if a scale is not finite or an index of the act order
    (all of `stored` that is given) names none of the `groups`.
    """
    scale = stored.get(form.scale_name)
    if scale is not None:
        wrong = scale == 255 if form.kind == "mxfp4" else ~torch.isfinite(scale.float())
        if wrong.any():
            raise ValueError(f"{form.scale_name} holds {int(wrong.sum())} NaN or infinite scales")
    for name in ("g_idx", "weight_g_idx"):
        index = stored.get(name)
        if index is not None and index.numel():
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= groups:
                raise ValueError(
                    f"{name} holds {low if low < 0 else high}, which is none of the {groups} groups"
                )
