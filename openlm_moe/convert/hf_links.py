"""Which tensor of a Hugging Face folder is which part of which of ours: one list serves both directions.

Shapes: D model dim, F expert hidden dim, E experts.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openlm_moe import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.count import build_on_meta
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.options import DTYPES
from openlm_moe.parallel.state import get_state

ROUTER = "feed_forward.router.weight"
_LISTED = 20

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Link:
    """The whole tensor `hf` is the part `where` of our tensor `ours`, `transposed` (last two dimensions) or not."""

    ours: str
    hf: str
    where: tuple[int | slice, ...] = ()
    transposed: bool = False

    def to_hf(self, ours: Tensor) -> Tensor:
        """The other side's tensor, as a view of ours."""
        part = ours[self.where]
        return part.transpose(-1, -2) if self.transposed else part


def add_dtype_arguments(parser: argparse.ArgumentParser) -> None:
    """What `chosen_dtype` reads."""
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of the weights; default: as they are stored")
    parser.add_argument(
        "--router-dtype",
        choices=(*DTYPES, "stored"),
        default="fp32",
        help="dtype of the routers' weights (default fp32); stored: as they are stored",
    )


def our_tensors(params: ModelParams, moe: MoEConfig) -> dict[str, Tensor]:
    """Every tensor of the built-in model by its name in checkpoints, on the meta device.

    A tied head is there twice, as in checkpoints; see `independent`.
    """
    return get_state(build_on_meta(params, moe), None)["model"]


def independent(tensors: Mapping[str, Tensor], params: ModelParams) -> dict[str, Tensor]:
    """`tensors` without the head where it is the embedding."""
    return {name: t for name, t in tensors.items() if not (params.weight_tying and name == "output.weight")}


def by_ours(links: Iterable[Link]) -> dict[str, list[Link]]:
    """The links of each of our tensors."""
    out: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        out[link.ours].append(link)
    return out


def check_links(links: Iterable[Link], ours: Mapping[str, Tensor], hf: Shapes, where: str) -> None:
    """Raises `UserError`, listing them, unless `links` use every tensor of `hf` and every element of `ours` once.

    where: what holds `hf`, for the message.
    """
    linked: dict[str, tuple[int, ...]] = {}
    covered = dict.fromkeys(ours, 0)
    for link in links:
        if link.hf in linked:
            raise UserError(f"{link.hf} would be used twice")
        linked[link.hf] = tuple(link.to_hf(ours[link.ours]).shape)
        covered[link.ours] += math.prod(linked[link.hf])
    check_same(linked, hf, where)
    partly = [name for name, count in covered.items() if count != ours[name].numel()]
    if partly:
        raise UserError(f"{where} has nothing, or more than fits, for {_listed(partly)}")


def check_same(wanted: Shapes, found: Shapes, where: str) -> None:
    """Raises `UserError`, listing them, unless `found`, the tensors of `where`, are those `wanted`."""
    faults = [
        ("lacks", [name for name in wanted if name not in found]),
        ("holds, without a use for them,", [name for name in found if name not in wanted]),
        (
            "has other shapes than its configuration says for",
            [
                f"{name} ({tuple(found[name])}, not {tuple(wanted[name])})"
                for name in wanted
                if name in found and tuple(wanted[name]) != tuple(found[name])
            ],
        ),
    ]
    told = [f"{what} {_listed(names)}" for what, names in faults if names]
    if told:
        raise UserError(f"{where} {'; it '.join(told)}; nothing was converted")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more


def assemble(links: list[Link], shape: torch.Size, dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
    """One of our tensors from its `links`; `read(name)` gives the other side's, which are held one at a time."""
    out = torch.empty(shape, dtype=dtype)
    for link in links:
        link.to_hf(out).copy_(read(link.hf))
    return out


def chosen_dtype(name: str, stored: torch.dtype, dtype: str | None, router_dtype: str) -> torch.dtype:
    """What our tensor `name` is converted to: a name in `DTYPES`, or None or "stored" to leave it as it is stored."""
    wanted = router_dtype if name.endswith(ROUTER) else dtype
    return DTYPES.get(wanted or "stored", stored) if stored.is_floating_point else stored
