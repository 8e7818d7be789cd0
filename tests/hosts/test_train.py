"""The trainer end to end on tiny data: what a run logs, saves and says."""

import json
import math

import pytest
import torch

from openlm_moe.data.loader import open_data
from openlm_moe.parallel.checkpoint import complete_checkpoints


def test_a_run_learns_logs_and_saves(tiny, capsys):
    assert tiny.start("--averagers", "ema_0.5,poly_1_2") == 0
    records = tiny.records()
    losses = tiny.losses()
    assert list(losses) == list(range(1, 13))
    assert losses[1] == pytest.approx(math.log(64), rel=0.2)
    assert losses[12] < losses[1] - 0.3
    first = records[0]
    assert first["tokens"] == first["train/tokens"] == 8 * 16
    assert first["train/perplexity"] == pytest.approx(math.exp(first["train/loss"]))
    assert first["train/lr"] == pytest.approx(0.5e-2)  # step 1 of 2 of warm-up
    assert first["train/load_balancing_loss"] == pytest.approx(0.1, rel=0.5)
    assert first["train/dropped_fraction"] == 0
    assert sum(first["experts/layer_0/load"]) == pytest.approx(1)
    assert "experts/layer_1/load" not in first
    assert {"train/grad_norm", "train/samples_per_second", "train/data_time", "train/active_flops"} <= first.keys()
    assert "train/mfu" not in first  # nobody knows this CPU's peak

    valid = [r for r in records if "valid/valid/loss" in r]
    assert [r["step"] for r in valid] == [6, 12]
    assert valid[1]["valid/valid/perplexity"] == pytest.approx(math.exp(valid[1]["valid/valid/loss"]))
    assert valid[1]["valid/valid/loss"] < valid[0]["valid/valid/loss"]
    assert "valid/valid@ema_0.5/loss" in valid[1] and "valid/valid@poly_1_2/loss" in valid[1]

    folder = tiny.run_folder()
    assert [p.name for p in complete_checkpoints(folder / "checkpoints")] == ["step_0000006", "step_0000012"]
    assert [p.name for p in complete_checkpoints(folder / "averages" / "ema_0.5")] == ["step_0000006", "step_0000012"]
    settings = json.loads((folder / "params.json").read_text())
    assert settings["moe"]["num_experts"] == 4 and settings["total_steps"] == 12

    said = capsys.readouterr().out
    for part in ("tokens", "train perplexity", "validation perplexity", "tokens/s", "active per token", "layer 0"):
        assert part in said
    assert str(folder / "checkpoints" / "step_0000012") in said and str(folder / "metrics.jsonl") in said


def test_same_seed_same_run_and_another_seed_another(tiny):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert tiny.start("--seed", seed, "--moe-jitter", 0.1, name=name) == 0
    assert tiny.losses("a") == tiny.losses("b")
    assert tiny.losses("a") != tiny.losses("c")
    checkpoints = [tiny.run_folder(name) / "checkpoints" / "step_0000012" for name in "ab"]
    assert (checkpoints[0] / "__0_0.distcp").read_bytes() == (checkpoints[1] / "__0_0.distcp").read_bytes()


@pytest.mark.parametrize("scope", ["micro", "sequence", "global"])
def test_cross_entropy_does_not_depend_on_accumulation(tiny, scope):
    for accum in (1, 4):
        flags = (
            "--moe-balance-scope",
            scope,
            "--accum-freq",
            accum,
            "--moe-loss-weight",
            0 if scope == "micro" else 0.1,
        )
        assert tiny.start(*flags, name=f"accum{accum}") == 0
    one, four = tiny.losses("accum1"), tiny.losses("accum4")
    assert list(one.values()) == pytest.approx(list(four.values()), rel=1e-5)


def test_micro_scope_keeps_the_scale_of_the_balancing_loss(tiny):
    values = []
    for accum in (1, 4):
        tiny.start("--accum-freq", accum, "--lr", 0, name=f"accum{accum}")
        values.append(tiny.records(f"accum{accum}")[0]["train/load_balancing_loss"])
    assert values[1] == pytest.approx(values[0], rel=0.25)


def test_activation_checkpointing_changes_nothing(tiny):
    for name, flags in (
        ("plain", ()),
        ("block", ("--grad-checkpointing",)),
        ("experts", ("--grad-checkpointing", "--grad-checkpointing-scope", "experts")),
    ):
        assert tiny.start(*flags, name=name) == 0
    assert tiny.losses("plain") == tiny.losses("block") == tiny.losses("experts")


def test_evaluation_between_steps_changes_nothing(tiny):
    assert tiny.start("--val-frequency", 1, name="often") == 0
    assert tiny.start("--val-frequency", 2, name="once") == 0
    assert tiny.losses("often") == tiny.losses("once")
    assert sum("valid/valid/loss" in r for r in tiny.records("once")) == 1


def test_autocast_keeps_fp32_weights(tiny):
    assert tiny.start("--precision", "amp_bfloat16", name="bf16") == 0
    assert tiny.start("--precision", "fp32", name="fp32") == 0
    bf16, fp32 = tiny.losses("bf16"), tiny.losses("fp32")
    assert bf16 != fp32
    assert list(bf16.values()) == pytest.approx(list(fp32.values()), rel=0.05)


def test_bias_balancing_and_capacity_run(tiny):
    assert tiny.start("--moe-balance", "bias", "--moe-bias-update-rate", "0.1", name="bias") == 0
    assert all(r["train/load_balancing_loss"] == 0 for r in tiny.records("bias") if "train/loss" in r)
    assert tiny.start("--moe-type", "capacity", "--moe-capacity-factor", 0.5, name="capacity") == 0
    dropped = [r["train/dropped_fraction"] for r in tiny.records("capacity") if "train/loss" in r]
    assert all(0.4 < fraction < 1 for fraction in dropped)


def test_dense_model_has_no_expert_metrics(tiny, capsys):
    assert tiny.start("--experts", 0) == 0
    assert not any(key.startswith("experts/") or "balancing" in key for r in tiny.records() for key in r)
    assert "expert load" not in capsys.readouterr().out


def test_capacity_factor_without_capacity_is_noted_once(tiny, capsys):
    assert tiny.start("--moe-capacity-factor", 2.0) == 0
    assert capsys.readouterr().out.count("--moe-capacity-factor 2 has no effect") == 1


def test_a_flag_that_the_models_json_overrides_is_noted(tiny, capsys):
    model = tiny.folder / "four.json"
    model.write_text(json.dumps({**json.loads(tiny.model.read_text()), "moe_num_experts": 4}))
    assert tiny.start("--experts", 16, "--model", model) == 0
    assert capsys.readouterr().out.count("num_experts 16 of the flags has no effect: the model's own is 4") == 1
    assert tiny.start("--experts", 4, "--model", model, name="same") == 0
    assert "has no effect" not in capsys.readouterr().out


def test_keep_last_and_save_frequency(tiny):
    assert tiny.start("--save-every-n-steps", 2, "--keep-last", 2, name="kept") == 0
    names = [p.name for p in complete_checkpoints(tiny.run_folder("kept") / "checkpoints")]
    assert names == ["step_0000010", "step_0000012"]
    assert tiny.start("--save-frequency", 0, name="end") == 0
    assert len(complete_checkpoints(tiny.run_folder("end") / "checkpoints")) == 1
    flags = ("--epochs", 3, "--save-frequency", 3, "--save-most-recent", "--multiple-data-passes")
    assert tiny.start(*flags, name="recent") == 0
    assert [p.name for p in complete_checkpoints(tiny.run_folder("recent") / "checkpoints")] == ["step_0000018"]


def test_z_loss_is_logged_beside_the_loss(tiny):
    assert tiny.start("--lr", 0, name="without") == 0
    assert tiny.start("--lr", 0, "--z-loss-coefficient", 1e-2, "--log-logit-mean", name="with") == 0
    with_z, without = tiny.records("with")[0], tiny.records("without")[0]
    assert with_z["train/loss"] == without["train/loss"]
    assert with_z["train/z_loss"] == pytest.approx(1e-2 * math.log(64) ** 2, rel=0.3)
    assert with_z["train/grad_norm"] != without["train/grad_norm"]
    assert "train/logit_mean" in with_z and "train/logit_mean" not in without


def test_pretrained_starts_at_step_0_with_the_weights(tiny):
    assert tiny.start(name="first") == 0
    assert tiny.start("--pretrained", tiny.run_folder("first"), "--lr", 0, "--wd", 0, name="second") == 0
    last = [r["valid/valid/loss"] for r in tiny.records("first") if "valid/valid/loss" in r][-1]
    assert [r["valid/valid/loss"] for r in tiny.records("second") if "valid/valid/loss" in r] == [last, last]
    assert len(tiny.losses("second")) == 12


def test_averages_can_be_loaded_as_weights(tiny):
    assert tiny.start("--averagers", "ema_0.9", name="first") == 0
    average = tiny.run_folder("first") / "averages" / "ema_0.9" / "step_0000012"
    assert tiny.start("--pretrained", average, "--lr", 0, "--wd", 0, name="second") == 0
    of_average = [r["valid/valid@ema_0.9/loss"] for r in tiny.records("first") if "valid/valid@ema_0.9/loss" in r][-1]
    assert [r["valid/valid/loss"] for r in tiny.records("second") if "valid/valid/loss" in r][-1] == of_average


def test_evaluation_of_a_checkpoint_alone(tiny, capsys):
    assert tiny.start(name="first") == 0
    last = [r["valid/valid/loss"] for r in tiny.records("first") if "valid/valid/loss" in r][-1]
    from openlm_moe.main import main

    flags = f"--model {tiny.model} --val-data {tiny.validation} --experts 4 --logs {tiny.logs} --name eval"
    assert main([*flags.split(), "--resume", str(tiny.run_folder("first") / "checkpoints" / "step_0000012")]) == 0
    assert [r["valid/valid/loss"] for r in tiny.records("eval")] == [pytest.approx(last, rel=1e-6)]
    assert "validation perplexity, valid" in capsys.readouterr().out


def test_profile_writes_a_trace(tiny):
    assert tiny.start("--profile") == 0
    trace = json.loads((tiny.run_folder() / "profile" / "trace.json").read_text())
    assert any(event.get("name") == "ProfilerStep#4" for event in trace["traceEvents"])
    assert "aten::mm" in (tiny.run_folder() / "profile" / "operators.txt").read_text()


def test_a_loss_that_is_not_finite_stops_the_run(tiny, capsys, monkeypatch):
    from openlm_moe.hosts.builtin import step

    assert tiny.start(name="whole") == 0
    original = step.summed_loss

    def poisoned(*args, **kwargs):
        out = original(*args, **kwargs)
        poisoned.calls += 1
        return out._replace(cross_entropy=out.cross_entropy * float("nan")) if poisoned.calls == 8 else out

    poisoned.calls = 0
    monkeypatch.setattr(step, "summed_loss", poisoned)
    assert tiny.start() == 1
    said = capsys.readouterr().err
    assert "the loss of step 8 is not finite" in said
    assert "00000000.tar sample" in said or "00000001.tar sample" in said or "00000002.tar sample" in said
    assert str(tiny.run_folder() / "checkpoints" / "step_0000006") in said
    assert [p.name for p in complete_checkpoints(tiny.run_folder() / "checkpoints")] == ["step_0000006"]
    assert list(tiny.losses()) == list(range(1, 8))
    monkeypatch.undo()


def test_a_gradient_that_is_not_finite_stops_the_run(tiny, capsys, monkeypatch):
    from openlm_moe.hosts.builtin import step

    monkeypatch.setattr(step, "clip_grad_norm_", lambda parameters, limit: torch.tensor(float("inf")))
    assert tiny.start() == 1
    assert "the gradient of step 1 is not finite" in capsys.readouterr().err
    assert not complete_checkpoints(tiny.run_folder() / "checkpoints")


def test_data_that_end_early_are_a_failure(tiny, capsys, monkeypatch):
    from openlm_moe.data.loader import TrainData

    original = TrainData.batches
    monkeypatch.setattr(
        TrainData, "batches", lambda self, size, num_batches, **more: original(self, size, num_batches=5, **more)
    )
    assert tiny.start() == 1
    assert "the data ended after step 5 of 12" in capsys.readouterr().err
    assert [p.name for p in complete_checkpoints(tiny.run_folder() / "checkpoints")] == ["step_0000005"]


def test_data_that_cannot_be_read_stop_the_run_before_their_step_and_lose_nothing(tiny, capsys, make_source):
    bad = make_source(tiny.folder / "bad", 3, 40, seed=1, bad=(1, 7))
    order = open_data([str(tiny.train)], seq_len=16, seed=1)
    bad_step = order.samples(0, 96).index((0, 1, 7, 0)) // 8 + 1
    assert bad_step > 3
    flags = ("--dataset-manifest", bad)
    assert tiny.start(*flags) == 1
    saved = complete_checkpoints(tiny.run_folder() / "checkpoints")[-1]
    assert saved.name == f"step_{bad_step - 2:07d}"
    said = capsys.readouterr().err
    assert (
        f"after step {bad_step - 2}, which was saved: sample 7 of shard {bad.parent}/00000001.tar has token id" in said
    )
    assert tiny.start(*flags, "--resume", "latest") == 2  # and again, before anything is done
    assert "error: sample 7 of shard" in capsys.readouterr().err
    assert tiny.start("--resume", "latest", "--allow-data-change") == 0  # the data made whole
    assert list(tiny.losses()) == list(range(1, 13))
    assert tiny.start(name="whole") == 0
    assert tiny.losses() == tiny.losses("whole")
