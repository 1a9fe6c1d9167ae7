"""What every test needs before torch is imported, and the models that many tests share."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run: a failure that comes and goes teaches nobody.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")

# One-row products in MKL depend on the weight's address alignment unless a code path is fixed.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Beside other workers, threads that wait for each other over a tiny product take a core from them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job begins with Ctrl-C ignored, and so would every child of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Garbage is looked for among what the module's tests make: over all that was imported it takes
    a third of a second each time, and a cache that is made anew asks for it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def variant_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`variant_folder("llama")` is its checkpoint, written once a session: do not change it."""
    import variants

    parent = tmp_path_factory.mktemp("variants")
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = variants.save(name, parent)
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint folder of a real small model, kept between sessions."""
    import demo_model

    # In a process of its own: converting would leave a gigabyte behind in this one.
    done = subprocess.run([sys.executable, demo_model.__file__], capture_output=True, text=True)
    if done.returncode == demo_model.UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of words "w3" to "w130" and a chat template."""
    import variants
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, variants.VOCABULARY))]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}w7 {{ m['content'] }} w8{% endfor %}"
        "{% if add_generation_prompt %} w9{% endif %}"
    )
    folder = variants.save("llama", tmp_path_factory.mktemp("chat"))
    tokenizer.save_pretrained(folder)
    return folder
