"""--remote-sync: a copy of the run's folder elsewhere, through fsspec, kept up to date by a thread of rank 0.

A checkpoint is copied once it is complete, and its marker last, so that a half-copied one is never taken for whole.
Nothing is removed there: what --keep-last removes here stays. Trouble with the remote place never stops training: what
could not be copied is tried again the next time.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from openlm_moe import UserError
from openlm_moe.hosts.builtin.run_folder import STOP_FILE
from openlm_moe.parallel.checkpoint import MARKER, complete_checkpoints

Say = Callable[[str], None]


class RemoteSync:
    """Copies `folder` to `remote` (an fsspec URL or a path) every `seconds`, and once more in `close`.

    Raises `UserError` from the constructor if the place cannot be written.
    """

    def __init__(self, folder: Path, remote: str, seconds: float, say: Say) -> None:
        self.folder, self.remote, self.seconds, self.say = folder, remote.rstrip("/"), seconds, say
        self._copied: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._fs, self._root = open_remote(self.remote)
        try:
            self._copy_all()
        except Exception as error:  # fsspec's back ends raise whatever theirs do
            raise UserError(f"--remote-sync {remote} cannot be written: {' '.join(str(error).split())}") from None
        self._thread = threading.Thread(target=self._loop, name="remote-sync", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copies what is left. Returns when that is done or has failed."""
        self._stop.set()
        self._thread.join()
        self._try("the last copy")

    def _loop(self) -> None:
        while not self._stop.wait(self.seconds):
            self._try("a copy")

    def _try(self, what: str) -> None:
        try:
            self._copy_all()
        except Exception as error:
            self.say(f"warning: {what} to {self.remote} failed ({type(error).__name__}: {error}); training goes on")

    def _copy_all(self) -> None:
        for path in files_to_copy(self.folder):
            try:
                stat = path.stat()
            except FileNotFoundError:  # removed meanwhile, as old checkpoints are
                continue
            seen = (stat.st_size, stat.st_mtime_ns)
            if self._copied.get(path) != seen:
                target = f"{self._root}/{path.relative_to(self.folder).as_posix()}"
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(path), target)
                self._copied[path] = seen


def files_to_copy(folder: Path) -> Iterator[Path]:
    """Every file of the run, markers of checkpoints after their files.

    Left out are incomplete checkpoints, and a request to stop, which is for this start of the run alone.
    """
    for path in sorted(folder.rglob("*"), key=lambda path: (path.name == MARKER, path)):
        steps = [p for p in path.parents if p.name.startswith((".writing-", ".replaced-", "step_"))]
        if path.is_file() and path != folder / STOP_FILE and all((step / MARKER).exists() for step in steps):
            yield path


def fetch_run(folder: Path, remote: str) -> bool:
    """Brings the newest complete checkpoint at `remote` here if it is newer than all in `folder`, with the run's logs.

    Returns whether there was one. Raises `UserError` if the place cannot be read.
    """
    try:
        fs, root = open_remote(remote.rstrip("/"))
        found = sorted(path for path in fs.glob(f"{root}/checkpoints/step_*/{MARKER}"))
        if not found:
            return False
        name = found[-1].split("/")[-2]
        local = [path.name for path in complete_checkpoints(folder / "checkpoints")]
        if local and local[-1] >= name:
            return False
        for path in fs.find(root):
            relative = path[len(root) :].lstrip("/")
            parts = relative.split("/")
            if parts[0] in ("checkpoints", "averages") and parts[-2] != name:
                continue
            if parts[-1] != MARKER:
                _get(fs, path, folder / relative)
        for path in fs.find(root):
            if path.endswith(f"/{name}/{MARKER}"):
                _get(fs, path, folder / path[len(root) :].lstrip("/"))
        return True
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--remote-sync {remote} cannot be read: {' '.join(str(error).split())}") from None


def _get(fs: object, path: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.part")
    fs.get_file(path, str(aside))  # type: ignore[attr-defined]
    shutil.move(aside, target)


def open_remote(remote: str) -> tuple[object, str]:
    """(file system, path in it) of an fsspec URL or a local path. Raises `UserError` for an unknown protocol."""
    import fsspec

    try:
        return fsspec.url_to_fs(remote)
    except (ImportError, ValueError) as error:
        raise UserError(f"--remote-sync {remote}: {error}") from None
