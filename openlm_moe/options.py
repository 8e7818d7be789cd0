"""One table of MoE flags: flag | open_lm's alias | MoEConfig field | help. Parser and docs come from it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openlm_moe.config import CHOICES, MoEConfig

_DEFAULTS = MoEConfig()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # as flags name them


@dataclass(frozen=True)
class Option:
    """One command-line flag. A `bool` type is a switch; `field` names the MoEConfig field it sets, if any."""

    flag: str
    help: str
    type: Callable[[str], Any] | type = str
    default: Any = None
    choices: tuple[Any, ...] | None = None
    nargs: str | None = None
    aliases: tuple[str, ...] = ()
    group: str = "training"
    field: str | None = None
    metavar: str | None = None

    @property
    def dest(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of layer ids such as 1,3,5") from None


def _moe(flag: str, field: str, help: str, type: Any = str, aliases: tuple[str, ...] = (), **more: Any) -> Option:
    default = getattr(_DEFAULTS, field)
    return Option(
        flag, help, type, default, CHOICES.get(field), aliases=aliases, group="mixture of experts", field=field, **more
    )


MOE_OPTIONS: tuple[Option, ...] = (
    _moe("--experts", "num_experts", "experts per MoE layer; 0 trains the dense model", int, ("--moe-num-experts",)),
    _moe("--moe-every", "every", "MoE in every n-th block: layers with layer_id % n == 0", int, ("--moe-freq",)),
    _moe("--moe-layers", "layers", "MoE in these blocks, such as 1,3,5; wins over --moe-every", _layer_ids),
    _moe("--top-k", "top_k", "experts each token goes to", int, ("--moe-top-k",)),
    _moe("--moe-type", "moe_type", "dropless (dMoE), or the capacity-factor baseline that drops tokens"),
    _moe("--moe-capacity-factor", "capacity_factor", "slots per expert over the balanced load, under capacity", float),
    _moe("--moe-ffn", "ffn", "the experts' feed-forward"),
    _moe(
        "--moe-ffn-dim",
        "ffn_dim",
        "hidden size of one expert; default 4*dim, for swiglu open_lm's",
        int,
    ),
    _moe("--moe-shared-experts", "shared_experts", "experts that every token passes beside its routed ones", int),
    _moe("--moe-score", "score", "router scores over the experts"),
    _moe("--moe-normalize-weights", "normalize_weights", "renormalise the k combine weights to sum 1", bool),
    _moe("--moe-jitter", "jitter", "noise on the router's input in training: times uniform 1 +- this", float),
    _moe("--moe-uniform-routing", "uniform_routing", "send tokens round robin, for benchmarks", bool),
    _moe("--moe-balance", "balance", "balance load by auxiliary loss, by selection bias (DeepSeek), or not at all"),
    _moe("--moe-balance-scope", "balance_scope", "what the balancing loss averages over before it multiplies"),
    _moe("--moe-loss-weight", "loss_weight", "weight of the load-balancing loss", float),
    _moe("--moe-z-loss-weight", "z_loss_weight", "weight of the router z-loss", float),
    _moe("--moe-bias-update-rate", "bias_update_rate", "step of the selection bias under --moe-balance bias", float),
    _moe("--moe-backend", "backend", "what computes the experts; auto logs its choice and why"),
)


class Parser(argparse.ArgumentParser):
    """argparse without prefix matching, whose complaint about an unknown flag names the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_flag_message(unknown[0], self.known_flags()))
        return known

    def known_flags(self) -> list[str]:
        """Every flag the parser accepts, aliases included."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> Any:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def unknown_flag_message(flag: str, known: Sequence[str]) -> str:
    """What to say about `flag`, which nobody knows; names the nearest of `known` if one is near."""
    name = flag.split("=", 1)[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"unknown argument {name}" + (f"; did you mean {near[0]}?" if near else "; --help lists all of them")


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Adds `options` to `parser`, one help section per group."""
    groups: dict[str, Any] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        names = (option.flag, *option.aliases)
        keywords: dict[str, Any] = {"dest": option.dest, "default": option.default, "help": help_text(option)}
        if option.type is bool:
            keywords["action"] = "store_true"
        else:
            keywords.update(type=option.type, choices=option.choices, nargs=option.nargs, metavar=option.metavar)
        groups[option.group].add_argument(*names, **keywords)


def help_text(option: Option) -> str:
    """The help line of one option, with its default where it has one that says something."""
    text = option.help.replace("%", "%%")
    return text if option.default in (None, False) else f"{text} (default {option.default})"


def moe_config_from(namespace: argparse.Namespace) -> MoEConfig:
    """The MoEConfig that the parsed MOE_OPTIONS describe. Raises `UserError` where they do not fit together."""
    return MoEConfig(**{o.field: getattr(namespace, o.dest) for o in MOE_OPTIONS if o.field is not None})


def markdown_table(options: Sequence[Option]) -> str:
    """A Markdown table of `options`: flag, open_lm's name, default, meaning. README carries the one of MOE_OPTIONS."""
    rows = ["| flag | open_lm's name | default | meaning |", "|---|---|---|---|"]
    for o in options:
        flag = f"`{o.flag}`" if o.choices is None else f"`{o.flag}` {{{','.join(map(str, o.choices))}}}"
        alias = ", ".join(f"`{a}`" for a in o.aliases)
        default = "" if o.default is None else "off" if o.default is False else str(o.default)
        rows.append(f"| {flag} | {alias} | {default} | {o.help} |")
    return "\n".join(rows)
