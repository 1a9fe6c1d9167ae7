"""Tensors that a forward holds and will not read again, while it waits in the middle of itself.

A model's forward keeps what it made ahead of its layers (embeddings, positions) in local variables
until it returns. One forward at a time, that is little; of all micro-batches that wait at a layer
it is as much again as their hidden states, or twice.
"""

from __future__ import annotations

import bisect
import ctypes
import dis
import functools
import sys
from types import CodeType, FrameType
from typing import Any

import torch

LEAST_BYTES = 1 << 20  # of a tensor that is worth it
_LOOKS_AT_ALL = {"locals", "vars", "eval", "exec", "dir"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}


def let_forwards_go(frame: FrameType | None, looked_at: set[tuple[int, CodeType, int]]) -> None:
    """`let_go` of the modules' forwards among the frames that wait for this one to return.

    It ends at one that stands where it was looked at before: so do those that wait for it. Of a
    frame `looked_at` keeps the number alone, as the frame would keep all that it holds. Where
    another call has got the same number, something is kept for longer.
    """
    while frame is not None:
        if frame.f_code.co_name == "forward":
            place = id(frame), frame.f_code, frame.f_lasti
            if place in looked_at:
                return
            looked_at.add(place)
            let_go(frame)
        frame = frame.f_back


def let_go(frame: FrameType) -> None:
    """Set the frame's local variables to None that hold a large tensor and are not read any more.

    Nothing is done where that cannot be told from the code, nor in Python 3.10, whose code does not
    tell it, and from 3.14 on, which keeps what a variable held until the frame ends.
    """
    names = _unread(frame.f_code, frame.f_lasti)
    if not names:
        return
    values = frame.f_locals  # until 3.12 a copy, which the frame keeps
    spent = [name for name in names if _is_large(values.get(name))]
    if sys.version_info >= (3, 13):
        for name in spent:
            values[name] = None
        return
    values.clear()
    if spent:
        values.update(dict.fromkeys(spent))
        # Takes over what is in the copy, and leaves other variables as they are.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        values.clear()


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes >= LEAST_BYTES


@functools.lru_cache(maxsize=1024)
def _unread(code: CodeType, at: int) -> tuple[str, ...]:
    """Local variables that no instruction reads which may still run once the call at the offset
    `at` has returned or raised.
    """
    if not (3, 11) <= sys.version_info < (3, 14) or sys.implementation.name != "cpython":
        return ()
    if _LOOKS_AT_ALL & set(code.co_names):
        return ()
    bytecode: Any = dis.Bytecode(code)
    steps = list(bytecode)
    offsets = [step.offset for step in steps]
    handlers = [(e.start, e.end, e.target) for e in bytecode.exception_entries]
    # `at` may be in the middle of an instruction, in its cache.
    now = bisect.bisect_right(offsets, at) - 1
    seen: set[int] = set()
    read: set[str] = set()
    open_ends = [now]
    while open_ends:
        i = open_ends.pop()
        if i in seen:
            continue
        seen.add(i)
        step = steps[i]
        if "FAST" in step.opname and step.opname != "STORE_FAST" and i != now:
            read |= {step.argval} if isinstance(step.argval, str) else set(step.argval)
        if step.opname not in _ENDS | _JUMPS and i + 1 < len(steps):
            open_ends.append(i + 1)
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            open_ends.append(bisect.bisect_left(offsets, step.argval))
        for start, end, target in handlers:
            if start <= step.offset < end:
                open_ends.append(bisect.bisect_left(offsets, target))
    return tuple(set(code.co_varnames) - read - set(code.co_cellvars))
