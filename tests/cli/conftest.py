"""The program `offload`, run inside the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import variants


@dataclass
class Outcome:
    """How a run of the program ended."""

    code: int
    out: str
    err: str


Program = Callable[..., Outcome]


@pytest.fixture
def program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Program]:
    """`program("run", folder, "--json")` runs it here, which saves importing torch each time."""
    import warnings

    from transformers.utils import logging

    from offload.cli import main

    # What main() changes for its own process.
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Outcome(code, *capsys.readouterr())

    yield run
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variant with fewer embeddings than the tokenizer of `chat_model` has tokens."""
    llama = variants.VARIANTS["llama"]
    few = replace(llama, arguments=llama.arguments | {"vocab_size": 50})
    monkeypatch.setitem(variants.VARIANTS, "few words", few)
    return "few words"
