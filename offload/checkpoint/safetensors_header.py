"""The header of a safetensors file -> the extents of its tensors, checked against the file."""

import json
import math
import os
import re
from typing import Any

import torch

from offload.checkpoint.extent import Extent
from offload.errors import CheckpointError, UnsupportedError

_LENGTH = 8  # the file begins with the header's length: little-endian, unsigned, 8 bytes
_MAX_HEADER = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_INCOMPLETE = "the file is incomplete or damaged: download it again"
_SURROGATE = re.compile("[\ud800-\udfff]")

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
# Known to the format, but smaller than a byte: only quantised checkpoints hold them.
_SUB_BYTE = {"F4", "F6_E2M3", "F6_E3M2"}


def read_header(file: str) -> tuple[dict[str, Extent], dict[str, str], bytes]:
    """The tensors of `file`, its free-form metadata, and the header's bytes as they stand there."""
    size, raw = _read_raw(file)
    try:
        header = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_unsigned,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: its header is not valid JSON ({error}); {_INCOMPLETE}"
        ) from (None)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ in its header must map names to strings")
    start = _LENGTH + len(raw)
    tensors = {name: _extent(file, name, entry, start) for name, entry in header.items()}
    _check_cover(file, tensors, start, size)
    return tensors, metadata, raw


def check_not_a_pointer(file: str, head: bytes) -> None:
    """Refuse the text stub that a clone without git-lfs leaves in place of a large file."""
    if head.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{file} is a git-LFS pointer ({os.path.getsize(file)} bytes of text), not the "
            "weights; run `git lfs pull` in its repository or download the file again"
        )


def _read_raw(file: str) -> tuple[int, bytes]:
    """The file's size and its header's bytes."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(64)
        check_not_a_pointer(file, head)
        if size < _LENGTH:
            what = "is empty" if size == 0 else f"has only {size} bytes"
            raise CheckpointError(
                f"{file} {what}, a safetensors file has at least 8; {_INCOMPLETE}"
            )
        length = int.from_bytes(head[:_LENGTH], "little")
        if length > _MAX_HEADER:
            raise CheckpointError(
                f"{file}: its first 8 bytes announce a header of {length} bytes, the format allows "
                f"{_MAX_HEADER}; this is no safetensors file, or it is damaged: download it again"
            )
        if _LENGTH + length > size:
            raise CheckpointError(
                f"{file}: its header should end at byte {_LENGTH + length}, but the file has "
                f"{size} bytes; {_INCOMPLETE}"
            )
        stream.seek(_LENGTH)
        raw = stream.read(length)
    if len(raw) != length or not raw.startswith(b"{"):
        raise CheckpointError(f"{file}: its header does not begin with '{{'; {_INCOMPLETE}")
    return size, raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a name that stands there twice is an error, not a silent choice."""
    for pair in pairs:
        for text in pair:
            if isinstance(text, str) and _SURROGATE.search(text):
                raise ValueError(f"{text!r:.80} is not valid text")
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands there twice")
    return result


def _unsigned(digits: str) -> int:
    if digits.startswith("-"):
        raise ValueError(f"the number {digits:.40} is negative")
    return int(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # bool is an int to Python, not here


def _extent(file: str, name: str, entry: Any, start: int) -> Extent:
    """The extent of one entry of the header whose data section begins at byte `start`."""

    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {what}; {_INCOMPLETE}")

    if not isinstance(entry, dict):
        raise bad(f"its header entry is {entry!r:.80}, not an object")
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str):
        raise bad(f"its dtype is {kind!r:.80}, not a name")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise bad(f"its shape is {shape!r:.80}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise bad(f"its data_offsets are {offsets!r:.80}, not two byte positions")
    if kind not in DTYPES:
        why = "has less than a byte an element" if kind in _SUB_BYTE else "this version lacks"
        raise UnsupportedError(
            f"{file}: tensor {name!r} has dtype {kind}, which {why}; use a checkpoint in one of "
            f"{', '.join(DTYPES)}"
        )
    dtype = DTYPES[kind]
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise bad(
            f"its data_offsets {offsets} hold {end - begin} bytes, but {kind} of shape {shape} "
            f"needs {nbytes}"
        )
    # A size of 0 hides the others from the bytes, but not from strides.
    if not _is_size(math.prod(max(1, size) for size in shape) * dtype.itemsize):
        raise bad(f"its shape {shape!r:.80} is beyond any memory")
    return Extent(file, start + begin, nbytes, dtype, tuple(shape))


def _check_cover(file: str, tensors: dict[str, Extent], start: int, size: int) -> None:
    """The tensors must fill the data section exactly: no overlap, no hole, no byte too many."""
    end = start + sum(extent.nbytes for extent in tensors.values())
    position, before = start, "the header"
    for name, extent in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if extent.offset != position:
            how = "overlaps" if extent.offset < position else "leaves a hole after"
            raise CheckpointError(
                f"{file}: tensor {name!r} at byte {extent.offset} {how} {before}, which ends at "
                f"byte {position}; {_INCOMPLETE}"
            )
        position, before = extent.offset + extent.nbytes, f"tensor {name!r}"
    if end != size:
        raise CheckpointError(
            f"{file} should have {end} bytes by its own header, but it has {size}; {_INCOMPLETE}"
        )
