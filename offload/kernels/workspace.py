"""Scratch memory on a device that kernels share: partial sums, and counters that stay zero."""

from __future__ import annotations

import torch


class Workspace:
    """Buffers for calls that run one after another on one stream of `device`.

    Calls that may run at the same time need a workspace each. A buffer that grows is a new one:
    calls made before keep theirs, so growing never breaks a captured graph, but it must happen
    before a capture, where memory would belong to the graph.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._partials = torch.empty(0, dtype=torch.float32, device=self.device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=self.device)

    def partials(self, nbytes: int) -> torch.Tensor:
        """Float32 [ceil(nbytes / 4)] with any content. Every caller gets the same memory."""
        if nbytes < 0:
            raise ValueError(f"workspace: nbytes must not be negative, got {nbytes}")
        count = -(-nbytes // 4)
        if count > self._partials.numel():
            self._refuse_capture(f"{nbytes} bytes of partial sums")
            with torch.inference_mode(False):  # whoever uses it next may be in another mode
                # First let go of the old one: both would be there at once.
                self._partials = torch.empty(0, dtype=torch.float32, device=self.device)
                self._partials = torch.empty(count, dtype=torch.float32, device=self.device)
        return self._partials[:count]

    def counters(self, n: int) -> torch.Tensor:
        """Int32 zeros [n], the same memory for every caller; a kernel leaves them zero."""
        if n < 0:
            raise ValueError(f"workspace: n must not be negative, got {n}")
        if n > self._counters.numel():
            self._refuse_capture(f"{n} counters")
            self._counters = torch.zeros(n, dtype=torch.int32, device=self.device)
            if self.device.type == "cuda":
                # They are zero for whichever stream uses them next, not only for this one.
                torch.cuda.current_stream(self.device).synchronize()
        return self._counters[:n]

    def _refuse_capture(self, what: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"workspace: {what} would be allocated inside a CUDA graph capture; make the "
                "calls, or ask the workspace for this size, before the capture begins"
            )
