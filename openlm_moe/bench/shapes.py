"""The shapes that are measured: published models' MoE layers, by name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from openlm_moe.errors import UserError


@dataclass(frozen=True)
class Shape:
    """One MoE layer: model dim D, expert hidden dim F, E experts, K of them a token, T tokens."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    activation: str = "gelu"
    tokens: int = 4096

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def width(self) -> int:
        """Columns of the pre-activation."""
        return self.hidden * (2 if self.activation == "swiglu" else 1)

    @property
    def flops(self) -> int:
        """Of the products in forward; backward has twice as many."""
        return 2 * self.rows * self.dim * (self.width + self.hidden)


SHAPES = {
    "41m-e8": Shape(288, 1152, 8, 2, tokens=2048),
    "87m-e8": Shape(512, 2048, 8, 2),
    "160m-e8": Shape(768, 3072, 8, 2),
    "160m-e32": Shape(768, 3072, 32, 2),
    "410m-e8": Shape(1024, 4096, 8, 2),
    "830m-e8": Shape(1536, 6144, 8, 2),
    "830m-e32": Shape(1536, 6144, 32, 2),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2, "swiglu"),
    "deepseek-v2-lite": Shape(2048, 1408, 64, 6, "swiglu"),
    "fine-grained": Shape(2048, 768, 128, 8, "swiglu"),
}
CPU_DEFAULT = ("160m-e8", "160m-e32")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (%(default)s)")
    parser.add_argument(
        "--shape", action="append", choices=tuple(SHAPES), help="a layer; may be repeated (on a CPU: 160m-e8, 160m-e32)"
    )
    parser.add_argument("--dtype", action="append", choices=("fp32", "bf16", "fp16"), help="repeatable; fp32 and bf16")
    parser.add_argument("--routing", choices=("balanced", "skewed", "both"), default="balanced")
    parser.add_argument("--tokens", type=int, help="tokens T of every shape")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are reported (%(default)s)")
    parser.add_argument("--backend", default="auto", help="backend of our kernels (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the measurements there")


def chosen_shapes(arguments: argparse.Namespace) -> dict[str, Shape]:
    """The shapes that the flags ask for."""
    if arguments.rounds < 1 or (arguments.tokens or 1) < 1:
        raise UserError("--rounds and --tokens must be 1 or more")
    names = arguments.shape or (CPU_DEFAULT if arguments.device == "cpu" else tuple(SHAPES))
    chosen = {name: SHAPES[name] for name in names}
    if arguments.tokens:
        chosen = {name: replace(shape, tokens=arguments.tokens) for name, shape in chosen.items()}
    return chosen


def routings(arguments: argparse.Namespace) -> tuple[str, ...]:
    return ("balanced", "skewed") if arguments.routing == "both" else (arguments.routing,)
