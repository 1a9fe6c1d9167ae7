"""What a setting would take and give: its memory, its passes, its tokens a second."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload.scheduler.footprint import Footprint, footprint
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.pass_time import PassTime, decode_pass, prefill_pass
from offload.scheduler.plan import Budget
from offload.scheduler.setting import Goal, Job, Setting


@dataclass(frozen=True, slots=True)
class Estimate:
    """The prediction for one setting of one job."""

    setting: Setting
    job: Job
    memory: Footprint
    prefill: PassTime  # one of `setting.prefill_passes`
    decode: PassTime

    @property
    def prefill_seconds(self) -> float:
        """Until the first token of the last sequence."""
        return self.setting.prefill_passes * self.prefill.seconds

    @property
    def seconds(self) -> float:
        """Of the job; the prefill gives each sequence its first token."""
        return self.prefill_seconds + (self.job.gen - 1) * self.decode.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens a second while decoding."""
        return self.setting.batch / self.decode.seconds

    @property
    def rate(self) -> float:
        """Generated tokens a second of the whole job."""
        return self.setting.batch * self.job.gen / self.seconds

    def score(self, goal: Goal) -> float:
        """More is better."""
        if goal is Goal.THROUGHPUT:
            return self.rate
        return 1 / self.seconds if goal is Goal.LATENCY else 1 / self.memory.device

    @property
    def limit(self) -> str:
        """What sets the time of the longer of the two phases."""
        if self.prefill_seconds > self.seconds / 2:
            return f"{self.prefill.limit} (prefill)"
        return f"{self.decode.limit} (decode)"

    def full(self, budget: Budget) -> tuple[str, ...]:
        """The memories that hold no further layer: more of them might make the plan faster."""
        found = []
        layer = self.memory.slots // max(1, self.setting.slots)
        if self.setting.streamed and self.memory.device + layer > budget.device:
            found.append("GPU memory")
        if self.setting.nvme and self.memory.cpu + layer > budget.cpu:
            found.append("CPU memory")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Plain types; seconds, bytes, tokens a second."""
        return {
            "setting": self.setting.as_dict(),
            "prefill_seconds": self.prefill_seconds,
            "decode_step_seconds": self.decode.seconds,
            "seconds": self.seconds,
            "decode_tokens_per_second": self.decode_rate,
            "tokens_per_second": self.rate,
            "limit": self.limit,
            "prefill_pass": {"seconds": self.prefill.seconds, "busy": dict(self.prefill.busy)},
            "decode_pass": {"seconds": self.decode.seconds, "busy": dict(self.decode.busy)},
            "device_bytes": self.memory.device,
            "cpu_bytes": self.memory.cpu,
            "memory": asdict(self.memory),
        }


def estimate(
    model: ModelProfile, hardware: Hardware, job: Job, setting: Setting, *, exact: bool = True
) -> Estimate:
    """Predict `setting`. Without `exact` the times are lower bounds. Raises HardwareError."""
    return Estimate(
        setting,
        job,
        footprint(model, job, setting),
        prefill_pass(model, hardware, job, setting, exact=exact),
        decode_pass(model, hardware, job, setting, exact=exact),
    )
