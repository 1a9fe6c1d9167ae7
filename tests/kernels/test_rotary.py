"""From QKV rows to rotated queries and the cache: every convention, odd sizes, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import DTYPES, assert_accurate, poisoned, random, random_norm, widened
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, launch
from test_residual_norm import torch_norm

from offload.kernels import Norm, QkvLayout, RotaryAppend, Rotation

HEADS = ((1, 1), (4, 4), (6, 2), (9, 3), (5, 1))
# Head and rotary dimensions: of models (GPT-NeoX rotates 24 of 96), and odd ones.
DIMENSIONS = (
    (8, 8), (64, 64), (128, 128), (80, 32), (96, 24), (96, 96), (256, 64), (64, 0), (33, 32),
    (20, 10), (7, 2), (1, 0), (256, 256), (520, 520), (24, 8), (80, 40),
)  # fmt: skip


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_every_two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def torch_rotary(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """As transformers does it, in x's own dtype; x [batch, tokens, heads, head_dim]."""
    if cos is None or sin is None:
        return x
    n = 2 * cos.shape[-1]
    turned, rest = x[..., :n], x[..., n:]
    c, s = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1))
        .to(x.dtype)
        .unsqueeze(2)
        for t in (cos, sin)
    )
    other = rotate_every_two(turned) if interleaved else rotate_half(turned)
    return torch.cat((turned * c + other * s, rest), -1)


def rotated(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the call takes them: what is of the rotation, as one."""
    left = {name: x for name, x in arguments.items() if name not in ("cos", "sin", "interleaved")}
    if arguments["cos"] is None:
        return left
    rotation = Rotation(arguments["cos"], arguments["sin"], arguments["interleaved"])
    return {**left, "rotation": rotation}


def torch_split(
    qkv: torch.Tensor,
    layout: QkvLayout,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    q_norm: Norm | None,
    k_norm: Norm | None,
    grouped: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By views and slices, as models have it: what `QkvLayout` must amount to."""
    x = qkv if bias is None else qkv + bias
    batch, tokens = qkv.shape[:2]
    d = layout.head_dim
    x = x[..., : layout.kv_heads * (layout.group + 2) * d]
    if grouped:
        x = x.reshape(batch, tokens, layout.kv_heads, layout.group + 2, d)
        q = x[..., :-2, :].reshape(batch, tokens, layout.heads, d)
        k, v = x[..., -2, :], x[..., -1, :]
    else:
        sizes = [layout.heads * d, layout.kv_heads * d, layout.kv_heads * d]
        q, k, v = (t.reshape(batch, tokens, t.shape[-1] // d, d) for t in x.split(sizes, -1))
    q, k = torch_norm(q, q_norm), torch_norm(k, k_norm)
    return (
        torch_rotary(q, cos, sin, interleaved),
        torch_rotary(k, cos, sin, interleaved),
        v.contiguous(),
    )


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    heads, kv_heads = draw(st.sampled_from(HEADS))
    head_dim, rotary_dim = draw(st.sampled_from(DIMENSIONS))
    return {
        "batch": draw(st.integers(0, 3)),
        "tokens": draw(st.sampled_from([0, 1, 1, 2, 5])),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "grouped": draw(flag),
        "interleaved": draw(flag),
        "dtype": draw(st.sampled_from(DTYPES)),
        "bias": draw(flag),
        "norm": draw(st.sampled_from([None, None, "rms", "layer", "plain"])),
        "weight_offset": draw(st.sampled_from([0.0, 1.0])),
        "q_only": draw(flag),
        "offset": draw(st.sampled_from([0, 0, 0, 1])),
        "shared_angles": draw(flag),
        "shared_column": draw(flag),
        "heads_first": draw(flag),
        "one_buffer": draw(flag),
        "variant": draw(st.sampled_from([0, 0, 1, 2, 3, 8])),
        "padding": draw(st.sampled_from([0, 0, 16, 1])),
        "seed": draw(st.integers(0, 99)),
    }


def run(machine: str, s: dict[str, Any], capacity: int = 7) -> None:
    """One call with these settings; the query and all of both caches are compared."""
    torch.manual_seed(s["seed"])
    device, dtype = device_of(machine), s["dtype"]
    batch, tokens, heads, kv_heads = s["batch"], s["tokens"], s["heads"], s["kv_heads"]
    head_dim, half, offset = s["head_dim"], s["rotary_dim"] // 2, s["offset"]
    like = {"dtype": dtype, "device": device, "offset": offset}
    make = QkvLayout.grouped if s["grouped"] else QkvLayout.apart
    layout = make(heads, kv_heads, head_dim)
    # Rows may be longer than what is used of them.
    wide = random(batch, tokens, layout.width + s["padding"], **like)
    qkv = wide[..., : layout.width]
    options: dict[str, Any] = {"interleaved": s["interleaved"]}
    options["bias"] = random(layout.width, **like) if s["bias"] else None
    options["cos"] = options["sin"] = None
    if half:
        angles = torch.rand(1 if s["shared_angles"] else batch, tokens, half, device=device) * 6
        options |= {"cos": angles.cos(), "sin": angles.sin()}
    norm = {"eps": 1e-6, "weight_offset": s["weight_offset"]}
    options["q_norm"] = random_norm(s["norm"], head_dim, **like, **norm)
    options["k_norm"] = None if s["q_only"] else random_norm(s["norm"], head_dim, **like, **norm)

    # Rows end inside the cache, across its end, and before its beginning.
    columns = [capacity - 3, 1, -1][: 1 if s["shared_column"] else batch] or [0]
    if not s["shared_column"] and not batch:
        columns = []
    column = torch.tensor(columns, dtype=torch.int32, device=device)
    shape = (batch, kv_heads, capacity, head_dim)
    if s["one_buffer"]:
        both, _ = poisoned(batch, 2, *shape[1:], **like)
        key_cache, value_cache = both[:, 0], both[:, 1]
    else:
        key_cache, value_cache = (poisoned(*shape, **like)[0] for _ in "kv")
    if s["heads_first"]:
        query = poisoned(batch, heads, tokens, head_dim, **like)[0].transpose(1, 2)
    else:
        query = poisoned(batch, tokens, heads, head_dim, **like)[0]

    split = (layout, *(options[n] for n in ("bias", "cos", "sin", "interleaved")))
    peers = torch_split(qkv, *split, options["q_norm"], options["k_norm"], s["grouped"])
    exact = torch_split(
        widened(qkv),
        layout,
        *(widened(options[n]) for n in ("bias", "cos", "sin")),
        s["interleaved"],
        widened(options["q_norm"]),
        widened(options["k_norm"]),
        s["grouped"],
    )
    call = RotaryAppend(
        qkv,
        layout=layout,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        column=column,
        **rotated(options),
    )
    call.arguments.variant = s["variant"]
    launch(call, machine)
    assert_accurate(query, peers[0], exact[0], f"query of {s}")
    for cache, peer, wanted, name in (
        (key_cache, peers[1], exact[1], "key"),
        (value_cache, peers[2], exact[2], "value"),
    ):
        ours = torch.full_like(wanted, math.nan).to(dtype)
        for b in range(batch):
            first = columns[0] if len(columns) == 1 else columns[b]
            for t in range(tokens):
                if 0 <= first + t < capacity:
                    ours[b, t] = cache[b, :, first + t]
                    cache[b, :, first + t] = math.nan
                else:
                    ours[b, t] = wanted[b, t].to(dtype)  # it must not be anywhere
        assert_accurate(ours, peer, wanted, f"{name} of {s}")
        assert torch.isnan(cache).all(), f"{name} cache: other columns were written ({s})"


@pytest.mark.parametrize("machine", MACHINES)
@hypothesis_settings(max_examples=100)
@given(s=settings())
def test_any_combination(machine: str, s: dict[str, Any]) -> None:
    run(machine, s)


MODELS = {
    "llama": {"heads": 8, "kv_heads": 8, "head_dim": 128, "rotary_dim": 128},
    "qwen3": {"heads": 8, "kv_heads": 2, "head_dim": 128, "rotary_dim": 128, "norm": "rms"},
    "gemma3": {
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 256,
        "rotary_dim": 256,
        "norm": "rms",
        "weight_offset": 1.0,
    },
    "gpt-j": {"heads": 4, "kv_heads": 4, "head_dim": 256, "rotary_dim": 64, "interleaved": True},
    "gpt-neox": {
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 96,
        "rotary_dim": 24,
        "grouped": True,
        "bias": True,
    },
    "bloom": {
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 128,
        "rotary_dim": 0,
        "grouped": True,
        "bias": True,
    },
    "smollm2": {"heads": 9, "kv_heads": 3, "head_dim": 64, "rotary_dim": 64},
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("model", MODELS)
def test_models(machine: str, model: str, tokens: int) -> None:
    """A decode step and a prompt, with enough rows that a thread takes several heads."""
    rows = 24 if machine == "cuda" else 3
    flags = {"grouped": False, "interleaved": False, "bias": False, "norm": None, "q_only": False}
    flags |= {
        "weight_offset": 0.0,
        "offset": 0,
        "shared_angles": False,
        "shared_column": tokens > 1,
    }
    flags |= {"heads_first": tokens > 1, "one_buffer": True, "padding": 0, "seed": 4, "variant": 0}
    s = {**flags, **MODELS[model], "tokens": tokens, "dtype": torch.bfloat16}
    # Columns are 3 from the cache's end, 1, and -1.
    run(machine, {**s, "batch": 3 if tokens == 1 else rows}, capacity=64)


# Heads that are rotated in part, in every way that their packs may lie beside each other.
IN_PART: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 4, "kv_heads": 4, "head_dim": 96, "rotary_dim": 24, "grouped": True},
    "groups of queries": {"heads": 6, "kv_heads": 2, "head_dim": 64, "rotary_dim": 16},
    "grouped queries": {"heads": 6, "kv_heads": 2, "head_dim": 64, "rotary_dim": 32},
    "one key": {"heads": 5, "kv_heads": 1, "head_dim": 128, "rotary_dim": 120},
    "across warps": {"heads": 4, "kv_heads": 4, "head_dim": 80, "rotary_dim": 32},
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", IN_PART)
def test_more_rows_than_l2_holds(machine: str, dtype: torch.dtype, bias: bool, name: str) -> None:
    """Threads with several rows: of two sequences, beyond the last one, outside of the cache."""
    s = {"grouped": name == "grouped queries", **IN_PART[name], "dtype": dtype, "bias": bias}
    s |= {"interleaved": False, "norm": None, "q_only": False, "weight_offset": 0.0, "offset": 0}
    s |= {"shared_angles": bias, "shared_column": False, "heads_first": bias, "one_buffer": True}
    s |= {"padding": 16, "seed": 5, "variant": 0}
    tokens = 67
    if machine == "cuda":  # a real L2
        tokens = 403
        s |= {"heads": 32 * s["heads"], "kv_heads": 32 * s["kv_heads"]}
    run(machine, {**s, "tokens": tokens, "batch": 3}, capacity=tokens - 3)


def test_layouts_are_what_they_say() -> None:
    apart, grouped = QkvLayout.apart(6, 2, 4), QkvLayout.grouped(6, 2, 4)
    assert (apart.width, apart.k_offset, apart.v_offset) == (40, 24, 32)
    assert (grouped.width, grouped.k_offset, grouped.v_offset) == (40, 12, 16)
    assert apart.group == grouped.group == 3
    with pytest.raises(ValueError, match=r"heads \(5\) must be a multiple of kv_heads \(2\)"):
        QkvLayout.apart(5, 2, 4)
    with pytest.raises(ValueError, match="kv_heads must be at least 1, got 0"):
        QkvLayout.grouped(4, 0, 4)
    with pytest.raises(ValueError, match=r"v at offset 7 .* does not fit a row of 8 elements"):
        QkvLayout(1, 1, 2, 8, 0, 2, 7, 2, 2)


LAYOUT = QkvLayout.apart(4, 2, 8)


def arguments(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "qkv": torch.zeros(2, 3, 64),
        "layout": LAYOUT,
        "query": torch.zeros(2, 3, 4, 8),
        "key_cache": torch.zeros(2, 2, 5, 8),
        "value_cache": torch.zeros(2, 2, 5, 8),
        "column": torch.zeros(1, dtype=torch.int32),
        "cos": torch.zeros(1, 3, 4),
        "sin": torch.zeros(1, 3, 4),
        "interleaved": False,
    }
    return rotated(good | changes)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "qkv": ({"qkv": 1}, "qkv must be a tensor, not int"),
    "flat": ({"qkv": torch.zeros(6, 64)}, r"qkv must be \[batch, tokens, width\], not \[6, 64\]"),
    "width": ({"qkv": torch.zeros(2, 3, 60)}, r"qkv must have shape \[2, 3, 64\]"),
    "dtype": ({"qkv": torch.zeros(2, 3, 64).double()}, "float64 is not supported"),
    "uneven": (
        {"qkv": torch.zeros(2, 4, 64)[:, :3]},
        "the rows of qkv must lie at one stride; its shape is",
    ),
    "columns of qkv": (
        {"qkv": torch.zeros(64, 2, 3).permute(1, 2, 0)},
        "last dimension of qkv must be contiguous",
    ),
    "layout": ({"layout": "apart"}, "layout must be a QkvLayout, not str"),
    "query": ({"query": torch.zeros(2, 4, 3, 8)}, r"query must have shape \[2, 3, 4, 8\]"),
    "expanded query": (
        {"query": torch.zeros(2, 1, 4, 8).expand(2, 3, 4, 8)},
        "elements of query overlap",
    ),
    "cache": ({"key_cache": torch.zeros(2, 5, 8)}, r"key_cache must be a tensor \[batch"),
    "cache heads": ({"key_cache": torch.zeros(2, 4, 5, 8)}, r"key_cache must have shape"),
    "capacity": ({"value_cache": torch.zeros(2, 2, 6, 8)}, r"value_cache must have shape"),
    "cache order": (
        {"key_cache": torch.zeros(2, 5, 2, 8).transpose(1, 2)},
        "columns of key_cache must lie next to each other",
    ),
    "cache strides": (
        {"key_cache": torch.zeros(2, 2, 9, 8)[:, :, :5]},
        "key_cache and value_cache must have equal strides",
    ),
    "column": ({"column": torch.zeros(1, dtype=torch.int64)}, "column must be torch.int32"),
    "columns": (
        {"column": torch.zeros(3, dtype=torch.int32)},
        r"column must have shape \[2\], not \[3\]",
    ),
    "column number": ({"column": 4}, "column must be a tensor, not int"),
    "bias": ({"bias": torch.zeros(32)}, r"bias must have shape \[64\]"),
    "cos flat": ({"cos": torch.zeros(3, 4)}, r"cos must be a tensor \[1 or 2, 3, rotary_dim / 2\]"),
    "too many angles": (
        {"cos": torch.zeros(1, 3, 5), "sin": torch.zeros(1, 3, 5)},
        "5 angles a token; a head of 8 elements takes 1 to 4",
    ),
    "cos dtype": ({"cos": torch.zeros(1, 3, 4).half()}, "cos must be torch.float32"),
    "sin tokens": ({"sin": torch.zeros(1, 2, 4)}, r"sin must have shape \[1, 3, 4\]"),
    "cos strides": (
        {"cos": torch.zeros(1, 3, 8)[..., :4]},
        "the tokens' angles in cos must lie next to each other",
    ),
    "q_norm": (
        {"q_norm": Norm("rms", torch.zeros(64))},
        r"q_norm.weight must have shape \[8\], not \[64\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    RotaryAppend(**arguments())
    with pytest.raises((ValueError, TypeError), match=message):
        RotaryAppend(**arguments(**changes))


@pytest.mark.parametrize("variant", [-1, 9])
def test_no_such_variant(variant: int) -> None:
    call = RotaryAppend(**arguments())
    call.arguments.variant = variant
    with pytest.raises(AssertionError, match=f"there is no variant {variant}"):
        launch(call, "host")
