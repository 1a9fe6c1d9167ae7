"""What a mask says of its rows: where they begin and end, and whether they have holes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.models.fused.padding import Holes, PaddingCheck, read_padding


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


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_what_was_expected_is_checked(dtype: torch.dtype) -> None:
    whole = torch.ones(2, 5).to(dtype)
    padded = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).to(dtype)
    holes = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 1, 1]]).to(dtype)
    device = whole.device
    none = PaddingCheck(None, 6, device)
    some = PaddingCheck(read_padding(padded), 6, device)

    def holds(check: PaddingCheck, mask: torch.Tensor) -> bool:
        check.ask(mask)
        return check.holds()

    one, zero = torch.ones_like(whole[:, :1]), torch.zeros_like(whole[:, :1])
    for _ in range(2):  # each answer is of the mask asked last
        assert holds(none, whole) and holds(some, padded)
        assert holds(some, torch.cat([padded, one], 1))
        for check, mask in [(none, padded), (some, holes), (some, whole), (none, holes)]:
            assert not holds(check, mask)
        assert not holds(some, torch.cat([padded, zero], 1))
        assert not holds(none, torch.cat([whole, zero], 1))
