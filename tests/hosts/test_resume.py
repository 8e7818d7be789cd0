"""Saved at step k and resumed: the steps after k equal those of the unbroken run bitwise. And stopping on request."""

import contextlib
import json
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from openlm_moe.hosts.builtin.remote_sync import files_to_copy
from openlm_moe.main import main
from openlm_moe.parallel.checkpoint import complete_checkpoints
from openlm_moe.parallel.stop import StopRequest

FLAGS = ("--moe-jitter", 0.2, "--moe-balance", "bias", "--averagers", "ema_0.8_2", "--save-every-n-steps", 5)


def tensors(checkpoint):
    """Every tensor of a checkpoint by name."""
    index = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in index.items() if hasattr(e, "size")}
    dcp.load(state, checkpoint_id=checkpoint)
    return state


def assert_same_checkpoints(one, other):
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys() and len(left) > 20
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def rewind(tiny, name, step):
    """Makes the run's folder look as if the process had died soon after the checkpoint of `step`."""
    for folder in [tiny.run_folder(name) / "checkpoints", *(tiny.run_folder(name) / "averages").glob("*")]:
        for path in complete_checkpoints(folder):
            if int(path.name[5:]) > step:
                shutil.rmtree(path)


@pytest.mark.parametrize("step", [5, 6, 10])  # within an epoch, at its edge, within the next
def test_resumed_steps_equal_the_unbroken_run_bitwise(tiny, step):
    assert tiny.start(*FLAGS, name="whole") == 0
    shutil.copytree(tiny.run_folder("whole"), tiny.run_folder("broken"))
    rewind(tiny, "broken", step)
    assert tiny.start(*FLAGS, "--resume", "latest", name="broken") == 0
    assert tiny.losses("broken") == tiny.losses("whole")
    assert [r["step"] for r in tiny.records("broken") if "train/loss" in r] == list(range(1, 13))
    for part in ("checkpoints", "averages/ema_0.8_2"):
        paths = [tiny.run_folder(name) / part / "step_0000012" for name in ("whole", "broken")]
        assert_same_checkpoints(*paths)


def test_moments_and_biases_are_in_the_checkpoint(tiny):
    assert tiny.start(*FLAGS) == 0
    state = tensors(tiny.run_folder() / "checkpoints" / "step_0000005")
    moments = [name for name in state if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert len(moments) == 2 * sum(name.startswith("model.") and "expert_bias" not in name for name in state)
    assert all(state[name].abs().sum() > 0 for name in moments)
    assert state["model.layers.0.feed_forward.router.expert_bias"].abs().sum() > 0


def test_workers_and_accumulation_may_change_on_resume(tiny):
    assert tiny.start("--save-every-n-steps", 5, name="whole") == 0
    shutil.copytree(tiny.run_folder("whole"), tiny.run_folder("broken"))
    rewind(tiny, "broken", 5)
    flags = ("--save-every-n-steps", 5, "--resume", "latest", "--workers", 1, "--accum-freq", 2)
    assert tiny.start(*flags, "--moe-loss-weight", 0.1, name="broken") == 0
    assert list(tiny.losses("broken").values()) == pytest.approx(list(tiny.losses("whole").values()), rel=1e-3)


def test_a_path_resumes_into_a_new_run(tiny):
    assert tiny.start("--save-every-n-steps", 5, name="whole") == 0
    source = tiny.run_folder("whole") / "checkpoints" / "step_0000005"
    assert tiny.start("--resume", source, name="branch") == 0
    assert tiny.losses("branch") == {step: loss for step, loss in tiny.losses("whole").items() if step > 5}


def test_resume_latest_starts_when_there_is_nothing_yet(tiny):
    assert tiny.start("--resume", "latest") == 0
    assert len(tiny.losses()) == 12


def test_a_finished_run_has_nothing_to_do(tiny, capsys):
    assert tiny.start() == 0
    assert tiny.start("--resume", "latest") == 0
    assert "nothing to do: the checkpoint is at step 12 of 12" in capsys.readouterr().out
    assert len(tiny.losses()) == 12


def test_a_torn_newest_checkpoint_is_passed_over(tiny, caplog):
    assert tiny.start("--save-every-n-steps", 5, name="whole") == 0
    shutil.copytree(tiny.run_folder("whole"), tiny.run_folder("torn"))
    rewind(tiny, "torn", 10)
    data = tiny.run_folder("torn") / "checkpoints" / "step_0000010" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    assert tiny.start("--save-every-n-steps", 5, "--resume", "latest", name="torn") == 0
    assert tiny.losses("torn") == tiny.losses("whole")
    assert "skipping checkpoint" in caplog.text and "step_0000010" in caplog.text


def test_a_run_of_damaged_checkpoints_is_not_started_over(tiny, capsys):
    assert tiny.start("--save-frequency", 0) == 0
    (tiny.run_folder() / "checkpoints" / "step_0000012" / "__0_0.distcp").write_bytes(b"")
    assert tiny.start("--resume", "latest") == 2
    assert "every checkpoint in" in capsys.readouterr().err


def stop_after(monkeypatch, steps, ask):
    """Calls `ask(stop request)` at the edge of step `steps`."""
    original = StopRequest.agreed
    edges = []

    def agreed(self):
        edges.append(0)
        if len(edges) == steps:
            ask(self)
        return original(self)

    monkeypatch.setattr(StopRequest, "agreed", agreed)


@pytest.mark.parametrize("how", ["file", "given file", "SIGTERM", "SIGUSR1"])
def test_a_stop_request_saves_and_says_how_to_go_on(tiny, how, monkeypatch, capsys):
    def ask(stop):
        if how.startswith("SIG"):
            signal.raise_signal(getattr(signal, how))
        else:
            stop.file.touch()

    assert tiny.start(name="whole") == 0
    flags = ("--stop-file", tiny.folder / "please_stop") if how == "given file" else ()
    with monkeypatch.context() as patch:
        stop_after(patch, 4, ask)
        assert tiny.start(*flags) == 0
    assert "stopped as asked after step 4 of 12; to go on, start the same command with --name run --resume latest" in (
        capsys.readouterr().out
    )
    assert [p.name for p in complete_checkpoints(tiny.run_folder() / "checkpoints")] == ["step_0000004"]
    assert tiny.start(*flags, "--resume", "latest") == 0  # the file is gone: it stops one run only
    assert tiny.losses() == tiny.losses("whole")


def test_a_transient_checkpoint_goes_with_the_next_one_after_a_restart_too(tiny, monkeypatch):
    def die(stop):
        raise KeyboardInterrupt

    flags = ("--epochs", 4, "--save-frequency", 4, "--save-most-recent", "--multiple-data-passes", "--resume", "latest")
    kept = []
    for _ in range(3):
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            stop_after(patch, 8, die)  # an epoch is 6 steps
            tiny.start(*flags)
        kept.append([p.name for p in complete_checkpoints(tiny.run_folder() / "checkpoints")])
    assert kept == [["step_0000006"], ["step_0000012"], ["step_0000018"]]
    assert tiny.start(*flags) == 0
    assert [p.name for p in complete_checkpoints(tiny.run_folder() / "checkpoints")] == ["step_0000024"]


def test_a_stop_at_the_last_step_is_a_finished_run(tiny, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 12, lambda stop: stop.file.touch())
        assert tiny.start() == 0
    assert "train perplexity" in capsys.readouterr().out


def test_changed_data_are_reported(tiny, make_source, capsys):
    assert tiny.start("--save-every-n-steps", 5) == 0
    rewind(tiny, "run", 5)
    other = make_source(tiny.folder / "other", 4, 40, seed=3)
    flags = ("--resume", "latest", "--dataset-manifest", other)
    assert tiny.start(*flags) == 2
    assert "the data differ from those of the checkpoint" in capsys.readouterr().err
    assert tiny.start(*flags, "--allow-data-change") == 0


@pytest.mark.parametrize(
    ("flags", "key", "saved"),
    [
        (("--experts", 8), "moe num_experts", "4"),
        (("--top-k", 1), "moe top_k", "2"),
        (("--moe-ffn", "swiglu"), "moe ffn", "gelu"),
        (("--moe-normalize-weights",), "moe normalize_weights", "False"),
        (("--model-norm", "rms_norm"), "model_norm", "default_layer_norm"),
        (("--qk-norm",), "qk_norm", "False"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tiny, capsys, flags, key, saved):
    if not (tiny.run_folder("first")).exists():
        assert tiny.start(name="first") == 0
    assert tiny.start(*flags, "--resume", tiny.run_folder("first"), name="other") == 2
    said = capsys.readouterr().err
    assert f"is of another architecture: its {key} is {saved}" in said and said.count("\n") == 1
    assert not tiny.run_folder("other").exists()


def test_another_batch_size_must_meet_the_place_in_the_data(tiny, capsys):
    assert tiny.start("--save-every-n-steps", 5) == 0
    rewind(tiny, "run", 5)
    assert tiny.start("--resume", "latest", "--global-batch-size", 16) == 2
    assert "stands at sample 40" in capsys.readouterr().err


def test_an_average_that_was_not_kept_cannot_be_resumed(tiny, capsys):
    assert tiny.start("--save-every-n-steps", 5) == 0
    rewind(tiny, "run", 5)
    assert tiny.start("--resume", "latest", "--averagers", "ema_0.9") == 2
    assert "has no average ema_0.9" in capsys.readouterr().err


def test_remote_sync_copies_the_run_and_brings_it_back(tiny):
    remote = tiny.folder / "remote"
    flags = ("--remote-sync", remote, "--save-every-n-steps", 5, "--averagers", "ema_0.8")
    assert tiny.start(*flags) == 0
    for relative in (
        "metrics.jsonl",
        "out.log",
        "checkpoints/step_0000012/COMPLETE",
        "averages/ema_0.8/step_0000005/COMPLETE",
    ):
        assert (remote / "run" / relative).read_bytes() == (tiny.run_folder() / relative).read_bytes()
    (tiny.run_folder() / "stop").touch()
    assert "stop" not in [path.name for path in files_to_copy(tiny.run_folder())], "it would stop the next start too"
    whole = tiny.losses()
    shutil.rmtree(tiny.run_folder())
    for step in (10, 12):
        for path in remote.glob(f"run/**/step_00000{step:02d}"):
            shutil.rmtree(path)
    assert tiny.start(*flags, "--resume", "latest") == 0
    assert {step: loss for step, loss in tiny.losses().items() if step > 6} == {s: v for s, v in whole.items() if s > 6}


def test_params_json_and_state_json_hold_the_settings(tiny):
    assert tiny.start("--moe-jitter", 0.2) == 0
    state = json.loads((tiny.run_folder() / "checkpoints" / "step_0000012" / "state.json").read_text())
    assert (state["step"], state["tokens"], state["epoch"], state["data"]["samples"]) == (12, 12 * 128, 2, 96)
    assert state["moe"]["jitter"] == 0.2 and state["model"]["hidden_dim"] == 16


def test_main_runs_in_a_process_of_its_own(tiny, run):
    done = run([sys.executable, "-m", "openlm_moe.main", *tiny.flags()], cwd=tiny.folder)
    assert done.returncode == 0, done.stderr
    assert "validation perplexity, valid" in done.stdout
    assert main(tiny.flags(name="here")) == 0
    assert tiny.losses() == tiny.losses("here")
