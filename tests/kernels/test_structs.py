"""What Python tells the kernels library by numbers, against the library's header."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path
from typing import get_args

import pytest

import offload.kernels
from offload.kernels import structs
from offload.kernels.weight_format import Layout

HEADER = Path(offload.kernels.__file__).parent / "csrc" / "offload_kernels.h"


@pytest.mark.parametrize("kind", [structs.Code, structs.CodeOrder, structs.ZeroKind])
def test_numbers_mean_what_they_do_in_the_header(kind: type[IntEnum]) -> None:
    body = re.search(rf"enum Offload{kind.__name__} {{(.*?)}};", HEADER.read_text(), re.S)
    assert body is not None
    found = {name: int(n) for name, n in re.findall(r"OFFLOAD_(\w+) = (\d+)", body[1])}
    assert found == {member.name: member.value for member in kind}


def test_every_layout_has_an_order() -> None:
    assert structs.CODE_ORDERS.keys() == set(get_args(Layout))
