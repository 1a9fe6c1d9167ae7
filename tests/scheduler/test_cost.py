"""What a pass is predicted to cost."""

from __future__ import annotations

import pytest

from offload.scheduler.cost import Rates, predict_busy, predict_pass
from offload.scheduler.plan import Budget, LayerSize, Plan, Tier, Workload, fixed_plan

GB = 10**9
LAYERS = [LayerSize(f"layers.{i}", GB + 4096, GB) for i in range(4)]


def plan(*tiers: Tier) -> Plan:
    work = Workload(outside_bytes=5 * GB, reserve_bytes=GB, depth=1)
    return fixed_plan(LAYERS, tiers, Budget(1 << 50, 1 << 50), work)


@pytest.mark.parametrize(
    ("tiers", "seconds"),
    [
        ((Tier.CPU,) * 4, 4 / 50),
        # Everything crosses the link; what lies in files also crosses the disk, at the same time.
        ((Tier.NVME,) * 4, 4 / 5),
        ((Tier.CPU, Tier.CPU, Tier.CPU, Tier.NVME), 1 / 5),
        ((Tier.DEVICE, Tier.DEVICE, Tier.CPU, Tier.DEVICE), 1 / 50),
    ],
)
def test_the_slower_of_link_and_disk(tiers: tuple[Tier, ...], seconds: float) -> None:
    rates = Rates(link=50 * GB, disk=5 * GB)
    assert predict_pass(plan(*tiers), rates) == pytest.approx(seconds)


def test_a_disk_faster_than_the_link() -> None:
    assert predict_pass(plan(*[Tier.NVME] * 4), Rates(link=2 * GB, disk=8 * GB)) == 2.0


def test_nothing_moves_or_a_rate_is_not_known() -> None:
    assert predict_pass(plan(*[Tier.DEVICE] * 4), Rates(link=GB, disk=GB)) is None
    assert predict_pass(plan(*[Tier.CPU] * 4), Rates()) is None
    assert predict_pass(plan(*[Tier.NVME] * 4), Rates(link=GB)) is None
    assert predict_pass(plan(*[Tier.CPU] * 4), Rates(link=GB)) == 4.0


def test_link_and_disk_each_for_what_they_move() -> None:
    half = plan(Tier.CPU, Tier.NVME, Tier.DEVICE, Tier.NVME)
    assert predict_busy(half, Rates(link=50 * GB, disk=5 * GB)) == {"link": 3 / 50, "disk": 2 / 5}
    assert predict_busy(half, Rates(link=50 * GB)) == {"link": 3 / 50}
    assert predict_busy(plan(*[Tier.CPU] * 4), Rates(disk=GB)) == {}


def test_rates_as_text() -> None:
    assert str(Rates(link=53.21 * GB, disk=6.5 * GB)) == "link 53.21 GB/s, disk 6.50 GB/s"
    assert str(Rates(link=GB)) == "link 1.00 GB/s"
    assert str(Rates()) == "nothing measured"
