"""How heads are rotated by their positions (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.kernels.call import check, check_equal_strides


@dataclass(frozen=True)
class Rotation:
    """Angles of the first rotary_dim elements of every head, as cos and sin: float32 [1 or batch,
    tokens, rotary_dim / 2]. They turn pairs (2i, 2i + 1) where `interleaved`, else (i, i +
    rotary_dim / 2).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @property
    def dim(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * self.cos.shape[-1]

    def check(self, op: str, batch: int, tokens: int, head_dim: int, like: torch.Tensor) -> None:
        """Refuse what `op` cannot use for so many tokens on the device of `like`."""
        cos = self.cos
        if not isinstance(cos, torch.Tensor) or cos.dim() != 3:
            what = list(cos.shape) if isinstance(cos, torch.Tensor) else cos
            raise ValueError(
                f"{op}: cos must be a tensor [1 or {batch}, {tokens}, rotary_dim / 2], not {what}"
            )
        rows, half = (1 if cos.shape[0] == 1 else batch), cos.shape[2]
        if not 1 <= half <= head_dim // 2:
            raise ValueError(
                f"{op}: cos has {half} angles a token; a head of {head_dim} elements takes 1 to "
                f"{head_dim // 2}"
            )
        for name, table in (("cos", cos), ("sin", self.sin)):
            check(
                op, name, table, (rows, tokens, half), like, dtype=torch.float32, contiguous=False
            )
            if tokens > 1 and table.stride(1) != half:
                raise ValueError(
                    f"{op}: the tokens' angles in {name} must lie next to each other; its strides "
                    f"are {list(table.stride())}"
                )
        check_equal_strides(op, {"cos": cos, "sin": self.sin}, (0,))
