"""The one exception that means: the person who started this can fix it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(Exception):
    """A mistake in flags, files or environment, told in one line: what is wrong with which value, and what to do.

    `openlm_moe.main` and the other commands print the message without a traceback and exit with code 2.
    """


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turns a failure to write `what` into a `UserError` with the free space beside it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _write_failure(error)
        if reason is None:
            raise
        raise UserError(f"{what} cannot be written: {reason}; {_free_space(what)}") from error


def _write_failure(error: Exception) -> str | None:
    if isinstance(error, OSError):
        return str(error)
    text = str(error)
    if "inline_container" in text:  # torch's zip writer, whatever the reason
        return "only a part of it was taken"
    return text if re.search(r"\(os error \d+\)", text) else None  # safetensors


def _free_space(path: Path) -> str:
    place = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    with suppress(OSError):
        return (
            f"{shutil.disk_usage(place).free / 2**20:,.0f} MiB are free in {place}; make room, or choose another place"
        )
    return f"look at {place}, or choose another place"
