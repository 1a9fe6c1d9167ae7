"""The offload folder: checked before use, written atomically, locked between processes."""

import contextlib
import errno
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from offload.errors import BudgetError
from offload.home import expanded

_TEMPORARY = ".part-"  # fixed and short: the target's own name may already be as long as allowed
_SAY_WAITING_AFTER = 1.0  # seconds
_HINT = (
    "choose another with offload_folder=..., the OFFLOAD_HOME environment variable or, of what is "
    "packed, its OUT"
)


def check_folder(path: str | os.PathLike[str], needed_bytes: int = 0) -> Path:
    """The folder `path`, made where it is missing, proven writable and large enough.

    Raises an OSError for a folder that cannot be used, BudgetError for one without the room.
    """
    folder = expanded(path).absolute()
    try:
        _check_free(folder, needed_bytes)  # first, so that a refusal leaves no empty folder behind
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / _temporary_name()
        try:
            with open(probe, "xb") as stream:
                stream.write(b"\0")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        _refuse(folder, error)
    return folder


def _check_free(folder: Path, needed: int) -> None:
    existing = folder
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(existing))
    if needed <= 0:
        return
    margin = needed // 64 + (1 << 20)  # the file system's own records, and other writers
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if free < needed + margin:
        raise BudgetError(
            f"the offload folder {folder} needs {needed} bytes (and {margin} to spare), but its "
            f"disk has {free} free; free some, or {_HINT}"
        )


def _refuse(folder: Path, error: OSError) -> NoReturn:
    """One line that says what is wrong with the folder, as the same kind of OSError."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        number = errno.ENOTDIR
        what = f"cannot be a folder: {error.filename or folder} is a file"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        number = error.errno
        what = f"is not writable for user id {os.geteuid()} ({os.strerror(number)})"
    else:
        number = error.errno or errno.EIO
        what = f"cannot be used ({os.strerror(number)})"
    raise OSError(number, f"the offload folder {folder} {what}; {_HINT}") from error


def _temporary_name() -> str:
    return f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"


@contextlib.contextmanager
def atomic_write(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write; `target` appears, whole and on the disk, when the block ends well.

    Whatever ends the block otherwise removes what was written and leaves an older `target` as it
    was.
    """
    target = Path(target)
    temporary = target.parent / _temporary_name()
    stream = open(temporary, "xb")  # noqa: SIM115 (closed below, before the rename)
    try:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()
        os.replace(temporary, target)
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails again
            stream.close()
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"the disk is full ({os.strerror(error.errno)}) while writing {target}; "
                "the partial file was removed: free some space and run again",
            ) from error
        raise
    sync_folder(target.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring the folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(file: Path) -> bool:
    """Whether a writer made it for itself."""
    return file.name.startswith(_TEMPORARY)


def remove_temporaries(folder: str | os.PathLike[str]) -> None:
    """Remove what killed writers left in `folder`; call it under the lock that writers take."""
    for file in filter(is_temporary, Path(folder).iterdir()):
        file.unlink(missing_ok=True)


# A forked child shares the parent's lock; it must let go, or a killed parent would stay "alive".
_held: set[int] = set()


def _forget_after_fork() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@contextlib.contextmanager
def lock(folder: str | os.PathLike[str], name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold `name` in `folder` against other processes and threads; several `shared` holders may.

    The kernel frees it when its holder dies. The lock file stays: removing it would let two
    processes hold locks on two files of the same name.
    """
    path = Path(folder) / f"{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(descriptor)
    owner = os.getpid()
    try:
        _acquire(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, path)
        yield
    finally:
        if os.getpid() == owner:
            _held.discard(descriptor)
            os.close(descriptor)


def _acquire(descriptor: int, kind: int, path: Path) -> None:
    deadline = time.monotonic() + _SAY_WAITING_AFTER
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)
    print(f"offload: waiting for another process that holds {path}", file=sys.stderr, flush=True)
    fcntl.flock(descriptor, kind)
