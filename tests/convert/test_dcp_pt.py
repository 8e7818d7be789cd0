"""dcp-to-pt and pt-to-dcp: round trip of weights, moments and state; foreign files; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from openlm_moe.convert.__main__ import main
from openlm_moe.parallel import Checkpointer

SHAPE = {"hidden_dim": 8, "n_layers": 2, "n_heads": 2, "positional_embedding_type": "rotary"}
STATE = {
    "step": 30,
    "epoch": 2,
    "seed": 5,
    "name": "run",
    "model": SHAPE,
    "evaluation": {"c4": 3.5},
    "data": {"x": [1]},
}


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), "norm": nn.LayerNorm(2)})
    optimizer = torch.optim.AdamW(
        [{"params": [*model["layers"].parameters()]}, {"params": [*model["norm"].parameters()]}]
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def converted(tmp_path):
    model, optimizer = make(0)
    keeper = Checkpointer(tmp_path / "run")
    path = keeper.save(30, model, optimizer, STATE)
    keeper.close()
    assert main(["dcp-to-pt", str(path), str(tmp_path / "pt")]) == 0
    return model, optimizer, tmp_path


def test_open_lm_finds_its_keys(converted):
    model, optimizer, folder = converted
    found = torch.load(folder / "pt" / "epoch_2.pt", weights_only=True)
    assert {"epoch": 2, "name": "run", "step": 30, "shard_shuffle_seed": 5}.items() <= found.items()
    assert found["evaluation_metrics"] == [{"val_data": ["c4"], "loss": 3.5}]
    tables = {f"layers.{i}.attention.pos_embed.inv_freq" for i in range(2)}
    assert found["state_dict"].keys() == model.state_dict().keys() | tables
    for name, value in model.state_dict().items():
        assert torch.equal(found["state_dict"][name], value), name
    torch.testing.assert_close(found["state_dict"][min(tables)], torch.tensor([1.0, 0.01]))
    moments = torch.load(folder / "pt" / "optimizer_2.pt", weights_only=True)["optimizer"]
    assert moments["state"].keys() == dict(model.named_parameters()).keys()
    assert moments["param_groups"][1]["params"] == ["norm.weight", "norm.bias"]
    assert torch.equal(moments["state"]["norm.bias"]["exp_avg"], optimizer.state[model["norm"].bias]["exp_avg"])


def test_and_back(converted):
    model, optimizer, folder = converted
    pt, back = folder / "pt", folder / "back"
    assert main(["pt-to-dcp", str(pt / "epoch_2.pt"), str(back), "--optimizer", str(pt / "optimizer_2.pt")]) == 0
    other, other_optimizer = make(1)
    keeper = Checkpointer(back)
    assert keeper.latest() == back / "step_0000030"
    assert keeper.load(keeper.latest(), other, other_optimizer) == STATE
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for ours, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_weights_alone(converted):
    _, _, folder = converted
    assert main(["dcp-to-pt", str(folder / "run" / "step_0000030"), str(folder / "w"), "--no-optimizer"]) == 0
    assert [path.name for path in (folder / "w").iterdir()] == ["epoch_2.pt"]


def test_a_file_of_open_lm(tmp_path):
    """Wrapped names, rotary tables and numpy numbers, as upstream saves them."""
    model, _ = make(3)
    weights = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    weights["module.layers.0.attention.pos_embed.inv_freq"] = torch.ones(2)
    metrics = [{"loss": np.float64(2.5), "tokens": np.int64(7)}]
    content = {"epoch": 1, "name": "up", "step": 12, "state_dict": weights, "evaluation_metrics": metrics}
    torch.save(content, tmp_path / "epoch_1.pt")
    assert main(["pt-to-dcp", str(tmp_path / "epoch_1.pt"), str(tmp_path / "out")]) == 0
    other, _ = make(4)
    assert Checkpointer(tmp_path / "out").load(tmp_path / "out" / "step_0000012", other, None)["epoch"] == 1
    assert all(map(torch.equal, model.parameters(), other.parameters()))


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"state_dict": {"w": torch.ones(1)}, "evaluation_metrics": Evil()},
            "cannot be read as tensors and plain values",
        ),
        ({"epoch": 1, "state_dict": {}}, "holds no weights"),
        ([1], "holds a list"),
        (None, "does not exist"),
    ],
)
def test_files_that_are_refused(tmp_path, capsys, content, words):
    if content is not None:
        torch.save(content, tmp_path / "epoch_1.pt")
    assert main(["pt-to-dcp", str(tmp_path / "epoch_1.pt"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert words in said.err and "ran" not in said.out and said.err.count("\n") == 1


def test_numbered_optimizer_state_is_refused(converted, capsys):
    _, optimizer, folder = converted
    torch.save({"optimizer": optimizer.state_dict()}, folder / "optimizer_2.pt")
    arguments = [str(folder / "pt" / "epoch_2.pt"), str(folder / "out"), "--optimizer", str(folder / "optimizer_2.pt")]
    assert main(["pt-to-dcp", *arguments]) == 2
    assert "state of 0, which is no parameter" in capsys.readouterr().err


def test_no_checkpoint(tmp_path, capsys):
    assert main(["dcp-to-pt", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_names(capsys):
    for arguments, words in (
        (["dcp-to-tp"], "dcp-to-pt"),
        (["dcp-to-pt", "a", "b", "--no-optimzer"], "did you mean --no-optimizer"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0 and "sharded checkpoint" in capsys.readouterr().out
