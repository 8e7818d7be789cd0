"""The published table of open_lm's MoE, as kept in published.json with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
_TABLE = json.loads(FILE.read_text())
SOURCE: str = _TABLE["source"]
WHAT: str = _TABLE["what"]
# model -> nodes of 8 GPUs; by number of experts: perplexity, thousand tokens/s/GPU, parameters
MODELS: dict[str, dict[str, Any]] = _TABLE["models"]


def perplexity_ratio(model: str, experts: int, over: int = 1) -> float | None:
    """Published perplexity with `experts` experts over that with `over`; None where one of them was not published."""
    found = MODELS[model]["perplexity"]
    if str(experts) not in found or str(over) not in found:
        return None
    return found[str(experts)] / found[str(over)]


def throughput(model: str, experts: int) -> float:
    """Published thousand tokens/s/GPU with 8 experts in every other layer, or of the dense model (0 or 1 experts)."""
    return MODELS[model]["kilotokens_per_second_per_gpu"][str(experts or 1)]


def throughput_ratio(model: str) -> float:
    """Published tokens a second with 8 experts over those of the dense model."""
    return throughput(model, 8) / throughput(model, 1)
