"""Versions and commit of what runs, for the record of a run."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("openlm-moe", "torch", "triton", "numpy", "transformers", "tokenizers", "webdataset", "wandb")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit(file: str | Path = __file__) -> str | None:
    """The git commit that `file` belongs to, '-dirty' appended when tracked files differ; None outside a repository.

    A file that git does not track (an installed package inside somebody's repository) has no commit.
    """
    folder, name = Path(file).resolve().parent, Path(file).name

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", name)
        head = git("rev-parse", "HEAD")
        return f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """{'versions': {package: version or None, 'python': ...}, 'commit': commit or None}."""
    versions: dict[str, str | None] = {package: _version(package) for package in PACKAGES}
    versions["python"] = platform.python_version()
    return {"versions": versions, "commit": commit()}
