"""`python -m openlm_moe.plan`: what it prints, what it advises, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from openlm_moe.plan.command import gpu_from, job_from, main, parse
from openlm_moe.plan.memory import available, estimate_memory

MOE = ["--moe-every", "2", "--experts", "8"]
BIG = ["--model", "open_lm_7b", *MOE, "--gpus", "8", "--gpu", "A100-80", "--batch", "64"]


def json_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    main([*flags, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "experts", "line"),
    [
        ("open_lm_41m", 8, "68.9M training / 45.0M active (top-2)"),
        ("open_lm_87m", 8, "165.4M training / 96.8M active (top-2)"),
        ("open_lm_160m", 8, "360.6M training / 190.7M active (top-2)"),
        ("open_lm_410m", 8, "1.1B training / 509.2M active (top-2)"),
        ("open_lm_830m", 8, "2.4B training / 1.1B active (top-2)"),
        ("open_lm_41m", 32, "164.5M training / 45.0M active (top-2)"),
        ("open_lm_87m", 32, "439.9M training / 96.8M active (top-2)"),
        ("open_lm_160m", 32, "1.0B training / 190.7M active (top-2)"),
        ("open_lm_410m", 32, "3.5B training / 509.2M active (top-2)"),
        ("open_lm_830m", 32, "7.9B training / 1.1B active (top-2)"),
    ],
)
def test_prints_the_published_counts(capsys: pytest.CaptureFixture[str], model: str, experts: int, line: str) -> None:
    assert main(["--model", model, "--moe-every", "2", "--experts", str(experts)]) == 0
    assert line in capsys.readouterr().out


def test_runs_as_a_module(run) -> None:
    done = run([sys.executable, "-m", "openlm_moe.plan", "--model", "open_lm_41m", *MOE, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"]["training"] == 68_882_976


def test_dense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "open_lm_41m", "--experts", "0"]) == 0
    assert "(dense)" in capsys.readouterr().out


def test_what_does_not_fit_gets_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BIG) == 1
    assert "fits         no" in capsys.readouterr().out
    plan = json_of(capsys, *BIG)
    assert not plan["fits"]
    assert plan["advice"][0]["flags"] == ["--fsdp", "--fsdp-amp"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "open_lm_830m", *MOE, "--gpus", "8", "--gpu", "A100-40", "--batch", "256"],
        ["--model", "open_lm_410m", *MOE, "--gpus", "1", "--gpu", "A100-80", "--batch", "64"],
        ["--model", "open_lm_1b", "--experts", "0", "--gpus", "8", "--batch", "64", "--gpu", "A100-40"],
        ["--model", "open_lm_7b", *MOE, "--gpus", "16", "--fsdp", "--gpu", "A100-80", "--batch", "1024"],
    ],
    ids=lambda flags: flags[1],
)
def test_following_the_advice_makes_it_fit(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    advice = json_of(capsys, *flags)["advice"]
    assert [step["fits"] for step in advice] == [False] * (len(advice) - 1) + [True]
    followed = [*flags, *(flag for step in advice for flag in step["flags"])]
    assert main(followed) == 0
    capsys.readouterr()
    assert json_of(capsys, *followed)["memory_bytes"]["peak"] == advice[-1]["peak"]
    assert main([*flags, *(flag for step in advice[:-1] for flag in step["flags"])]) == 1


def test_json_is_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "open_lm_160m", "--experts", "32", "--gpus", "16", "--gpu", "h100", "--batch", "128"]
    flags += ["--seq", "1024", "--fsdp", "--fsdp-amp", "--expert-parallel", "auto", "--accum-freq", "2", "--qk-norm"]
    plan, args = json_of(capsys, *flags), parse(flags)
    job, gpu = job_from(args), gpu_from(args)
    assert (job.expert_parallel, job.params.seq_len, job.sequences, job.fsdp, job.params.qk_norm) == (
        8,
        1024,
        4,
        "amp",
        True,
    )
    assert plan["memory_bytes"]["peak"] == estimate_memory(job).peak()
    assert plan["memory_bytes"]["available"] == available(gpu)
    assert plan["job"]["gpu"]["name"] == "H100"
    assert plan["step"]["tokens_per_second_per_gpu"] > 0 and plan["step"]["bound_by"]
    assert {c["name"] for c in plan["communication"]} >= {"all-gather of dense", "all-to-all: rows to the experts"}


def test_text_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    main([*BIG, "--gpus", "16", "--fsdp", "--fsdp-amp", "--expert-parallel", "8"])
    out = capsys.readouterr().out
    for word in ("weights", "gradients", "optimizer", "saved activations", "all-to-all buffers", "worst routing"):
        assert word in out
    for word in ("all-gather of experts", "bound by", "MFU", "GFLOP per token", "tokens/s/GPU"):
        assert word in out


def test_network_flag_moves_the_bound() -> None:
    flags = ["--model", "open_lm_160m", "--gpus", "16", "--gpu", "H200"]
    assert gpu_from(parse(flags)).network == 50e9
    assert gpu_from(parse([*flags, "--network-gbps", "100"])).network == 12.5e9


def test_legacy_batch_size_counts_one_rank() -> None:
    flags = ["--model", "open_lm_41m", "--gpus", "8", "--batch-size", "4"]
    assert job_from(parse(flags)).global_batch_size == 32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "open_lm_42m"], "open_lm_41m"),
        ([*BIG[:-4], "--gpu", "V100"], "H200"),
        (["--experts", "8"], "--model is missing"),
        (["--model", "open_lm_41m", "--gpus", "8", "--batch", "63"], "multiple of 8"),
        (["--model", "open_lm_41m", "--gpus", "12", "--batch", "24"], "nodes"),
        (["--model", "open_lm_41m", "--gpus", "8", "--expert-parallel", "3"], "1, 2, 4, 8 would fit"),
        (["--model", "open_lm_41m", "--gpus", "0"], "1 or more"),
        (["--model", "open_lm_41m", "--moe-weight-parallelism"], "FSDP"),
        (["--config", "open_lm_42m_e8"], "open_lm_41m_e8"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(flags) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_unknown_flags_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--modle", "open_lm_41m"])
    assert stopped.value.code == 2
    assert "--model" in capsys.readouterr().err


def test_a_preset_brings_its_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = json_of(capsys, "--config", "open_lm_830m_e32")
    assert (plan["job"]["gpus"], plan["job"]["nodes"], plan["job"]["gpu"]["name"]) == (32, 4, "A100-80")
    other = json_of(capsys, "--config", "open_lm_830m_e32", "--gpus", "64", "--gpu", "H100")
    assert (other["job"]["gpus"], other["job"]["gpu"]["name"]) == (64, "H100")
