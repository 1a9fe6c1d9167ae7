"""The errors that offload raises; each message says what is wrong, which value, and what to do."""


class OffloadError(Exception):
    """Base of all errors of this package (asynchronous I/O has `offload.aio.AioError`)."""


class CheckpointError(OffloadError, ValueError):
    """A checkpoint is damaged, incomplete or contradicts its own headers."""


class MissingWeightError(CheckpointError):
    """The model has parameters for which the checkpoint holds no tensor."""


class UnsupportedError(OffloadError, NotImplementedError):
    """The request is well-formed, but this version cannot serve it."""


class BudgetError(OffloadError, ValueError):
    """A memory or disk budget cannot hold the least that a run needs."""


class ClosedError(OffloadError, RuntimeError):
    """The offloaded model was closed; its weights are gone."""


class JobError(OffloadError, RuntimeError):
    """One of several jobs on one model failed; `number` counts from 0, `__cause__` is its error."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class ModelNotFoundError(OffloadError, FileNotFoundError):
    """The model's name is neither a folder nor a hub id that can be had."""
