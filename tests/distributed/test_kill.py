"""Runs that are killed, stopped or fail: each goes on from its last checkpoint, and ends as the unbroken run."""

from __future__ import annotations

import random
import time

import pytest
import torch

pytestmark = pytest.mark.distributed

PROGRAM, STEPS = "program_train.py", 14


@pytest.fixture(scope="module")
def unbroken(ranks, tmp_path_factory):
    """(weights, seconds) of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("unbroken")
    begin = time.monotonic()
    found = ranks(2, PROGRAM, folder, STEPS, "nothing")
    assert (found["first"], found["last"], found["stopped"]) == (0, STEPS, False)
    assert found["kept"] == [f"step_{STEPS - 2:07d}", f"step_{STEPS:07d}"]
    return torch.load(folder / "weights.pt"), time.monotonic() - begin


def assert_same(folder, weights) -> None:
    found = torch.load(folder / "weights.pt")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_random_moments(ranks, tmp_path, unbroken, kills):
    weights, seconds = unbroken
    folder = tmp_path / "killed"
    folder.mkdir()
    moments, landed = random.Random(kills), 0
    while landed < kills:
        victim = moments.randrange(2)
        answer, where = ranks.start(2, PROGRAM, folder, STEPS, "nothing", kill=(victim, moments.uniform(0.2, seconds)))
        if "STARTED" in (where / f"out.{1 - victim}").read_text():  # before, it waits for the other to arrive
            assert not answer["forced"], "a rank waited for the dead one: " + (where / f"err.{1 - victim}").read_text()
        if any(answer["codes"]):
            landed += 1
        else:  # it was through before the kill: begin again from its last but one checkpoint, and kill earlier
            seconds *= 0.7
            for left in ("weights.pt", f"checkpoints/step_{STEPS:07d}/COMPLETE"):
                (folder / left).unlink()
    found = ranks(2, PROGRAM, folder, STEPS, "nothing")
    assert found["last"] == STEPS
    assert all(name.startswith("step_") for name in found["kept"]), "a broken save was left behind"
    assert_same(folder, weights)


@pytest.mark.parametrize("how", ["touch", "signal"])
def test_stops_together_and_goes_on(ranks, tmp_path, unbroken, how):
    weights, _ = unbroken
    folder = tmp_path / how
    folder.mkdir()
    stopped = ranks(2, PROGRAM, folder, STEPS, how)
    assert stopped["stopped"] and stopped["same step"] and stopped["last"] in (5, 6)
    assert stopped["kept"][-1] == f"step_{stopped['last']:07d}"
    resumed = ranks(2, PROGRAM, folder, STEPS, "nothing")
    assert resumed["first"] == stopped["last"] and not resumed["stopped"], "the stop request was not used up"
    assert_same(folder, weights)


@pytest.mark.parametrize("how", ["raise", pytest.param("die", marks=pytest.mark.slow)])
def test_a_dead_rank_ends_the_job(torchrun, tmp_path, how):
    begin = time.monotonic()
    program = str(__file__).replace("test_kill", "program_train")
    job = torchrun(2, program, tmp_path, STEPS, how, timeout=100)
    assert job.returncode != 0
    assert time.monotonic() - begin < 90
    if how == "raise":
        assert "rank 1 ran into trouble" in job.stderr
    else:
        assert "Signal 9 (SIGKILL)" in job.stderr
