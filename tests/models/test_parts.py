"""Models taken apart: their layers, what stands outside, ties and buffers, for every family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import variants
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from offload.checkpoint import open_checkpoint
from offload.checkpoint.expressions import Held
from offload.errors import UnsupportedError
from offload.models.build import build_model
from offload.models.modules import ancestors, find_layers
from offload.models.parts import ModelParts, take_apart

pytestmark = pytest.mark.compat

LLAMA_LIKE = ("model.layers", 3)
LAYERS: dict[str, list[tuple[str, int]]] = {
    "gpt2": [("transformer.h", 3)],
    "gptj": [("transformer.h", 3)],
    "gpt_neo": [("transformer.h", 4)],
    "gpt_neox": [("gpt_neox.layers", 3)],
    "opt": [("model.decoder.layers", 3)],
    "opt-350m-like": [("model.decoder.layers", 3)],
    "bloom": [("transformer.h", 3)],
    "falcon": [("transformer.h", 3)],
    "falcon-40b-like": [("transformer.h", 3)],
    "falcon-rw-alibi": [("transformer.h", 3)],
    "bert": [("bert.encoder.layer", 3)],
    "roberta": [("roberta.encoder.layer", 3)],
    "t5": [("encoder.block", 3), ("decoder.block", 3)],
    "t5-v1.1-untied": [("encoder.block", 3), ("decoder.block", 2)],
}
TIED = {
    "gpt2": [("transformer.wte.weight", "lm_head.weight")],
    "gpt_neo": [("transformer.wte.weight", "lm_head.weight")],
    "opt": [("model.decoder.embed_tokens.weight", "lm_head.weight")],
    "opt-350m-like": [("model.decoder.embed_tokens.weight", "lm_head.weight")],
    "bert": [
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ],
    "roberta": [
        ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        ("lm_head.bias", "lm_head.decoder.bias"),
    ],
}
for name in ("bloom", "falcon", "falcon-40b-like", "falcon-rw-alibi"):
    TIED[name] = [("transformer.word_embeddings.weight", "lm_head.weight")]
for name in ("llama-tied", "qwen2", "qwen3", "gemma2", "gemma3_text"):
    TIED[name] = [("model.embed_tokens.weight", "lm_head.weight")]
for name in ("t5", "t5-v1.1-untied"):
    shared = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    TIED[name] = [(*shared, "lm_head.weight")]


@pytest.mark.parametrize("name", variants.NAMES)
def test_layers_are_the_blocks_and_nothing_else(name: str) -> None:
    model = variants.build(name)
    lists = LAYERS.get(name, [LLAMA_LIKE])
    expected = [f"{prefix}.{i}" for prefix, count in lists for i in range(count)]
    found = find_layers(model)
    assert list(found) == expected
    assert all(found[layer] is model.get_submodule(layer) for layer in expected)


def check(parts: ModelParts, model: PreTrainedModel) -> None:
    """Every parameter has one owner, and every place that holds it is known."""
    places = [b.name for p in (*parts.layers, parts.outside) for bs in p.bindings for b in bs]
    expected = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert Counter(places) == Counter(expected)
    for part in (*parts.layers, parts.outside):
        assert len(part.layer.places) == len(part.bindings) == len(part.placeholders)
        for place, bindings, empty in zip(
            part.layer.places, part.bindings, part.placeholders, strict=True
        ):
            parameter = model.get_parameter(bindings[0].name)
            assert place.name == bindings[0].name
            for b in bindings:
                assert b.module._parameters[b.key] is parameter is model.get_parameter(b.name)
            assert isinstance(place.source, Held)
            assert torch.equal(place.source.read(), parameter)
            assert (place.shape, place.dtype) == (parameter.shape, parameter.dtype)
            assert empty.is_meta and (empty.shape, empty.dtype) == (place.shape, place.dtype)
    total = sum(p.nbytes for p in model.parameters())
    assert sum(p.layer.weight_bytes for p in (*parts.layers, parts.outside)) == total


@pytest.mark.parametrize("name", variants.NAMES)
def test_every_parameter_has_one_owner(name: str) -> None:
    model = variants.build(name)
    parts = take_apart(model)
    check(parts, model)
    layers = find_layers(model)
    assert [p.layer.name for p in parts.layers] == list(layers)
    for part in parts.layers:
        assert part.modules == (layers[part.layer.name],)
        assert all(p.name.startswith(f"{part.layer.name}.") for p in part.layer.places)
    prefixes = tuple(f"{layer}." for layer in layers)
    assert not any(p.name.startswith(prefixes) for p in parts.outside.layer.places)
    ties = [tuple(b.name for b in bs) for bs in parts.outside.bindings if len(bs) > 1]
    assert ties == TIED.get(name, [])


@pytest.mark.parametrize("name", variants.NAMES)
def test_buffers_stay_on_the_device(name: str) -> None:
    """Also those inside layers: GPT-Neo's masks, and the routing bias of DeepSeek."""
    model = variants.build(name)
    parts = take_apart(model)
    found = [b.name for shared in parts.buffers for b in shared.bindings]
    assert sorted(found) == sorted(n for n, _ in model.named_buffers(remove_duplicate=False))
    assert not parts.outside_buffers
    nbytes = sum(shared.tensor.nbytes for shared in parts.buffers)
    assert parts.outside_bytes == parts.outside.layer.nbytes + nbytes
    if name == "gpt_neo":
        assert found == [f"transformer.h.{i}.attn.attention.bias" for i in range(4)]
    if name == "deepseek_v3":
        bias = "mlp.gate.e_score_correction_bias"
        assert {f"model.layers.{i}.{bias}" for i in (1, 2)} <= set(found)
    if name.startswith("gemma"):
        assert "model.embed_tokens.embed_scale" in found


def test_a_stored_buffer_is_loaded_with_what_stands_outside(
    variant_folder: Callable[[str], Path],
) -> None:
    parts = take_apart(build_model(open_checkpoint(variant_folder("deepseek_v3"))))
    names = {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}
    assert parts.outside_buffers == names
    assert names <= {p.name for p in parts.outside.layer.places}
    assert not names & {b.name for shared in parts.buffers for b in shared.bindings}


def test_layers_differ_in_size_where_they_do() -> None:
    def sizes(name: str) -> list[int]:
        return [p.layer.weight_bytes for p in take_apart(variants.build(name)).layers]

    dense, *experts = sizes("qwen3_moe-mixed")
    assert dense != experts[0] == experts[1]
    first, *rest = sizes("t5")
    assert first > rest[0] == rest[1] and rest[2] > rest[3]  # relative_attention_bias


# ---- a tier of their own ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "users"),
    [
        ("llama", "model.embed_tokens", ["model.embed_tokens"]),
        ("llama", "lm_head", ["lm_head"]),
        ("llama-tied", "model.embed_tokens", ["model.embed_tokens", "lm_head"]),
        ("llama-tied", "lm_head", ["lm_head", "model.embed_tokens"]),
        ("gpt2", "transformer.wte", ["transformer.wte", "lm_head"]),
        ("t5", "shared", ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]),
    ],
)
def test_an_embedding_moves_with_all_who_use_it(name: str, module: str, users: list[str]) -> None:
    model = variants.build(name)
    parts = take_apart(model, [module])
    check(parts, model)
    [part] = [p for p in parts.layers if p.layer.name == module]
    names = {m: n for n, m in model.named_modules(remove_duplicate=False)}
    assert {names[m] for m in part.modules} | {names[model.get_submodule(module)]} == {
        names[model.get_submodule(user)] for user in users
    }
    order = [p.layer.name for p in parts.layers]
    assert order == sorted(order, key=[n for n, _ in model.named_modules()].index)
    assert not any(p.name.startswith(f"{module}.") for p in parts.outside.layer.places)


# ---- models that are made otherwise -------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Small(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__(PretrainedConfig())
        self.blocks = blocks
        self.head = nn.Linear(4, 4)


def test_a_model_that_declares_no_blocks() -> None:
    model = Small(nn.ModuleList([Block(), Block(), Block()]))
    assert list(find_layers(model)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_all_lists_of_blocks_are_streamed() -> None:
    """Encoder and decoder of FSMT and LED, attentions and feed-forwards of XLM."""
    model = Small(nn.ModuleList([Block(), Block()]))
    model.decoder = Small(nn.ModuleList([Block(), Block(), Block()]))
    expected = ["blocks.0", "blocks.1", *(f"decoder.blocks.{i}" for i in range(3))]
    assert list(find_layers(model)) == expected


def test_lists_beside_the_blocks_stay() -> None:
    model = Small(nn.ModuleList([Block(width=20), Block(width=20)]))
    model.heads = nn.ModuleList([nn.Linear(20, 20) for _ in range(5)])
    model.gates = nn.ModuleList([Block(width=5), Block(width=5)])
    assert list(find_layers(model)) == ["blocks.0", "blocks.1"]


def test_bare_modules_are_layers_where_there_is_nothing_else() -> None:
    model = Small(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert list(find_layers(model)) == ["blocks.0", "blocks.1"]
    with pytest.raises(UnsupportedError, match="has no list of transformer blocks"):
        find_layers(Small(nn.ModuleList([nn.ReLU(), nn.ReLU()])))


def test_a_list_of_one_is_a_layer_unless_it_holds_the_list() -> None:
    """ALBERT runs its one group many times; a wrapper around all blocks would be one layer."""
    assert list(find_layers(Small(nn.ModuleList([Block()])))) == ["blocks.0"]
    wrapper = Small(nn.ModuleList([Block(), Block()]))
    names = ["blocks.0.blocks.0", "blocks.0.blocks.1"]
    assert list(find_layers(Small(nn.ModuleList([wrapper])))) == names


def test_a_list_of_lists_is_not_a_list_of_blocks() -> None:
    """Nobody calls a list, so nothing would bring its weights; Funnel is made this way."""
    lists = [nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block(), Block()])]
    assert list(find_layers(Small(nn.ModuleList(lists)))) == [
        "blocks.0.0",
        "blocks.0.1",
        "blocks.1.0",
        "blocks.1.1",
        "blocks.1.2",
    ]


class Declaring(Small):
    _no_split_modules = ["Block"]  # noqa: RUF012


def test_a_list_inside_a_block_moves_with_it() -> None:
    blocks = [Block(), Block()]
    for block in blocks:
        block.inner = nn.ModuleList([Block(), Block()])
    assert list(find_layers(Declaring(nn.ModuleList(blocks)))) == ["blocks.0", "blocks.1"]


def test_a_single_block_is_a_layer_where_it_is_declared() -> None:
    assert list(find_layers(Declaring(nn.ModuleList([Block()])))) == ["blocks.0"]


def test_a_model_without_blocks() -> None:
    with pytest.raises(UnsupportedError, match="Small has no list of transformer blocks"):
        find_layers(Small(nn.Linear(4, 4)))


def test_one_block_run_several_times_is_one_layer() -> None:
    block, other = Block(), Block()
    model = Small(nn.ModuleList([block, other, block]))
    assert find_layers(model) == {"blocks.0": block, "blocks.1": other}
    parts = take_apart(model)
    assert [p.layer.name for p in parts.layers] == ["blocks.0", "blocks.1"]


def test_a_weight_that_two_layers_share_stays_outside() -> None:
    blocks = [Block(), Block(), Block()]
    blocks[2].linear.weight = blocks[0].linear.weight
    model = Small(nn.ModuleList(blocks))
    parts = take_apart(model)
    check(parts, model)
    outside = [[b.name for b in bindings] for bindings in parts.outside.bindings]
    assert ["blocks.0.linear.weight", "blocks.2.linear.weight"] in outside
    assert [len(p.layer.places) for p in parts.layers] == [1, 2, 1]


def test_a_weight_that_a_layer_shares_with_the_head_stays_outside() -> None:
    blocks = [Block(), Block()]
    model = Small(nn.ModuleList(blocks))
    model.head.weight = blocks[1].linear.weight
    parts = take_apart(model)
    check(parts, model)
    outside = [[b.name for b in bindings] for bindings in parts.outside.bindings]
    assert ["blocks.1.linear.weight", "head.weight"] in outside


def test_layers_whose_modules_are_shared_do_not_move() -> None:
    blocks = [Block(), Block(), Block()]
    blocks[1].linear = blocks[0].linear
    model = Small(nn.ModuleList(blocks))
    parts = take_apart(model)
    assert [p.layer.name for p in parts.layers] == ["blocks.2"]
    assert "blocks.0.linear.weight" in [p.name for p in parts.outside.layer.places]


def test_ancestors_are_the_modules_whose_forward_is_a_pass() -> None:
    model = variants.build("t5")
    found = [name for name, _ in ancestors(model, list(find_layers(model)))]
    assert found == ["", "decoder", "encoder"]


def test_detach_and_release() -> None:
    model = variants.build("llama")
    part = take_apart(model).layers[0]
    part.detach()
    assert all(p.is_meta for p in part.modules[0].parameters())
    part.release()
    with pytest.raises(UnsupportedError, match="moved to the store"):
        part.layer.places[0].source.read()
