"""The time of a layer's products with its weights, as an engine computes them."""

from __future__ import annotations

from dataclasses import dataclass

from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import LayerProfile, ModelProfile, Precision


@dataclass(frozen=True, slots=True)
class Products:
    """Seconds of one layer's products, and for how many of them its memory and its matrix units are
    busy.
    """

    seconds: float
    hbm: float
    matrix: float
    made: float = 0.0  # those of the seconds in which weights are made whole


@dataclass(frozen=True, slots=True)
class FewRows:
    """The products of a decode step's rows, which run in `parts` one after the other, with weights
    of one precision.
    """

    model: ModelProfile
    hardware: Hardware
    precision: Precision
    batch: int
    parts: int

    @property
    def rows(self) -> float:
        """Rows of a part."""
        return self.batch / self.parts

    def of(self, layer: LayerProfile, size: int, resident: bool) -> Products:
        """The products of a layer of `size` bytes, which is resident or comes through a slot."""
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
        # Each part makes them whole.
        wide = self.parts * layer.active * self.model.itemsize(self.precision)
        product = self._plain(wide, flop)
        made = (read + wide) / (self.hardware.hbm_copy or hbm)
        seconds, read = made + product.seconds, (read + wide) / hbm + product.hbm
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
        """With weights in the model's own type, of which `read` bytes are read."""
        busy = Products(0.0, read / self.hardware.needed("hbm"), flop / self._matrix)
        rate = None
        if self.model.engine.own_kernels:
            rate = self.hardware.few_rows_rate(self.model.dtype(self.precision), self.rows)
        seconds = max(busy.hbm, busy.matrix) if rate is None else read / rate
        return Products(seconds, busy.hbm, busy.matrix)

    def _as_stored(self, read: float, flop: float) -> Products:
        """With quantised weights as they are stored, at best. With few rows, the measured rate of
        wide weights is how fast they are read: weights of fewer bytes take less time, until the
        matrix units are the limit.
        """
        rate, group, model = self._matrix, self.precision.group, self.model
        fewer = model.itemsize(self.precision) * group / self.precision.weight_bytes(group)
        most = self.hardware.matrix_rate(model.dtype(self.precision), 1 << 30)
        rate = max(rate, min(rate * fewer, most))
        busy = read / self.hardware.needed("hbm"), flop / rate
        return Products(max(busy), *busy)

    def _made_whole(self, resident: bool) -> bool:
        """Whether quantised weights are made whole before they are multiplied with."""
        engine = self.model.engine
        if engine.stored_rows is None:
            return False
        return self.rows > engine.stored_rows or not (resident or engine.stored_streamed)
