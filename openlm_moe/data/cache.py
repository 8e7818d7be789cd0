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
    """The cache folder, created: `cache_dir`, or $XDG_CACHE_HOME/openlm-moe, or ~/.cache/openlm-moe.

    Raises `UserError` where it cannot be created or written.
    """
    if cache_dir is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openlm-moe"
    else:
        root = Path(cache_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root):
            pass
    except OSError as error:
        raise UserError(
            f"the cache folder {root} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from error
    return root


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
