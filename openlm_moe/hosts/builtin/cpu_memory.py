"""Keeps freed memory in the process when training runs on a CPU.

glibc hands every large tensor back to the kernel when it is freed and takes it anew, page fault by page fault, in the
next step; for small models that costs more than their arithmetic.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3), from <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Tells glibc's allocator so; does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 256 * 2**20)
