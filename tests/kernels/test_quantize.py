"""Formats of quantised weights: against the compressed-tensors package, transformers' dequantisers
and the letter of the definitions; and round trips.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_weights import Numbers, awq, gptq

from offload.kernels.dequantize import check_values, dequantise
from offload.kernels.packing import E2M1, decode_e8m0, encode_e2m1, pack_words, unpack_words
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import WeightFormat

INTEGERS = [
    f"{kind}-{shared}{zero}"
    for kind in ("int4", "int8")
    for shared in ("g32", "g64", "g128", "channel")
    for zero in ("", "-zp")
]
WRITTEN = [*INTEGERS, "fp8-channel", "fp8-tensor", "fp8-block", "mxfp4"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of different sizes, some of one sign, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    weight[::3] = weight[::3].abs()
    weight[min(1, n - 1)] = 0
    return weight.to(dtype)


def scheme(form: WeightFormat) -> tuple[Any, Any]:
    """The same format in compressed-tensors' words, and its compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    rows, columns = form.block
    shared = {(0, 0): "tensor", (1, 0): "channel"}.get(
        form.block, "group" if rows == 1 else "block"
    )
    arguments = QuantizationArgs(
        num_bits=form.bits,
        type="int" if form.kind.startswith("int") else "float",
        symmetric=not form.zero_points,
        strategy=shared,
        group_size=columns if shared == "group" else None,
        block_structure=[rows, columns] if shared == "block" else None,
        scale_dtype=torch.uint8 if form.kind == "mxfp4" else None,
    )
    named = {
        "packed": "pack-quantized",
        "plain": "float-quantized",
        "mxfp4": "mxfp4-pack-quantized",
    }
    compressor = BaseCompressor.get_value_from_registry(named[form.layout])
    return QuantizationScheme(targets=["Linear"], weights=arguments), compressor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_compressed_tensors_reads_what_is_written(name: str, dtype: torch.dtype) -> None:
    form = WeightFormat.parse(name)
    weight = draw(45, 256, dtype=dtype)
    stored = quantise(weight, form)
    form.check_stored({n: (t.dtype, tuple(t.shape)) for n, t in stored.items()}, (45, 256))
    ours = dequantise(
        form, stored, (45, 256), stored["weight_scale"].dtype if form.kind != "mxfp4" else dtype
    )
    described, compressor = scheme(form)
    theirs = compressor.decompress(dict(stored), described)["weight"]
    assert torch.equal(ours, theirs.to(ours.dtype))


@pytest.mark.parametrize("name", WRITTEN)
def test_compressed_tensors_writes_the_same(name: str) -> None:
    """From float32, where both compute in it; every byte."""
    from compressed_tensors.quantization.utils import calculate_qparams

    form = WeightFormat.parse(name)
    weight = draw(45, 256)
    weight[1] = 1e-3  # their scale of zeros is an epsilon
    described, compressor = scheme(form)
    rows, columns = form.block
    high, wide = rows or 45, columns or 256
    padded = torch.nn.functional.pad(weight, (0, -256 % wide, 0, -45 % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero = calculate_qparams(least, most, described.weights)
    if form.block == (0, 0):
        scale, zero = scale.flatten(), zero.flatten()
    state = {"weight": weight, "weight_scale": scale}
    if form.zero_points:
        state["weight_zero_point"] = zero
    theirs = compressor.compress(state, described)
    ours = quantise(weight, form)
    assert ours.keys() == theirs.keys()
    for part in ours:
        assert ours[part].dtype == theirs[part].dtype
        assert torch.equal(
            ours[part].view(torch.uint8),
            theirs[part].clone(memory_format=torch.contiguous_format).view(torch.uint8),
        ), part


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_bytes_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    form, weight = WeightFormat.parse(name), draw(450, 1024, dtype=dtype)
    stored = quantise(weight.cuda(), form)
    for part, tensor in quantise(weight, form).items():
        assert torch.equal(stored[part].cpu().view(torch.uint8), tensor.view(torch.uint8)), part


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(40, 96, 32), (8, 64, 0), (72, 104, 32), (2064, 128, 128)]
)
def test_gptq(bits: int, layout: str, order: bool, n: int, k: int, group: int) -> None:
    form = WeightFormat(f"int{bits}", layout, (1, group), zero_points=True, act_order=order)
    numbers = Numbers.draw(n, k, group, bits, 3, order)
    stored = gptq(numbers, bits, form)
    form.check_stored({x: (t.dtype, tuple(t.shape)) for x, t in stored.items()}, (n, k))
    for dtype in DTYPES:
        assert torch.equal(dequantise(form, stored, (n, k), dtype), numbers.weight(dtype))


@pytest.mark.parametrize(("n", "k", "group"), [(40, 96, 32), (8, 64, 0), (2064, 128, 128)])
def test_awq(n: int, k: int, group: int) -> None:
    form = WeightFormat("int4", "awq", (1, group), zero_points=True)
    numbers = Numbers.draw(n, k, group, 4, 4, False)
    stored = awq(numbers)
    form.check_stored({x: (t.dtype, tuple(t.shape)) for x, t in stored.items()}, (n, k))
    for dtype in DTYPES:
        assert torch.equal(dequantise(form, stored, (n, k), dtype), numbers.weight(dtype))
    # compressed-tensors reads AutoAWQ's layout with code of its own.
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    converter = AutoAWQConverter(group_size=group or k)
    converted = converter.process({f"a.{x}": t for x, t in stored.items()})
    other = WeightFormat("int4", "packed", (1, group), zero_points=True)
    stored = {x.removeprefix("a."): t for x, t in converted.items()}
    assert torch.equal(
        dequantise(other, stored, (n, k), torch.float16), numbers.weight(torch.float16)
    )


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_as_transformers_reads_them(scale: torch.dtype) -> None:
    form = WeightFormat("fp8", "fp8_block", (128, 128))
    weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = (2.0 ** torch.randint(-9, 0, (2, 3)) * (1 if scale.itemsize == 1 else 1.37)).to(scale)
    found = dequantise(
        form, {"weight": weight, "weight_scale_inv": scales}, (256, 384), torch.bfloat16
    )
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("high", "broad"), [(128, 128), (24, 100)])
@pytest.mark.parametrize(("n", "k"), [(130, 200), (200, 8200)])  # chunks begin within a block
def test_fp8_blocks_that_are_cut_off(n: int, k: int, high: int, broad: int) -> None:
    form = WeightFormat("fp8", "fp8_block", (high, broad))
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scales = torch.rand(math.ceil(n / high), math.ceil(k / broad)) + 1
    wide = scales.repeat_interleave(high, 0).repeat_interleave(broad, 1)[:n, :k]
    stored = {"weight": weight, "weight_scale_inv": scales}
    form.check_stored({x: (t.dtype, tuple(t.shape)) for x, t in stored.items()}, (n, k))
    assert torch.equal(dequantise(form, stored, (n, k), torch.float32), weight.float() * wide)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_experts_of_gpt_oss_as_transformers_reads_them(dtype: torch.dtype) -> None:
    form = WeightFormat("mxfp4", "gpt_oss", (1, 32))
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 50, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 50, 2), generator=generator, dtype=torch.uint8)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = dequantise(form, {"blocks": blocks, "scales": scales}, (3, 64, 50), dtype)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_scales_of_mxfp4_are_powers_of_two() -> None:
    found = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert found[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert math.isnan(found[255])


def test_every_e2m1_is_its_own_nearest() -> None:
    assert encode_e2m1(torch.tensor(E2M1)).tolist() == list(range(16))
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert [E2M1[i] for i in encode_e2m1(middles)] == [0, 1, 1, 2, 2, 4, 4]
    assert [E2M1[i] for i in encode_e2m1(torch.tensor([7.0, -9.0]))] == [6, -6]


@given(
    bits=st.sampled_from([4, 8]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 70)),
    seed=st.integers(0, 1 << 30),
)
def test_words_give_back_their_codes(bits: int, shape: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert words.shape[-1] == math.ceil(shape[1] * bits / 32)
    assert torch.equal(unpack_words(words, bits, shape[1]), codes)


@given(
    name=st.sampled_from(WRITTEN),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(DTYPES),
    clip=st.booleans(),
)
def test_round_trips_err_by_half_a_step(
    name: str, n: int, k: int, seed: int, dtype: torch.dtype, clip: bool
) -> None:
    form = WeightFormat.parse(name)
    if form.block[1] > 1 and form.kind != "fp8":
        k = max(1, k // form.block[1]) * form.block[1]
    weight = draw(n, k, seed, dtype)
    stored = quantise(weight, form, clip=clip)
    found = dequantise(form, stored, (n, k), torch.float32)
    error = (found - weight.float()).abs()
    wide = form.block[1] or k
    high = form.block[0] or n
    padded = torch.nn.functional.pad(weight.float(), (0, -k % wide, 0, -n % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    largest = blocks.abs().amax((1, 3)).repeat_interleave(high, 0).repeat_interleave(wide, 1)
    largest = largest[:n, :k]
    if form.kind in ("int4", "int8"):
        span = blocks.amax((1, 3)).clamp(min=0) - blocks.amin((1, 3)).clamp(max=0)
        span = span.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:n, :k]
        steps = (1 << form.bits) - 1
        step = span / steps if form.zero_points else 2 * largest / steps
        # The scale's rounding moves the last code; a zero point's moves all by half a step.
        half = (1.0 if form.zero_points else 0.5) * step + largest * 2.0**-8
    elif form.kind == "fp8":
        half = torch.maximum(weight.float().abs() * 2.0**-4, largest / 448 * 2.0**-9) * 1.02
    else:
        half = torch.maximum(weight.float().abs() / 4, largest / 8)  # 1 of 6, and saturation
    if not clip:
        assert (error <= half + 2.0**-24).all()
    else:
        plain = dequantise(form, quantise(weight, form), (n, k), torch.float32)
        assert error.square().sum() <= (plain - weight.float()).square().sum() * (1 + 1e-5)


def test_clipping_finds_a_better_range() -> None:
    weight = torch.randn(64, 512)
    weight[:, ::64] *= 6  # an outlier a group
    for name, share in (("int4-g64", 0.9), ("int4-g64-zp", 0.99), ("mxfp4", 1.0)):
        form = WeightFormat.parse(name)
        plain, clipped = (
            (dequantise(form, quantise(weight, form, clip=c), (64, 512), torch.float32) - weight)
            .square()
            .sum()
            for c in (False, True)
        )
        assert clipped < share * plain, name


@pytest.mark.parametrize("name", ["int4", "fp8-block", "mxfp4"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(name: str, value: float) -> None:
    weight = torch.randn(140, 64)
    weight[137, 5] = value
    with pytest.raises(ValueError, match=r"NaN or infinity \(1 in rows 0 to 139\)"):
        quantise(weight, WeightFormat.parse(name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int4", "int4-zp", "int8", "fp8", "fp8-tensor", "mxfp4"])
def test_largest_and_smallest_weights_of_a_dtype(name: str, dtype: torch.dtype) -> None:
    form = WeightFormat.parse(name)
    for size in (torch.finfo(dtype).max * 0.85, torch.finfo(dtype).tiny * 64):
        weight = torch.tensor([[size, -size] * 32], dtype=dtype)
        stored = quantise(weight, form)
        check_values(form, stored, 1)
        found = dequantise(form, stored, (1, 64), dtype)
        assert torch.allclose(found.double(), weight.double(), rtol=0.13, atol=0), (name, dtype)
    with pytest.raises(ValueError, match="so near the largest"):
        quantise(torch.full((1, 64), torch.finfo(dtype).max, dtype=dtype), form)


@pytest.mark.parametrize(
    ("text", "wrong"), [("int3", "int3"), ("int4-g48", "g48"), ("fp8-g64", "fp8-g64"), ("", "''")]
)
def test_formats_that_do_not_exist(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.*is no format for weights; use int4"):
        WeightFormat.parse(text)


def test_names_are_parsed_again() -> None:
    for name in WRITTEN:
        assert WeightFormat.parse(WeightFormat.parse(name).name) == WeightFormat.parse(name)


def test_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="100 inputs do not divide into groups of 64"):
        quantise(torch.ones(8, 100), WeightFormat.parse("int4-g64"))
    with pytest.raises(ValueError, match="12 outputs do not divide into words of 8"):
        WeightFormat("int4", "gptq", (1, 32), True).check_shape((12, 64))


def test_stored_tensors_that_do_not_fit() -> None:
    form = WeightFormat.parse("int4-g32-zp")
    good = {n: (t.dtype, tuple(t.shape)) for n, t in quantise(torch.ones(9, 64), form).items()}
    form.check_stored(good, (9, 64))
    for name in good:
        rest = {n: t for n, t in good.items() if n != name}
        with pytest.raises(ValueError, match=f"{name} is missing"):
            form.check_stored(rest, (9, 64))
        with pytest.raises(ValueError, match=name):
            form.check_stored({**good, name: (good[name][0], (3, 5))}, (9, 64))
        with pytest.raises(ValueError, match=name):
            form.check_stored({**good, name: (torch.bool, good[name][1])}, (9, 64))


def test_values_that_no_weight_can_have() -> None:
    form = WeightFormat("int4", "gptq", (1, 32), True, act_order=True)
    scales = torch.ones(2, 8, dtype=torch.float16)
    check_values(form, {"scales": scales, "g_idx": torch.tensor([0, 1])}, 2)
    with pytest.raises(ValueError, match="g_idx holds 2, which is none of the 2 groups"):
        check_values(form, {"g_idx": torch.tensor([0, 2])}, 2)
    with pytest.raises(ValueError, match="g_idx holds -1"):
        check_values(form, {"g_idx": torch.tensor([0, -1])}, 2)
    scales[1, 3] = math.nan
    with pytest.raises(ValueError, match="scales holds 1 NaN"):
        check_values(form, {"scales": scales}, 2)
    mx = WeightFormat.parse("mxfp4")
    with pytest.raises(ValueError, match="weight_scale holds 1 NaN"):
        check_values(mx, {"weight_scale": torch.tensor([[3, 255]], dtype=torch.uint8)}, 2)
