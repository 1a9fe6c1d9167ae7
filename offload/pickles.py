"""A `.bin` file of torch.save, zip or old format -> the extents of its tensors, without running it.

A pickle is a program. Here it runs on a small machine of our own that knows the instructions and
the few names a state dict needs; the tensors it builds are symbols, so no weight is read.
"""

import hashlib
import io
import os
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import torch

from offload.errors import CheckpointError, UnsupportedError
from offload.extent import Extent, is_contiguous
from offload.safetensors_header import check_not_a_pointer

_MAX_PICKLE = 1 << 28  # bytes; a million tensors stay below this
_MAX_DIMENSIONS = 64  # torch's own limit
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001
_DAMAGED = "the file is incomplete or damaged: download it again"

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """A run of bytes, known so far by its key only."""

    key: str
    dtype: torch.dtype
    numel: int
    shift: int = 0  # elements between the start of the keyed bytes and this view of them

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A view of a storage; offset and stride count elements of `dtype`."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _TensorType:
    """torch.Tensor or Parameter where a pickle names the class itself."""


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


# ---- the two containers -------------------------------------------------------------------------


def _read_zip(file: str, stream: BinaryIO, size: int) -> dict[str, Extent]:
    """The format since torch 1.6: a zip archive of one pickle and a stored record per storage."""
    try:
        with zipfile.ZipFile(stream) as archive:
            records = {info.filename: info for info in archive.infolist()}
            pickled = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
            if len(pickled) != 1:
                raise CheckpointError(f"{file} is a zip archive, but not one of torch.save")
            prefix = pickled[0].removesuffix("data.pkl")
            if prefix + "constants.pkl" in records:
                raise UnsupportedError(
                    f"{file} is a TorchScript program, not a state dict; give the checkpoint it "
                    "was made from"
                )
            if records[pickled[0]].file_size > _MAX_PICKLE:
                raise CheckpointError(
                    f"{file}: its data.pkl is over {_MAX_PICKLE} bytes; {_DAMAGED}"
                )
            order = prefix + "byteorder"
            if order in records and archive.read(order).strip() != b"little":
                _refuse_big_endian(file)
            content = _Machine(file).run(io.BytesIO(archive.read(pickled[0])))
    except (
        zipfile.BadZipFile,
        EOFError,
        ValueError,
        RuntimeError,
        struct.error,
    ) as error:
        if isinstance(error, (CheckpointError, UnsupportedError)):
            raise
        raise CheckpointError(f"{file}: not a complete zip archive ({error}); {_DAMAGED}") from None

    def locate(storage: _Storage) -> int:
        info = records.get(f"{prefix}data/{storage.key}")
        if info is None:
            raise CheckpointError(f"{file}: record data/{storage.key} is missing; {_DAMAGED}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError(
                f"{file}: record data/{storage.key} is compressed; load the file with torch.load "
                "and save it again"
            )
        wanted = storage.nbytes
        if info.file_size != wanted:
            raise CheckpointError(
                f"{file}: record data/{storage.key} has {info.file_size} bytes, its pickle says "
                f"{wanted}; {_DAMAGED}"
            )
        # The record's own header repeats the name, and its extra field differs from the directory's.
        stream.seek(info.header_offset)
        local = stream.read(30)
        if len(local) != 30 or not local.startswith(b"PK\x03\x04"):
            raise CheckpointError(f"{file}: record data/{storage.key} is not in place; {_DAMAGED}")
        name_length, extra_length = struct.unpack_from("<HH", local, 26)
        return info.header_offset + 30 + name_length + extra_length

    return _extents(file, content, size, locate)


def _read_old(file: str, stream: BinaryIO, size: int) -> dict[str, Extent]:
    """The format before torch 1.6: five pickles, then per storage its element count and bytes."""
    limit = 1 << 20
    while True:  # nothing says how long the pickles are, so widen the view until they fit
        stream.seek(0)
        view = io.BytesIO(stream.read(limit))
        try:
            if _Machine(file).run(view) != _OLD_MAGIC or _Machine(file).run(view) != _OLD_PROTOCOL:
                raise CheckpointError(f"{file} is a pickle, but not one of torch.save")
            system = _Machine(file).run(view)
            if not isinstance(system, dict) or system.get("little_endian") is not True:
                _refuse_big_endian(file)
            machine = _Machine(file)
            content = machine.run(view)
            keys = _Machine(file).run(view)
            break
        except _Cut:
            if limit >= min(size, _MAX_PICKLE):
                raise CheckpointError(f"{file} ends within its pickles; {_DAMAGED}") from None
            limit *= 8
    starts: dict[str, int] = {}
    position = view.tell()
    for key in keys if isinstance(keys, list) else []:
        storage = machine.storages.get(str(key))
        if storage is None:
            raise CheckpointError(f"{file}: no tensor uses its storage {key!s:.40}; {_DAMAGED}")
        stream.seek(position)
        count = int.from_bytes(stream.read(8), "little", signed=True)
        wanted = storage.numel
        if position + 8 <= size and count != wanted:
            raise CheckpointError(
                f"{file}: storage {key} has {count} elements, its pickle says {wanted}; {_DAMAGED}"
            )
        starts[str(key)] = position + 8
        position += 8 + storage.nbytes
    if position > size:
        raise CheckpointError(
            f"{file} should have at least {position} bytes by its own header, but it has {size}; "
            f"{_DAMAGED}"
        )

    def locate(storage: _Storage) -> int:
        if storage.key not in starts:
            raise CheckpointError(f"{file}: storage {storage.key} is missing; {_DAMAGED}")
        return starts[storage.key] + storage.shift * storage.dtype.itemsize

    return _extents(file, content, size, locate)


def _refuse_big_endian(file: str) -> NoReturn:
    raise UnsupportedError(
        f"{file} was written on a big-endian machine; load it with torch.load and save it again"
    )


def _extents(
    file: str, content: Any, size: int, locate: Callable[[_Storage], int]
) -> dict[str, Extent]:
    """The flat state dict `content` with every tensor's place in the file."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not a dict of tensors")
    extents: dict[str, Extent] = {}
    places: dict[_Storage, int] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            raise CheckpointError(
                f"{file}: {name!r} is itself a dict; a checkpoint's .bin file maps names to tensors "
                f"directly. Save that part alone: torch.save(torch.load(file)[{name!r}], file)"
            )
        if not isinstance(value, _Tensor):
            continue  # a step counter and the like, which transformers ignores as well
        if not isinstance(name, str):
            raise CheckpointError(f"{file}: a tensor's name is {name!r:.40}, not text")
        if value.storage not in places:
            places[value.storage] = locate(value.storage)
        extents[name] = _extent(file, name, value, places[value.storage], size)
    return extents


def _extent(file: str, name: str, tensor: _Tensor, start: int, size: int) -> Extent:
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


# ---- the machine --------------------------------------------------------------------------------


class _Cut(Exception):
    """The pickle goes on behind the bytes that were given."""


class _Mark:
    pass


_MARK = _Mark()
_Global = Callable[..., Any] | _StorageType | _TensorType | torch.dtype


class _Machine:
    """Runs one pickle of a state dict; whatever a state dict does not need is refused by name."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.storages: dict[str, _Storage] = {}

    def run(self, stream: io.BytesIO) -> Any:
        """The object that the pickle at the stream's position builds."""
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "STOP":
                    return self._stack.pop()
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise CheckpointError(
                        f"{self._file}: its pickle uses the instruction {opcode.name}, which no "
                        "state dict needs; nothing was executed"
                    )
                step(self, argument)
        except (CheckpointError, UnsupportedError):
            raise
        except (
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            if stream.tell() >= len(stream.getbuffer()):
                raise _Cut from None
            raise CheckpointError(
                f"{self._file}: its pickle is malformed ({type(error).__name__}: {error}); {_DAMAGED}"
            ) from None
        raise _Cut

    def _since_mark(self) -> list[Any]:
        """Take everything above the last mark off the stack."""
        stack = self._stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                items = stack[place + 1 :]
                del stack[place:]
                return items
        raise IndexError("no mark on the stack")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push(self._find(module, name))

    def _stack_global(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push(self._find(module, name))

    def _find(self, module: Any, name: Any) -> _Global:
        found = _GLOBALS.get(f"{module}.{name}") if type(module) is type(name) is str else None
        if found is None:
            raise CheckpointError(
                f"{self._file}: its pickle asks for {module!s:.80}.{name!s:.80}, which is not "
                "part of a state dict; it was refused and nothing was executed. Save plain tensors, "
                "best as safetensors"
            )
        return found

    def _persistent(self, _: None) -> None:
        """('storage', type, key, device, element count[, (view key, offset, element count)])."""
        fields = self._stack.pop()
        if not isinstance(fields, tuple) or len(fields) not in (5, 6) or fields[0] != "storage":
            raise ValueError("a reference to something other than a storage")
        kind, key, _, numel = fields[1:5]
        view = fields[5] if len(fields) == 6 else None
        if not isinstance(kind, _StorageType) or type(key) is not str:
            raise ValueError("a storage without type or key")
        root = _Storage(key, kind.dtype, _size(numel))
        known = self.storages.setdefault(key, root)
        if known != root:
            raise ValueError(f"storage {key:.40} is described in two ways")
        if view is None:
            self._push(root)
            return
        _, offset, length = view
        if _size(offset) + _size(length) > root.numel:
            raise ValueError(f"a view reaches beyond storage {key:.40}")
        self._push(_Storage(key, root.dtype, length, offset))

    def _reduce(self, _: None) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple) or function not in _CALLABLE:
            raise ValueError("a call of something that is no function")
        self._push(function(*arguments))

    def _build(self, _: None) -> None:
        """An OrderedDict carries module versions as attributes; no weight is among them."""
        self._stack.pop()
        if not isinstance(self._stack[-1], OrderedDict):
            raise TypeError("state for an object that has none")

    def _setitems(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items for something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEYS:  # a deeply nested tuple would overflow the C stack in hash()
                raise ValueError(f"a dict key of type {type(key).__name__}")
            target[key] = value

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError("items for something that is no list")
        target.extend(items)

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("stack is empty")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push(items)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > _MAX_DIMENSIONS:
        raise ValueError("a shape that is no tuple of sizes")
    for value in values:
        _size(value)
    return values


def _tensor_of(
    storage: Any,
    dtype: torch.dtype | None,
    offset: Any,
    shape: Any,
    stride: Any,
    metadata: Any,
) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without storage")
    if metadata and any(metadata.values()):
        raise UnsupportedError("a tensor is stored conjugated or negated; save it resolved")
    shape, stride = _sizes(shape), _sizes(stride)
    if len(shape) != len(stride):
        raise ValueError(f"shape {shape} with stride {stride}")
    kind = storage.dtype if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError("a tensor without dtype")
    return _Tensor(storage, kind, _size(offset), shape, stride)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> _Tensor:
    return _tensor_of(storage, None, offset, shape, stride, None)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> _Tensor:
    return _tensor_of(storage, None, offset, shape, stride, metadata)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> _Tensor:
    return _tensor_of(storage, dtype, offset, shape, stride, metadata)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor that carries attributes of its own, which are dropped."""
    if function not in _CALLABLE or not isinstance(kind, _TensorType):
        raise ValueError("a tensor subclass")
    return function(*arguments)


def _torch_size(values: Any) -> tuple[int, ...]:
    return _sizes(values)


def _ordered_dict() -> "OrderedDict[Any, Any]":
    return OrderedDict()


_GLOBALS: dict[str, _Global] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _torch_size,
    "torch.Tensor": _TensorType(),
    "torch.nn.parameter.Parameter": _TensorType(),
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    **{f"torch.{name}": _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.cuda.{name}": _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.storage.{name}": _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{
        f"torch.{name}": dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and not name.startswith(("q", "bits"))
    },
}
_CALLABLE = frozenset(
    value
    for value in _GLOBALS.values()
    if not isinstance(value, (_StorageType, _TensorType, torch.dtype))
)
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})

_Step = Callable[[_Machine, Any], None]


def _constant(value: Any) -> _Step:
    return lambda machine, _: machine._push(value)


_STEPS: dict[str, _Step] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _constant(_MARK),
    "POP": lambda machine, _: machine._stack.pop() and None,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_DICT": lambda machine, _: machine._push({}),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "TUPLE": lambda machine, _: machine._push(tuple(machine._since_mark())),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "APPEND": lambda machine, _: machine._append([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._since_mark()),
    "SETITEM": lambda machine, _: machine._setitems([machine._stack.pop(-2), machine._stack.pop()]),
    "SETITEMS": lambda machine, _: machine._setitems(machine._since_mark()),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
    "MEMOIZE": lambda machine, _: machine._put(len(machine._memo)),
    **{name: _Machine._put for name in ("PUT", "BINPUT", "LONG_BINPUT")},
    **{
        name: lambda machine, place: machine._push(machine._memo[place])
        for name in ("GET", "BINGET", "LONG_BINGET")
    },
    **{
        name: _Machine._push
        for name in (
            "INT",
            "BININT",
            "BININT1",
            "BININT2",
            "LONG",
            "LONG1",
            "LONG4",
            "BINFLOAT",
            "SHORT_BINBYTES",
            "BINBYTES",
            "SHORT_BINSTRING",
            "BINSTRING",
            "UNICODE",
            "BINUNICODE",
            "SHORT_BINUNICODE",
            "BINUNICODE8",
        )
    },
}
