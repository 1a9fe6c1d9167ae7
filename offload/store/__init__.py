"""The bytes of every layer: where they rest, and how they come to the compute device."""

from offload.store.store import POISON, POISON_BYTE, WeightStore

__all__ = ["POISON", "POISON_BYTE", "WeightStore"]
