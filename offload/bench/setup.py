"""How a model is run to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.bench.peers import PEERS
from offload.bench.subject import Subject
from offload.bench.workload import Workload
from offload.config import OffloadConfig


@dataclass(frozen=True)
class Setup:
    """Where weights rest and what may be used; the names are those of `offload.run`."""

    device_map: str | dict[str, Any] = "cpu"  # or "resident": every layer on the compute device
    gpu_memory: int | None = None
    cpu_memory: int | None = None
    prefetch: int | None = None
    folder: str | None = None  # for a random checkpoint
    keep: bool = False
    peers: tuple[str, ...] = ()
    engine: str = "auto"
    kv_on_cpu: int = 0  # sequences of the batch
    kv_dtype: str = "auto"  # of their keys and values
    kv_attention: str = "auto"  # who attends to them
    trace: str | None = None  # a file, for what offload does; in micro-batches if there are any
    micro_batch: int | None = None  # sequences of each, measured beside one batch of all
    goal: str | None = None  # what is planned for, with the device map "auto"
    choose_batch: bool = False  # the plan says how many sequences run at once

    def __post_init__(self) -> None:
        unknown = [peer for peer in self.peers if peer not in PEERS]
        if unknown:
            raise ValueError(f"peer {unknown[0]!r} is not known; choose of {', '.join(PEERS)}")

    @property
    def micro_batches(self) -> dict[str, int]:
        """The size that was asked for, by the name of its row."""
        if self.micro_batch is None:
            return {}
        return {f"offload-micro-{self.micro_batch}": self.micro_batch}

    @property
    def reads_files(self) -> bool:
        """Whether every layer is read from a checkpoint in every pass."""
        return self.device_map in ("nvme", "disk")

    @property
    def where(self) -> str:
        """Where weights of the layers rest, for tables."""
        if self.goal is not None:
            return "planned"
        return self.device_map if isinstance(self.device_map, str) else "as given"

    def config(self, subject: Subject, work: Workload) -> OffloadConfig:
        """What `offload.run` would be asked for."""
        limits: dict[int | str, int] = {}
        if self.gpu_memory is not None and subject.device.type == "cuda":
            limits[subject.device.index or 0] = self.gpu_memory
        if self.cpu_memory is not None:
            limits["cpu"] = self.cpu_memory
        lengths: dict[str, Any] = {"max_length": work.prompt + work.gen}
        if self.goal is not None:
            lengths = {"goal": self.goal, "prompt_len": work.prompt, "gen_len": work.gen}
            lengths["choose_batch"] = self.choose_batch
        return OffloadConfig(
            device_map={"": 0} if self.device_map == "resident" else self.device_map,
            max_memory=limits or None,
            offload_folder=self.folder,
            dtype=subject.dtype or "auto",
            engine=self.engine,
            device=subject.device,
            prefetch=self.prefetch,
            batch_size=work.batch,
            kv_on_cpu=self.kv_on_cpu,
            kv_dtype=self.kv_dtype,
            kv_attention=self.kv_attention,
            **lengths,
        )
