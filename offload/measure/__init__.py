"""The rates that bound a pass, measured on the machine that is to run it."""

from offload.measure.stream import measure_disk, measure_link, measure_rates

__all__ = ["measure_disk", "measure_link", "measure_rates"]
