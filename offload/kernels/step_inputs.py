"""A decode step's ids, positions and mask: taken in, and checked, by one launch."""

from __future__ import annotations

import torch

from offload.kernels import structs
from offload.kernels.call import Call, check, pointer

OP = "step_inputs"
MASKS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


class StepInputs(Call):
    """ids_out = ids; positions_out = positions; as_expected = 0 where the mask is not as expected.

    `ids_out`, `positions_out`: int64 [batch, 1], contiguous. `as_expected`: one bool, else left as
    it is; it may be in pinned host memory. What comes in is given anew for each launch by `take`,
    which looks at nothing: a step is `launch`ed while the GPU waits for it.

    Raises ValueError or TypeError for outputs that do not fit.
    """

    function = "offload_step_inputs"

    def __init__(
        self, ids_out: torch.Tensor, positions_out: torch.Tensor, as_expected: torch.Tensor
    ) -> None:
        batch = ids_out.shape[0]
        check(OP, "ids_out", ids_out, (batch, 1), ids_out, dtype=torch.int64)
        check(OP, "positions_out", positions_out, (batch, 1), ids_out, dtype=torch.int64)
        pinned = as_expected.device == ids_out.device or as_expected.is_pinned()
        if as_expected.shape or as_expected.dtype != torch.bool or not pinned:
            raise ValueError(f"{OP}: as_expected must be one bool that the device can write")
        self.arguments = structs.StepInputsStruct(
            ids_out=pointer(ids_out),
            positions_out=pointer(positions_out),
            as_expected=pointer(as_expected),
            batch=batch,
        )
        self._out = ids_out, positions_out, as_expected
        self._ready(ids_out.device)

    def take(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        past: int,
        mask: torch.Tensor | None = None,
        start: torch.Tensor | None = None,
    ) -> None:
        """What the next launch takes in, all on the device of `ids_out`, and kept until then.

        ids: int64 [batch, 1]. positions: int64 [1 or batch, 1]; None: `past`. mask: [batch,
        columns] of one of MASKS, expected to be nonzero in the columns from start[b] on (int32
        [batch], contiguous; None: 0) and zero before; None: not looked at.
        """
        self._in = ids, positions, past, mask, start
        a = self.arguments
        a.ids, a.ids_stride, a.past = ids.data_ptr(), ids.stride(0), past
        if positions is None:
            a.positions = None
        else:
            a.positions = positions.data_ptr()
            a.positions_stride = positions.stride(0) if positions.shape[0] > 1 else 0
        if mask is None:
            a.mask = None
        else:
            a.mask, a.columns = mask.data_ptr(), mask.shape[1]
            a.mask_row_stride, a.mask_column_stride = mask.stride()
            a.mask_bytes, a.mask_floating = mask.element_size(), mask.is_floating_point()
            a.start = None if start is None else start.data_ptr()

    def _reference(self) -> None:
        ids, positions, past, mask, start = self._in
        ids_out, positions_out, as_expected = self._out
        ids_out.copy_(ids)
        if positions is None:
            positions_out.fill_(past)
        else:
            positions_out.copy_(positions)
        if mask is not None:
            column = torch.arange(mask.shape[1], device=mask.device)
            expected = True if start is None else column >= start[:, None]
            if not bool(((mask != 0) == expected).all()):
                as_expected.fill_(False)
