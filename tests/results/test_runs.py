"""What is read from the sweep's records: learning rates, seeds, ratios, verdicts; and what the queue file promises."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from results.sweep_queue import RECORDS_FILE, Run, flags, read_queue, stage_runs
from results.tables import ladder, questions
from results.tables.runs import Sweep, load_curve, ratios

SIZE, TOKENS = "0.1M", 2457600
RATES = read_queue()["learning_rates"][SIZE]


def record(arm: str, lr: float, seed: int, loss: float | None, **more) -> dict:
    what = {"size": SIZE, "arm": arm, "lr": lr, "seed": seed, "tokens": TOKENS, "valid_loss": loss}
    counts = {"parameters": {"total": 100, "active": 50}, "flops_per_token": 1e6}
    return {**what, **counts, "dropped": 0.0, "load": {}, "train_loss": [[1, 2.0]], **more}


def sweep(tmp_path: Path, *found: dict) -> Sweep:
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in found))
    return Sweep(path)


def test_the_best_rate_so_far_counts_and_the_table_says_so(tmp_path: Path) -> None:
    made = sweep(tmp_path, record("dense", RATES[0], 0, 4.0), record("dense", RATES[1], 0, 3.0))
    arm = made.arm(SIZE, "dense")
    assert (arm.lr, arm.tried, arm.rates) == (RATES[1], 2, len(RATES))
    assert arm.perplexities == [math.exp(3.0)]
    assert f"{RATES[1]:g}, 2 of {len(RATES)} tried" in ladder.make(made)


def test_a_diverged_run_is_a_try_and_not_a_result(tmp_path: Path) -> None:
    tuned = [record("dense", rate, 0, loss) for rate, loss in zip(RATES, (None, 4.0, 5.0), strict=True)]
    made = sweep(tmp_path, *tuned, record("dense", RATES[1], 1, None), record("dense", RATES[2], 1, 1.0))
    arm = made.arm(SIZE, "dense")
    assert (arm.lr, arm.tried) == (RATES[1], len(RATES))
    assert list(arm.runs) == [0]


def test_an_arm_that_is_not_tuned_runs_at_the_rate_that_its_stage_names(tmp_path: Path) -> None:
    tuned = [record("dmoe-8", rate, 0, loss) for rate, loss in zip(RATES, (4.0, 3.5, 5.0), strict=True)]
    made = sweep(tmp_path, *tuned, record("top-1", RATES[0], 0, 1.0), record("top-1", RATES[1], 0, 3.6))
    assert made.arm(SIZE, "top-1").perplexities == [math.exp(3.6)]
    text = questions.make(made)
    assert f"| top-1 | 1 | {math.exp(3.6):.2f} | {math.exp(0.1):.3f} |" in text


def test_only_seeds_that_both_have_are_compared(tmp_path: Path) -> None:
    found = [record(arm, rate, 0, 3.0 + i) for arm in ("dense", "dmoe-8") for i, rate in enumerate(RATES)]
    found += [record("dense", RATES[0], 1, 3.2), record("dmoe-8", RATES[0], 2, 9.0), record("dmoe-8", RATES[0], 1, 3.1)]
    made = sweep(tmp_path, *found)
    got = ratios(made.arm(SIZE, "dmoe-8"), made.arm(SIZE, "dense"))
    assert got == pytest.approx([1.0, math.exp(-0.1)])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([], "not run"),
        ([0.9, 0.8], "yes, ratio 0.850 (2 seeds)"),
        ([1.1], "no, ratio 1.100 (1 seed)"),
        ([0.9, 1.2], "undecided, better with 1 of 2 seeds, mean ratio 1.050"),
    ],
)
def test_the_verdict_follows_the_seeds(found: list[float], says: str) -> None:
    assert ladder.compared(found) == says


def test_the_load_is_that_of_the_worst_layer() -> None:
    load = {
        "experts/layer_0/max_over_mean": [[1, 9.0], [2, 1.5]],
        "experts/layer_2/max_over_mean": [[1, 2.0], [2, 3.0]],
        "experts/layer_2/min_over_mean": [[1, 7.0], [2, 7.0]],
    }
    assert load_curve({"load": load}) == [(1, 9.0), (2, 3.0)]
    assert load_curve({"load": {}}) == []


def test_the_stated_budget_counts_the_runs_of_the_queue() -> None:
    queue = read_queue()
    runs = set()
    for stage in queue["stages"][1:]:  # the runs of the first are among the second's
        rates = queue["learning_rates"][stage["size"]] if stage["lr"] == "all" else [None]
        runs |= {
            (stage["size"], stage["tokens"], a, s, r) for a in stage["arms"] for s in stage["seeds"] for r in rates
        }
    assert int(re.match(r"(\d+) runs", queue["budget"])[1]) == len(runs)
    assert Sweep().distinct()[1] == len(runs)
    first, second = queue["stages"][:2]
    assert set(first["arms"]) <= set(second["arms"]) and first["seeds"] == second["seeds"] and second["lr"] == "all"
    for size in queue["sizes"]:
        told = re.search(rf"(?<![\d.]){re.escape(size)}: (.*?): [\d.]+ core hours", queue["budget"])[1]
        counts = {tokens: int(count) for count, tokens in re.findall(r"(\d+) (?:runs )?of ([\d.]+)M", told)}
        asked = Counter(f"{run[1] / 1e6:.1f}" for run in runs if run[0] == size)
        assert counts == asked


def test_every_arm_is_trained_alike() -> None:
    """Same tokens, batch, schedule and rates within a stage; arms differ in what they are."""
    queue = read_queue()
    for stage in queue["stages"]:
        for arm in stage["arms"]:
            made = flags(Run(stage["size"], arm, 0.01, 0, stage["tokens"]), queue)
            assert {
                k: v for k, v in made.items() if k in queue["common"] and k not in ("--ffn-type", "--moe-every")
            } == {k: v for k, v in queue["common"].items() if k not in ("--ffn-type", "--moe-every")}
            assert set(queue["arms"][arm]["flags"]) <= {
                "--experts", "--top-k", "--moe-ffn-dim", "--moe-balance", "--moe-type", "--moe-every", "--ffn-type",
                "--moe-ffn", "--moe-normalize-weights", "--moe-loss-weight",
            }  # fmt: skip


def test_every_record_is_a_run_of_the_queue_or_of_a_rate_that_was_dropped() -> None:
    made = Sweep()
    asked = {run for stage in made.queue["stages"] for run in stage_runs(stage, made.queue, made.done)}
    for run, found in made.done.items():
        assert run in asked or run.lr not in made.queue["learning_rates"][run.size], f"{RECORDS_FILE}: {run}"
        assert run.tokens <= 4 * found["corpus"]["train_tokens"]
        assert found["flags"]["--lr"] == run.lr
        assert {"machine", "versions", "commit"} <= found.keys()
