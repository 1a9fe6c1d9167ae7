"""A small machine that runs the pickle of a state dict and builds symbols instead of tensors.

A pickle is a program, and Python's own interpreter for it can be led to run anything. This one
knows only the instructions and names that a state dict needs and refuses the rest by name.
"""

import io
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from offload.errors import CheckpointError, UnsupportedError

_MAX_DIMENSIONS = 64  # torch's own limit

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
class Storage:
    """A run of bytes, known so far by its key only."""

    key: str
    dtype: torch.dtype
    numel: int
    shift: int = 0  # elements between the start of the keyed bytes and this view of them

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage; offset and stride count elements of `dtype`."""

    storage: Storage
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


class CutPickle(Exception):
    """The pickle goes on behind the bytes that were given."""


class _Mark:
    pass


_MARK = _Mark()
_Global = Callable[..., Any] | _StorageType | _TensorType | torch.dtype


class PickleMachine:
    """Runs one pickle of a state dict; whatever a state dict does not need is refused by name."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

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
        except UnsupportedError as error:
            raise UnsupportedError(f"{self._file}: {error}") from None
        except CheckpointError:
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
                raise CutPickle from None
            raise CheckpointError(
                f"{self._file}: its pickle is malformed ({type(error).__name__}: {error!s:.200}); "
                f"the file is incomplete or damaged: download it again"
            ) from None
        raise CutPickle

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
                "part of a state dict; it was refused and nothing was executed. Save plain "
                "tensors, best as safetensors"
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
        root = Storage(key, kind.dtype, _size(numel))
        known = self.storages.setdefault(key, root)
        if known != root:
            raise ValueError(f"storage {key:.40} is described in two ways")
        if view is None:
            self._push(root)
            return
        _, offset, length = view
        if _size(offset) + _size(length) > root.numel:
            raise ValueError(f"a view reaches beyond storage {key:.40}")
        self._push(Storage(key, root.dtype, length, offset))

    def _reduce(self, _: None) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._push(_call(function, arguments))

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


def _call(function: Any, arguments: Any) -> Any:
    """Only the functions of this file can get here: the machine makes no others."""
    if not isinstance(function, FunctionType) or not isinstance(arguments, tuple):
        raise TypeError("a call of something that is no function")
    return function(*arguments)


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
) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without storage")
    if metadata and any(metadata.values()):
        raise UnsupportedError("a tensor is stored conjugated or negated; save it resolved")
    shape, stride = _sizes(shape), _sizes(stride)
    if len(shape) != len(stride):
        raise ValueError(f"shape {shape} with stride {stride}")
    kind = storage.dtype if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError("a tensor without dtype")
    return StoredTensor(storage, kind, _size(offset), shape, stride)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    return _tensor_of(storage, None, offset, shape, stride, None)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> StoredTensor:
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
) -> StoredTensor:
    return _tensor_of(storage, dtype, offset, shape, stride, metadata)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor that carries attributes of its own, which are dropped."""
    if not isinstance(kind, _TensorType):
        raise TypeError("a tensor subclass")
    return _call(function, arguments)


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
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})

_Step = Callable[[PickleMachine, Any], None]


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
    "GLOBAL": PickleMachine._global,
    "STACK_GLOBAL": PickleMachine._stack_global,
    "REDUCE": PickleMachine._reduce,
    "BUILD": PickleMachine._build,
    "BINPERSID": PickleMachine._persistent,
    "MEMOIZE": lambda machine, _: machine._put(len(machine._memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), PickleMachine._put),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"),
        lambda machine, place: machine._push(machine._memo[place]),
    ),
    **dict.fromkeys(
        ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT"),
        PickleMachine._push,
    ),
    **dict.fromkeys(
        ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), PickleMachine._push
    ),
    **dict.fromkeys(
        ("SHORT_BINBYTES", "BINBYTES", "SHORT_BINSTRING", "BINSTRING"), PickleMachine._push
    ),
}
