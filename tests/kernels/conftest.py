"""Puts `moe_cases` on the path, and can make uninitialised memory visible."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """`torch.empty` and its relatives give NaN (integers: the largest), so what is never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
