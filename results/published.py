"""The published table of open_lm's MoE, as kept in published.json with its source."""

from __future__ import annotations

import json
from typing import Any

from results.records import RESULTS

_FILE = json.loads((RESULTS / "published.json").read_text())
SOURCE: str = _FILE["source"]
WHAT: str = _FILE["what"]
MODELS: dict[str, dict[str, Any]] = _FILE["models"]


def perplexity_ratio(model: str, experts: int, over: int = 1) -> float | None:
    """Published perplexity with `experts` experts over that with `over`; None where one of them was not published."""
    found = MODELS[model]["perplexity"]
    if str(experts) not in found or str(over) not in found:
        return None
    return found[str(experts)] / found[str(over)]


def throughput_ratio(model: str) -> float:
    """Published tokens a second with 8 experts over those of the dense model."""
    found = MODELS[model]["kilotokens_per_second_per_gpu"]
    return found["8"] / found["1"]
