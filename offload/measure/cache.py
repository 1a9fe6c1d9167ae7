"""Measured rates kept in the user's cache folder, under the fingerprint of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from offload.home import expanded, home_folder
from offload.measure.hardware import Progress, measure_hardware
from offload.measure.machine import this_machine
from offload.scheduler.hardware import Hardware, HardwareError
from offload.store.folder import atomic_write, check_folder


def rates_file(folder: str | os.PathLike[str] | None, device: torch.device) -> Path:
    """Where this machine's rates are kept; a machine that changed has another file."""
    home = expanded(folder or home_folder()).absolute()
    return home / "rates" / f"{this_machine(home, device).fingerprint}.json"


def kept_hardware(folder: str | os.PathLike[str] | None, device: torch.device) -> Hardware | None:
    """What was measured on this machine, as it is now; None where nothing was, or what is there
    cannot be read.
    """
    file = rates_file(folder, device)
    try:
        found = read_hardware(file)
    except (OSError, HardwareError):
        return None
    return found if found.machine.fingerprint == file.stem else None


def read_hardware(file: str | os.PathLike[str]) -> Hardware:
    """The rates in a file, of whatever machine: what `measured_hardware` keeps, or what
    `offload info --measure --json` prints. Raises OSError, and HardwareError that names the file.
    """
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads(text)
        if isinstance(found, dict) and "hardware" in found:
            found = found["hardware"]
        return Hardware.from_dict(found)
    except HardwareError as error:
        raise HardwareError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{file} holds no JSON: {error}") from error


def measured_hardware(
    folder: str | os.PathLike[str] | None,
    device: torch.device,
    *,
    again: bool = False,
    progress: Progress = lambda text: None,
) -> tuple[Hardware, Path]:
    """This machine's rates and the file that keeps them: measured where none are kept, or where
    they are wanted `again`.
    """
    file = rates_file(folder, device)
    kept = None if again else kept_hardware(folder, device)
    if kept is not None:
        return kept, file
    check_folder(file.parent)
    found = measure_hardware(device, file.parent, progress)
    with atomic_write(file) as stream:
        stream.write(json.dumps(found.as_dict(), indent=1).encode())
    return found, file
