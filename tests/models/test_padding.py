"""What a mask says of its rows: where they begin, and whether they have holes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.models.padding import left_padding


@given(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(
            st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    st.sampled_from([torch.long, torch.bool, torch.float32, torch.int32]),
)
def test_against_the_rows_read_one_by_one(rows: list[list[bool]], dtype: torch.dtype) -> None:
    start, problem = left_padding(torch.tensor(rows).to(dtype))
    text = ["".join("1" if x else "0" for x in row) for row in rows]
    broken = any("1" not in row or "0" in row.strip("0") for row in text)
    assert (problem is not None) == broken
    first = [row.find("1") for row in text]
    if broken or not any(first):
        assert start is None
    else:
        assert start is not None and start.dtype == torch.int32 and start.tolist() == first
