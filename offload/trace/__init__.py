"""What happened when: passes recorded, drawn on one page, and written for a viewer."""

from offload.trace.picture import Picture, picture
from offload.trace.recorder import KEYS_AND_VALUES, Span, Trace, Track

__all__ = ["KEYS_AND_VALUES", "Picture", "Span", "Trace", "Track", "picture"]
