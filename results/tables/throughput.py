"""Tokens a second with 8 experts over those of the dense model, beside the published ratio and what FLOPs allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.count import flops_per_token
from openlm_moe.hosts.builtin.params import load_model_params
from results import published, records
from results.records import RESULTS
from results.tables.markdown import NOT_RUN, table

STEP = {False: "full", True: "forward and backward, no optimizer"}


def newest(path: Path = RESULTS / "throughput" / "record.jsonl") -> dict[str, dict[str, Any]]:
    """{model: its last record}, in the published order."""
    found = {r["model"]: r for r in records.read(path)}
    return {model: found[model] for model in published.MODELS if model in found}


def bound(record: dict[str, Any]) -> float:
    """Active FLOPs of the dense model over those of the MoE, for one token of the record's sequences."""
    params = replace(load_model_params(record["model"]), seq_len=record["seq_len"])
    dense = flops_per_token(params, MoEConfig(num_experts=0))
    return dense / flops_per_token(params, MoEConfig.from_dict(record["moe"]))


def measured(record: dict[str, Any]) -> float:
    """The median over rounds of MoE / dense tokens a second."""
    return 1 / record["results"]["moe"]["ratio"]


def make() -> str:
    found = newest()
    rows: list[list[object]] = []
    for model in published.MODELS:
        told = f"{published.throughput_ratio(model):.2f}"
        if model not in found:
            rows.append([model, *[NOT_RUN] * 6, told])
            continue
        r = found[model]
        speeds = [r["results"][name]["tokens_per_second"] for name in ("dense", "moe")]
        rows.append(
            [
                model,
                f"{STEP[r['no_optimizer']]}, {r['sequences']} x {r['seq_len']} tokens, {r['dtype']}",
                f"{speeds[0]:.0f}",
                f"{speeds[1]:.0f}",
                f"{measured(r):.3f}",
                f"{bound(r):.3f}",
                f"{measured(r) / bound(r):.2f}",
                told,
            ]
        )
    header = [
        "model",
        "step",
        "dense tokens/s",
        "8 experts tokens/s",
        "ratio here",
        "bound by FLOPs",
        "ratio / bound",
        "ratio published (A100)",
    ]
    return table(header, rows)
