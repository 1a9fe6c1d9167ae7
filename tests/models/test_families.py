"""What the fused engine makes of a config: a block for the families it knows, or words why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import variants
from torch import nn
from transformers import PreTrainedModel

from offload.kernels.qkv import QkvLayout
from offload.models.quantized.layer import adjacent
from offload.models.specs import families
from offload.models.specs.describe import describe
from offload.models.specs.spec import CannotExpress, LayerSpec, LinearSpec, NormSpec

pytestmark = pytest.mark.compat

UNKNOWN = {
    "gpt_neo": "the family 'gpt_neo'",
    "mixtral": "the family 'mixtral'",
    "qwen3_moe": "the family 'qwen3_moe'",
    "qwen3_moe-mixed": "the family 'qwen3_moe'",
    "deepseek_v3": "the family 'deepseek_v3'",
    "gpt_oss": "the family 'gpt_oss'",
    "bert": "the family 'bert'",
    "roberta": "the family 'roberta'",
    "t5": "layers in several lists",
    "t5-v1.1-untied": "layers in several lists",
}
KNOWN = [name for name in variants.NAMES if name not in UNKNOWN]


@pytest.mark.parametrize("name", KNOWN)
def test_every_parameter_has_its_place(name: str) -> None:
    model = variants.build(name)
    spec = describe(model)
    layers = [model.get_submodule(n) for n in spec.layer_names]
    assert len(layers) == len(spec.layers) == model.config.num_hidden_layers
    for layer, block in zip(layers, spec.layers, strict=True):
        assert block.names() == {n for n, _ in layer.named_parameters()}
    holder = model.get_submodule(spec.holder)
    assert isinstance(getattr(holder, spec.tokens), nn.Embedding)
    positions = torch.arange(3)[None]
    for table in spec.tables:
        cos, sin = spec.angles(holder, positions, table)
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.shape == sin.shape and cos.shape[:2] == (1, 3)
    groups = {len(group) for groups in adjacent(model, spec).values() for group in groups}
    assert groups <= {2, 3}


@pytest.mark.parametrize(("name", "words"), UNKNOWN.items())
def test_unknown_families_are_named(name: str, words: str) -> None:
    with pytest.raises(CannotExpress, match=words):
        describe(variants.build(name))


def test_windows_tables_and_caps_are_those_of_the_layer() -> None:
    def of(name: str, field: str) -> list[Any]:
        return [getattr(x, field) for x in describe(variants.build(name)).layers]

    assert of("mistral", "window") == [8, 8, 8] and of("llama", "window") == [0, 0, 0]
    assert of("qwen2-swa", "window") == [0, 8, 8] and of("qwen2", "window") == [0, 0, 0]
    assert of("gemma3_text", "window") == [8, 0, 8] and of("phi3-longrope", "window") == [0, 0, 0]
    assert of("gemma3_text", "rotary") == [
        *("sliding_attention", "full_attention", "sliding_attention")
    ]
    gemma2 = variants.build("gemma2")
    for attention, softcap in (("eager", 50.0), ("sdpa", 0.0)):  # sdpa does not apply it
        gemma2.config._attn_implementation = attention
        assert {layer.softcap for layer in describe(gemma2).layers} == {softcap}
    assert set(of("gemma3_text", "softcap")) == {0.0}
    assert set(of("gptj", "interleaved")) == {True} and set(of("gpt_neox", "interleaved")) == {
        False
    }
    assert [x.weight_offset for x in of("gemma2", "attention_norm")] == [1.0] * 3
    assert of("opt", "attention_sum_norm") == [None] * 3
    assert of("opt-350m-like", "attention_norm") == [None] * 3
    assert all(isinstance(x, NormSpec) for x in of("opt-350m-like", "mlp_sum_norm"))
    assert of("falcon", "layout")[0] == QkvLayout.grouped(4, 1, 8)
    assert describe(variants.build("falcon-40b-like")).cache_copies == 2


def set_config(**values: Any) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        for name, value in values.items():
            setattr(model.config, name, value)

    return change


def first_layer(model: PreTrainedModel) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]


def add_parameter(model: PreTrainedModel) -> None:
    first_layer(model).mlp.down_proj.lora = nn.Parameter(torch.zeros(1))


def other_class(model: PreTrainedModel) -> None:
    class Quantised(nn.Linear):
        pass

    first_layer(model).mlp.down_proj.__class__ = Quantised


def own_forward(model: PreTrainedModel) -> None:
    module = first_layer(model).mlp
    module.forward = module.forward


def hooked(model: PreTrainedModel) -> None:
    first_layer(model).mlp.register_forward_hook(lambda *_: None)


def shared(model: PreTrainedModel) -> None:
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight


def mixed_dtypes(model: PreTrainedModel) -> None:
    first_layer(model).input_layernorm.double()


def custom_model(model: PreTrainedModel) -> None:
    class LlamaModel(type(model.model)):  # type: ignore[misc]
        pass

    model.model.__class__ = LlamaModel


def half_of_the_biases(model: PreTrainedModel) -> None:
    first_layer(model).self_attn.k_proj.bias = None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", set_config(activation_function="mish"), "activation 'mish'"),
        ("gpt2", set_config(add_cross_attention=True), "cross-attention"),
        ("bloom", set_config(apply_residual_connection_post_layernorm=True), "post_layernorm"),
        ("falcon-40b-like", set_config(parallel_attn=False), "parallel_attn"),
        ("gemma2", set_config(use_bidirectional_attention=True), "bidirectional"),
        ("gemma3_text", set_config(attn_logit_softcapping=5.0), "softcapping"),
        ("qwen3", set_config(layer_types=["chunked_attention"] * 3), "chunked_attention"),
        ("qwen2", set_config(layer_types=["sliding_attention"] * 3), "sliding_window=None"),
        ("llama", set_config(num_hidden_layers=2), "3 layers where the config says 2"),
        ("llama", set_config(is_causal=False), "not causal"),
        ("llama", set_config(head_dim=16), "qkv"),
        ("llama", add_parameter, "mlp.down_proj.lora"),
        ("llama", other_class, "Quantised"),
        ("llama", own_forward, "hooks or a forward of its own"),
        ("llama", hooked, "hooks or a forward of its own"),
        ("llama", shared, "shared with another place"),
        ("llama", mixed_dtypes, "torch.float64 beside torch.float32"),
        ("llama", lambda model: model.double(), "the dtype torch.float64"),
        ("llama", custom_model, "LlamaModel"),
        ("qwen2", half_of_the_biases, "only some of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_block_cannot_express_is_said(
    name: str, change: Callable[[PreTrainedModel], None], words: str
) -> None:
    model = variants.build(name)
    describe(model)
    change(model)
    with pytest.raises(CannotExpress, match=words):
        describe(model)


def test_a_rotation_wider_than_a_head() -> None:
    arguments = variants.VARIANTS["gptj"].arguments | {"rotary_dim": 12}
    model = variants.Variant("GPTJ", arguments).model()
    with pytest.raises(CannotExpress, match="a rotation of 12 elements in heads of 8"):
        describe(model)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 12, 32, 71, 112])
def test_alibi_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    assert torch.equal(alibi[:, 0, 1], families.alibi_slopes(heads))


def test_shapes_are_checked() -> None:
    block = LayerSpec(
        qkv=LinearSpec(("q", "k", "v"), ("qb", "kb", "vb")),
        layout=QkvLayout.apart(4, 2, 8),
        attention_out=LinearSpec(("o",)),
        mlp_in=LinearSpec(("g", "u")),
        mlp_out=LinearSpec(("d",)),
        activation="silu",
        gated=True,
    )
    shapes = {
        "q": (32, 20),
        "k": (16, 20),
        "v": (16, 20),
        "o": (20, 32),
        "g": (6, 20),
        "u": (6, 20),
    }
    shapes |= {"d": (20, 6), "qb": (32,), "kb": (16,), "vb": (16,)}
    block.check("layer", shapes, 20)
    for name, shape in [
        ("k", (8, 20)),
        ("k", (16, 21)),
        ("vb", (8,)),
        ("u", (5, 20)),
        ("o", (20,)),
    ]:
        with pytest.raises(CannotExpress, match="layer: "):
            block.check("layer", shapes | {name: shape}, 20)
    transposed = dataclasses.replace(block, mlp_out=LinearSpec(("d",), transposed=True))
    transposed.check("layer", shapes | {"d": (6, 20)}, 20)
