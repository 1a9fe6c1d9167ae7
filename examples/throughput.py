"""More tokens a pass: a streamed pass costs the same for one sequence as for many.

python examples/throughput.py MODEL --device-map cpu --batch 1 8 32
"""

import argparse
import time

import torch
from transformers import PreTrainedModel

import offload


def tokens_per_second(model: PreTrainedModel, batch: int, prompt: int, new: int) -> float:
    """Of greedy generation from random tokens, with no early end."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (batch, prompt), device=model.device)
    mask = torch.ones_like(ids)
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
    )
    made = output[:, prompt:].cpu().numel()  # waits for a GPU
    return made / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint folder or hub id")
    parser.add_argument("--device-map", default="cpu", help="cpu or nvme: every layer moves")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new", type=int, default=8, help="tokens")
    args = parser.parse_args()

    with offload.run(
        args.model,
        device_map=args.device_map,
        batch_size=max(args.batch),
        max_length=args.prompt + args.new,
    ) as model:
        tokens_per_second(model, 1, args.prompt, 1)  # warm up
        for batch in args.batch:
            rate = tokens_per_second(model, batch, args.prompt, args.new)
            print(f"batch {batch:4}: {rate:10.2f} tokens/s", flush=True)
        print(model.offload.report().achieved)


if __name__ == "__main__":
    main()
