"""Files that may lie elsewhere: opened by fsspec, shards kept in a bounded local cache. No shell unless allowed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from openlm_moe.data.cache import locked, writable
from openlm_moe.errors import UserError

PIPE = "pipe:"
_ATTEMPTS = 5
_STALE_SECONDS = 24 * 3600
T = TypeVar("T")


def is_remote(url: str) -> bool:
    """Whether `url` needs more than open(): a protocol other than file://, or a pipe."""
    return url.startswith(PIPE) or ("://" in url and not url.startswith("file://"))


def local_part(url: str) -> str:
    """The path that a local `url` means (file:// taken off)."""
    return url.removeprefix("file://")


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for `url` and the path in it. Raises `UserError` naming the package that is missing."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"cannot open {url}: {error}") from error
    except ValueError as error:
        raise UserError(f"cannot open {url}: {error}; s3://, gs://, http:// and local paths work") from error


def read_bytes(url: str, what: str) -> bytes:
    """The whole content of the small file at `url`; `what` is what messages call it. Raises `UserError`."""
    if url.startswith(PIPE):
        raise UserError(f"{what} {url} is a shell command; give its path or URL instead")
    try:
        if not is_remote(url):
            return Path(local_part(url)).read_bytes()
        fs, path = file_system(url)
        return _retried(lambda: fs.cat_file(path))
    except FileNotFoundError as error:
        raise UserError(f"{what} {url} does not exist; check the path") from error
    except UserError:
        raise
    except Exception as error:  # every fsspec backend has its own exceptions
        raise UserError(f"{what} {url} cannot be read: {_one_line(error)}") from error


class ShardCache:
    """Local copies of remote shards under `folder`, at most about `limit_bytes` of them, the oldest used go first.

    Safe for many processes at once: one downloads, the others wait; a copy that is open stays readable when removed.
    """

    def __init__(self, folder: Path, limit_bytes: int, allow_pipe: bool = False) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.allow_pipe = allow_pipe

    def open(self, url: str) -> tuple[int, str]:
        """(file descriptor, identity) of the shard at `url`, downloaded if need be. The caller closes the descriptor.

        The identity changes when the shard's content does: an index made for it can be kept.
        Raises `UserError` for a shard that is not there or cannot be fetched, and for a pipe that is not allowed.
        """
        if not is_remote(url):
            return _open_local(local_part(url))
        identity = self._identity(url)
        copy = writable(self.folder) / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.tar"
        with locked(copy.with_suffix(".lock")):
            try:
                descriptor = os.open(copy, os.O_RDONLY)
                with contextlib.suppress(FileNotFoundError):  # removed by another process; what is open stays readable
                    os.utime(copy)
            except FileNotFoundError:
                descriptor = self._download(url, copy)
                self._evict(keep=copy)
        return descriptor, identity

    def check_exists(self, url: str) -> None:
        """Raises `UserError` where the remote `url` is missing or a pipe that is not allowed; downloads nothing."""
        self._identity(url)

    def _identity(self, url: str) -> str:
        if url.startswith(PIPE):
            if not self.allow_pipe:
                raise UserError(
                    f"{url} would run a shell command; give the s3:// or gs:// URL itself, or pass --allow-pipe"
                )
            return url
        fs, path = file_system(url)
        try:
            return f"{url} {_version(_retried(lambda: fs.info(path)))}"
        except FileNotFoundError as error:
            raise UserError(f"shard {url} does not exist; check the path, or the manifest that names it") from error
        except Exception as error:
            raise UserError(f"shard {url} cannot be reached: {_one_line(error)}") from error

    def _download(self, url: str, copy: Path) -> int:
        """Fetches `url` to `copy` and returns a descriptor of it, opened before anyone can evict it."""
        handle, part = tempfile.mkstemp(dir=self.folder, suffix=".part")
        os.close(handle)
        try:
            if url.startswith(PIPE):
                _run_pipe(url, part)
            else:
                fs, path = file_system(url)
                _retried(lambda: fs.get_file(path, part))
            descriptor = os.open(part, os.O_RDONLY)
            os.replace(part, copy)
            return descriptor
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"shard {url} cannot be downloaded: {_one_line(error)}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    def _evict(self, keep: Path) -> None:
        for part in self.folder.glob("*.part"):  # of processes that were killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                    part.unlink()
        copies = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(FileNotFoundError):
                copies.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if total <= self.limit_bytes:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


def _version(info: dict[str, Any]) -> str:
    """What tells one content of a remote file from another, of the fields that its file system has."""
    named = ("ETag", "etag", "md5Hash", "generation", "mtime", "created", "LastModified", "last_modified")
    return f"{info.get('size')} {next((info[name] for name in named if info.get(name)), '')}"


def _open_local(path: str) -> tuple[int, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise UserError(f"shard {path} does not exist; check the path, or the manifest that names it") from error
    except OSError as error:
        raise UserError(f"shard {path} cannot be read: {error.strerror}") from error
    status = os.fstat(descriptor)
    return descriptor, f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"


def _run_pipe(url: str, part: str) -> None:
    with open(part, "wb") as file:
        done = subprocess.run(url.removeprefix(PIPE), shell=True, stdout=file, stderr=subprocess.PIPE)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"{url} ended with code {done.returncode}: {last[0]}")


def _retried(action: Callable[[], T]) -> T:
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except (FileNotFoundError, PermissionError, ImportError, NotImplementedError):
            raise
        except Exception:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(2**attempt)
    raise AssertionError("unreachable")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
