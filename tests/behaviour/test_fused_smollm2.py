"""A real model on the fused engine: the same text in float32, the same perplexity in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import offload

GPL = Path("/usr/share/common-licenses/GPL-3")


def plain_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.slow
def test_same_text_of_64_tokens_in_float32(smollm2: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    want = plain_model(smollm2, torch.float32).generate(**prompt, **options)
    with offload.run(smollm2, dtype="float32", device_map="nvme", engine="fused") as model:
        got = model.generate(**prompt, **options)
        assert model.offload.report().unserved == {}
    assert torch.equal(got, want) and " Paris" in tokenizer.decode(got[0])


def test_same_perplexity_in_bfloat16(smollm2: Path) -> None:
    if not GPL.exists():
        pytest.skip(f"needs {GPL} (Debian's base-files)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(GPL.read_text(), return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        want = plain_model(smollm2, torch.bfloat16)(ids, labels=ids).loss.exp()
        with offload.run(smollm2, device_map="nvme", engine="fused") as model:
            assert model.dtype == torch.bfloat16
            got = model(ids, labels=ids).loss.exp()
            assert model.offload.report().unserved == {}
    assert 5 < want < 40  # a model that knows its language
    assert abs(got / want - 1) < 1e-3, (float(got), float(want))
