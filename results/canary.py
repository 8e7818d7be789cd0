"""Does dropless MoE beat the dense model of equal active FLOPs at equal tokens, and does the balancing loss balance?

`python -m results.canary [SEED ...]` trains three arms on the embedded corpus, by default with seeds 0, 1 and 2, and
writes results/canary.jsonl:

- moe          8 experts, top-2 with normalised weights, hidden 4*dim, in every block, balancing loss
- no_balance   the same without balancing
- dense        one expert of hidden 8*dim in the same blocks: the FLOPs of two experts for every token

The corpus is read once, which is about what a model this small needs before experts pay: after a third of it the dense
model is still ahead. A record that is there already, from the same settings, is not made again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from openlm_moe.main import main as train
from results import records

RECORDS = Path(__file__).with_suffix(".jsonl")
DIM, STEPS, BATCH, SEQ = 64, 1600, 16, 128
MODEL = {
    "hidden_dim": DIM,
    "n_layers": 4,
    "n_heads": 2,
    "seq_len": SEQ,
    "vocab_size": 4096,
    "post_embed_norm": False,
    "weight_tying": True,
    "model_norm": "gain_only_layer_norm",
    "qk_norm": True,
}
ARMS = {
    "moe": ["--experts", "8", "--top-k", "2", "--moe-normalize-weights"],
    "no_balance": ["--experts", "8", "--top-k", "2", "--moe-normalize-weights", "--moe-balance", "none"],
    "dense": ["--experts", "1", "--top-k", "1", "--moe-ffn-dim", str(8 * DIM)],
}
SEEDS = (0, 1, 2)


def run(arm: str, seed: int) -> dict:
    """Trains one arm; returns its record: validation loss, and the last step's expert load over its mean."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "canary.json"
        model.write_text(json.dumps(MODEL))
        flags = {
            "--model": model,
            "--seed": seed,
            "--moe-every": 1,
            "--train-num-samples": STEPS * BATCH * SEQ,
            "--global-batch-size": BATCH,
            "--lr": 6e-3,
            "--warmup": 40,
            "--logs": folder,
            "--name": "run",
            "--log-every-n-steps": 50,
        }
        code = train([str(word) for pair in flags.items() for word in pair] + ARMS[arm])
        if code:
            raise SystemExit(code)
        rows = records.read(Path(folder) / "run" / "metrics.jsonl")
    valid = [row["valid/stdlib_validation/loss"] for row in rows if "valid/stdlib_validation/loss" in row]
    loads = [value for key, value in _last(rows, "experts/").items() if key.endswith("max_over_mean")]
    return {
        "arm": arm,
        "seed": seed,
        "steps": STEPS,
        "tokens": STEPS * BATCH * SEQ,
        "valid_loss": valid[-1],
        "max_over_mean": max(loads, default=1.0),
        "model": MODEL,
        "flags": ARMS[arm],
        **records.origin(),
    }


def _last(rows: list[dict], prefix: str) -> dict:
    return next((r for r in reversed(rows) if any(key.startswith(prefix) for key in r)), {})


def committed() -> list[dict]:
    """The committed records of these settings."""
    found = records.read(RECORDS)
    return [r for r in found if r["steps"] == STEPS and r["model"] == MODEL and r["flags"] == ARMS[r["arm"]]]


def main(seeds: tuple[int, ...]) -> None:
    """Makes the records that are missing, one line each as it is done."""
    done = {(r["arm"], r["seed"]) for r in committed()}
    for seed in seeds:
        for arm in ARMS:
            if (arm, seed) not in done:
                record = run(arm, seed)
                records.append(RECORDS, record)
                print(arm, seed, record["valid_loss"], record["max_over_mean"], flush=True)


if __name__ == "__main__":
    main(tuple(int(seed) for seed in sys.argv[1:]) or SEEDS)
