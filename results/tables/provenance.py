"""Where the records were made, how far the sweep is, and what it takes to finish it."""

from __future__ import annotations

from pathlib import Path

from results import records
from results.records import RESULTS
from results.tables.markdown import table
from results.tables.runs import Sweep

FILES = {
    "sweep.jsonl": "`OMP_NUM_THREADS=1 python -m results.sweep`, two at a time",
    "canary.jsonl": "`python -m results.canary`",
    "throughput/record.jsonl": "`python -m results.throughput.measure`",
    "layer/record.jsonl": "`python -m results.layer.measure`",
    "numerics/record.jsonl": "`python -m results.numerics.measure`",
}


def origins() -> str:
    """For each file of records: how many, from which machine, versions and commits, and the hours that runs took."""
    rows: list[list[object]] = []
    for name, how in FILES.items():
        found = records.read(RESULTS / name)
        seconds = [r["seconds"] for r in found if "seconds" in r]
        rows.append(
            [
                f"[{name}]({name})",
                how,
                len(found),
                _each({_machine(r["machine"]) for r in found if "machine" in r}),
                f"{sum(seconds) / 3600:.1f} h" if seconds else "-",
                _each({f"torch {r['versions']['torch']}, Python {r['versions']['python']}" for r in found}),
                _each({_commit(r["commit"]) for r in found}),
            ]
        )
    return table(["records", "made by", "number", "machine", "time of all runs", "versions", "commits"], rows)


def _machine(found: dict) -> str:
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    return f"{found.get('gpu', found['cpu'])}, {found['cores']} cores, {threads}"


def _commit(name: str | None) -> str:
    """Short, with a mark where tracked files differed from it."""
    return "unknown" if name is None else name[:7] + ("+" if name.endswith("-dirty") else "")


def _each(values: set[str]) -> str:
    return "; ".join(sorted(values)) or "-"


def progress(sweep: Sweep) -> str:
    """Runs done of the queue, stage by stage, and the hours that the rest would take."""
    rows = [
        [
            stage["name"],
            stage["size"],
            f"{stage['tokens'] / 1e6:.1f}M",
            ", ".join(stage["arms"]),
            ", ".join(str(seed) for seed in stage["seeds"]),
            f"{done} of {of}",
        ]
        for stage, done, of in sweep.progress()
    ]
    done, of = sweep.distinct()
    head = f"{done} of {of} runs are done; one can belong to two stages. The queue's budget: {sweep.queue['budget']}"
    return f"{head}\n\n{sweep.queue['note']}\n\n" + table(["stage", "size", "tokens", "arms", "seeds", "runs"], rows)


def corpora(sweep: Sweep) -> str:
    """The texts that the records were trained on."""
    found = {r["corpus"]["name"]: r["corpus"] for r in sweep.records}
    rows = [
        [
            name,
            c.get("package", "sources of Python's standard library"),
            f"`{c.get('package_sha256', c.get('sha256'))[:16]}`",
            f"{c['train_tokens']:,}",
            f"{c['validation_tokens']:,}",
            f"`{c['tokenizer_sha256'][:16]}`",
        ]
        for name, c in found.items()
    ]
    header = ["corpus", "what", "SHA-256 (start)", "training tokens", "validation tokens", "tokenizer (start)"]
    return table(header, rows)


def gpu(folder: Path = RESULTS / "gpu" / "record") -> str:
    """The table that `results/gpu/run.py` printed, if it was run on a GPU and its record is here."""
    made = folder / "table.md"
    if made.exists():
        return made.read_text().strip()
    return "No record of a GPU is here yet; nothing in this folder was measured on one."
