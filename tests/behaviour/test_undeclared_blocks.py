"""Models that name no blocks, or run one block in several places, are streamed whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
import variants
from comparison import plain_model

import offload

pytestmark = pytest.mark.compat

IDS = {"vocab_size": variants.VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
PAIR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
}
XLM = {"vocab_size": variants.VOCABULARY, "emb_dim": 32, "n_layers": 3, "n_heads": 4}

Maker = Callable[[], transformers.PreTrainedModel]
# The model, and how many blocks it has.
MODELS: dict[str, tuple[Maker, int]] = {
    "FSMT": (
        lambda: transformers.FSMTForConditionalGeneration(
            transformers.FSMTConfig(
                langs=["en", "de"],
                src_vocab_size=variants.VOCABULARY,
                tgt_vocab_size=variants.VOCABULARY,
                max_position_embeddings=64,
                **PAIR,
            )
        ),
        5,
    ),
    "LED": (
        lambda: transformers.LEDForConditionalGeneration(
            transformers.LEDConfig(
                max_encoder_position_embeddings=64,
                max_decoder_position_embeddings=64,
                attention_window=8,
                **IDS | PAIR,
            )
        ),
        5,
    ),
    "Marian": (
        lambda: transformers.MarianMTModel(
            transformers.MarianConfig(
                max_position_embeddings=64, decoder_start_token_id=1, **IDS | PAIR
            )
        ),
        5,
    ),
    "UDOP": (
        lambda: transformers.UdopForConditionalGeneration(
            transformers.UdopConfig(image_size=16, patch_size=8, **variants.T5)
        ),
        6,
    ),
    "XLM": (
        lambda: transformers.XLMWithLMHeadModel(transformers.XLMConfig(**XLM)),
        6,  # attentions and feed-forwards
    ),
    "Funnel": (
        lambda: transformers.FunnelForMaskedLM(
            transformers.FunnelConfig(
                vocab_size=variants.VOCABULARY,
                block_sizes=[2, 1],
                num_decoder_layers=1,
                d_model=32,
                n_head=4,
                d_head=8,
                d_inner=48,
            )
        ),
        4,
    ),
    "ALBERT": (
        lambda: transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(embedding_size=16, **variants.ENCODER)
        ),
        1,
    ),
    "ALBERT of two groups": (
        lambda: transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(embedding_size=16, num_hidden_groups=2, **variants.ENCODER)
        ),
        2,
    ),
}


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="12KB")
    return folder


def arguments(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 19).view(2, 19) % (variants.VOCABULARY - 3) + 3
    given = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, 5:12]
    if model.config.model_type == "udop":
        given["bbox"] = (ids[..., None] * torch.arange(1, 5) % 97) / 97
    return given


@pytest.mark.parametrize("name", MODELS)
def test_every_block_is_streamed(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    make, count = MODELS[name]
    folder = save(make(), tmp_path / "model")
    plain = plain_model(folder)
    given = arguments(plain)
    with torch.no_grad():
        want = plain(**given).logits
    for tier in ("nvme", "cpu"):
        with offload.run(folder, device_map=tier, offload_folder=tmp_path / "packs") as model:
            plan = model.offload.plan
            assert len(plan.tiers) == count == plan.count(tier), plan
            for _ in range(2):
                assert torch.equal(model(**given).logits, want)


def test_a_block_in_two_places_is_streamed_for_each(tmp_path: Path) -> None:
    plain = variants.build("bert")
    plain.bert.encoder.layer[2] = plain.bert.encoder.layer[0]
    given = variants.inputs("bert")
    with torch.no_grad():
        want = plain(**given).logits
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    with offload.run(plain, device_map="nvme", offload_folder=tmp_path, prefetch=1) as model:
        assert [layer.name for layer in model.offload.plan.layers] == [
            "bert.encoder.layer.0",
            "bert.encoder.layer.1",
        ]
        for _ in range(2):
            assert torch.equal(model(**given).logits, want)
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key]), key
