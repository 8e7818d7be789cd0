"""The steps of `run.py`: commands, each with the most seconds that it may take."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = ROOT / "tests" / "kernels" / "triton_kernels"
SIZES = ("41m", "87m", "160m", "410m", "830m")
SEQUENCES = {"41m": 8, "87m": 8, "160m": 8, "410m": 4, "830m": 2}  # of 2048 tokens a step; AdamW on one GPU
LAYERS = (*(f"{size}-e8" for size in SIZES), "160m-e32", "mixtral-8x7b")
BENCH = (sys.executable, "-m", "openlm_moe.bench")
WORK = (sys.executable, "-m", "results.gpu.work")


@dataclass(frozen=True)
class Step:
    """`command` may name the file "{made}", into which it writes JSON."""

    name: str
    kind: str  # which part of the table shows it
    command: tuple[object, ...]
    limit: int  # seconds
    env: dict[str, str] = field(default_factory=dict)


def gpu_steps(out: Path) -> list[Step]:
    """In the order of importance: is it right, does it train, how fast is it, and how fast when tuned."""
    cuda = ("--device", "cuda")
    steps = [_tests(file, 420) for file in sorted(KERNEL_TESTS.glob("test_*.py"))]
    numerics = ("-m", "results.gpu.work", "numerics", "triton", *cuda)
    steps.append(Step("numerics", "numerics", (sys.executable, *numerics, "--json", "{made}"), 300))
    steps.append(_train(out, steps=200, dim=256, limit=420))
    for size in SIZES:
        model = (*cuda, "--model", f"open_lm_{size}", "--seq-len", 2048, "--sequences", SEQUENCES[size])
        steps.append(Step(f"model-{size}", "model", (*BENCH, "model", *model, "--json", "{made}"), 300))
        plain = (*BENCH, "model", *model, "--moe-backend", "torch", "--json", "{made}")
        steps.append(Step(f"model-{size}-torch", "model", plain, 300))
        steps.append(Step(f"memory-{size}", "memory", (*WORK, "memory", *model, "--json", "{made}"), 200))
    for name in LAYERS:
        layer = (*cuda, "--shape", name, "--dtype", "bf16", "--routing", "both", "--json", "{made}")
        steps.append(Step(f"layer-{name}", "layer", (*BENCH, "layer", *layer), 240))
        steps.append(Step(f"kernels-{name}", "kernels", (*BENCH, "kernels", *layer), 240))
    for name in LAYERS:
        table = out / f"tuned-{name}.table.json"
        tune = (*BENCH, "tune", "--shape", name, "--dtype", "bf16", "--out", table)
        tuned = ("--shape", name, "--dtype", "bf16", "--routing", "both", "--json", "{made}")
        steps.append(Step(f"tune-{name}", "tune", tune, 470))
        use = {"OPENLM_MOE_KERNEL_TABLE": str(table)}
        steps.append(Step(f"tuned-layer-{name}", "layer", (*BENCH, "layer", *cuda, *tuned), 240, use))
    return steps


def tiny_steps(out: Path) -> list[Step]:
    """One step of each kind, on a CPU; kernels run in Triton's interpreter."""
    model = out / "tiny_model.json"
    shape = {"hidden_dim": 32, "n_layers": 2, "n_heads": 2, "seq_len": 32, "vocab_size": 64}
    model.write_text(json.dumps({**shape, "post_embed_norm": False, "weight_tying": False}))
    interpreter = {"TRITON_INTERPRET": "1"}
    whole = ("--device", "cpu", "--model", model, "--seq-len", 32, "--sequences", 2)
    layer = ("--device", "cpu", "--shape", "41m-e8", "--tokens", 16, "--rounds", 1, "--dtype", "fp32")
    tests = _tests(KERNEL_TESTS / "test_tiles.py", 120)
    tune = ("--layer", "32,48,3,1", "--tokens", 40, "--dtype", "fp32", "--kernel", "wgrad", "--rounds", 1, "--steps", 1)
    table = out / "tuned-tiny.table.json"
    return [
        Step(tests.name, tests.kind, tests.command, tests.limit, interpreter),
        _train(out, steps=6, dim=32, limit=120),
        Step("model-tiny", "model", (*BENCH, "model", *whole, "--rounds", 1, "--json", "{made}"), 120),
        Step("memory-tiny", "memory", (*WORK, "memory", *whole, "--json", "{made}"), 120),
        Step("layer-tiny", "layer", (*BENCH, "layer", *layer, "--malloc", "tuned", "--json", "{made}"), 120),
        Step("kernels-tiny", "kernels", (*BENCH, "kernels", *layer, "--json", "{made}"), 120),
        Step("tune-tiny", "tune", (*BENCH, "tune", *tune, "--out", table), 120, interpreter),
        Step("numerics", "numerics", (*WORK, "numerics", "torch", "--device", "cpu", "--json", "{made}"), 120),
    ]


def _tests(file: Path, limit: int) -> Step:
    ini = ROOT / "results" / "gpu" / "pytest.ini"
    places = ("-c", ini, "--rootdir", ROOT, "--confcutdir", ROOT)
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *places, "-m", "not slow", file)
    return Step(f"tests-{file.stem}", "tests", command, limit)


def _train(out: Path, steps: int, dim: int, limit: int) -> Step:
    command = (*WORK, "train", "--steps", steps, "--dim", dim, "--folder", out / "train", "--json", "{made}")
    return Step("train", "train", command, limit)
