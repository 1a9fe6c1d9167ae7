"""Compares the fused engine on a GPU with the plain models there; a script, so that nothing but
torch and transformers is needed.

    python tests/gpu/check_fused.py [--tiers resident,cpu,nvme] [--dtypes float32,bfloat16]
                                    [--quantised] [--kv-on-cpu {cpu,turns,gpu}] [--device cuda]
                                    [NAME ...]

One line a variant, tier and dtype: the largest error against float64 of the fused engine and of
the plain model, the number of graphs that were replayed, and "ok" or FAILED with what is wrong.
Tokens are compared in float32. Nothing stops at a failure; the exit code is 1 if there was one.

--quantised: variants are quantised ones instead, named llama/int4 and so on, and compared with the
plain model whose weights are what the stored ones stand for; what other programs store is so in
16 bits alone (float16 is what GPTQ's and AWQ's scales are in). What is stored for products
of resident layers must lie in panels where its scales are of the model's dtype.

--kv-on-cpu: all sequences but the first keep keys and values in CPU memory, and prompts go through
a layer sequence by sequence; no graph is replayed then. CPU cores attend to them, or the GPU (a
head of a sequence at a time), as it says; with `turns` cores to all sequences, in two micro-batches
that take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OFFLOAD_POISON", "1")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / x) for x in ("", "behaviour", "quantized"))]

import comparison  # noqa: E402
import exactness  # noqa: E402
import folders  # noqa: E402
import published  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import variants  # noqa: E402

import offload  # noqa: E402
from offload import kernels  # noqa: E402
from offload.scheduler import kv_pieces  # noqa: E402

# Half of the layers stream beside resident ones, which are graphs of one layer each.
TIERS: dict[str, Any] = {"resident": {"": 0}, "cpu": "cpu", "nvme": "nvme", "mixed": None}
QUANTISED = (
    *("llama/int4", "llama/int4-g32-zp", "llama/int8-channel", "llama/int8-zp", "llama/fp8"),
    *("llama/fp8-block", "llama/mxfp4", "llama-tied/int4-g32", "qwen2/int4-zp", "phi3/int4"),
    *("opt/int4", "opt/int8-channel-zp", "opt/gptq", "llama/gptq-order", "llama/awq"),
    *("qwen2/int8-zeros", "llama/gptq", "llama/int8-g32"),
)
# In which dtype of the model resident layers lie in panels.
PANELS = {
    **dict.fromkeys(("int4", "int4-g32", "int4-zp", "int4-g32-zp"), torch.bfloat16),
    **dict.fromkeys(("int8-g32", "int8-channel", "int8-zp", "int8-channel-zp"), torch.bfloat16),
    **dict.fromkeys(("gptq", "awq"), torch.float16),
}


def graphs_of(model: Any, name: str) -> int:
    """How many graphs one more generation replays; its cache must be held for that."""
    prompt = {k: v.to(model.device) for k, v in comparison.left_padded(name).items()}
    out = model.generate(**prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    session = out[exactness.name_of_cache(model)].layers[0].common.session
    return len(session.graphs)


def check(
    folder: Path,
    name: str,
    tier: str,
    dtype: torch.dtype,
    device: str,
    asked: Any,
    exact: Any,
    kv_on_cpu: str | None = None,
) -> tuple[str, bool]:
    """What to print, and whether all is right. `asked`: the plain model's logits and tokens."""
    plain, said = asked
    place = TIERS[tier]
    if place is None:
        known = folders.VARIANTS if "/" in name else variants.VARIANTS
        names = comparison.layer_names(known[name.partition("/")[0]].model())
        place = {"": "cpu", **dict.fromkeys(names[::2], 0)}
    name, _, form = name.partition("/")
    arguments = {"device_map": place, "device": device, "dtype": dtype, "max_length": 64}
    turns = kv_on_cpu == "turns"
    if kv_on_cpu:
        attention = "cpu" if turns else kv_on_cpu
        arguments |= {"batch_size": 2, "kv_on_cpu": 1 + turns, "kv_attention": attention}
    with offload.run(folder, engine="fused", **arguments) as model:
        if kv_on_cpu:
            model.offload._engine.prefill_rows = 1
            model.offload._engine.micro_batches = 1 + turns
        got = exactness.logits(model, name)
        tokens = exactness.tokens(model, name) if dtype == torch.float32 else {}
        graphs = graphs_of(model, name)
        panels = any(key.endswith("weight_panels") for key, _ in model.named_parameters())
        report = model.offload.report()
    wrong = exactness.worse(got, plain, exact, dtype)
    wrong += [f"{way}: other tokens" for way, ids in tokens.items() if not ids.equal(said[way])]
    wrong += [f"{count} calls unserved: {why}" for why, count in report.unserved.items()]
    wrong += [note for note in report.notes if "graph" in note]
    if panels != (PANELS.get(form) == dtype and tier in ("resident", "mixed")):
        wrong.append("weights lie in panels" if panels else "no weight lies in panels")
    wanted = {"resident": 1, "mixed": 2}.get(tier, 0) if device != "cpu" else 0
    wanted = 0 if kv_on_cpu else wanted
    if kv_on_cpu in ("cpu", "turns") and not model.offload.cpu_work.steps:
        wrong.append("nothing was done on CPU cores")
    if kv_on_cpu == "gpu" and not model.offload.streamed_kv.steps:
        wrong.append("nothing came up")
    if graphs != wanted:
        wrong.append(f"{graphs} graphs instead of {wanted}")
    errors = [max(comparison.spread(x[k], exact[k]) for k in exact) for x in (got, plain)]
    line = f"{errors[0]:.1e} / {errors[1]:.1e}  {graphs} graphs  "
    return line + (f"FAILED {'; '.join(wrong)}" if wrong else "ok"), not wrong


def prepare(folder: Path, name: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """The plain model's logits and (in float32) tokens, and the exact logits of the same weights,
    which bfloat16 rounds.
    """
    name = name.partition("/")[0]
    rounded = comparison.plain_model(folder, dtype=dtype).double()
    exact = exactness.logits(rounded, name, alone=name in exactness.NAN_IN_PADDING)
    plain = comparison.plain_model(folder, device, dtype=dtype)
    tokens = exactness.tokens(plain, name) if dtype == torch.float32 else {}
    return (exactness.logits(plain, name), tokens), exact


def quantised(name: str, dtype: torch.dtype, parent: Path) -> tuple[Path, Path]:
    """A quantised variant's folder, and that of the plain model of the same weights in `dtype`."""
    family, _, form = name.partition("/")
    source = folders.save(family, parent / "source")
    if form in published.METHODS:
        published.DTYPE = dtype
        out, state = published.save(form, source, parent / "stored")
    else:
        out = folders.pack(source, parent / "stored", form)
        state = folders.whole(out, form, dtype)
    folders.plain_model(source, state, parent / "plain", dtype)
    return out, parent / "plain"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quantised", action="store_true")
    parser.add_argument("--kv-on-cpu", nargs="?", const="cpu", choices=("cpu", "turns", "gpu"))
    parser.add_argument("--tiers", default="resident,cpu,nvme,mixed")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.kv_on_cpu == "gpu":
        kv_pieces.KV_PIECE = 1
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if options.device != "cpu":
        print(f"kernels: {kernels.why_not() or 'in use'}", flush=True)
    names = options.names or (QUANTISED if options.quantised else exactness.FUSED)
    begin, failed, done = time.perf_counter(), [], 0
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        for name, kind in itertools.product(names, options.dtypes.split(",")):
            if kind == "float32" and name.partition("/")[2] in published.METHODS:
                continue
            try:
                dtype = getattr(torch, kind)
                if options.quantised:
                    parent = Path(temporary) / f"{name.replace('/', '-')}-{kind}"
                    folder, plain = quantised(name, dtype, parent)
                else:
                    folder = plain = variants.save(name, temporary)
                asked, exact = prepare(plain, name, dtype, options.device)
            except Exception as error:
                traceback.print_exc(limit=-4)
                print(f"{name} {kind}: FAILED before it began: {error}", flush=True)
                failed.append(f"{name} {kind}")
                done += 1
                continue
            for tier in options.tiers.split(","):
                start = time.perf_counter()
                try:
                    place = folder, name, tier, dtype, options.device
                    line, right = check(*place, asked, exact, options.kv_on_cpu)
                except Exception as error:
                    traceback.print_exc(limit=-4)
                    line, right = f"FAILED {type(error).__name__}: {error}", False
                done += 1
                label = f"{name} {tier} {kind}"
                failed += [] if right else [label]
                print(f"{label:<36}{time.perf_counter() - start:5.1f} s  {line}", flush=True)
    where = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"{done - len(failed)} of {done} right on {where} in {time.perf_counter() - begin:.0f} s, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
