"""Products of a few rows: odd sizes, every fused step, every variant, and bad arguments."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import gemm_machine
import pytest
import torch
from accuracy import DTYPES
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of
from products import allowed_error, exact_product, make

from offload.kernels import KernelError, Norm
from offload.kernels.gemm import SkinnyGemm

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
EXAMPLES = {"reference": 10, "host": 15, "cuda": 400}


def problem(machine: str, a: dict[str, Any], **forced: Any) -> str | None:
    """What is wrong with the product, which must be bit for bit the same each time."""
    exact = exact_product(a)
    allowed = allowed_error(a, exact)
    before = a["out"].clone()
    results = []
    for turn in range(2):
        a["out"].copy_(before)
        gemm_machine.run({**a, **forced}, machine, turn)
        results.append(a["out"].clone())
    out = results[0]
    if torch.isnan(out).any():
        return f"{int(torch.isnan(out).sum())} of {out.numel()} are NaN"
    if not torch.equal(out, results[1]):
        return "another result the second time"
    error = (out.double() - exact).abs().max().item()
    if not error <= allowed:
        return f"wrong by {error:.3g}, allowed {allowed:.3g}"
    around = a["out"]._base
    assert around is not None
    outside = around.clone()
    outside[1:-1, : out.shape[1]] = math.nan
    return None if torch.isnan(outside).all() else "something was written next to the output"


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    wide = draw(st.integers(0, 6)) > 0
    depths = st.sampled_from([8, 16, 40, 128, 136, 256, 264, 512, 520, 776, 1032])
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "rows": draw(st.integers(1, 16)),
        "depth": draw(depths if wide else st.integers(1, 300)),
        "outputs": draw(st.sampled_from([1, 3, 8, 17, 33, 64, 65, 130, 200, 257])),
        "gated": draw(flag),
        "bias": draw(flag),
        "residual": draw(st.sampled_from([None, "apart", "in place"])),
        "norm": draw(st.sampled_from([None, None, "rms", "layer", "plain"])),
        "weight_offset": draw(st.sampled_from([0.0, 1.0])),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "pad": draw(st.sampled_from([0, 8, 16])) if wide else draw(st.sampled_from([0, 1, 3])),
        "offset": draw(st.sampled_from([0, 0, 0, 0, 1])),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_any_product(machine: str) -> None:
    @given(settings(), st.integers(0, 99), st.sampled_from([0, 1, 2, 3, 5, 64]), st.booleans())
    @hypothesis_settings(max_examples=EXAMPLES[machine])
    def check(drawn: dict[str, Any], pick: int, splits: int, early: bool) -> None:
        a = make(machine, **drawn)
        call = SkinnyGemm(**a)
        count = gemm_machine.host_variants(call) if machine == "host" else call.variants
        forced = {"variant": pick % (count + 1), "splits": splits}
        if machine == "cuda":
            forced["early"] = early  # behind the copy that fills the output
        assert problem(machine, a, **forced) is None, forced

    check()


def grid(machine: str) -> list[dict[str, Any]]:
    """Sizes that cut tiles at all kinds of places, one a bucket of rows and dtype."""
    sizes = [(520, 200), (1544, 328)] if machine == "cuda" else [(264, 24)]
    rows = (1, 2, 3, 8, 16) if machine == "cuda" else (2, 16)
    dtypes = DTYPES if machine == "cuda" else (torch.bfloat16,)
    return [
        {"dtype": dtype, "rows": r, "depth": depth, "outputs": outputs, "gated": gated}
        for dtype, r, (depth, outputs), gated in itertools.product(
            dtypes, rows, sizes, (False, True)
        )
    ]


@pytest.mark.parametrize("norm", [None, "rms"])
@pytest.mark.parametrize("machine", MACHINES[1:])
def test_every_variant_and_split(machine: str, norm: str | None) -> None:
    splits = (0, 1, 2, 3, 7, 64) if machine == "cuda" else (1, 2)
    failures = []
    for size in grid(machine):
        a = make(machine, bias=True, residual="apart", norm=norm, activation="silu", **size)
        call = SkinnyGemm(**a)
        count = gemm_machine.host_variants(call) if machine == "host" else call.variants
        assert count > 1
        for variant, split in itertools.product(range(1, count + 1), splits):
            wrong = problem(machine, a, variant=variant, splits=split)
            if wrong:
                failures.append(f"{size} variant {variant} splits {split}: {wrong}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("machine", MACHINES[1:])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16])
def test_tiles_of_float32_that_blocks_share(machine: str, rows: int, gated: bool) -> None:
    """Whoever comes last adds what all of them have of a tile, in the order of the depth."""
    a = make(machine, dtype=torch.float32, rows=rows, depth=1032, outputs=40, gated=gated)
    call = SkinnyGemm(**a)
    count = gemm_machine.host_variants(call) if machine == "host" else call.variants
    for variant, splits in itertools.product(range(1, count + 1), (2, 3, 7)):
        assert problem(machine, a, variant=variant, splits=splits) is None, (variant, splits)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("dtype", "kind", "mean", "scale"),
    [
        (torch.bfloat16, "layer", 10.0, 1.0),  # most digits are the mean's
        (torch.bfloat16, "layer", -0.5, 1.0),
        (torch.float16, "layer", 300.0, 1.0),
        (torch.bfloat16, "rms", 0.0, 1e15),
        (torch.float16, "rms", 0.0, 1e4),  # times the norm's weight: beyond float16
        (torch.float16, "rms", 0.0, 1e-5),
        (torch.float16, "layer", 0.0, 1e-5),
    ],
)
def test_rows_far_from_what_a_norm_makes_of_them(
    machine: str, dtype: torch.dtype, kind: str, mean: float, scale: float
) -> None:
    """A norm is applied behind the product, whose terms may neither lose digits nor overflow."""
    a = make(machine, dtype=dtype, rows=3, depth=776, outputs=40, norm=kind, bias=True)
    a["input"].mul_(scale).add_(mean)
    a["norm"].weight.mul_(8)
    a["norm"] = replace(a["norm"], eps=1e-12)
    for splits in (1, 2):
        assert problem(machine, a, splits=splits) is None


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rows", [6, 7, 8, 14, 15])
def test_a_layer_norm_beside_as_many_rows_as_there_is_room_for(machine: str, rows: int) -> None:
    """Its weight and bias take columns of the product's tiles, which have 8 or 16."""
    a = make(machine, dtype=torch.bfloat16, rows=rows, depth=264, outputs=40, norm="layer")
    assert problem(machine, a) is None


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_row_that_is_not_finite_spoils_no_other(machine: str, kind: str) -> None:
    a = make(machine, dtype=torch.bfloat16, rows=3, depth=264, outputs=40, norm=kind)
    gemm_machine.run(a, machine)
    before = a["out"].clone()
    assert torch.isfinite(before).all()
    a["input"][2, 5] = math.inf
    gemm_machine.run(a, machine)
    assert torch.equal(a["out"][:2], before[:2])
    assert not torch.isfinite(a["out"][2]).any()


@pytest.mark.parametrize("machine", MACHINES)
def test_rows_of_zeros_and_of_equal_values(machine: str) -> None:
    for kind, value in (("rms", 0.0), ("layer", 0.0), ("layer", 3.0)):
        a = make(machine, dtype=torch.bfloat16, rows=2, depth=264, outputs=40, norm=kind)
        a["input"].fill_(value)
        assert problem(machine, a) is None, kind


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_shapes_of_real_models() -> None:
    failures = []
    sizes = [(5120, 5120), (4096, 12288), (11008, 4096), (13824, 5120), (576, 1536), (28672, 8192)]
    for (depth, outputs), rows, norm in itertools.product(sizes, (1, 4, 16), (None, "layer")):
        a = make("cuda", dtype=torch.bfloat16, rows=rows, depth=depth, outputs=outputs, norm=norm)
        ways = itertools.product(range(SkinnyGemm(**a).variants + 1), (1, 2))
        for variant, splits in ways:
            wrong = problem("cuda", a, variant=variant, splits=splits)
            if wrong:
                failures.append(
                    f"K{depth} N{outputs} rows {rows} {norm} variant {variant} splits {splits}: "
                    f"{wrong}"
                )
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("early", [False, True])
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote(early: bool) -> None:
    """Forty products, each of the one before, on two buffers: a load that comes too early, or a
    write that comes too soon, shows."""
    torch.manual_seed(0)
    width, rows = 2048, 2
    weights = [torch.randn(width, width, device="cuda").bfloat16() * width**-0.5 for _ in range(40)]
    buffers = [torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2)]
    start = buffers[0].clone()
    norm = Norm("rms", torch.rand(width, device="cuda").bfloat16() + 0.5)
    workspace = gemm_machine.Workspace("cuda")
    calls = [
        SkinnyGemm(
            buffers[i % 2],
            w,
            buffers[1 - i % 2],
            norm=norm,
            splits=4,
            workspace=workspace,
            early=early and i > 0,
        )
        for i, w in enumerate(weights)
    ]

    def plain() -> torch.Tensor:
        for call in calls:
            call.launch(torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
        return buffers[0].clone()

    wanted = plain()
    buffers[0].copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call.launch(torch.cuda.current_stream().cuda_stream)
    for _ in range(20):
        buffers[0].copy_(start)
        buffers[1].fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffers[0], wanted)


def test_rows_may_have_leading_dimensions() -> None:
    x, w = torch.randn(2, 3, 24), torch.randn(10, 24)
    out = torch.full((2, 3, 10), math.nan)
    SkinnyGemm(x, w, out).launch()
    torch.testing.assert_close(out, x @ w.T)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_rows_at_all(machine: str) -> None:
    device = device_of(machine)
    x, w = torch.empty(0, 24, device=device), torch.randn(10, 24, device=device)
    gemm_machine.run({"input": x, "weight": w, "out": x.new_empty(0, 10)}, machine)


X, W, OUT = torch.randn(4, 16), torch.randn(6, 16), torch.zeros(4, 6)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": torch.randn(17, 16), "out": torch.zeros(17, 6)}, ValueError, "at most 16 rows.*17"),
    ({"input": X.double()}, ValueError, "dtype torch.float64 is not supported"),
    ({"input": None}, TypeError, "input must be a tensor, not NoneType"),
    ({"input": torch.tensor(1.0)}, ValueError, r"input must be \[..., depth\], not \[\]"),
    ({"input": X.half()}, ValueError, "weight must be torch.float16, not torch.float32"),
    ({"weight": torch.randn(6, 15)}, ValueError, r"weight must have shape \[6, 16\], not \[6, 15"),
    ({"gated": True}, ValueError, r"weight must have shape \[12, 16\], not \[6, 16\]"),
    ({"weight": torch.randn(16, 6).T}, ValueError, "last dimension of weight must be contiguous"),
    ({"weight": torch.randn(16).expand(6, 16)}, ValueError, "rows of weight must not overlap"),
    ({"out": torch.zeros(3, 6)}, ValueError, r"out must have shape \[4, 6\], not \[3, 6\]"),
    ({"out": torch.zeros(6).expand(4, 6)}, ValueError, "rows of out must not overlap"),
    ({"out": torch.zeros(4, 6, device="meta")}, ValueError, "out must be on cpu, not on meta"),
    ({"bias": torch.zeros(7)}, ValueError, r"bias must have shape \[6\], not \[7\]"),
    ({"residual": torch.zeros(4, 7)}, ValueError, r"residual must have shape \[4, 6\]"),
    ({"residual": torch.zeros(6, 4).T}, ValueError, "last dimension of residual"),
    ({"norm": Norm("rms", torch.ones(15))}, ValueError, r"norm.weight must have shape \[16\]"),
    ({"activation": "tanh"}, ValueError, "activation must be one of .*'silu', not 'tanh'"),
    ({"variant": -1}, ValueError, "variant must not be negative, got -1"),
    ({"splits": -2}, ValueError, "splits must not be negative, got -2"),
    ({"weight": torch.randn(4, 16), "out": X[:, :4]}, ValueError, "out shares memory with input"),
    ({"residual": OUT.view(-1)[1:].as_strided((4, 6), (5, 1))}, ValueError, "with residual"),
    ({"workspace": gemm_machine.Workspace("meta")}, ValueError, "workspace must be on cpu"),
]


@pytest.mark.parametrize(("changed", "error", "text"), BAD, ids=[text for _, _, text in BAD])
def test_bad_arguments_are_named(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = {"input": X, "weight": W, "out": OUT, **changed}
    with pytest.raises(error, match=text):
        SkinnyGemm(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_library_refuses_what_it_cannot_do() -> None:
    x, w = X.cuda(), W.cuda()
    call = SkinnyGemm(x, w, torch.zeros(4, 6, device="cuda"), variant=1)
    call.arguments.variant = 99
    with pytest.raises(KernelError, match="variant must be 0 to"):
        call.launch()
    call.arguments.variant, call.arguments.rows = 0, 17
    with pytest.raises(KernelError, match="rows must be 0 to 16, not 17"):
        call.launch()
    call.arguments.rows, call.arguments.input = 4, None
    with pytest.raises(KernelError, match="must not be null"):
        call.launch()


def test_the_host_library_refuses_a_workspace_that_is_too_small() -> None:
    a = make("host", dtype=torch.float32, rows=2, depth=1024, outputs=64)
    call = SkinnyGemm(**a, splits=4)
    library = gemm_machine.host_library()
    assert library.offload_skinny_gemm(call.arguments, None) == -1
    assert b"bytes of workspace" in library.offload_last_error()
