"""The doctor reports truthfully and fails loudly."""

import json

import pytest
import torch

from openlm_moe import doctor
from openlm_moe_kernels import torch_backend

SMALL = ["--moe-ffn-dim", "24", "--model", "open_lm_test_tiny"]


def test_on_a_cpu_it_says_that_no_triton_kernel_was_verified(capsys):
    assert doctor.main(SMALL) == 0
    printed = capsys.readouterr().out
    for words in ("torch 2", "dim 16, hidden 24, 8 experts, top-2, gelu", "bf16", "dweights", "All checks passed"):
        assert words in printed
    assert ("No Triton kernel was verified" in printed) == (not torch.cuda.is_available())


def test_a_wrong_kernel_fails_it(capsys, monkeypatch):
    forward = torch_backend.ffn_forward

    def wrong(*args, **kwargs):
        out, pre = forward(*args, **kwargs)
        out[:, -1] = 0
        return out, pre

    monkeypatch.setattr(torch_backend, "ffn_forward", wrong)
    assert doctor.main([*SMALL, "--moe-backend", "torch"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "FAILED" in printed


def test_shapes_of_a_hugging_face_folder(tmp_path, capsys):
    config = {"hidden_size": 20, "intermediate_size": 28, "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert doctor.main(["--hf-dir", str(tmp_path)]) == 0
    assert "dim 20, hidden 28, 4 experts, top-2, swiglu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hf-dir", "nowhere"], "nowhere/config.json cannot be read"),
        (["--experts", "0"], "no MoE layer"),
        (["--model", "open_lm_42m"], "unknown model 'open_lm_42m'"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(argv, words, capsys):
    assert doctor.main(argv) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_a_dense_hugging_face_model_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 20, "intermediate_size": 28}))
    assert doctor.main(["--hf-dir", str(tmp_path)]) == 2
    assert "does not look like a mixture of experts" in capsys.readouterr().err
