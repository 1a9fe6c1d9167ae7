"""What a mask says of its rows: where they begin and end, and whether they have holes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.models.padding import Holes, PaddingCheck, read_padding


@given(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(
            st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    st.sampled_from([torch.long, torch.bool, torch.float32, torch.int32]),
)
def test_against_the_rows_read_one_by_one(rows: list[list[bool]], dtype: torch.dtype) -> None:
    mask = torch.tensor(rows).to(dtype)
    text = ["".join("1" if x else "0" for x in row) for row in rows]
    if any("0" in row.strip("0") for row in text):
        with pytest.raises(Holes, match="holes"):
            read_padding(mask)
        return
    padding = read_padding(mask)
    if all("0" not in row for row in text):
        assert padding is None
        return
    width = len(rows[0])
    assert padding is not None and padding.start.dtype == padding.end.dtype == torch.int32
    assert padding.start.tolist() == [row.find("1") if "1" in row else width for row in text]
    assert padding.end.tolist() == [row.rfind("1") + 1 or width for row in text]
    assert padding.at_end == any(row.endswith("0") and "1" in row for row in text)


def test_what_was_expected_is_checked() -> None:
    whole, padded = torch.ones(2, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    holes = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 1, 1]])
    padding = read_padding(padded)
    assert PaddingCheck(whole, None).holds() and PaddingCheck(padded, padding).holds()
    longer = torch.cat([padded, torch.ones(2, 1)], 1)
    assert PaddingCheck(longer, padding).holds()
    for mask, expected in [(padded, None), (holes, padding), (whole, padding), (holes, None)]:
        assert not PaddingCheck(mask, expected).holds()
    assert not PaddingCheck(torch.cat([padded, torch.zeros(2, 1)], 1), padding).holds()
