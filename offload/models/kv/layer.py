"""One layer's keys and values in a cache that the fused kernels and transformers both use.

Layout: the keys and the values of a layer are two tensors [batch, kv_heads, capacity, head_dim],
contiguous, in the model's dtype. Column j holds token j of the sequence, padding included, in the
first `length` columns; the content of the others is undefined. A sliding window drops nothing: the
kernels read no more than its columns. If some sequences of a batch keep theirs in CPU memory, the
first rows are in those buffers and the last ones in two more of the same layout. These may be int8
with scales: what is read is then within half a scale of what was computed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from offload.models.kv.host_columns import HostColumns
from offload.models.kv.host_kv import GpuShare, HostBlock, HostKv
from offload.models.kv.split_rows import SPARE, RowMoves, SplitRows, first_columns
from offload.models.specs.spec import ModelSpec

MAX_AHEAD = 4096  # columns allocated before they are needed, where the final length is known
MIN_AHEAD = 128  # and where it is not: these, or half of what is needed

# Until 5.16 `crop` took the length to keep; later releases take the columns to remove, negative.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


@dataclass(slots=True)
class HostWrites:
    """What was written to a cache's columns in CPU memory."""

    arriving: Any = None  # the point at which all that was sent there has arrived
    changes: int = 0  # how often anything but a decode step wrote


@dataclass(slots=True)
class KvCommon:
    """What the layers of one cache share."""

    max_length: int = 0  # columns that will be needed in the end; 0: unknown
    session: Any = None  # calls that were made for these buffers; dropped when one of them moves
    spec: ModelSpec | None = None  # of the model whose calls they are, that very object
    host: HostKv | None = None  # where the last rows' go; None: all stay on the compute device
    writes: HostWrites = field(default_factory=HostWrites)
    share: GpuShare | None = None  # of the rows on the compute device

    def __deepcopy__(self, memo: Any) -> KvCommon:
        self.settle()
        return KvCommon(self.max_length, host=self.host)  # a copy's buffers lie elsewhere

    def __reduce__(self) -> Any:
        return KvCommon, (self.max_length,)  # calls are for buffers of this process

    def rows_for_cpu(self, batch: int) -> int:
        """How many of `batch` rows, the last ones, go to CPU memory in buffers made anew."""
        if self.host is None:
            return 0
        if self.share is None or self.share.batch != batch:
            self.share = None  # given back first
            self.share = self.host.share(batch)
        return batch - self.share.rows

    def settle(self) -> None:
        """Wait until the host may read what is in CPU memory."""
        point, self.writes.arriving = self.writes.arriving, None
        if point is not None and self.host is not None:
            self.host.copies.synchronize(point)


class KvLayer(CacheLayerMixin):
    """One layer's keys and values, of which the first `length` columns count.

    `key_buffer` and `value_buffer` are on the compute device and hold the first rows, `host_keys`
    and `host_values` the others, if there are any. They are replaced together or not at all.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    record_past = False  # nothing is ever dropped

    # The parent's __init__ would set `keys` and `values`, which are views here.
    def __init__(self, common: KvCommon, copies: int = 1) -> None:
        self.common = common
        self.copies = copies
        self.length = 0
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None
        self.host_keys: HostColumns | None = None
        self.host_values: HostColumns | None = None
        self._block: HostBlock | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether there are buffers."""
        return self.key_buffer is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """[batch, kv_heads, length, head_dim], a view where all rows are on one device."""
        return self._whole(self.key_buffer, self.host_keys)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """[batch, kv_heads, length, head_dim], likewise."""
        return self._whole(self.value_buffer, self.host_values)

    def _whole(
        self, on_device: torch.Tensor | None, on_cpu: HostColumns | None
    ) -> torch.Tensor | None:
        if on_device is None:
            return None
        on_device = on_device[:, :, : self.length]
        if on_cpu is None:
            return on_device
        self.common.settle()
        return torch.cat([on_device, on_cpu.read(self.length).to(on_device.device)])

    @property
    def rows_on_cpu(self) -> int:
        """Rows whose keys and values are in CPU memory."""
        return 0 if self.host_keys is None else self.host_keys.shape[0]

    def host_bytes(self, window: int = 0) -> int:
        """Bytes that attention to those rows reads at most; `window`: the columns that it sees, 0:
        all.
        """
        keys = self.host_keys
        if keys is None:
            return 0
        rows, heads, capacity, width = keys.shape
        columns = min(window or capacity, capacity)
        return 2 * HostColumns.nbytes(
            (rows, heads, columns, width), keys.dtype, keys.scales is not None
        )

    @property
    def batch_size(self) -> int:
        """Rows; 0 before anything was kept."""
        return 0 if self.key_buffer is None else self.key_buffer.shape[0] + self.rows_on_cpu

    max_batch_size = batch_size

    @property
    def device(self) -> torch.device | None:
        """Where computation takes place."""
        return None if self.key_buffer is None else self.key_buffer.device

    def reserve(self, columns: int, like: torch.Tensor, batch: int, heads: int, width: int) -> None:
        """Make room for `columns` columns of [batch, heads, columns, width], dtype as `like`."""
        if self.key_buffer is not None:
            if columns <= self.key_buffer.shape[2]:
                return
            (_, heads, _, width), batch = self.key_buffer.shape, self.batch_size
        if self.common.max_length:
            ahead = min(max(self.common.max_length - columns, 0), MAX_AHEAD)
        else:
            ahead = max(columns // 2, MIN_AHEAD)
        on_device, on_cpu = self._on_device(), self._on_cpu()
        self.common.settle()
        block = self._block  # for as long as it is read
        cpu_rows = self.common.rows_for_cpu(batch) if on_device[0] is None else self.rows_on_cpu
        self._allocate((batch, heads, columns + ahead, width), cpu_rows, like)
        for before, now in zip(on_device, self._on_device(), strict=True):
            if before is not None and now is not None:
                now[:, :, : self.length] = before[:, :, : self.length]
        for kept, place in zip(on_cpu, self._on_cpu(), strict=True):
            if kept is not None and place is not None:
                place.take(kept, self.length)
        del block

    def _on_device(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.key_buffer, self.value_buffer

    def _on_cpu(self) -> tuple[HostColumns | None, HostColumns | None]:
        return self.host_keys, self.host_values

    def _allocate(self, shape: tuple[int, ...], cpu_rows: int, like: torch.Tensor) -> None:
        """New buffers for [batch, heads, columns, width], their content undefined; the last
        `cpu_rows` rows are in CPU memory.
        """
        self.common.session = None  # its calls would keep the old buffers alive
        with torch.inference_mode(False):
            on_device = (shape[0] - cpu_rows, *shape[1:])
            keys = torch.empty(on_device, dtype=like.dtype, device=like.device)
            values = torch.empty_like(keys)
            block, home = None, self.common.host
            on_cpu: tuple[HostColumns | None, HostColumns | None] = None, None
            if cpu_rows and home is not None:
                part = (cpu_rows, *shape[1:])
                nbytes = 2 * HostColumns.nbytes(part, like.dtype, home.int8)
                block = home.borrow(nbytes, cpu_rows, self.common.share)
                on_cpu = block.halves(part, like.dtype, home.int8)
        # Last, when nothing can fail any more: until then the old buffers are still in use.
        self.key_buffer, self.value_buffer, self._block = keys, values, block
        self.host_keys, self.host_values = on_cpu

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, tokens, width = key_states.shape
        self.reserve(tokens, key_states, batch, heads // self.copies, width)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, tokens, head_dim] each; returns all that is kept."""
        batch, heads, tokens, width = key_states.shape
        self.reserve(self.length + tokens, key_states, batch, heads // self.copies, width)
        end = self.length + tokens
        assert self.key_buffer is not None and self.value_buffer is not None
        split = self.key_buffer.shape[0]
        for states, on_device, on_cpu in (
            (key_states, self.key_buffer, self.host_keys),
            (value_states, self.value_buffer, self.host_values),
        ):
            states = states[:, :: self.copies]  # of several equal heads one is kept
            on_device[:, :, self.length : end] = states[:split]
            if on_cpu is not None:
                self.common.settle()
                self.common.writes.changes += 1
                on_cpu.write(self.length, states[split:])
        self.length = end
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        if self.copies > 1:
            keys, values = (x.repeat_interleave(self.copies, dim=1) for x in (keys, values))
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def activate_past_recording(self) -> None:
        """Nothing to do: no column is ever dropped."""

    def crop(self, tokens_to_remove: int) -> None:
        """As DynamicLayer's in the release at hand: a length to keep, or minus what to remove."""
        if tokens_to_remove < 0:
            self.length = max(0, self.length + tokens_to_remove)
        elif tokens_to_remove or _CROPS_TO_LENGTH:
            self.length = min(self.length, tokens_to_remove)

    def reset(self) -> None:
        self.length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """In place, so that calls and graphs made for the buffers stay good."""
        self._pick(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pick(torch.arange(self.batch_size).repeat_interleave(repeats))

    def _pick(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        if self.key_buffer is None:
            return
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        count = rows.numel()
        stays = count == self.batch_size
        cpu_rows = self.rows_on_cpu if stays else self.common.rows_for_cpu(count)
        if self.host_keys is None and not cpu_rows:
            buffers = [x for x in self._on_device() if x is not None]
            kept = [first_columns(x, rows, self.length) for x in buffers]
            if not stays:
                self._allocate((count, *self.key_buffer.shape[1:]), 0, self.key_buffer)
            for now, found in zip(self._on_device(), kept, strict=True):
                assert now is not None
                now[:, :, : self.length] = found
        else:
            self._pick_from_both_sides(rows.cpu().long(), cpu_rows, stays)

    def _pick_from_both_sides(self, rows: torch.Tensor, cpu_rows: int, stays: bool) -> None:
        """The same where the last `cpu_rows` rows are in CPU memory, before or after. In buffers
        that stay, only rows that move are touched: each crosses the link once, or is copied once
        within CPU memory.
        """
        assert self.key_buffer is not None and self.value_buffer is not None
        self.common.settle()
        self.common.writes.changes += 1
        block = self._block  # for as long as it is read
        before = [
            SplitRows(self.key_buffer, self.host_keys, self.length),
            SplitRows(self.value_buffer, self.host_values, self.length),
        ]
        there = self.rows_on_cpu
        moves = RowMoves.of(rows, (self.key_buffer.shape[0], there), cpu_rows, stays)
        # All that may fail comes before anything is written.
        up = [side.to_device(moves.up_from) for side in before]
        down = [side.to_cpu(moves.down_from, self._int8_on_cpu) for side in before]
        spare = None
        if stays and self.host_keys is not None:
            spare = self.host_keys.spare_row(self.length)
        if not stays:
            self._allocate((rows.numel(), *self.key_buffer.shape[1:]), cpu_rows, self.key_buffer)
        for now, side, came in zip(self._on_cpu(), before, down, strict=True):
            for target, source in moves.copies:
                to = spare if target == SPARE or now is None else now[target : target + 1]
                found = spare
                if source >= there:
                    found = came[source - there : source - there + 1]
                elif source != SPARE and side.on_cpu is not None:
                    found = side.on_cpu[source : source + 1]
                assert to is not None and found is not None
                to.take(found, self.length)
        for buffer, kept in zip(self._on_device(), up, strict=True):
            assert buffer is not None
            buffer[:, :, : self.length].index_copy_(0, moves.up.to(buffer.device), kept)
        del block

    @property
    def _int8_on_cpu(self) -> bool:
        """Whether what goes to CPU memory goes as int8: as what is there is kept, else as the rows
        of a new buffer will be.
        """
        if self.host_keys is not None:
            return self.host_keys.scales is not None
        return self.common.host is not None and self.common.host.int8

    def offload(self) -> None:
        raise NotImplementedError("keys and values of the fused engine stay where they are")

    prefetch = offload
