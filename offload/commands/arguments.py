"""Arguments that several commands take, from text to what `offload.run` takes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from offload.scheduler.setting import Goal


def positive(text: str) -> int:
    """A whole number above zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return value


def count(text: str) -> int:
    """A whole number."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, zero or more")
    return int(text)


def path(text: str) -> str:
    """The name of a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a file or folder is empty")
    return text


def size(text: str) -> int:
    """Bytes: 500MB, 20GiB."""
    from offload.memory_limits import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def memory(text: str) -> tuple[int | str, int]:
    """One entry of max_memory: cpu=64GiB, 0=20GiB."""
    place, equals, amount = text.partition("=")
    number = place.isascii() and place.isdigit()
    if not equals or not (place == "cpu" or number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PLACE=SIZE; PLACE is 'cpu' or the number of a GPU, as in cpu=64GiB"
        )
    return (int(place) if number else place), size(amount)


def max_memory(entries: Iterable[tuple[int | str, int]]) -> dict[int | str, int]:
    """All entries, each place once."""
    found: dict[int | str, int] = {}
    for place, nbytes in entries:
        if place in found:
            raise ValueError(
                f"--max-memory names {place} twice ({found[place]} and {nbytes} bytes): say it once"
            )
        found[place] = nbytes
    return found


def device_map(text: str) -> str | dict[str, Any]:
    """A name, or a JSON object of module names to 0, "cpu" or "nvme"."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        places: dict[str, Any] = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not valid JSON: {error}") from error
    return places


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose names stand there once each."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} stands there twice")
    return dict(pairs)


def add_placement(parser: argparse.ArgumentParser, default: str = "auto") -> Any:
    """Where weights rest and where they are computed; the group of these arguments. `default`: told
    of --device-map.
    """
    group = parser.add_argument_group("placement")
    group.add_argument(
        "--device-map",
        type=device_map,
        default="auto",
        metavar="WHERE",
        help="auto (fill the GPU, then CPU memory, the rest stays in files), cpu, nvme, or a JSON "
        f'object such as \'{{"": "nvme", "model.layers.0": 0}}\' (default: {default})',
    )
    group.add_argument(
        "--prefetch",
        type=positive,
        metavar="N",
        help="loads ahead of the layer in use (default: 2 where a GPU computes, else 1)",
    )
    add_device(group, "where layers run: cuda:1, cpu, ...")
    group.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="float16, bfloat16, float32, ... (default: the model's own)",
    )
    return group


def add_device(parser: Any, what: str = "cuda:1, cpu, ...") -> None:
    """Where something runs. `what`: said of it."""
    parser.add_argument("--device", metavar="DEVICE", help=f"{what} (default: the GPU)")


def add_json(parser: Any) -> None:
    """The result as JSON; `console.show` prints it so."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def add_job(parser: Any, gen_len: int = 32) -> None:
    """How long prompts are, and what follows."""
    parser.add_argument(
        "--prompt-len",
        type=positive,
        default=512,
        metavar="N",
        help="tokens of each prompt (default: 512)",
    )
    parser.add_argument(
        "--gen-len",
        type=positive,
        default=gen_len,
        metavar="N",
        help=f"new tokens of each sequence (default: {gen_len})",
    )


def add_remote_code(parser: Any) -> None:
    """Whether code of the checkpoint may run."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the model code of the checkpoint"
    )


def add_goal(parser: Any) -> None:
    """What a plan is made for."""
    parser.add_argument(
        "--goal",
        choices=[goal.value for goal in Goal],
        help="plan what rests where by measured rates: most tokens a second, the shortest time, or "
        "the least GPU memory (default: no plan; --device-map says it)",
    )


def add_kv(parser: Any) -> None:
    """Whose keys and values are in CPU memory, how they are kept, and who attends to them."""
    parser.add_argument(
        "--kv-on-cpu",
        type=count,
        default=0,
        metavar="N",
        help="sequences of the batch that keep keys and values in CPU memory (default: 0)",
    )
    add_kv_dtype(parser)
    parser.add_argument(
        "--kv-attention",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="who attends to them: cpu, its cores, or gpu, to which they come up the link in every "
        "step (default: auto, cpu unless a plan says otherwise)",
    )


def add_kv_dtype(parser: Any) -> None:
    """How keys and values in CPU memory are kept."""
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="of keys and values that are in CPU memory: the model's (default), or int8 with a "
        "scale a token and head",
    )


def add_trace(parser: Any) -> None:
    """Where a trace of the passes is written."""
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=path,
        help="write what link, disk, compute and host did in every pass, in Chrome's JSON (for "
        "Perfetto, too), and draw one of the passes",
    )


def add_weights(parser: Any, required: bool = False) -> None:
    """The arguments that say how weights are quantised."""
    parser.add_argument(
        "--weights",
        required=required,
        metavar="FORMAT",
        help="int4 or int8 (in groups of 64; with -g32, -g128 or -channel of other sizes, with -zp "
        "with zero points, with -clip at the end with ranges chosen by their error: "
        "int4-g128-zp-clip), fp8 (a scale a row; also fp8-block, fp8-tensor), mxfp4, or w8a8 (int8 "
        "with a scale a row, and activations in int8 with a scale a token): of the layers' Linears",
    )
    parser.add_argument(
        "--weights-of",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="of modules in whose name the regular expression is found, heads and embeddings too; "
        "'none' leaves them as they are; may be repeated, the first that is found decides",
    )


def quantization(args: argparse.Namespace) -> str | dict[str, str] | None:
    """What `--weights` and `--weights-of` ask for, as `offload.run` takes it."""
    if not args.weights_of:
        return args.weights
    found: dict[str, str] = {}
    for text in args.weights_of:
        pattern, equals, form = text.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"--weights-of {text!r} is not PATTERN=FORMAT, as in lm_head=int8")
        if pattern == "default":
            raise ValueError(f"--weights-of {text!r}: the format of all else is that of --weights")
        if pattern in found:
            raise ValueError(f"--weights-of has {pattern!r} twice ({found[pattern]} and {form})")
        found[pattern] = form
    return found | ({"default": args.weights} if args.weights else {})
