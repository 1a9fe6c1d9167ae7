"""Continue a prompt with a model that need not fit in memory.

python examples/generate.py MODEL "The capital of France is" --device-map nvme
"""

import argparse

from transformers import AutoTokenizer, TextStreamer

import offload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint folder or hub id")
    parser.add_argument("prompt")
    parser.add_argument("--device-map", default="auto", help="auto, cpu or nvme")
    parser.add_argument("--cpu-memory", help="what weights may take of it, such as 8GiB")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    limits = {"cpu": args.cpu_memory} if args.cpu_memory else None
    with offload.run(args.model, device_map=args.device_map, max_memory=limits) as model:
        print(model.offload.report(), end="\n\n")

        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.generate(**inputs, max_new_tokens=args.max_new_tokens, streamer=streamer)

        print(f"\n{model.offload.report().achieved}")


if __name__ == "__main__":
    main()
