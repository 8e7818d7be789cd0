"""The trainer on process groups: losses of one process, resuming on other layouts, stops and faults by agreement."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from openlm_moe.data.loader import open_data
from openlm_moe.parallel.checkpoint import complete_checkpoints

pytestmark = pytest.mark.distributed


def launch(tiny, torchrun, processes, *flags, name, **more):
    return torchrun(processes, "-m", "--", "openlm_moe.main", *tiny.flags(*flags, name=name), **more)


def assert_close(tiny, name, wanted, tolerance=1e-4):
    losses = tiny.losses(name)
    assert losses.keys() == wanted.keys()
    assert list(losses.values()) == pytest.approx(list(wanted.values()), rel=tolerance)


SEQUENCE = ("--moe-balance-scope", "sequence")


def test_two_ranks_with_fsdp_and_expert_parallelism_equal_one_process_and_resume_there(tiny, torchrun):
    flags = (*SEQUENCE, "--save-every-n-steps", 5, "--averagers", "ema_0.8")
    assert tiny.start(*flags, name="one") == 0
    done = launch(tiny, torchrun, 2, *flags, "--fsdp", "--expert-parallel", 2, "--accum-freq", 2, name="two")
    assert done.returncode == 0, done.stderr
    assert_close(tiny, "two", tiny.losses("one"))
    final = [[r for r in tiny.records(name) if "valid/valid/loss" in r][-1] for name in ("one", "two")]
    for key in ("valid/valid/loss", "valid/valid@ema_0.8/loss"):
        assert final[1][key] == pytest.approx(final[0][key], rel=1e-4)
    assert done.stdout.count("validation perplexity, valid") == 1  # rank 0 alone speaks

    source = tiny.run_folder("two") / "checkpoints" / "step_0000005"
    assert tiny.start(*flags, "--resume", source, name="back") == 0
    assert_close(tiny, "back", {step: loss for step, loss in tiny.losses("two").items() if step > 5})


@pytest.mark.slow
def test_plain_data_parallelism_with_accumulation_equals_one_process(tiny, torchrun):
    flags = (*SEQUENCE, "--moe-balance", "bias", "--moe-bias-update-rate", 0.05)
    assert tiny.start(*flags, name="one") == 0
    done = launch(tiny, torchrun, 2, *flags, "--accum-freq", 2, "--save-every-n-steps", 6, name="two")
    assert done.returncode == 0, done.stderr
    assert_close(tiny, "two", tiny.losses("one"))


def test_a_signal_to_one_rank_stops_all_at_one_step(tiny, torchrun):
    """The signal goes to a worker, found by its parent, as soon as the run has logged a step."""
    flags = ("--train-num-samples", 16 * 48 * 100, "--multiple-data-passes", "--epochs", 1)

    def workers():
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if (
                    b"openlm_moe.main" in (words := path.read_bytes())
                    and b"signalled" in words
                    and b"torch.distributed.run" not in words
                ):
                    yield int(path.parent.name)
            except OSError:
                continue

    def send():
        metrics = tiny.run_folder("signalled") / "metrics.jsonl"
        for _ in range(600):
            if metrics.exists() and metrics.stat().st_size > 0:
                os.kill(max(workers()), signal.SIGTERM)
                return
            time.sleep(0.1)

    sender = threading.Thread(target=send)
    sender.start()
    done = launch(tiny, torchrun, 2, *flags, name="signalled")
    sender.join()
    assert done.returncode == 0, done.stderr
    assert "stopped as asked after step" in done.stdout
    (checkpoint,) = complete_checkpoints(tiny.run_folder("signalled") / "checkpoints")
    assert f"after step {int(checkpoint.name[5:])} of" in done.stdout


def test_bad_input_is_told_once(tiny, torchrun):
    done = launch(tiny, torchrun, 2, "--expert-parallel", 3, name="bad")
    assert done.returncode != 0
    assert done.stderr.count("openlm_moe.main: error: --expert-parallel 3 does not fit 4 experts on 2 ranks") == 1
    assert not tiny.run_folder("bad").exists()


def test_data_that_one_rank_cannot_read_stop_both_before_their_step(tiny, torchrun, make_source):
    bad = make_source(tiny.folder / "bad", 3, 40, seed=1, bad=(1, 7))
    order = open_data([str(tiny.train)], seq_len=16, seed=1)
    bad_step = order.samples(0, 96).index((0, 1, 7, 0)) // 8 + 1
    done = launch(tiny, torchrun, 2, "--dataset-manifest", bad, "--expert-parallel", 2, name="bad")
    assert done.returncode == 1
    assert done.stderr.count("openlm_moe.main: stopped: after step") == 1
    assert f"after step {bad_step - 1}, which was saved: sample 7 of shard" in done.stderr
    assert done.stderr.count("Traceback") == 1  # torchrun's own
    assert complete_checkpoints(tiny.run_folder("bad") / "checkpoints")[-1].name == f"step_{bad_step - 1:07d}"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_stops_both(tiny, torchrun):
    program = tiny.folder / "poisoned.py"
    program.write_text(
        "import os, sys\n"
        "from openlm_moe.hosts.builtin import step\n"
        "original, calls = step.summed_loss, []\n"
        "def poisoned(*args):\n"
        "    calls.append(0)\n"
        "    out = original(*args)\n"
        "    bad = len(calls) == 3 and os.environ['RANK'] == '1'\n"
        "    return out._replace(cross_entropy=out.cross_entropy * float('nan')) if bad else out\n"
        "step.summed_loss = poisoned\n"
        "from openlm_moe.main import main\n"
        "sys.exit(main())\n"
    )
    flags = tiny.flags("--save-every-n-steps", 1, name="nan")
    flags[flags.index("--logs")] = "--output"
    done = torchrun(2, program, *flags)
    assert done.returncode == 1
    assert done.stderr.count("the loss of step 3 is not finite") == 1
    assert "step_0000002" in done.stderr
    assert [p.name for p in complete_checkpoints(tiny.run_folder("nan") / "checkpoints")][-1] == "step_0000002"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--fsdp", "--expert-parallel", "auto"), ("--fsdp", "--fsdp-hybrid"), ()])
def test_four_ranks_equal_one_process(tiny, torchrun, flags):
    assert tiny.start(*SEQUENCE, name="one") == 0
    done = launch(tiny, torchrun, 4, *SEQUENCE, *flags, name="four", timeout=240)
    assert done.returncode == 0, done.stderr
    assert_close(tiny, "four", tiny.losses("one"))


@pytest.mark.slow
def test_the_command_runs_under_torchrun_without_dashes(tiny, torchrun):
    flags = tiny.flags(name="plain")
    flags[flags.index("--logs")] = "--output"
    done = torchrun(1, "-m", "openlm_moe.main", *flags)
    assert done.returncode == 0, done.stderr
    assert sys.executable and len(tiny.losses("plain")) == 12
