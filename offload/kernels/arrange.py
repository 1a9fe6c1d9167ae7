"""The codes of a stored weight put in panels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels import structs
from offload.kernels.call import Call, check, pointer
from offload.kernels.panels import codes_in_panels, panels_of
from offload.kernels.weight_format import WeightFormat

OP = "arrange"


class Arrange(Call):
    """panels = the codes of the weight [N, K] that `stored` (by the ends of names) stands for.

    form: `packed`, `gptq` or `awq`, of a shape that `panels_of` takes. panels: uint8
    [N / 16, K / C, 512] in memory of its own, at a multiple of 16 bytes. Scales and zero points
    are `scales_in_panels`.

    Raises ValueError or TypeError for arguments that do not fit, naming the tensor.
    """

    function = "offload_arrange"

    def __init__(
        self,
        form: WeightFormat,
        stored: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        panels: torch.Tensor,
    ) -> None:
        into = panels_of(form, shape)
        if into is None:
            raise ValueError(f"{OP}: a weight of {list(shape)} in {form.name} has no panels")
        end = "weight_packed" if form.layout == "packed" else "qweight"
        if end not in stored:
            raise ValueError(f"{OP}: {end} is missing")
        codes = stored[end]
        dtype, size = form.stored(shape)[end]
        check(OP, end, codes, size, codes, dtype=dtype)
        check(
            OP, "panels", panels, into.stored(shape)["weight_panels"][1], codes, dtype=torch.uint8
        )
        begin, length = codes.data_ptr(), codes.nbytes
        if abs(panels.data_ptr() - begin) < length:
            raise ValueError(f"{OP}: panels share memory with {end}")
        if panels.data_ptr() % 16:
            raise ValueError(f"{OP}: panels must lie at a multiple of 16 bytes")
        self.arguments = structs.ArrangeStruct(
            codes=pointer(codes),
            panels=pointer(panels),
            rows=shape[0],
            depth=shape[1],
            bits=form.bits,
            order=structs.CODE_ORDERS[form.layout],
        )
        self._form, self._stored, self._panels = form, {end: codes}, panels
        self._ready(panels.device, codes, panels)

    def _reference(self) -> None:
        self._panels.copy_(codes_in_panels(self._form, self._stored))
