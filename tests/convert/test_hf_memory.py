"""Neither direction between Hugging Face folders and ours holds more than a few tensors, whatever the model's size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
DIM, HIDDEN, EXPERTS, LAYERS = 256, 512, 8, 12
MB = 2**20
LARGEST = EXPERTS * DIM * 2 * HIDDEN * 4 / MB  # gate and up of a layer's experts
MODEL = LAYERS * 1.5 * LARGEST

MEASURE = """
import sys
from pathlib import Path
from openlm_moe.convert.__main__ import main

def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

home = Path(sys.argv[1])
for name in ("small", "large"):  # what is imported at first use does not count
    before = memory("VmRSS")
    for command, source, target in (("hf-to-openlm", "hf", "ours"), ("openlm-to-hf", "ours", "back")):
        Path("/proc/self/clear_refs").write_text("5")
        assert main([command, str(home / name / source), str(home / name / target)]) == 0
        print("PEAK", name, memory("VmHWM") - before)
"""


def write_mixtral(folder: Path, dim: int, hidden: int, experts: int, layers: int) -> None:
    """A folder of one file, under transformers' names, without transformers."""
    from safetensors.torch import save_file

    config = {
        "model_type": "mixtral",
        "vocab_size": 16,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": experts,
        "max_position_embeddings": 8,
    }
    shapes = {"model.embed_tokens": (16, dim), "lm_head": (16, dim), "model.norm": (dim,)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        rows = {"q": dim, "k": dim // 2, "v": dim // 2, "o": dim}
        shapes |= {f"{block}.self_attn.{part}_proj": (count, dim) for part, count in rows.items()}
        shapes |= {f"{block}.input_layernorm": (dim,), f"{block}.post_attention_layernorm": (dim,)}
        shapes[f"{block}.block_sparse_moe.gate"] = (experts, dim)
        for expert in range(experts):
            for part, shape in (("w1", (hidden, dim)), ("w2", (dim, hidden)), ("w3", (hidden, dim))):
                shapes[f"{block}.block_sparse_moe.experts.{expert}.{part}"] = shape
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for a process's peak memory")
def test_peak(run, tmp_path):
    write_mixtral(tmp_path / "small" / "hf", 8, 4, 2, 1)
    write_mixtral(tmp_path / "large" / "hf", DIM, HIDDEN, EXPERTS, LAYERS)
    done = run([sys.executable, "-c", MEASURE, tmp_path])
    assert done.returncode == 0, done.stderr
    peaks = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("PEAK large")]
    assert len(peaks) == 2
    bound = 3 * LARGEST + 16
    assert bound < MODEL / 3
    assert max(peaks) < bound, peaks
    assert (tmp_path / "large" / "back" / "model.safetensors").stat().st_size > MODEL * MB
