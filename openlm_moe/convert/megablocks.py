"""open_lm's epoch_N.pt trained with MegaBlocks' layers to the same file with ours.

Both of MegaBlocks' layouts are known: the stacked one of its capacity MLP, w1 (E, D, F) and w2 (E, F, D), and the
flattened one of its dropless MLP, both (E*F, D). The bias that MegaBlocks keeps beside the experts never reached
open_lm's output, so it is left out.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torch import Tensor

from openlm_moe.convert.open_lm_format import load_pt, model_tensors, save_pt
from openlm_moe.errors import UserError

_THEIRS = re.compile(
    r"(layers\.\d+\.feed_forward)\.(router\.layer\.weight|experts\.mlp\.w1|experts\.mlp\.w2|experts\.bias)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", type=Path, help="epoch_N.pt trained with MegaBlocks")
    parser.add_argument("output", type=Path, help="the .pt file to write")


def run(arguments: argparse.Namespace) -> None:
    """Converts, and reports what became of every tensor."""
    if arguments.output.exists():
        raise UserError(f"{arguments.output} exists already; name another file")
    checkpoint = load_pt(arguments.weights)
    source = model_tensors(checkpoint)
    converted, unused = convert(source)
    save_pt({**checkpoint, "state_dict": converted}, arguments.output)
    layers = sum(name.endswith("router.weight") for name in converted)
    print(
        f"{arguments.output}: {len(converted)} tensors, {layers} MoE layers; each of {len(source)} tensors used once,"
        f" {len(unused)} left out"
    )
    print("\n".join(f"  {name}: left out, MegaBlocks never adds it to the output" for name in unused))


def convert(source: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under our names, and the names left out. Raises `UserError` for layouts it does not know."""
    out: dict[str, Tensor] = {}
    unused: list[str] = []
    for name, value in source.items():
        match = _THEIRS.fullmatch(name)
        if match is None:
            out[name] = value
            continue
        layer, part = match.groups()
        router = source.get(f"{layer}.router.layer.weight")
        if router is None:
            raise UserError(f"{name} has no {layer}.router.layer.weight beside it, so its experts cannot be counted")
        if part == "router.layer.weight":
            out[f"{layer}.router.weight"] = value
        elif part == "experts.bias":
            unused.append(name)
        else:
            out[f"{layer}.experts.{part[-2:]}"] = expert_stack(name, value, *router.shape)
    if not any(_THEIRS.fullmatch(name) for name in source):
        raise UserError("the file holds no MegaBlocks layer (feed_forward.router.layer.weight); there is nothing to do")
    return out, unused


def expert_stack(name: str, value: Tensor, n_experts: int, dim: int) -> Tensor:
    """One of MegaBlocks' expert weights as our w1 (E, D, F) or w2 (E, F, D)."""
    first = name.endswith("w1")
    if value.dim() == 2 and value.shape[0] % n_experts == 0 and value.shape[1] == dim:
        rows_EFD = value.view(n_experts, -1, dim)
        return rows_EFD.transpose(1, 2).contiguous() if first else rows_EFD.contiguous()
    if value.dim() == 3 and value.shape[0] == n_experts and value.shape[1 if first else 2] == dim:
        return value
    raise UserError(
        f"{name} has shape {tuple(value.shape)}; with {n_experts} experts of model dim {dim} MegaBlocks stores "
        f"{'(E, D, F)' if first else '(E, F, D)'} or (E*F, D)"
    )
