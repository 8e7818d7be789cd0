"""Tokens a second with 8 experts over those of the dense model, beside the published ratio and what FLOPs allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.count import flops_per_token
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.plan import published
from results import records
from results.records import RESULTS
from results.tables.markdown import NOT_RUN, table

RECORDS = RESULTS / "throughput" / "record.jsonl"


def newest(path: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """{model: its last record}, in the published order."""
    found = {r["model"]: r for r in records.read(path)}
    return {model: found[model] for model in published.MODELS if model in found}


def bound(record: dict[str, Any]) -> float:
    """Active FLOPs of the dense model over those of the MoE, for one token of the record's sequences."""
    params = replace(load_model_params(record["model"]), seq_len=record["seq_len"])
    dense = flops_per_token(params, MoEConfig(num_experts=0))
    return dense / flops_per_token(params, MoEConfig.from_dict(record["moe"]))


def step(record: dict[str, Any]) -> str:
    """What the timed step was."""
    if record["no_optimizer"]:
        return "forward and backward, no optimizer"
    return f"full, {record['dtype']} throughout" if record["pure"] else "full"


def measured(record: dict[str, Any]) -> float:
    """The median over rounds of MoE / dense tokens a second."""
    return 1 / record["results"]["moe"]["ratio"]


def make(path: Path = RECORDS) -> str:
    """A row for every record, in the published order of models; the spread between a model's rows is the noise."""
    found = records.read(path)
    rows: list[list[object]] = []
    for model in published.MODELS:
        told = f"{published.throughput_ratio(model):.2f}"
        own = [r for r in found if r["model"] == model]
        rows += [[model, *_cells(r), told] for r in own] or [[model, *[NOT_RUN] * 7, told]]
    header = [
        "model",
        "step",
        "dense tokens/s",
        "8 experts tokens/s",
        "ratio here",
        "of the median times",
        "bound by FLOPs",
        "ratio / bound",
        "ratio published (A100)",
    ]
    return table(header, rows)


def _cells(r: dict[str, Any]) -> list[object]:
    dense, moe = (r["results"][name]["tokens_per_second"] for name in ("dense", "moe"))
    return [
        f"{step(r)}, {r['sequences']} x {r['seq_len']} tokens, {r['dtype']}, {r['rounds']} rounds",
        f"{dense:.0f}",
        f"{moe:.0f}",
        f"{measured(r):.3f}",
        f"{moe / dense:.3f}",
        f"{bound(r):.3f}",
        f"{measured(r) / bound(r):.2f}",
    ]
