"""Weights used, changed or replaced while they are not in the model: an error, never an answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import pytest
import torch
import transformers
import variants
from comparison import output
from torch import nn
from transformers import PreTrainedModel

import offload

Folder = Callable[[str], Path]
HIDDEN = torch.ones(1, 5, 32)


@pytest.fixture(params=["cpu", "nvme"])
def model(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[PreTrainedModel]:
    with offload.run(variant_folder("llama"), device_map=request.param, prefetch=1) as offloaded:
        yield offloaded


@pytest.fixture(scope="module")
def plain(variant_folder: Folder) -> PreTrainedModel:
    return comparison.plain_model(variant_folder("llama"))


MISUSES: dict[str, Callable[[Any], Any]] = {
    # torch multiplies a CPU tensor by a meta tensor and answers with memory nobody wrote.
    "part": lambda layer: layer.mlp(HIDDEN),
    "product": lambda layer: HIDDEN @ layer.mlp.up_proj.weight.T,
    "norm": lambda layer: layer.input_layernorm(HIDDEN),
    "value": lambda layer: layer.mlp.up_proj.weight.sum().item(),
    "cpu": lambda layer: layer.mlp.up_proj.weight.cpu(),
    "fill": lambda layer: layer.mlp.up_proj.weight.data.fill_(0),
    "add": lambda layer: layer.mlp.up_proj.weight.add_(1),
    "copy": lambda layer: layer.mlp.up_proj.weight.copy_(torch.ones(48, 32)),
    "merge": lambda layer: layer.mlp.up_proj.weight + torch.ones(48, 32),
}


@pytest.mark.compat
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_weight_out_of_reach(model: PreTrainedModel, plain: PreTrainedModel, misuse: str) -> None:
    output(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(offload.UnsupportedError, match=r"model\.layers\.1\..*weight"):
            MISUSES[misuse](model.model.layers[1])
    if misuse in ("part", "product"):
        with pytest.raises(offload.UnsupportedError):
            MISUSES[misuse](model.model.layers[1])
    assert torch.equal(output(model), output(plain))


def test_what_needs_no_values_works(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    for (name, weight), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(weight, nn.Parameter) and name
        assert weight.shape == want.shape and weight.dtype == want.dtype
        assert weight.requires_grad == want.requires_grad and weight.nbytes == want.nbytes
    weight = model.model.layers[0].mlp.up_proj.weight
    assert "model.layers.0.mlp.up_proj.weight" in repr(weight)
    assert torch.zeros_like(weight, device="cpu").shape == weight.shape
    assert model.get_memory_footprint() == plain.get_memory_footprint()


def test_after_close(variant_folder: Folder) -> None:
    with offload.run(variant_folder("llama"), device_map="nvme") as model:
        pass
    ids = variants.inputs("llama")["input_ids"]
    for use in (lambda: model.lm_head(HIDDEN), lambda: model.model.embed_tokens(ids)):
        with torch.no_grad(), pytest.raises(offload.UnsupportedError, match=r"close\(\)"):
            use()


def test_a_replaced_weight_is_not_covered(model: PreTrainedModel) -> None:
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(torch.zeros(48, 32))
    for _ in range(2):  # the refusal does not put the stored weight back either
        with pytest.raises(offload.UnsupportedError, match=r"layers\.1\.mlp\.up_proj.* replaced"):
            output(model)


class LowRank(nn.Module):
    """An adapter around a layer's own projection, as fine-tuning libraries insert them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.full((base.in_features, 2), 0.1))
        self.up = nn.Parameter(torch.full((2, base.out_features), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def test_adapters_inside_layers(model: PreTrainedModel, variant_folder: Folder) -> None:
    plain = comparison.plain_model(variant_folder("llama"))
    before = output(plain)
    for each in (model, plain):
        for layer in each.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
            layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    assert torch.equal(output(model), output(plain))
    assert not torch.equal(output(plain), before)


def test_resize_token_embeddings(variant_folder: Folder) -> None:
    plain = comparison.plain_model(variant_folder("llama"))
    with offload.run(variant_folder("llama"), device_map="nvme") as model:
        for each in (model, plain):
            each.resize_token_embeddings(140, mean_resizing=False)
            with torch.no_grad():
                each.get_input_embeddings().weight[131:] = 0.5
                each.get_output_embeddings().weight[131:] = 0.5
        assert output(model).shape[-1] == 140
        assert torch.equal(output(model), output(plain))


def test_a_streamed_embedding_keeps_its_size(
    variant_folder: Folder, plain: PreTrainedModel
) -> None:
    places = {"": "cpu", "model.embed_tokens": "cpu"}
    with offload.run(variant_folder("llama"), device_map=places) as model:
        with pytest.raises(offload.UnsupportedError, match=r"embed_tokens\.weight is streamed"):
            model.resize_token_embeddings(140)
        assert torch.equal(output(model), output(plain))


def test_copy_is_refused_in_its_own_words(model: PreTrainedModel) -> None:
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(model)


@pytest.mark.parametrize("every", [2, 0])
def test_a_model_that_changes_its_weights(tmp_path: Path, every: int) -> None:
    """RWKV divides weights of its later blocks in its first forward, unless told not to."""
    config = transformers.RwkvConfig(
        vocab_size=131, hidden_size=32, num_hidden_layers=4, context_length=64, rescale_every=every
    )
    plain = transformers.RwkvForCausalLM(config).eval()
    plain.save_pretrained(tmp_path / "rwkv")
    with offload.run(tmp_path / "rwkv", device_map="nvme") as model:
        if every:
            with pytest.raises(offload.UnsupportedError, match=r"blocks\.0.*weight"):
                model(torch.arange(10)[None])
        else:
            ids = torch.arange(10)[None]
            with torch.no_grad():
                assert torch.equal(model(ids).logits, plain(ids).logits)
