"""`offload run`: a model answers a prompt, and says where its weights were and what that cost."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.commands.arguments import (
    add_goal,
    add_kv,
    add_placement,
    add_remote_code,
    add_trace,
    add_weights,
    max_memory,
    memory,
    path,
    positive,
    quantization,
)
from offload.commands.console import quiet_transformers
from offload.commands.prompt import add_prompt, encode, load_tokenizer, pad_token, read_prompt
from offload.scheduler.setting import MOST

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Scores are divided by the temperature in float32: below, the largest might become infinite, and
# above, the temperature itself, which makes excluded tokens (-inf) no numbers.
_TEMPERATURES = (1e-30, 1e30)


def add_parser(commands: Any) -> None:
    """Add this command to the program."""
    parser = commands.add_parser(
        "run",
        help="answer a prompt with a model that need not fit",
        description="Answer a prompt with a model that need not fit. The text goes to standard "
        "output as it is generated; where the weights are and what a pass costs, to standard "
        "error.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, or a hub id")
    text = parser.add_argument_group("text")
    add_prompt(text)
    text.add_argument(
        "--max-new-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="stop after so many (default: 128)",
    )
    text.add_argument("--sample", action="store_true", help="draw tokens instead of the likeliest")
    text.add_argument(
        "--temperature", type=float, metavar="T", help="of --sample (default: the model's)"
    )
    text.add_argument(
        "--seed", type=int, metavar="N", help="of --sample (default: another in every run)"
    )
    text.add_argument(
        "--json", action="store_true", help="print one JSON object, when done, instead of the text"
    )
    add_goal(add_placement(parser))
    add_kv(parser.add_argument_group("keys and values in CPU memory"))
    add_weights(parser.add_argument_group("quantisation of a plain checkpoint"))
    parser.add_argument(
        "--engine",
        default="auto",
        metavar="NAME",
        help="transformers (the model's own modules), fused (the project's CUDA kernels), or auto: "
        "fused where the GPU and the family allow it (default: auto)",
    )
    add_trace(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-memory",
        type=memory,
        action="append",
        default=[],
        metavar="PLACE=SIZE",
        help="a limit for 'cpu' or a GPU's number: cpu=64GiB, 0=20GiB; may be repeated (default: "
        "most of what is free)",
    )
    limits.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens that GPU memory is kept free for (default: those of this run)",
    )
    limits.add_argument(
        "--batch-size",
        type=positive,
        default=1,
        metavar="N",
        help="sequences that GPU memory is kept free for (default: 1)",
    )
    limits.add_argument(
        "--offload-folder",
        type=path,
        metavar="FOLDER",
        help="for weights that must be rewritten (default: in the user's cache)",
    )
    loading = parser.add_argument_group("loading")
    loading.add_argument("--revision", metavar="REV", help="of a hub id")
    add_remote_code(loading)
    loading.add_argument("--attn-implementation", metavar="NAME", help="sdpa, eager, ...")


def execute(args: argparse.Namespace) -> int:
    """Generate, and report before and after."""
    _check_generation(args)
    prompt = read_prompt(args)

    from offload.checkpoint.hub import resolve_model

    quiet_transformers()
    folder = resolve_model(args.model, args.revision, args.trust_remote_code)
    tokenizer = load_tokenizer(folder, args.trust_remote_code)
    inputs = encode(tokenizer, prompt, chat=not args.no_chat)
    with _load(folder, args, inputs["input_ids"].shape[1]) as model:
        if not model.can_generate():
            raise ValueError(f"{type(model).__name__} does not generate text")
        if not args.json:
            print(model.offload.report(), end="\n\n", file=sys.stderr, flush=True)
        traced = model.offload.trace(args.trace) if args.trace else contextlib.nullcontext()
        with traced:
            result = _generate(model, tokenizer, inputs, args)
        report = model.offload.report()
    if args.json:
        print(json.dumps({**result, "report": report.as_dict()}, ensure_ascii=False))
    else:
        sys.stdout.flush()
        print(
            "\n{tokens} tokens in {seconds:.2f} s, {tokens_per_second:.2f} tokens/s, the first "
            "after {first_token_seconds:.2f} s".format_map(result),
            file=sys.stderr,
        )
        print(report.achieved, file=sys.stderr)
        if report.picture is not None:
            print("", *report.picture.lines(report.predicted), sep="\n", file=sys.stderr)
    return 0


def _load(folder: Path, args: argparse.Namespace, length: int) -> Any:
    import offload

    return offload.run(
        folder,
        device_map=args.device_map,
        max_memory=max_memory(args.max_memory),
        offload_folder=args.offload_folder,
        dtype=args.dtype or "auto",
        quantization=quantization(args),
        device=args.device,
        prefetch=args.prefetch,
        engine=args.engine,
        batch_size=args.batch_size,
        kv_on_cpu=args.kv_on_cpu,
        kv_dtype=args.kv_dtype,
        kv_attention=args.kv_attention,
        **_lengths(args, length),
        trust_remote_code=args.trust_remote_code,
        attn_implementation=args.attn_implementation,
    )


def _lengths(args: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """What memory is kept for, or a plan is made for."""
    if args.goal is None:
        return {"max_length": args.max_length or prompt + args.max_new_tokens}
    lengths = {"prompt_len": prompt, "gen_len": args.max_new_tokens}
    return {"goal": args.goal, "max_length": args.max_length, **lengths}


def _generate(
    model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """The text, printed on the way unless JSON was asked for, and what it took."""
    import torch
    from transformers import TextStreamer

    from offload.models.limits import check_length, check_tokens

    length = inputs["input_ids"].shape[1]
    check_tokens(model, inputs["input_ids"])
    if beyond := check_length(model.config, length, args.max_new_tokens):
        print(f"offload: warning: {beyond}", file=sys.stderr)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    temperature = {} if args.temperature is None else {"temperature": args.temperature}
    if args.seed is not None:
        torch.manual_seed(args.seed)
    first = _FirstToken()
    start = time.perf_counter()
    output = model.generate(
        **inputs.to(model.device),
        max_new_tokens=args.max_new_tokens,
        do_sample=args.sample,
        **temperature,
        pad_token_id=pad_token(tokenizer, model),
        streamer=None if args.json else streamer,
        logits_processor=[first],
    )
    seconds = time.perf_counter() - start
    new = output[0] if model.config.is_encoder_decoder else output[0, length:]
    return {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": length,
        "tokens": len(new),
        "seconds": seconds,
        "first_token_seconds": first.time - start,
        "tokens_per_second": len(new) / seconds,
    }


class _FirstToken:
    """A logits processor that changes nothing and notes when the first token was known. Raises
    ValueError for logits of which none could be chosen.
    """

    time = float("nan")

    def __call__(self, ids: Any, scores: Any) -> Any:
        if self.time != self.time:
            if bool(scores.isnan().any()):  # waits for a GPU, which may be behind
                raise ValueError(
                    "the model's logits are NaN: its numbers overflow (--dtype bfloat16 or float32 "
                    "has a wider range), or its weights are damaged"
                )
            self.time = time.perf_counter()
        return scores


def _check_generation(args: argparse.Namespace) -> None:
    """What transformers and torch would answer with a traceback, or with nonsense."""
    if args.max_new_tokens > MOST:
        raise ValueError(f"--max-new-tokens must be at most {MOST}, got {args.max_new_tokens}")
    if not args.sample and (args.temperature is not None or args.seed is not None):
        raise ValueError("--temperature and --seed belong to --sample")
    low, high = _TEMPERATURES
    if args.temperature is not None and not low <= args.temperature <= high:
        raise ValueError(
            f"--temperature must be between {low} and {high}, got {args.temperature}; without "
            "--sample the likeliest token is taken"
        )
    if args.seed is not None and not -(1 << 63) <= args.seed < 1 << 64:
        raise ValueError(f"--seed must be a number of 64 bits, got {args.seed}")
