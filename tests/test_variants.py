"""The tiny models that the other tests stand on: random, repeatable, the same from disk."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import variants
from transformers import PreTrainedModel

pytestmark = pytest.mark.compat


def logits(model: PreTrainedModel, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**variants.inputs(name)).logits


@pytest.mark.parametrize("name", variants.NAMES)
def test_every_weight_is_random_and_repeatable(name: str) -> None:
    once, again = variants.build(name), variants.build(name)
    for (key, weight), other in zip(
        once.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(weight, other), key
        if weight.is_floating_point():  # random numbers repeat, but rarely
            assert weight.unique().numel() > 0.99 * weight.numel(), key
    assert not torch.equal(logits(once, name), logits(variants.build(name, seed=9), name))


@pytest.mark.parametrize("name", variants.NAMES)
def test_reload_is_bit_equal(name: str, variant_folder: Callable[[str], Path]) -> None:
    folder = variant_folder(name)
    assert len(list(folder.glob("*.safetensors"))) >= 10
    model = variants.build(name)
    reloaded = type(model).from_pretrained(folder).eval()
    assert torch.equal(logits(model, name), logits(reloaded, name))
    if model.can_generate():
        prompt = variants.inputs(name)
        prompt.pop("decoder_input_ids", None)
        tokens = [m.generate(**prompt, max_new_tokens=4, num_beams=2) for m in (model, reloaded)]
        assert torch.equal(*tokens)
        assert tokens[0].shape[1] % variants.LENGTH >= 4  # no end token cuts it short


@pytest.mark.parametrize("name", ["llama3-rope", "llama-dynamic-rope"])
def test_rotary_kind_shows(name: str) -> None:
    """These have llama's weights, so only the rotary embedding can tell them from it."""
    difference = logits(variants.build(name), name) - logits(variants.build("llama"), name)
    assert difference.abs().max() > 1e-2


def test_window_shows() -> None:
    model = variants.build("mistral")
    windowed = logits(model, "mistral")
    model.config.sliding_window = variants.LENGTH
    assert (logits(model, "mistral") - windowed).abs().max() > 1e-2
