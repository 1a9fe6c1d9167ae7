"""Products with quantised weights in panels: all sizes, every fused step, bad arguments."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any

import host_build
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, needs_gpu
from products import allowed_error, exact_product, rows_of

from offload.kernels import KernelError, structs
from offload.kernels.call import current_stream
from offload.kernels.dequantize import dequantise
from offload.kernels.panels import in_panels, panels_of
from offload.kernels.quant_gemm import QuantGemm
from offload.kernels.quantize import quantise
from offload.kernels.random_weight import random_stored
from offload.kernels.weight_format import WeightFormat

# On the host as on a GPU of compute capability 9.0, as on another ("older"), and as on one of 8.0.
HERE = [*MACHINES[:2], pytest.param("older"), *MACHINES[2:]]
HOST_DEVICES = {"host": "0", "older": "1", "ampere": "2"}
# Where a test says which clusters there are, two of that size run at once.
CLUSTERS = "int cluster, int* count) {"
ONLY_ONE_SIZE = """
    if (const char* only = getenv("HOST_CLUSTER")) {
        *count = cluster == atoi(only) ? 2 : 0;
        return 0;
    }
"""
EXAMPLES = {"reference": 10, "host": 8, "older": 12, "cuda": 400}
FORMS = [
    WeightFormat.parse(f"{kind}-{shared}{zero}")
    for kind in ("int4", "int8")
    for shared in ("g32", "g64", "g128", "channel")
    for zero in ("", "-zp")
]


@functools.cache
def host_library(ampere: bool = False) -> ctypes.CDLL:
    """The kernels compiled for this processor, with stand-ins for what only a GPU has; ampere: as
    they are compiled for sm_80.
    """
    forms = (host_build.CSRC / "quant_gemm_forms.cuh").read_text()
    launches = (host_build.CSRC / "cluster_launch.cuh").read_text()
    assert "kFewRows = 8;" in forms and CLUSTERS in launches
    instead = {
        "async_copy.cuh": '#include "host_async_copy.hpp"\n',
        "tensor_core.cuh": '#include "host_tensor_core.hpp"\n',
        "warpgroup.cuh": '#include "host_warpgroup.hpp"\n',
        # What is measured to be quick on a GPU is too large to be tried here.
        "quant_gemm_forms.cuh": forms.replace("kFewRows = 8;", "kFewRows = 2;"),
        "cluster_launch.cuh": launches.replace(CLUSTERS, CLUSTERS + ONLY_ONE_SIZE),
        # What it would declare is in host_gemm.hpp.
        "cluster.cuh": "#pragma once\n#define OFFLOAD_HAS_CLUSTERS 1\n",
    }
    sources = ["library.cu", "quant_gemm.cu", "quant_gemm_wide.cu"]
    flags = [*host_build.SANITIZED, "-DOFFLOAD_SM90A"]
    if ampere:
        instead["cluster.cuh"] = "#pragma once\n"
        flags[-1] = "-DHOST_WITHOUT_BULK_COPIES"
    name = "quant-gemm-sm80" if ampere else "quant-gemm"
    library = host_build.kernels(name, sources, "host_gemm.hpp", instead, flags)
    pointer = ctypes.POINTER(structs.QuantGemmStruct)
    library.offload_quant_gemm.argtypes = [pointer, ctypes.c_void_p]
    library.offload_last_error.restype = ctypes.c_char_p
    return library


def run(a: dict[str, Any], machine: str, turn: int = 0) -> None:
    """Make the call and issue it; on the host an odd turn does in another order what the hardware
    may do in any.
    """
    call = QuantGemm(**a)
    if machine not in HOST_DEVICES:
        call.launch(current_stream(a["input"].device))
        if machine == "cuda":
            torch.cuda.synchronize()
        return
    os.environ["HOST_COPIES"] = "soon" if turn % 2 else "late"
    os.environ["HOST_BLOCKS"] = "backwards" if turn % 2 else "forwards"
    os.environ["HOST_DEVICE"] = HOST_DEVICES[machine]
    library = host_library(machine == "ampere")
    status = library.offload_quant_gemm(ctypes.byref(call.arguments), None)
    assert status == 0, library.offload_last_error()


def panels(weight: torch.Tensor, rows: WeightFormat) -> tuple[WeightFormat, Any]:
    """`weight` in the format `rows`, in panels."""
    form = panels_of(rows, tuple(weight.shape))
    assert form is not None
    return form, in_panels(rows, quantise(weight, rows))


def make(
    machine: str,
    rows_form: WeightFormat,
    *,
    dtype: torch.dtype,
    rows: int,
    groups: int,
    outputs: int,
    gated: bool = False,
    bias: bool = False,
    residual: str | None = None,
    activation: str | None = None,
    pad: int = 0,
    seed: int = 0,
    drawn: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of QuantGemm, and those of the same product with the weight made whole. `out` is
    NaN, and so is what lies around it. drawn: the stored weight is random, none is quantised.
    """
    torch.manual_seed(seed)
    device = device_of(machine)
    depth = groups * max(rows_form.block[1], 64 if rows_form.bits == 4 else 32)
    products = 2 * outputs if gated else outputs
    shape = (products, depth)
    if drawn:
        found = panels_of(rows_form, shape)
        assert found is not None
        form, stored = found, random_stored(found, shape, torch.device(device), dtype)
    else:
        form, stored = panels((torch.randn(shape) * depth**-0.5).to(dtype), rows_form)
        stored = {name: tensor.to(device) for name, tensor in stored.items()}
    like: dict[str, Any] = {"dtype": dtype, "device": device, "offset": 0, "scale": 1.0}
    around = torch.full((rows + 2, outputs + 5), math.nan, dtype=dtype, device=device)
    out = around[1:-1, :outputs]
    fused: dict[str, Any] = {
        "input": rows_of(rows, depth, pad=pad, **like),
        "bias": torch.randn(products, device=device).to(dtype) if bias else None,
        "residual": None,
        "activation": activation,
        "gated": gated,
    }
    if residual == "apart":
        fused["residual"] = rows_of(rows, outputs, pad=3, **like)
    elif residual == "in place":
        out.normal_()
        fused["residual"] = out
    whole = dequantise(form, stored, (products, depth), dtype)
    exact = dequantise(form, stored, (products, depth), torch.float32)
    return (
        {**fused, "form": form, "stored": stored, "out": out},
        {**fused, "weight": whole, "exact": exact, "norm": None, "out": out},
    )


def problem(machine: str, a: dict[str, Any], whole: dict[str, Any]) -> str | None:
    """What is wrong with the product, which must be bit for bit the same each time."""
    exact = exact_product({**whole, "weight": whole["exact"]})
    allowed = allowed_error(whole, exact)
    before = a["out"].clone()
    results = []
    for turn in range(2):
        a["out"].copy_(before)
        run(a, machine, turn)
        results.append(a["out"].clone())
    error = (results[0].double() - exact).abs().max().item()
    if not error <= allowed:  # NaN too
        return f"wrong by {error:.3g}, allowed {allowed:.3g}"
    if not torch.equal(*results):
        return "another result the second time"
    around = a["out"]._base
    assert around is not None
    outside = around.clone()
    outside[1:-1, : results[0].shape[1]] = math.nan
    return None if torch.isnan(outside).all() else "something was written next to the output"


@pytest.mark.parametrize("machine", HERE)
def test_any_product(machine: str) -> None:
    @given(
        st.sampled_from(FORMS),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([torch.float16, torch.bfloat16]),
                "rows": st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33, 64]),
                "groups": st.sampled_from([1, 2, 3, 5, 9]),
                "outputs": st.sampled_from([16, 32, 48, 64, 112, 128, 208, 272]),
                "gated": st.booleans(),
                "bias": st.booleans(),
                "residual": st.sampled_from([None, "apart", "in place"]),
                "activation": st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"]),
                "pad": st.sampled_from([0, 8]),
                "seed": st.integers(0, 99),
            }
        ),
    )
    @hypothesis_settings(max_examples=EXAMPLES[machine])
    def check(form: WeightFormat, drawn: dict[str, Any]) -> None:
        a, whole = make(machine, form, **drawn)
        assert problem(machine, a, whole) is None, (form.name, drawn)

    check()


@pytest.mark.parametrize("machine", [*HERE[1:], "ampere"])
@pytest.mark.parametrize("name", ["int4-g32-zp", "int4-g64-zp", "int8-g32-zp"])
def test_outputs_and_depths_that_blocks_do_not_share_evenly(machine: str, name: str) -> None:
    form = WeightFormat.parse(name)
    for rows in (2, 16):
        for gated in (False, True):
            a, whole = make(
                machine,
                form,
                dtype=torch.bfloat16,
                rows=rows,
                groups=37,
                outputs=80 if gated else 144,
                gated=gated,
                bias=True,
                activation="silu",
            )
            wrong = problem(machine, a, whole)
            assert wrong is None, f"rows {rows} gated {gated}: {wrong}"


@pytest.mark.parametrize("machine", HERE[1:])
def test_every_number_of_rows(machine: str) -> None:
    form = WeightFormat.parse("int4-zp")
    some = (1, 3, 8, 10, 16, 24, 25, 32, 34, 48, 49, 64)
    for rows in range(1, 65) if machine == "cuda" else some:
        a, whole = make(
            machine, form, dtype=torch.bfloat16, rows=rows, groups=3, outputs=48, bias=True
        )
        assert problem(machine, a, whole) is None, rows


@pytest.mark.parametrize("machine", HERE[1:])
@pytest.mark.parametrize("rows", [3, 33, 64])
def test_what_lies_behind_the_depth_is_not_multiplied(machine: str, rows: int) -> None:
    """Scales that would make any other code infinite stand for zeros here."""
    form = WeightFormat.parse("int4-zp")
    a, whole = make(machine, form, dtype=torch.float16, rows=rows, groups=3, outputs=48)
    for tensor in a["stored"].values():
        tensor.fill_(60000.0 if tensor.dtype == torch.float16 else 0)
    whole["weight"].zero_()
    whole["exact"].zero_()
    assert problem(machine, a, whole) is None


@pytest.mark.parametrize("machine", HERE[1:])
@pytest.mark.parametrize("rows", [16, 20])
def test_a_wide_weight(machine: str, rows: int) -> None:
    """More outputs than all blocks at once have room for the sums of."""
    outputs = 900_000 if machine == "cuda" else 30_000
    form = WeightFormat.parse("int4")
    a, whole = make(machine, form, dtype=torch.float16, rows=rows, groups=1, outputs=outputs)
    assert problem(machine, a, whole) is None


@pytest.mark.parametrize("machine", HERE[2:])
@pytest.mark.parametrize("gated", [False, True])
def test_a_deep_weight(machine: str, gated: bool) -> None:
    """More activations than a block of the form that keeps all of them has room for."""
    for name, rows, groups in (
        ("int4-g128-zp", 16, 51),
        ("int8-g64", 13, 103),
        ("int4-g32", 9, 150),
        ("int4-g128", 16, 400),  # fewer rows at once than the tensor cores would take
    ):
        a, whole = make(
            machine,
            WeightFormat.parse(name),
            dtype=torch.bfloat16,
            rows=rows,
            groups=groups,
            outputs=32 if gated else 48,
            gated=gated,
            residual="apart",
        )
        assert problem(machine, a, whole) is None, (name, rows)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 8, 13, 30, 64])
def test_clusters_of_any_size(rows: int, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that warpgroups have alone, in pairs, and both; and so many that sums take the place
    of stages.
    """
    monkeypatch.setenv("HOST_CLUSTER", str(cluster))
    for name, outputs, gated in (
        ("int4-g64", 176, False),
        ("int8-g32-zp", 112, True),
        ("int4-g32", 608, False),
        ("int4-g64-zp", 1024, False),
    ):
        a, whole = make(
            "host",
            WeightFormat.parse(name),
            dtype=torch.bfloat16,
            rows=rows,
            groups=13,
            outputs=outputs,
            gated=gated,
            residual="in place",
            drawn=True,
        )
        wrong = problem("host", a, whole)
        assert wrong is None, f"{name} {outputs}: {wrong}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_shapes_of_real_models() -> None:
    for name in ("int4", "int4-g128-zp", "int8"):
        form = WeightFormat.parse(name)
        for depth, outputs in ((4096, 12288), (4096, 4096), (11008, 4096), (5120, 20480)):
            for rows in (1, 8, 16, 64):
                a, whole = make(
                    "cuda",
                    form,
                    dtype=torch.bfloat16,
                    rows=rows,
                    groups=depth // form.block[1],
                    outputs=outputs,
                )
                wrong = problem("cuda", a, whole)
                assert wrong is None, f"{name} K{depth} N{outputs} rows {rows}: {wrong}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [3, 8, 9, 16])
@pytest.mark.parametrize("name", ["int4", "int4-zp", "int8"])
def test_a_large_weight_of_few_rows(name: str, rows: int) -> None:
    form = WeightFormat.parse(name)
    a, whole = make(
        "cuda", form, dtype=torch.bfloat16, rows=rows, groups=128, outputs=28672, drawn=True
    )
    assert problem("cuda", a, whole) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [2, 12, 24])
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote(rows: int, early: bool) -> None:
    """Forty products, each of the one before, on two buffers: a load that comes too early, or a
    write that comes too soon, shows."""
    torch.manual_seed(0)
    width = 2048
    buffers = [torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2)]
    start = buffers[0].clone()
    calls = []
    for i in range(40):
        weight = torch.randn(width, width, device="cuda").bfloat16() * width**-0.5
        stored = panels(weight, WeightFormat.parse("int4-zp"))
        x, out = buffers[i % 2], buffers[1 - i % 2]
        calls.append(QuantGemm(x, *stored, out, early=early and i > 0))
    for call in calls:
        call.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    wanted = buffers[0].clone()
    assert torch.isfinite(wanted).all() and wanted.abs().max() > 0.01
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


X, OUT = torch.randn(4, 64).bfloat16(), torch.zeros(4, 16).bfloat16()
FORM, STORED = panels(torch.randn(16, 64).bfloat16(), WeightFormat.parse("int4-g32"))
ROWS = WeightFormat.parse("int4-g32")
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": torch.zeros(65, 64).bfloat16(), "out": torch.zeros(65, 16).bfloat16()}, ValueError,
     "at most 64 rows, not 65"),
    ({"input": X.float(), "out": OUT.float()}, ValueError, "float32 is neither"),
    ({"input": X.half(), "out": OUT.half()}, ValueError, "scales are torch.bfloat16"),
    ({"input": None}, TypeError, "input must be a tensor, not NoneType"),
    ({"out": torch.zeros(4, 32).bfloat16()}, ValueError, r"weight_panels is torch.uint8 \[1, 1, 5"),
    ({"out": torch.zeros(4, 9).bfloat16()}, ValueError, "9 outputs and 64 inputs do not divide in"),
    ({"out": OUT[:, :8], "gated": True}, ValueError, "gate and up of 8 outputs do not begin with"),
    ({"form": WeightFormat("int4", "panels", (1, 32), True)}, ValueError,
     "weight_panel_zero is missing"),
    ({"form": ROWS, "stored": quantise(torch.ones(16, 64).bfloat16(), ROWS)}, ValueError,
     "int4 stored as 'packed' does not lie in panels"),
    ({"form": ROWS}, ValueError, "weight_scale is missing"),  # panels are not taken for rows
    ({"stored": quantise(torch.ones(16, 64).bfloat16(), ROWS)}, ValueError,
     "weight_panel_scale is missing"),
    ({"bias": torch.zeros(8).bfloat16()}, ValueError, r"bias must have shape \[16\]"),
    ({"residual": torch.zeros(4, 8).bfloat16()}, ValueError, r"residual must have shape \[4, 16\]"),
    ({"activation": "tanh"}, ValueError, "activation must be one of"),
    ({"out": X[:, :16]}, ValueError, "out shares memory with input"),
    ({"out": torch.zeros(16).bfloat16().expand(4, 16)}, ValueError, "rows of out must not overlap"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "text"), BAD, ids=[text for _, _, text in BAD])
def test_bad_arguments_are_named(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        QuantGemm(**{"input": X, "form": FORM, "stored": STORED, "out": OUT, **changed})


@pytest.mark.parametrize("machine", ["host", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rows", 65, "rows must be 0 to 64, not 65"),
        ("bits", 5, "bits must be 4 or 8, not 5"),
        ("depth", 96, "depth must be a multiple of 64, not 96"),
        ("outputs", 24, "outputs must be"),
        ("group", 48, "group must be the depth, or a power of 2"),
        ("input", 8, "must lie at multiples of 16"),
        ("input_stride", 65, "stride must be a multiple of 8"),
        ("scale", None, "must not be null"),
    ],
)
def test_the_library_refuses(machine: str, field: str, value: Any, text: str) -> None:
    device = device_of(machine)
    stored = {name: tensor.to(device) for name, tensor in STORED.items()}
    call = QuantGemm(X.to(device), FORM, stored, OUT.to(device))
    setattr(call.arguments, field, value)
    if machine == "cuda":
        with pytest.raises(KernelError, match=text):
            call.launch()
    else:
        library = host_library()
        assert library.offload_quant_gemm(call.arguments, None) == -1
        assert text in library.offload_last_error().decode()
