"""Metric names: every constant is documented, open_lm's names are kept, names can be taken apart again."""

from __future__ import annotations

import pytest

from openlm_moe.telemetry import metrics

OPEN_LM = ("loss", "load_balancing_loss", "data_time", "batch_time", "forward_time", "backward_time", "optim_step_time")
OPEN_LM += ("sync_time", "samples_per_second", "samples_per_second_per_gpu", "lr", "tokens")


def test_open_lm_names_are_kept() -> None:
    documented = {m.name for m in metrics.TABLE}
    assert {f"train/{name}" for name in OPEN_LM} <= documented


def test_every_name_is_documented_once() -> None:
    constants = {v for k, v in vars(metrics).items() if k.isupper() and isinstance(v, str)}
    names = [m.name for m in metrics.TABLE]
    assert len(names) == len(set(names))
    assert constants <= set(names)
    for what in metrics.LAYER_METRICS:
        assert metrics.describe(metrics.layer_metric(7, what)).name == f"experts/layer_<id>/{what}"
    for what in metrics.VALID_METRICS:
        assert metrics.describe(metrics.valid_metric("stdlib", what)).name == f"valid/<name>/{what}"
    assert metrics.describe("train/unheard_of") is None


def test_markdown_table_has_a_row_per_metric() -> None:
    lines = metrics.markdown_table().splitlines()
    assert len(lines) == 2 + len(metrics.TABLE)
    assert all(line.count("|") == 4 for line in lines)


def test_names_can_be_taken_apart() -> None:
    assert metrics.parse_layer_metric("experts/layer_12/load") == (12, "load")
    assert metrics.parse_layer_metric("train/loss") is None
    assert metrics.parse_valid_metric("valid/a/b/perplexity") == ("a/b", "perplexity")
    assert metrics.parse_valid_metric("train/perplexity") is None


def test_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="'typo' is no expert metric"):
        metrics.layer_metric(0, "typo")
    with pytest.raises(ValueError, match="'typo' is no validation metric"):
        metrics.valid_metric("x", "typo")
