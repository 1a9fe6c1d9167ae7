"""Products with quantised weights: odd sizes, every fused step, every variant, bad arguments."""

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
from machines import MACHINES, device_of, guarded_workspace, needs_gpu
from products import allowed_error, exact_product, rows_of

from offload.kernels import KernelError, structs
from offload.kernels.call import current_stream
from offload.kernels.dequantize import dequantise
from offload.kernels.quant_gemm import QuantGemm
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import WeightFormat
from offload.kernels.workspace import Workspace

EXAMPLES = {"reference": 10, "host": 12, "cuda": 400}
FORMS = [
    WeightFormat.parse(f"{kind}-{shared}{zero}")
    for kind in ("int4", "int8")
    for shared in ("g32", "g64", "g128", "channel")
    for zero in ("", "-zp")
]


@functools.cache
def host_library() -> ctypes.CDLL:
    """quant_gemm.cu compiled for this processor, with stand-ins for what only a GPU has."""
    instead = {
        "async_copy.cuh": '#include "host_async_copy.hpp"\n',
        "tensor_core.cuh": '#include "host_tensor_core.hpp"\n',
    }
    sources = ["library.cu", "quant_gemm.cu"]
    library = host_build.kernels("quant-gemm", sources, "host_gemm.hpp", instead)
    pointer = ctypes.POINTER(structs.QuantGemmStruct)
    library.offload_quant_gemm.argtypes = [pointer, ctypes.c_void_p]
    for name in ("workspace", "counters"):
        getattr(library, f"offload_quant_gemm_{name}").restype = ctypes.c_int64
    library.offload_last_error.restype = ctypes.c_char_p
    return library


def run(a: dict[str, Any], machine: str, turn: int = 0) -> None:
    """Make the call, issue it, and check what it must leave behind. Partial sums are NaN before,
    counters zero before and after; on the host an odd turn does in another order what the hardware
    may do in any.
    """
    if machine != "host":
        workspace = Workspace(a["input"].device)
        call = QuantGemm(**a, workspace=workspace)
        workspace._partials.fill_(math.nan)
        call.launch(current_stream(workspace.device))
        if machine == "cuda":
            torch.cuda.synchronize()
        assert not workspace._counters.any(), "counters were left behind"
        return
    library, arguments = host_library(), QuantGemm(**a).arguments
    nbytes = library.offload_quant_gemm_workspace(ctypes.byref(arguments))
    count = library.offload_quant_gemm_counters(ctypes.byref(arguments))
    assert nbytes >= 0 and count >= 0, library.offload_last_error()
    os.environ["HOST_COPIES"] = "soon" if turn % 2 else "late"
    os.environ["HOST_BLOCKS"] = "backwards" if turn % 2 else "forwards"
    with guarded_workspace(arguments, nbytes, count):
        status = library.offload_quant_gemm(ctypes.byref(arguments), None)
        assert status == 0, library.offload_last_error()


def make(
    machine: str,
    form: WeightFormat,
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
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of QuantGemm, and those of the same product with the weight made whole. `out` is
    NaN, and so is what lies around it.
    """
    torch.manual_seed(seed)
    device = device_of(machine)
    depth = groups * (form.block[1] or 32)
    products = 2 * outputs if gated else outputs
    weight = (torch.randn(products, depth) * depth**-0.5).to(dtype)
    stored = {name: tensor.to(device) for name, tensor in quantise(weight, form).items()}
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


def problem(machine: str, a: dict[str, Any], whole: dict[str, Any], variant: int) -> str | None:
    """What is wrong with the product, which must be bit for bit the same each time."""
    exact = exact_product({**whole, "weight": whole["exact"]})
    allowed = allowed_error(whole, exact)
    before = a["out"].clone()
    results = []
    for turn in range(2):
        a["out"].copy_(before)
        run({**a, "variant": variant}, machine, turn)
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


def variants(machine: str, a: dict[str, Any]) -> int:
    call = QuantGemm(**a)
    if machine == "host":
        return host_library().offload_quant_gemm_variants(ctypes.byref(call.arguments))
    return call.variants


@pytest.mark.parametrize("machine", MACHINES)
def test_any_product(machine: str) -> None:
    @given(
        st.sampled_from(FORMS),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([torch.float16, torch.bfloat16]),
                "rows": st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33, 64]),
                "groups": st.sampled_from([1, 2, 3, 5, 9]),
                "outputs": st.sampled_from([1, 3, 8, 17, 64, 130, 200, 257]),
                "gated": st.booleans(),
                "bias": st.booleans(),
                "residual": st.sampled_from([None, "apart", "in place"]),
                "activation": st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"]),
                "pad": st.sampled_from([0, 8]),
                "seed": st.integers(0, 99),
            }
        ),
        st.integers(0, 3),
    )
    @hypothesis_settings(max_examples=EXAMPLES[machine])
    def check(form: WeightFormat, drawn: dict[str, Any], variant: int) -> None:
        a, whole = make(machine, form, **drawn)
        variant %= variants(machine, a) + 1
        assert problem(machine, a, whole, variant) is None, (form.name, drawn, variant)

    check()


@pytest.mark.parametrize("machine", MACHINES[1:])
@pytest.mark.parametrize("name", ["int4-g32-zp", "int4-g64-zp", "int8-g32-zp"])
def test_every_variant(machine: str, name: str) -> None:
    """Over several tiles and chunks, the last of each cut off."""
    form = WeightFormat.parse(name)
    for rows in (2, 16):
        for gated in (False, True):
            a, whole = make(
                machine,
                form,
                dtype=torch.bfloat16,
                rows=rows,
                groups=67 * 32 // form.block[1],
                outputs=70 if gated else 140,
                gated=gated,
                bias=True,
                activation="silu",
            )
            for variant in range(1, variants(machine, a) + 1):
                wrong = problem(machine, a, whole, variant)
                assert wrong is None, f"rows {rows} gated {gated} variant {variant}: {wrong}"


@pytest.mark.parametrize("machine", MACHINES[1:])
@pytest.mark.parametrize("gated", [False, True])
def test_a_deep_weight(machine: str, gated: bool) -> None:
    """More activations than a block has room for at once."""
    for name, rows, groups in (
        ("int4-g128-zp", 16, 51),
        ("int8-g64", 13, 103),
        ("int4-g32", 9, 300),
    ):
        a, whole = make(
            machine,
            WeightFormat.parse(name),
            dtype=torch.bfloat16,
            rows=rows,
            groups=groups,
            outputs=21 if gated else 42,
            gated=gated,
            residual="apart",
        )
        assert problem(machine, a, whole, 0) is None, (name, rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_shapes_of_real_models() -> None:
    for name in ("int4", "int4-g128-zp", "int8"):
        form = WeightFormat.parse(name)
        for depth, outputs in ((4096, 12288), (4096, 4096), (11008, 4096), (5120, 20480)):
            for rows in (1, 16, 64):
                a, whole = make(
                    "cuda",
                    form,
                    dtype=torch.bfloat16,
                    rows=rows,
                    groups=depth // form.block[1],
                    outputs=outputs,
                )
                for variant in range(variants("cuda", a) + 1):
                    wrong = problem("cuda", a, whole, variant)
                    assert wrong is None, (
                        f"{name} K{depth} N{outputs} rows {rows} {variant}: {wrong}"
                    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("early", [False, True])
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote(early: bool) -> None:
    """Forty products, each of the one before, on two buffers: a load that comes too early, or a
    write that comes too soon, shows."""
    torch.manual_seed(0)
    width, form = 2048, WeightFormat.parse("int4-zp")
    buffers = [torch.randn(2, width, device="cuda").bfloat16() for _ in range(2)]
    start = buffers[0].clone()
    workspace = Workspace("cuda")
    calls = []
    for i in range(40):
        weight = torch.randn(width, width, device="cuda").bfloat16() * width**-0.5
        stored = quantise(weight, form)
        calls.append(
            QuantGemm(
                buffers[i % 2],
                form,
                stored,
                buffers[1 - i % 2],
                workspace=workspace,
                early=early and i > 0,
            )
        )
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


FORM = WeightFormat.parse("int4-g32")
X, OUT = torch.randn(4, 64).bfloat16(), torch.zeros(4, 9).bfloat16()
STORED = quantise(torch.randn(9, 64).bfloat16(), FORM)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": torch.zeros(65, 64).bfloat16(), "out": torch.zeros(65, 9).bfloat16()}, ValueError,
     "at most 64 rows, not 65"),
    ({"input": X.float(), "out": OUT.float()}, ValueError, "float32 is neither"),
    ({"input": X.half(), "out": OUT.half()}, ValueError, "scales are torch.bfloat16"),
    ({"input": None}, TypeError, "input must be a tensor, not NoneType"),
    ({"out": torch.zeros(4, 8).bfloat16()}, ValueError, r"weight_packed is torch.int32 \[9, 8\]"),
    ({"gated": True}, ValueError, r"weight_packed is torch.int32 \[9, 8\], but a weight of \[18"),
    ({"form": WeightFormat.parse("int4-g32-zp")}, ValueError, "weight_zero_point is missing"),
    ({"form": WeightFormat.parse("fp8"), "stored": quantise(torch.ones(9, 64).bfloat16(),
      WeightFormat.parse("fp8"))}, ValueError, "fp8 stored as 'plain' is not multiplied"),
    ({"bias": torch.zeros(8).bfloat16()}, ValueError, r"bias must have shape \[9\]"),
    ({"residual": torch.zeros(4, 8).bfloat16()}, ValueError, r"residual must have shape \[4, 9\]"),
    ({"activation": "tanh"}, ValueError, "activation must be one of"),
    ({"variant": -1}, ValueError, "variant must not be negative, got -1"),
    ({"out": X[:, :9]}, ValueError, "out shares memory with input"),
    ({"out": torch.zeros(9).bfloat16().expand(4, 9)}, ValueError, "rows of out must not overlap"),
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
        ("variant", 9, "variant must be 0 or 1, not 9"),
        ("rows", 65, "rows must be 0 to 64, not 65"),
        ("bits", 5, "bits must be 4 or 8, not 5"),
        ("depth", 60, "depth must be a multiple of 32, not 60"),
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
