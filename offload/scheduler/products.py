"""The time of a layer's products with its weights, as an engine computes them."""

from __future__ import annotations

from dataclasses import dataclass

from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import LayerProfile, ModelProfile, Precision


@dataclass(frozen=True, slots=True)
class Products:
    """Seconds of one layer's products, and of them those that its memory and matrix units work."""

    seconds: float
    hbm: float
    matrix: float
    made: float = 0.0  # of the seconds those in which weights are made whole


@dataclass(frozen=True, slots=True)
class FewRows:
    """Products of a decode step's rows, in `parts` one after the other, with weights of one
    precision.
    """

    model: ModelProfile
    hardware: Hardware
    precision: Precision
    batch: int
    parts: int

    @property
    def rows(self) -> float:
        """Of a part."""
        return self.batch / self.parts

    def of(self, layer: LayerProfile, size: int, resident: bool) -> Products:
        """Those of a layer of `size` bytes, which stays or comes through a slot."""
        hbm = self.hardware.needed("hbm")
        flop = 2 * layer.active * self.batch
        read = self.parts * size * self._met(layer)
        if not self.precision.quantised:
            return self._plain(read, flop)
        if not self._made_whole(resident):
            rate = self.hardware.few_rows_rate(self.precision.name, self.rows)
            if rate is not None:
                return Products(read / rate, read / hbm, flop / self._matrix)
            if not self.model.engine.own_kernels:
                return self._as_stored(read, flop)
        # Once a layer, whatever the parts.
        wide = layer.active * self.model.itemsize(self.precision)
        once = size * self._met(layer)
        product = self._plain(self.parts * wide, flop)
        made = (once + wide) / (self.hardware.hbm_copy or hbm)
        seconds, read = made + product.seconds, (once + wide) / hbm + product.hbm
        return Products(seconds, read, product.matrix, made)

    def _met(self, layer: LayerProfile) -> float:
        """The share of the weights that a part of the rows meets: few tokens meet few experts."""
        chosen = layer.active / max(1, layer.matrices + layer.others)
        return min(1.0, chosen * self.rows)

    @property
    def _matrix(self) -> float:
        """FLOP/s."""
        return self.hardware.matrix_rate(self.model.dtype(self.precision), self.rows)

    def _plain(self, read: float, flop: float) -> Products:
        """With weights of the model's own type, of which `read` bytes are read."""
        busy = Products(0.0, read / self.hardware.needed("hbm"), flop / self._matrix)
        rate = None
        if self.model.engine.own_kernels:
            rate = self.hardware.few_rows_rate(self.model.dtype(self.precision), self.rows)
        seconds = max(busy.hbm, busy.matrix) if rate is None else read / rate
        return Products(seconds, busy.hbm, busy.matrix)

    def _as_stored(self, read: float, flop: float) -> Products:
        """With quantised weights, at best: with few rows what was measured of wide ones is how fast
        they are read, and fewer bytes a weight take less time, down to that of the matrix units.
        """
        rate, group, model = self._matrix, self.precision.group, self.model
        fewer = model.itemsize(self.precision) * group / self.precision.weight_bytes(group)
        most = self.hardware.matrix_rate(model.dtype(self.precision), 1 << 30)
        rate = max(rate, min(rate * fewer, most))
        busy = read / self.hardware.needed("hbm"), flop / rate
        return Products(max(busy), *busy)

    def _made_whole(self, resident: bool) -> bool:
        """Whether quantised weights are made wide before they are multiplied with."""
        engine = self.model.engine
        if engine.stored_rows is None:
            return False
        return self.rows > engine.stored_rows or not (resident or engine.stored_streamed)
