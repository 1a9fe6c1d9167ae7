"""Seconds from the call of `offload.run` to the first token, no file being in memory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import offload
from offload.bench.bounds import read_rate
from offload.bench.files import drop_cache, weight_files
from offload.bench.memory import gpu_limit, reset_peaks
from offload.bench.result import machine
from offload.bench.setup import Setup
from offload.bench.subject import Subject
from offload.bench.workload import Workload


@dataclass(frozen=True)
class ColdStart:
    """Seconds since the call: when it returned, and when the first token was there."""

    model: str
    weight_bytes: int
    disk_rates: list[float]  # plain direct reads, before and after
    run_seconds: float
    first_token_seconds: float
    machine: dict[str, Any]

    @property
    def disk_rate(self) -> float:
        """Mean of before and after."""
        return sum(self.disk_rates) / len(self.disk_rates)

    @property
    def share_of_bound(self) -> float:
        """What plain reads of all weights would take, over what it took."""
        return self.weight_bytes / self.disk_rate / self.first_token_seconds

    def as_dict(self) -> dict[str, Any]:
        """All figures, the derived ones too."""
        derived = {"disk_rate": self.disk_rate, "share_of_bound": self.share_of_bound}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        before_after = " and ".join(f"{rate / 1e9:.2f}" for rate in self.disk_rates)
        return (
            f"{self.model}, cold start: {self.weight_bytes / 1e9:.2f} GB, offload.run returned "
            f"after {self.run_seconds:.2f} s, first token after {self.first_token_seconds:.2f} s, "
            f"{self.weight_bytes / self.first_token_seconds / 1e9:.2f} GB/s, "
            f"{self.share_of_bound:.1%} of plain direct reads ({before_after} GB/s before and "
            "after)"
        )


def measure_cold_start(subject: Subject, work: Workload, setup: Setup) -> ColdStart:
    """Weights go to where `setup` says; imports and the GPU's context are done before."""
    device = subject.device
    with subject.on_disk(setup.folder, setup.keep) as stored:
        folder = Path(stored.folder or "")
        files = weight_files(folder)
        sizes = stored.sizes_for(work)  # imports the model's code, too
        _wake(device)
        config = setup.config(stored, work)
        drop_cache(files)
        whole = sum(Path(file).stat().st_size for file in files)
        rates = [read_rate(files, whole)]
        reset_peaks(device)
        prompts = work.prompts(256, device)
        with gpu_limit(device, setup.gpu_memory):
            start = time.perf_counter()
            model: Any = offload.run(
                folder,
                device_map=config.device_map,
                max_memory=config.max_memory,
                dtype=config.dtype,
                engine=config.engine,
                device=device,
                prefetch=config.prefetch,
                batch_size=work.batch,
                max_length=work.prompt + 1,
            )
            ran = time.perf_counter() - start
            with model:
                model.generation_config = GenerationConfig(pad_token_id=0)
                model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=1,
                    do_sample=False,
                ).cpu()
                first = time.perf_counter() - start
        rates.append(read_rate(files, whole))
    return ColdStart(subject.name, sizes.total_bytes, rates, ran, first, machine(device))


def _wake(device: torch.device) -> None:
    """The context and the library of matrix products."""
    square = torch.ones(64, 64, device=device, dtype=torch.float16)
    if device.type == "cuda":
        (square @ square).sum().item()
