"""The bytes of every layer: where they rest, and how they come to the compute device."""

from offload.store.store import POISON, WeightStore

__all__ = ["POISON", "WeightStore"]
