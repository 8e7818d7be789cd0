"""Checkpoints in one process: round trip, atomicity, damage, what is refused, what stays."""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from openlm_moe import UserError
from openlm_moe.errors import writing
from openlm_moe.parallel import Checkpointer
from openlm_moe.parallel import checkpoint as module
from openlm_moe.parallel.checkpoint import MARKER, complete_checkpoints, read_checked_index, read_state
from openlm_moe.parallel.safe_reader import read_index, read_tensors


def make(seed: int, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    model.register_buffer("counts", torch.arange(5.0) * seed)
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[1].parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.01 * (seed + 1), betas=(0.9, 0.95))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_round_trip_and_going_on(tmp_path, asynchronous):
    model, optimizer = make(1)
    keeper = Checkpointer(tmp_path, asynchronous=asynchronous)
    step(model, optimizer)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    path = keeper.save(1, model, optimizer, {"tokens": 7, "none": None})
    step(model, optimizer)  # while it may still be writing
    keeper.wait()
    other, other_optimizer = make(2)
    assert keeper.load(path, other, other_optimizer) == {"tokens": 7, "none": None, "step": 1}
    for name, value in other.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert other_optimizer.param_groups[0]["lr"] == 0.02
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.1, 0.01]
    step(other, other_optimizer)
    assert all(map(torch.equal, moments(optimizer), moments(other_optimizer)))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    keeper.close()


def test_step_counters_start_at_0(tmp_path):
    """A checkpoint before the first step must not count one: Adam's first update would be too small after a resume."""
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    path = keeper.save(0, model, optimizer, {})
    other, other_optimizer = make(3)
    keeper.load(path, other, other_optimizer)
    assert {int(state["step"]) for state in other_optimizer.state.values()} == {0}
    for m, o in ((model, optimizer), (other, other_optimizer)):
        step(m, o)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_how_the_optimizer_computes_is_not_loaded(tmp_path):
    model, optimizer = make(0)
    optimizer.param_groups[0]["foreach"] = True
    keeper = Checkpointer(tmp_path)
    path = keeper.save(0, model, optimizer, {})
    other, other_optimizer = make(0)
    keeper.load(path, other, other_optimizer)
    assert other_optimizer.param_groups[0]["foreach"] is None


def test_keep_last(tmp_path):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path, keep_last=2)
    for number in (3, 10, 4, 20):
        keeper.save(number, model, optimizer, {})
    keeper.close()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_0000010", "step_0000020"]
    assert sorted(os.listdir(tmp_path)) == ["step_0000010", "step_0000020"]


def damage_bit(path):
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def damage_length(path):
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DAMAGE = {
    "bit": damage_bit,
    "length": damage_length,
    "missing": lambda path: (path / "__0_0.distcp").unlink(),
    "index": lambda path: (path / ".metadata").write_bytes(b"x"),
    "state": lambda path: (path / "state.json").write_text("{"),
    "marker": lambda path: (path / MARKER).write_text("{"),
    "no marker": lambda path: (path / MARKER).unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, kind, caplog):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    for number in (1, 2):
        keeper.save(number, model, optimizer, {"step": number})
    keeper.wait()
    assert keeper.latest().name == "step_0000002"
    DAMAGE[kind](tmp_path / "step_0000002")
    with caplog.at_level(logging.WARNING):
        assert keeper.latest().name == "step_0000001"
    assert kind == "no marker" or "skipping checkpoint" in caplog.text
    keeper.save(2, model, optimizer, {"step": 2})  # the damaged one is replaced
    assert keeper.latest().name == "step_0000002"


@pytest.mark.parametrize("kind", sorted(DAMAGE.keys() - {"no marker"}))
def test_a_damaged_checkpoint_is_not_read(tmp_path, kind):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    path = keeper.save(1, model, optimizer, {})
    keeper.wait()
    DAMAGE[kind](path)
    for read in (lambda: keeper.load(path, *make(1)), lambda: read_checked_index(path)):
        with pytest.raises(UserError, match=r"step_0000001 is damaged: .*; use an older one"):
            read()


def test_keep_last_keeps_what_was_just_saved(tmp_path):
    """A run that goes on from an older checkpoint, since the newest is damaged, must not lose its own to that one."""
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    for number in (10, 20):
        keeper.save(number, model, optimizer, {})
    keeper.close()
    damage_bit(tmp_path / "step_0000020")
    again = Checkpointer(tmp_path, keep_last=1)
    assert again.latest().name == "step_0000010"
    again.save(12, model, optimizer, {})
    assert again.latest().name == "step_0000012"
    again.save(20, model, optimizer, {})
    again.close()
    assert os.listdir(tmp_path) == ["step_0000020"]


def test_none_at_all(tmp_path):
    assert Checkpointer(tmp_path / "new").latest() is None


@pytest.mark.parametrize("failing", ["_finish", "_checksum"])
def test_a_save_that_fails_leaves_the_last_one(tmp_path, monkeypatch, failing):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    keeper.save(1, model, optimizer, {})
    keeper.wait()

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(Checkpointer if failing == "_finish" else module, failing, broken)
    keeper.save(2, model, optimizer, {})
    with pytest.raises(UserError, match=r"step_0000002 cannot be written: disk full; .* MiB are free in"):
        keeper.wait()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["step_0000001"]


def test_what_a_killed_save_left_is_removed_by_the_next_save(tmp_path):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    keeper.save(1, model, optimizer, {})
    keeper.close()
    (tmp_path / ".writing-step_0000002").mkdir()
    again = Checkpointer(tmp_path)
    assert again.latest().name == "step_0000001"
    assert sorted(os.listdir(tmp_path)) == [".writing-step_0000002", "step_0000001"], "a reader must remove nothing"
    again.save(3, model, optimizer, {})
    again.close()
    assert sorted(os.listdir(tmp_path)) == ["step_0000001", "step_0000003"], "what a broken save left is removed"


def test_killed_between_the_renames(tmp_path):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    path = keeper.save(1, model, optimizer, {})
    keeper.wait()
    for use in (lambda again: again.latest(), lambda again: again.save(2, model, optimizer, {})):
        path.rename(tmp_path / ".replaced-step_0000001")
        again = Checkpointer(tmp_path)
        use(again)
        again.close()
        assert complete_checkpoints(tmp_path)[0] == path


def test_another_architecture_is_refused(tmp_path):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path)
    path = keeper.save(1, model, optimizer, {})
    keeper.wait()
    with pytest.raises(UserError, match=r"0\.bias is \(4,\) there and \(5,\) here"):
        keeper.load(path, *make(0, width=5))
    with pytest.raises(UserError, match=r"it has 1\.bias, the model has not"):
        keeper.load(path, nn.Sequential(nn.Linear(3, 4)), None)
    bigger, _ = make(0)
    bigger.append(nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"it has no 2\.bias"):
        keeper.load(path, bigger, None)
    model, _ = make(0)
    with pytest.raises(UserError, match=r"no optimizer state momentum_buffer of 0\.weight"):
        keeper.load(path, model, torch.optim.SGD(model.parameters(), momentum=0.9))


def test_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        Checkpointer(tmp_path).load(tmp_path, *make(0))
    with pytest.raises(UserError, match="--keep-last is 0"):
        Checkpointer(tmp_path, keep_last=0)


class Evil:
    ran = False

    def __reduce__(self):
        return (exec, ("from pathlib import Path; Path('ran').touch()",))


def test_an_index_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path / "c")
    path = keeper.save(1, model, optimizer, {})
    keeper.wait()
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    files = json.loads((path / MARKER).read_text())
    files["files"][".metadata"] = module._checksum(path / ".metadata")
    (path / MARKER).write_text(json.dumps(files))
    assert keeper.latest() is None
    with pytest.raises(UserError, match=r"must not name builtins\.exec"):
        keeper.load(path, model, optimizer)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": {"w": torch.ones(2)}, "value": Evil()}, checkpoint_id=tmp_path / "c", no_dist=True)
    why = r"it holds exec, which is neither a tensor nor a plain value"
    with pytest.raises(UserError, match=f"cannot be read: {why}; use an older one$"):
        read_tensors({"model": {"w": torch.zeros(2)}, "value": None}, tmp_path / "c")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def small_files():
    """No file of this process may grow beyond 2000 bytes, as on a disk that is full."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    signal.signal(signal.SIGXFSZ, previous)


def test_a_disk_that_is_full(tmp_path, small_files):
    keeper = Checkpointer(tmp_path)
    keeper.save(1, *make(0, width=400), {})
    with pytest.raises(UserError, match=r"step_0000001 cannot be written: .*MiB are free in"):
        keeper.wait()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_whoever_writes(tmp_path, small_files):
    from openlm_moe.convert.open_lm_format import save_pt

    with pytest.raises(UserError, match=r"w\.pt cannot be written: only a part of it was taken; .*MiB are free in"):
        save_pt({"w": torch.zeros(1000)}, tmp_path / "w.pt")
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(UserError, match=r"w cannot be written: .*os error"), writing(tmp_path / "w"):
        safetensors.save_file({"w": torch.zeros(1000)}, tmp_path / "w")
    with pytest.raises(UserError, match=r"w cannot be written: \[Errno 27\] File too large"), writing(tmp_path / "w"):
        (tmp_path / "w").write_bytes(bytes(3000))
    with pytest.raises(RuntimeError, match="a fault of the program"), writing(tmp_path / "w"):
        raise RuntimeError("a fault of the program")
    assert os.listdir(tmp_path) == ["w"]


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"step": "7"}', "{"])
def test_a_state_that_is_none_is_refused(tmp_path, text):
    keeper = Checkpointer(tmp_path)
    path = keeper.save(7, *make(0), {"tokens": 3})
    keeper.wait()
    assert read_state(path) == {"tokens": 3, "step": 7}
    (path / "state.json").write_text(text)
    with pytest.raises(UserError, match="step_0000007 cannot be read"):
        read_state(path)


def test_an_index_that_points_elsewhere_is_refused(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    index = read_index(tmp_path)
    for info in index.storage_data.values():
        info.relative_path = "../outside"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(pickle.UnpicklingError, match="outside its folder"):
        read_index(tmp_path)
