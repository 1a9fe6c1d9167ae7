"""A stored weight of random numbers, to measure kernels with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels.weight_format import SHAPE, WeightFormat


def random_stored(
    form: WeightFormat, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Random codes and zeros, scales of `dtype` of about a weight's size, on `device`."""
    groups = form.groups(shape)[1]
    stored = {}
    for name, (kind, size) in form.stored(shape, dtype).items():
        if name == SHAPE:
            stored[name] = torch.tensor(shape)
        elif name in ("g_idx", "weight_g_idx"):
            order = torch.randperm(size[0], device=device) * groups // size[0]
            stored[name] = order.to(torch.int32)
        elif kind == dtype:
            stored[name] = torch.rand(size, device=device).to(dtype) * 0.01 + 0.001
        elif name == form.scale_name:  # powers of two
            stored[name] = torch.randint(110, 120, size, dtype=kind, device=device)
        else:  # e4m3 has no NaN below 127
            length = torch.Size(size).numel() * kind.itemsize
            most = 127 if kind == torch.float8_e4m3fn else 256
            codes = torch.randint(most, (length,), dtype=torch.uint8, device=device)
            stored[name] = codes.view(kind).view(size)
    return stored


def stored_bytes(stored: Mapping[str, torch.Tensor]) -> int:
    """Of what stands for a weight."""
    return sum(tensor.nbytes for name, tensor in stored.items() if name != SHAPE)
