"""What a report says of passes that took a known time."""

from __future__ import annotations

import pytest

from offload.report import Report
from offload.scheduler.cost import Rates
from offload.scheduler.plan import Budget, LayerSize, Tier, Workload, fixed_plan

GB = 10**9


def report(rates: Rates, *seconds: float) -> Report:
    layers = [LayerSize(f"layers.{i}", GB, GB) for i in range(4)]
    tiers = [Tier.CPU, Tier.NVME, Tier.CPU, Tier.NVME]
    plan = fixed_plan(layers, tiers, Budget(1 << 50, 1 << 50), Workload(0, 0, 1))
    return Report(
        model="m", engine="e", engine_reason="r", device="d", plan=plan, rates=rates,
        passes=len(seconds), pass_seconds=seconds,
    )  # fmt: skip


def test_predicted_against_achieved_by_resource() -> None:
    found = report(Rates(link=50 * GB, disk=5 * GB), 0.4, 0.5, 0.8)
    assert found.busy == {"link": 0.08, "disk": 0.4}
    assert found.busy_shares == pytest.approx({"link": 0.16, "disk": 0.8})
    assert found.predicted_seconds == 0.4
    lines = str(found).splitlines()
    assert "  bound of a pass: 400.0 ms, the disk's (link 50.00 GB/s, disk 5.00 GB/s)" in lines
    assert "  achieved: 3 passes, median 500.0 ms, 0 B moved, 80% of the bound" in lines
    assert "  link: predicted to work 80.0 ms of a pass, which is 16% of the median" in lines
    assert not [line for line in lines if "disk: predicted" in line]
    assert found.achieved.endswith("80% of the bound (400.0 ms: link 50.00 GB/s, disk 5.00 GB/s)")
    assert found.as_dict()["busy_shares"] == dict(found.busy_shares)


def test_before_the_first_pass_there_is_nothing_to_compare() -> None:
    found = report(Rates(link=50 * GB, disk=5 * GB))
    assert found.busy and found.busy_shares == {}
    assert "of the median" not in str(found)


def test_a_rate_that_is_not_known_is_left_out() -> None:
    found = report(Rates(link=50 * GB), 0.5)
    assert found.busy_shares == pytest.approx({"link": 0.16})
    assert found.predicted_seconds is None
    assert "  link: predicted to work 80.0 ms of a pass, which is 16% of the median" in str(found)
