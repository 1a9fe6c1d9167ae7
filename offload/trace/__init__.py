"""What happened when: passes recorded, drawn on one page, and written for a viewer."""

from offload.trace.picture import Picture, picture
from offload.trace.recorder import Span, Trace, Track

__all__ = ["Picture", "Span", "Trace", "Track", "picture"]
