"""The user's cache folder: where it is, and how several processes write into it at once without harm."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from openlm_moe.errors import UserError


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder, not made yet: `cache_dir`, or $XDG_CACHE_HOME/openlm-moe, or ~/.cache/openlm-moe."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "openlm-moe"


def writable(folder: Path) -> Path:
    """`folder`, created. Raises `UserError` where it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be written ({error.strerror}); name another one by --data-cache-dir or "
            "XDG_CACHE_HOME"
        ) from error
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` (created, never removed); other processes wait. Freed when the holder dies.

    A file system without locks makes this a no-op: writers rename finished files into place, so that the worst
    outcome is work done twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path` whole or not at all: written beside it, synced, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
