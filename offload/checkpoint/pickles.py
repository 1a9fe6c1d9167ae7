"""A `.bin` file of torch.save, zip or old format -> the extents of its tensors, no weight read."""

import hashlib
import io
import os
import struct
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from offload.checkpoint.extent import Extent, is_contiguous
from offload.checkpoint.pickle_machine import CutPickle, PickleMachine, Storage, StoredTensor
from offload.checkpoint.safetensors_header import check_not_a_pointer
from offload.errors import CheckpointError, UnsupportedError

_MAX_PICKLE = 1 << 28  # bytes; a million tensors stay below this
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001
_DAMAGED = "the file is incomplete or damaged: download it again"


def read_header(file: str) -> tuple[dict[str, Extent], dict[str, str], bytes]:
    """The tensors of `file`, its metadata (none in this format), and a digest of its structure."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(512)
        stream.seek(0)
        check_not_a_pointer(file, head)
        if size == 0:
            raise CheckpointError(f"{file} is empty; {_DAMAGED}")
        if head.startswith(b"PK\x03\x04"):
            tensors = _read_zip(file, stream, size)
        elif head.startswith(b"\x80"):
            tensors = _read_old(file, stream, size)
        elif head[257:262] == b"ustar":
            raise UnsupportedError(
                f"{file} is in the tar format of torch before 0.1.10; load it with torch.load and "
                "save it again"
            )
        else:
            raise CheckpointError(f"{file} begins like no file of torch.save; {_DAMAGED}")
    return tensors, {}, _digest(tensors)


def _digest(tensors: dict[str, Extent]) -> bytes:
    """What the structure says, for a fingerprint: pickles of one state dict differ in addresses."""
    digest = hashlib.sha256()
    for name, extent in tensors.items():
        place = (
            name,
            extent.offset,
            extent.nbytes,
            str(extent.dtype),
            extent.shape,
            extent.stride,
        )
        digest.update(repr(place).encode("utf-8", "surrogatepass"))
    return digest.digest()


def _read_zip(file: str, stream: BinaryIO, size: int) -> dict[str, Extent]:
    """The format since torch 1.6: a zip archive of one pickle and a stored record per storage."""
    try:
        with zipfile.ZipFile(stream) as archive:
            records = {info.filename: info for info in archive.infolist()}
            if any(not 0 <= info.header_offset < size for info in records.values()):
                raise CheckpointError(f"{file}: its directory points outside the file; {_DAMAGED}")
            pickled = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
            if len(pickled) != 1:
                raise CheckpointError(f"{file} is a zip archive, but not one of torch.save")
            prefix = pickled[0].removesuffix("data.pkl")
            if prefix + "constants.pkl" in records:
                raise UnsupportedError(
                    f"{file} is a TorchScript program, not a state dict; give the checkpoint it "
                    "was made from"
                )
            order = prefix + "byteorder"
            if order in records and _small(file, archive, order, 16).strip() != b"little":
                _refuse_big_endian(file)
            machine = PickleMachine(file)
            content = machine.run(io.BytesIO(_small(file, archive, pickled[0], _MAX_PICKLE)))
    except CutPickle:
        raise CheckpointError(f"{file} ends within its pickle; {_DAMAGED}") from None
    except (CheckpointError, UnsupportedError):  # they are kinds of those below
        raise
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{file}: not a complete zip archive ({error}); {_DAMAGED}") from None

    def locate(storage: Storage) -> int:
        info = records.get(f"{prefix}data/{storage.key}")
        return _data_of_record(file, stream, info, storage)

    return _extents(file, content, size, machine.storages, locate)


def _data_of_record(
    file: str, stream: BinaryIO, info: zipfile.ZipInfo | None, storage: Storage
) -> int:
    """The byte at which the storage's data begins in the archive, where it is whole and plain."""
    record = f"{file}: record data/{storage.key}"
    if info is None:
        raise CheckpointError(f"{record} is missing; {_DAMAGED}")
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedError(
            f"{record} is compressed; load the file with torch.load and save it again"
        )
    if info.file_size != storage.nbytes:
        raise CheckpointError(
            f"{record} has {info.file_size} bytes, its pickle says {storage.nbytes}; {_DAMAGED}"
        )
    # The record's own header repeats the name; its extra field is not the directory's.
    stream.seek(info.header_offset)
    local = stream.read(30)
    if len(local) != 30 or not local.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{record} is not in place; {_DAMAGED}")
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    return info.header_offset + 30 + name_length + extra_length


def _small(file: str, archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A record that belongs to the structure; unpacking could make a little file enormous."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        raise CheckpointError(
            f"{file}: its record {name:.80} is compressed or too large; {_DAMAGED}"
        )
    return archive.read(name)


def _read_old(file: str, stream: BinaryIO, size: int) -> dict[str, Extent]:
    """The format before torch 1.6: five pickles, then per storage its element count and bytes."""
    limit = 1 << 20
    while True:  # nothing says how long the pickles are, so widen the view until they fit
        stream.seek(0)
        view = io.BytesIO(stream.read(limit))
        try:
            if (
                PickleMachine(file).run(view) != _OLD_MAGIC
                or PickleMachine(file).run(view) != _OLD_PROTOCOL
            ):
                raise CheckpointError(f"{file} is a pickle, but not one of torch.save")
            system = PickleMachine(file).run(view)
            if not isinstance(system, dict) or system.get("little_endian") is not True:
                _refuse_big_endian(file)
            machine = PickleMachine(file)
            content = machine.run(view)
            keys = PickleMachine(file).run(view)
            break
        except CutPickle:
            if limit >= min(size, _MAX_PICKLE):
                raise CheckpointError(f"{file} ends within its pickles; {_DAMAGED}") from None
            limit *= 8
    starts: dict[str, int] = {}
    position = view.tell()
    for key in keys if isinstance(keys, list) else []:
        storage = machine.storages.get(key) if type(key) is str else None
        if storage is None:
            raise CheckpointError(f"{file}: it lists a storage that no tensor uses; {_DAMAGED}")
        stream.seek(position)
        count = int.from_bytes(stream.read(8), "little", signed=True)
        wanted = storage.numel
        if position + 8 <= size and count != wanted:
            raise CheckpointError(
                f"{file}: storage {key} has {count} elements, its pickle says {wanted}; {_DAMAGED}"
            )
        starts[key] = position + 8
        position += 8 + storage.nbytes
    if position > size:
        raise CheckpointError(
            f"{file} should have at least {position} bytes by its own header, but it has {size}; "
            f"{_DAMAGED}"
        )

    def locate(storage: Storage) -> int:
        if storage.key not in starts:
            raise CheckpointError(f"{file}: storage {storage.key} is missing; {_DAMAGED}")
        return starts[storage.key]

    return _extents(file, content, size, machine.storages, locate)


def _refuse_big_endian(file: str) -> NoReturn:
    raise UnsupportedError(
        f"{file} was written on a big-endian machine; load it with torch.load and save it again"
    )


def _extents(
    file: str,
    content: Any,
    size: int,
    storages: dict[str, Storage],
    locate: Callable[[Storage], int],
) -> dict[str, Extent]:
    """The flat state dict `content` with every tensor's place in the file.

    `locate` says at which byte one of the whole `storages` begins.
    """
    if not isinstance(content, dict):
        kind = "tensor" if isinstance(content, StoredTensor) else type(content).__name__
        raise CheckpointError(f"{file} holds a {kind}, not a dict of names and tensors")
    extents: dict[str, Extent] = {}
    starts: dict[str, int] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            raise CheckpointError(
                f"{file}: {name!r} is itself a dict; a checkpoint's .bin file maps names to "
                f"tensors. Save that part alone: torch.save(torch.load(file)[{name!r:.80}], file)"
            )
        if not isinstance(value, StoredTensor):
            continue  # a step counter and the like: no weight
        if not isinstance(name, str):
            raise CheckpointError(f"{file}: a tensor's name is {name!r:.40}, not text")
        storage = value.storage
        if storage.key not in starts:
            starts[storage.key] = locate(storages[storage.key])
        start = starts[storage.key] + storage.shift * storage.dtype.itemsize
        extents[name] = _extent(file, name, value, start, size)
    return extents


def _extent(file: str, name: str, tensor: StoredTensor, start: int, size: int) -> Extent:
    """The extent of `tensor`, whose storage begins at byte `start` of the file."""
    itemsize = tensor.dtype.itemsize
    steps = zip(tensor.shape, tensor.stride, strict=True)
    span = 0 if 0 in tensor.shape else 1 + sum((length - 1) * step for length, step in steps)
    if span and (tensor.offset + span) * itemsize > tensor.storage.nbytes:
        raise CheckpointError(
            f"{file}: tensor {name!r} reaches beyond its storage of {tensor.storage.nbytes} bytes; "
            f"{_DAMAGED}"
        )
    if start + tensor.storage.nbytes > size:
        raise CheckpointError(
            f"{file}: tensor {name!r} should end at byte {start + tensor.storage.nbytes}, but the "
            f"file has {size} bytes; {_DAMAGED}"
        )
    contiguous = is_contiguous(tensor.shape, tensor.stride)
    return Extent(
        file=file,
        offset=start + (tensor.offset * itemsize if span else 0),
        nbytes=span * itemsize,
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=None if contiguous else tensor.stride,
    )
