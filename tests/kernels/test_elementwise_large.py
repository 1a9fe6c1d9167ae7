"""What only a GPU shows: tensors of more than 2^31 elements, and kernels that begin early."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate, random
from machines import needs_gpu

from offload.kernels import (
    Activation,
    Norm,
    QkvLayout,
    ResidualNorm,
    RotaryAppend,
    Rotation,
    reference,
)
from offload.kernels.call import Call, current_stream

pytestmark = needs_gpu
MORE = 2**31 + 2**20  # elements
GPU = torch.device("cuda")


def launch(*calls: Call) -> None:
    for call in calls:
        call.launch(current_stream(GPU))


def big(rows: int, width: int) -> torch.Tensor:
    """Bfloat16 [rows, width], random at both ends and zero between."""
    if torch.cuda.mem_get_info()[0] < 8 * MORE:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=GPU)
    x[:3].normal_()
    x[-3:].normal_()
    return x


def test_more_elements_than_32_bits_count() -> None:
    width = 4096
    rows = MORE // width
    x = big(rows, width)
    out = torch.full_like(x, torch.nan)
    launch(Activation(x, out, kind="gelu"))
    for part in (slice(0, 3), slice(rows - 3, rows)):
        peer = reference.activate(x[part], "gelu")
        assert_accurate(out[part], peer, reference.activate(x[part].double(), "gelu"))
    assert not torch.isnan(out).any()

    norm = Norm("rms", torch.ones(width, dtype=torch.bfloat16, device=GPU))
    out.fill_(torch.nan)
    launch(ResidualNorm(residual=x, norm=norm, out=out))
    for part in (slice(0, 3), slice(rows - 3, rows)):
        exact = reference.normalise(x[part].double(), norm)
        assert_accurate(out[part], exact.bfloat16(), exact)
    assert not torch.isnan(out).any()


def test_more_cache_elements_than_32_bits_count() -> None:
    layout = QkvLayout.apart(8, 8, 128)
    batch, capacity = 3, MORE // (2 * 8 * 128)
    cache = big(2 * batch * capacity, 8 * 128).view(2, batch, 8, capacity, 128)
    qkv = random(batch, 2, layout.width, dtype=torch.bfloat16, device="cuda")
    query = torch.empty(batch, 2, 8, 128, dtype=torch.bfloat16, device=GPU)
    column = torch.tensor([0, 5, capacity - 2], dtype=torch.int32, device=GPU)
    launch(
        RotaryAppend(
            qkv,
            layout=layout,
            query=query,
            key_cache=cache[0],
            value_cache=cache[1],
            column=column,
        )
    )
    expected = reference.split_qkv(qkv, layout)
    for part, new in zip(cache, expected[1:], strict=True):
        for b, first in enumerate(column.tolist()):
            assert torch.equal(part[b, :, first : first + 2].transpose(0, 1), new[b])
    assert torch.equal(query, expected[0])


@pytest.mark.parametrize("rows", [1, 16, 1200])
def test_kernels_that_begin_early_wait(rows: int) -> None:
    """A chain in which each kernel reads what the one before wrote, and writes what it read."""
    width, layout = 4096, QkvLayout.apart(16, 8, 128)
    torch.manual_seed(rows)

    def tensor(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=torch.bfloat16, device="cuda")

    norm = Norm("layer", tensor(width), tensor(width))
    begin, added = tensor(rows, width), tensor(rows, width)
    rotation = Rotation(*torch.rand(2, 1, 1, 64, device=GPU))
    column = torch.zeros(1, dtype=torch.int32, device=GPU)

    def chain(early: bool) -> tuple[torch.Tensor, list[Call]]:
        x, y, z = begin.clone(), torch.empty_like(begin), torch.empty_like(begin)
        query = torch.empty(rows, 1, 16, 128, dtype=torch.bfloat16, device=GPU)
        cache = torch.empty(2, rows, 8, 1, 128, dtype=torch.bfloat16, device=GPU)
        calls: list[Call] = []
        for step in range(20):
            is_early = early and step > 0
            calls += [
                ResidualNorm(branch=added, residual=x, norm=norm, sum_out=x, out=y, early=is_early),
                Activation(y, z, kind="gelu", early=early),
                RotaryAppend(
                    z.view(rows, 1, width),
                    layout=layout,
                    query=query,
                    key_cache=cache[0],
                    value_cache=cache[1],
                    column=column,
                    rotation=rotation,
                    early=early,
                ),
                Activation(
                    query.view(rows, 2048), y.view(2 * rows, 2048)[:rows], kind="relu", early=early
                ),
                ResidualNorm(branch=z, residual=x, norm=norm, sum_out=x, out=y, early=early),
            ]
        return x, calls

    expected, plain = chain(early=False)
    launch(*plain)
    result, early = chain(early=True)
    start = result.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*early)
    for _ in range(30):
        result.copy_(start)
        graph.replay()
        assert torch.equal(result, expected)
    result.copy_(start)
    torch.cuda.synchronize()
    launch(*early)
    assert torch.equal(result, expected)
