"""What a model is asked: the prompt's text, and its tokens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.commands.arguments import path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def add_prompt(group: Any) -> None:
    """Where the prompt comes from, and how it is put to the model."""
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="(default: read standard input)")
    source.add_argument(
        "--prompt-file", type=path, metavar="FILE", help="a file that holds the prompt"
    )
    group.add_argument(
        "--no-chat",
        action="store_true",
        help="continue the prompt as it stands, even if the model has a chat template",
    )


def read_prompt(args: argparse.Namespace) -> str:
    """The text that was given, or is read from a file or standard input. Raises ValueError for one
    that is empty or not UTF-8.
    """
    source, text = "--prompt", args.prompt
    try:
        if args.prompt_file is not None:
            source = args.prompt_file
            text = Path(source).read_text(encoding="utf-8")
        elif text is None:
            source = "standard input"
            if sys.stdin is not None and sys.stdin.isatty():
                print("Prompt, then Ctrl-D:", file=sys.stderr)
            text = sys.stdin.read() if sys.stdin is not None else ""  # None: it was closed
        text.encode()  # Python may have kept bytes of another encoding
    except UnicodeError as error:
        raise ValueError(f"the prompt ({source}) is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"the prompt ({source}) is empty; see --prompt and --prompt-file")
    return text


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder; raises FileNotFoundError or ValueError where there is
    none.
    """
    from transformers import AutoTokenizer

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint folder: it has no config.json")
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        # Without any, transformers makes an empty one for some models.
        raise FileNotFoundError(f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {reason}") from error


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Any:
    """Token ids [1, tokens] and their mask; `chat`: in the model's chat template where it has one.
    Raises ValueError where nothing comes of the prompt.
    """
    inputs: Any
    if chat and tokenizer.chat_template:
        from jinja2 import TemplateError

        try:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        except TemplateError as error:
            raise ValueError(
                f"the model's chat template refuses a prompt by itself ({error}); --no-chat "
                "continues the prompt as it stands"
            ) from error
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
        inputs.pop("token_type_ids", None)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(f"the tokenizer makes no token of the prompt {prompt!r}")
    return inputs


def pad_token(tokenizer: PreTrainedTokenizerBase, model: Any) -> int | None:
    """What rows are filled with: the padding token, else the end of a text."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    end = model.generation_config.eos_token_id
    return end[0] if isinstance(end, list) else end
