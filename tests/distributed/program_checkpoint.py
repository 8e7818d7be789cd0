"""Checkpoints between layouts. Arguments: save|load, a folder, and layouts: an expert-parallel size under FSDP, or
r and a size for replicated parameters.

`save` trains two AdamW steps under each layout, and keeps beside each checkpoint the whole tensors as a reference.
`load` puts every checkpoint of the folder into a fresh model under each layout and compares bitwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import toy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from openlm_moe import MoEConfig
from openlm_moe.parallel import Checkpointer, make_layout, parallelize
from openlm_moe.parallel.state import full_tensor

CONFIG = MoEConfig(num_experts=4, ffn_dim=24, ffn="swiglu", shared_experts=1, balance="bias")


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    layout = make_layout(
        not kind.startswith("r"), False, int(kind.removeprefix("r")), CONFIG.num_experts, torch.device("cpu")
    )
    model = parallelize(toy.build(CONFIG, torch.float32, "dm", seed), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + seed), betas=(0.9, 0.95))
    return model, optimizer, layout


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    out = {f"model.{name}": full_tensor(value).clone() for name, value in model.state_dict().items()}
    for name, values in get_optimizer_state_dict(model, optimizer)["state"].items():
        out |= {f"optim.{name}.{key}": full_tensor(value).clone() for key, value in values.items()}
    return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Any, number: int) -> None:
    tokens = toy.batch(number, 8)
    toy.train_step(model, toy.share_of_rank(tokens, layout.rank, layout.world_size), tokens[:, 1:].numel())
    optimizer.step()
    optimizer.zero_grad()


def save(folder: Path, kind: str) -> str:
    model, optimizer, layout = make(kind, 0)
    model.blocks[1].ffn.router.expert_bias.copy_(torch.arange(4.0))
    for number in range(2):
        step(model, optimizer, layout, number)
    name = f"{layout.world_size}-{kind}"
    checkpointer = Checkpointer(folder / name)
    checkpointer.save(2, model, optimizer, {"name": name})
    reference = whole_state(model, optimizer)
    step(model, optimizer, layout, 2)  # the save must not see this, though it may still be writing
    checkpointer.close()
    if layout.rank == 0:
        torch.save(reference, folder / f"{name}.pt")
    return name


def load(folder: Path, kind: str) -> dict[str, str]:
    found = {}
    for home in sorted(path for path in folder.iterdir() if path.is_dir()):
        model, optimizer, layout = make(kind, 7)
        checkpointer = Checkpointer(home)
        state = checkpointer.load(checkpointer.latest(), model, optimizer)
        checkpointer.close()
        reference, loaded = torch.load(folder / f"{home.name}.pt"), whole_state(model, optimizer)
        different = [n for n in reference | loaded if n not in loaded or not torch.equal(reference[n], loaded[n])]
        before = toy.weights(model)
        step(model, optimizer, layout, 2)
        still = [name for name, value in toy.weights(model).items() if torch.equal(value, before[name])]
        steps = {int(values["step"]) for values in optimizer.state.values()}
        right = (
            not still
            and state == {"name": home.name, "step": 2}
            and steps == {3}
            and optimizer.param_groups[0]["lr"] == 1e-2
        )
        verdict = "equal" if not different and right and len(reference) > 20 else f"{different[:3]} {steps} {state}"
        found[f"{home.name} -> {layout.world_size}-{kind}"] = verdict
    return found


def program(arguments: list[str]) -> dict[str, Any]:
    what, folder, *kinds = arguments
    if what == "save":
        return {"saved": [save(Path(folder), kind) for kind in kinds]}
    return {name: verdict for kind in kinds for name, verdict in load(Path(folder), kind).items()}


if __name__ == "__main__":
    toy.main(program)
