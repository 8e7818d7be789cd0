"""These tests launch Triton kernels: on a GPU where there is one, else in Triton's interpreter on the CPU.

The interpreter is chosen when triton is imported, so it has processes of its own: `../test_triton_interpreter.py`
starts them with TRITON_INTERPRET=1. Collected without it on a machine without a GPU, this folder is empty.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parent))
    if INTERPRETED:
        import interpreter_patches

        interpreter_patches.install()


@pytest.fixture(autouse=True)
def always(uninitialised_is_nan: None) -> None:
    """Every test here runs so."""


@pytest.fixture(autouse=True)
def launches() -> Iterator[Counter[str]]:
    """How often each kernel was launched, by name."""
    from openlm_moe_kernels.gpu.launch import launcher

    counts: Counter[str] = Counter()

    def wrap(inner):
        def count(kernel, grid, device, arguments):
            counts[kernel.fn.__name__] += 1
            inner(kernel, grid, device, arguments)

        return count

    with launcher(wrap):
        yield counts


@pytest.fixture
def nothing_launched() -> None:
    """Turns the next function's demand around."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Every test must have launched a kernel, or it compares the references with each other."""
    result = yield
    counts, expected = pyfuncitem.funcargs["launches"], "nothing_launched" not in pyfuncitem.fixturenames
    assert bool(counts) == expected, f"launched: {dict(counts)}"
    return result
