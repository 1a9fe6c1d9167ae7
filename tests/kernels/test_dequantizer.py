"""Dequantisation by the kernels: bit for bit the reference, for every format; and bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, launch, needs_gpu
from stored_weights import Numbers, awq, gptq

from offload.kernels import KernelError
from offload.kernels.dequantize import dequantise
from offload.kernels.dequantize_reference import dequantise_reference
from offload.kernels.dequantizer import Dequantize
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import WeightFormat

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXAMPLES = {"reference": 20, "host": 120, "cuda": 600}
Stored = dict[str, torch.Tensor]

WRITTEN = [
    f"{kind}-{shared}{zero}"
    for kind in ("int4", "int8")
    for shared in ("g32", "g64", "g128", "channel")
    for zero in ("", "-zp")
] + ["fp8-channel", "fp8-tensor", "fp8-block", "mxfp4"]
FORMS = [WeightFormat.parse(name) for name in WRITTEN] + [
    WeightFormat("int8", "plain", (1, 0)),
    WeightFormat("int8", "plain", (1, 64), zero_points=True),
    WeightFormat("int8", "plain", (0, 0), zero_points=True),
    WeightFormat("int4", "packed", (0, 0)),
    WeightFormat("int4", "packed", (1, 32), zero_points=True, act_order=True),
    WeightFormat("int8", "packed", (1, 64), act_order=True),
    WeightFormat("fp8", "fp8_block", (128, 128)),
    WeightFormat("fp8", "fp8_block", (24, 100)),
    WeightFormat("mxfp4", "gpt_oss", (1, 32)),
    WeightFormat("int4", "awq", (1, 64), zero_points=True),
    WeightFormat("int4", "awq", (1, 0), zero_points=True),
    *(
        WeightFormat(kind, "panels", (1, group), zeros)
        for kind in ("int4", "int8")
        for group, zeros in ((0, True), (32, True), (64, False), (96, True))
    ),
    *(
        WeightFormat(kind, layout, (1, group), zero_points=True, act_order=order)
        for kind in ("int4", "int8")
        for layout in ("gptq", "gptq_v2")
        for group, order in ((0, False), (32, False), (64, True), (12, False))
    ),
]


def random_stored(form: WeightFormat, shape: tuple[int, ...], scale: torch.dtype) -> Stored:
    """Random codes, zeros and scales in the format, by its own table of tensors."""
    groups = form.groups(shape)[1]
    stored: Stored = {}
    for name, (dtype, size) in form.stored(shape, scale).items():
        if name == "weight_shape":
            stored[name] = torch.tensor(shape)
        elif name in ("g_idx", "weight_g_idx"):
            stored[name] = torch.randint(groups, size, dtype=torch.int32)
        elif dtype == torch.float8_e4m3fn:
            code = torch.randint(256, size, dtype=torch.uint8)
            stored[name] = torch.where(code % 128 == 127, 0, code).view(dtype)  # no NaN
        elif dtype in (torch.int32, torch.int8):
            limits = torch.iinfo(dtype)
            stored[name] = torch.randint(limits.min, limits.max + 1, size, dtype=dtype)
        elif dtype == torch.uint8:
            scales = name in ("weight_scale", "scales")
            stored[name] = torch.randint(0, 255 if scales else 256, size, dtype=dtype)
        elif dtype == torch.float8_e8m0fnu:
            stored[name] = torch.randint(0, 255, size, dtype=torch.uint8).view(dtype)
        else:
            stored[name] = (torch.randn(size) * 0.3).to(dtype)
    return stored


def around(rows: int, columns: int, pad: int, offset: int, dtype: torch.dtype, device: str) -> Any:
    """[rows, columns] of NaN between more NaN, and all of it."""
    whole = torch.full(((rows + 1) * (columns + pad) + offset,), math.nan, dtype=dtype)
    whole = whole.to(device)
    view = whole[offset:].view(rows + 1, columns + pad)[:rows, :columns]
    return view, whole


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    return torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))


def problem(
    machine: str, form: WeightFormat, stored: Stored, shape: tuple[int, ...], **drawn: Any
) -> str | None:
    device, dtype = device_of(machine), drawn["dtype"]
    wanted = dequantise(form, stored, shape, dtype)
    on_device = {name: tensor.to(device) for name, tensor in stored.items()}
    if form.layout == "gpt_oss":
        out = whole = torch.full((shape[0], shape[2], shape[1]), math.nan, dtype=dtype).to(device)
        found = out.transpose(1, 2)
    else:
        out, whole = around(*shape, drawn["pad"], drawn["offset"], dtype, device)
        found = out
    launch(Dequantize(form, on_device, out, variant=drawn["variant"]), machine)
    if not same_bits(found.cpu(), wanted):
        wrong = ~(found.cpu() == wanted)
        at = wrong.nonzero()[0].tolist() if wrong.any() else "signs of zeros"
        return f"{int(wrong.sum())} of {wrong.numel()} differ, the first at {at}"
    out.fill_(math.nan)
    return None if torch.isnan(whole).all() else "something was written next to the output"


@pytest.mark.parametrize("machine", MACHINES)
def test_every_format_equals_the_reference(machine: str) -> None:
    @given(
        st.sampled_from(FORMS),
        st.integers(1, 300 if machine == "cuda" else 70),
        st.integers(1, 600 if machine == "cuda" else 200),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(DTYPES),
                "pad": st.sampled_from([0, 0, 8, 3]),
                "offset": st.sampled_from([0, 0, 0, 8, 1]),
                "variant": st.integers(0, 2),
            }
        ),
        st.sampled_from([*DTYPES, torch.float8_e8m0fnu]),
        st.integers(0, 1 << 20),
    )
    @hypothesis_settings(max_examples=EXAMPLES[machine])
    def check(
        form: WeightFormat, n: int, k: int, drawn: dict[str, Any], scale: torch.dtype, seed: int
    ) -> None:
        torch.manual_seed(seed)
        if form.layout != "fp8_block" and scale == torch.float8_e8m0fnu:
            scale = torch.float32
        if form.layout == "panels" and scale == torch.float32:
            scale = torch.float16
        if form.layout in ("gptq", "gptq_v2", "awq"):
            n, k = -(-n // form.per_word) * form.per_word, -(-k // form.per_word) * form.per_word
        columns = form.block[1]
        if form.layout == "panels":
            step = math.lcm(form.panel_columns, columns or 1)
            n, k = -(-n // 16) * 16, -(-k // step) * step
        if columns and form.layout in ("packed", "awq", "mxfp4", "gpt_oss"):
            k = max(1, k // columns) * columns
        shape = (2, k, n) if form.layout == "gpt_oss" else (n, k)
        stored = random_stored(form, shape, scale)
        assert problem(machine, form, stored, shape, **drawn) is None, (form, shape, drawn)

    check()


BY_STRIPS = [f for f in FORMS if f.layout in ("packed", "plain", "fp8_block", "mxfp4", "gpt_oss")]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (19, 768), (2, 2304)], ids=str)
def test_rows_of_whole_strips(machine: str, shape: tuple[int, int]) -> None:
    """Several a warp, which end with a row or in the middle of one."""
    torch.manual_seed(shape[0])
    for i, form in enumerate(BY_STRIPS):
        if shape[1] % (form.block[1] or 1) and form.layout != "fp8_block":
            continue
        size = (2, shape[1], shape[0]) if form.layout == "gpt_oss" else shape
        stored = random_stored(form, size, DTYPES[i % 3])
        drawn = {"dtype": DTYPES[(i + shape[0]) % 3], "pad": i % 2 * 8, "offset": 0, "variant": 2}
        assert problem(machine, form, stored, size, **drawn) is None, (form, drawn)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_of_fp8_and_every_scale_of_mxfp4(machine: str, dtype: torch.dtype) -> None:
    """NaN too."""
    device = device_of(machine)
    code = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 256)
    stored = {"weight": code, "weight_scale": torch.tensor([0.37])}
    packed = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(1, -1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, -1)
    for form, tensors, columns in (
        (WeightFormat.parse("fp8-tensor"), stored, 256),
        (WeightFormat.parse("mxfp4"), {"weight_packed": packed, "weight_scale": scales}, 8192),
    ):
        wanted = dequantise(form, tensors, (1, columns), dtype)
        out = torch.zeros(1, columns, dtype=dtype, device=device)
        launch(Dequantize(form, {n: t.to(device) for n, t in tensors.items()}, out), machine)
        assert torch.equal(torch.isnan(out.cpu()), torch.isnan(wanted))
        assert same_bits(out.cpu().nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("machine", MACHINES[1:])
def test_what_other_programs_write(machine: str) -> None:
    """GPTQ and AWQ by the letter of their definitions, over several tiles."""
    device = device_of(machine)
    numbers = Numbers.draw(528, 160, 32, 4, 5, True)
    ordered = WeightFormat("int4", "gptq", (1, 32), zero_points=True, act_order=True)
    plain = Numbers.draw(528, 160, 32, 4, 6, False)
    interleaved = WeightFormat("int4", "awq", (1, 32), zero_points=True)
    for form, stored, weight in (
        (ordered, gptq(numbers, 4, ordered), numbers.weight(torch.bfloat16)),
        (interleaved, awq(plain), plain.weight(torch.bfloat16)),
    ):
        out = torch.full((528, 160), math.nan, dtype=torch.bfloat16, device=device)
        launch(Dequantize(form, {n: t.to(device) for n, t in stored.items()}, out), machine)
        assert same_bits(out.cpu(), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sizes_of_real_models() -> None:
    for form in FORMS:
        if form.layout == "gpt_oss" or form.block[1] in (12, 100):
            continue
        torch.manual_seed(1)
        stored = random_stored(form, (5120, 13824), torch.bfloat16)
        stored = {name: tensor.cuda() for name, tensor in stored.items()}
        wanted = torch.empty(5120, 13824, dtype=torch.bfloat16, device="cuda")
        dequantise_reference(form, stored, wanted)
        for variant in (0, 1, 2):
            out = torch.full_like(wanted, math.nan)
            launch(Dequantize(form, stored, out, variant=variant), "cuda")
            assert same_bits(out, wanted), (form, variant)


FORM = WeightFormat.parse("int4-g32-zp")
GOOD = quantise(torch.randn(9, 64, dtype=torch.bfloat16), FORM)
OUT = torch.zeros(9, 64)
BAD: list[tuple[dict[str, Any], torch.Tensor, type[Exception], str]] = [
    ({}, torch.zeros(9, 64).double(), ValueError, "dtype torch.float64 is not supported"),
    ({}, torch.zeros(64), ValueError, r"out must be \[N, K\], not \[64\]"),
    ({}, torch.zeros(64, 9).T, ValueError, "last dimension of out must be contiguous"),
    ({}, torch.zeros(64).expand(9, 64), ValueError, "rows of out must not overlap"),
    ({}, torch.zeros(9, 96), ValueError, r"weight_packed is torch.int32 \[9, 8\], but"),
    ({"weight_scale": None}, OUT, ValueError, "weight_scale is missing"),
    ({"weight_zero_point": None}, OUT, ValueError, "weight_zero_point is missing"),
    ({"weight_scale": torch.ones(9, 3)}, OUT, ValueError, "weight_scale is torch.float32"),
    ({"weight_scale": torch.ones(9, 2, device="meta")}, OUT, ValueError, "weight_scale must be on"),
    ({"weight_packed": GOOD["weight_packed"].T.contiguous().T}, OUT, ValueError, "weight_packed m"),
]


@pytest.mark.parametrize(("changed", "out", "error", "text"), BAD, ids=[bad[-1] for bad in BAD])
def test_bad_arguments_are_named(
    changed: dict[str, Any], out: torch.Tensor, error: type[Exception], text: str
) -> None:
    stored = {n: t for n, t in {**GOOD, **changed}.items() if t is not None}
    with pytest.raises(error, match=text):
        Dequantize(FORM, stored, out)


@pytest.mark.parametrize("machine", ["host", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("variant", 7, "variant must be 0 to 2, not 7"),
        ("code", 9, "no code has the number 9"),
        ("order", 2, "words of rows hold 8 codes"),
        ("scale_dtype", 4, "no dtype of scales has the number 4"),
        ("dtype", 4, "no dtype has the number 4"),
        ("group", 0, "9 rows and 0 columns|1 rows and 0 columns"),
        ("zero", None, "zero or output is null"),
    ],
)
def test_the_library_refuses(machine: str, field: str, value: Any, text: str) -> None:
    device = device_of(machine)
    stored = {name: tensor.to(device) for name, tensor in GOOD.items()}
    call = Dequantize(FORM, stored, OUT.to(device))
    setattr(call.arguments, field, value)
    with pytest.raises((AssertionError, KernelError), match=text):
        launch(call, machine)


@pytest.mark.parametrize("machine", ["host", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rows", 24, "24 rows of 128 do not divide into panels of 16 and 64"),
        ("depth", 96, "32 rows of 96 do not divide into panels of 16 and 64"),
        ("group", 48, "or some times that, not of 1 rows and 48 columns"),
        ("scale_dtype", 0, "panels have no scales of dtype 0"),
        ("zero_kind", 1, "codes in the order 3 have no zeros of the kind 1"),
        ("order", 0, "codes in the order 0 have no zeros of the kind 4"),
    ],
)
def test_the_library_refuses_what_are_no_panels(
    machine: str, field: str, value: int, text: str
) -> None:
    device, form = device_of(machine), WeightFormat("int4", "panels", (1, 64), True)
    stored = random_stored(form, (32, 128), torch.bfloat16)
    stored = {name: tensor.to(device) for name, tensor in stored.items()}
    call = Dequantize(form, stored, torch.zeros(32, 128, device=device))
    setattr(call.arguments, field, value)
    with pytest.raises((AssertionError, KernelError), match=text):
        launch(call, machine)
