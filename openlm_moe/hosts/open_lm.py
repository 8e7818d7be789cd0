"""The adapter that puts our MoE layers into an installed, unmodified mlfoundations/open_lm.

    openlm_moe.register_open_lm(MoEConfig(num_experts=8))    # replaces the names below
    open_lm.main.main(argv)                                  # open_lm's own flags, and ours
    openlm_moe.unregister_open_lm()                          # puts every name back

or `python -m openlm_moe.main --host open_lm --moe-every 2 --experts 8 ...`. open_lm's own MoE branch never runs: its
loop trains on cross-entropy alone, and the auxiliary losses' gradients enter at the layers (see layers/losses.py).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.layers.balance import update_expert_biases
from openlm_moe.layers.losses import LossCollector, collect_losses
from openlm_moe.layers.moe import build_moe
from openlm_moe.layers.recompute import checkpoint
from openlm_moe.options import MOE_OPTIONS, help_text
from openlm_moe.parallel import (
    fsdp1_clip_grad_norm_,
    fsdp1_expert_parallel,
    fsdp1_ignored_states,
    fsdp1_wrap_policy,
    gather_experts,
    make_layout,
    scatter_experts,
)
from openlm_moe.parallel.fsdp1 import gather_expert_moments, scatter_expert_moments
from openlm_moe.parallel.mesh import let_gloo_finish

log = logging.getLogger("openlm_moe")

# Every name that is replaced or wrapped, with the parameters it had at this commit of mlfoundations/open_lm.
# None: a class, module or library function, of which only the name is needed.
UPSTREAM_COMMIT = "9bb92ef1689333534b7057942a20d18a46d1fa52"
REPLACED: dict[str, tuple[str, ...] | None] = {
    "open_lm.model.Block": ("layer_id", "args"),
    "open_lm.model.create_params": ("args",),
    "open_lm.model.checkpoint": None,
    "open_lm.main.Block": ("layer_id", "args"),
    "open_lm.main.FSDP": None,
    "open_lm.main.FullStateDictConfig": None,
    "open_lm.main.train_one_epoch": (
        "model",
        "data",
        "loss",
        "epoch",
        "step",
        "optimizer",
        "scaler",
        "scheduler",
        "total_steps",
        "args",
        "tb_writer",
        "averagers",
    ),
    "open_lm.params.add_model_args": ("parser",),
    "open_lm.params.check_args": ("args",),
    "open_lm.params.maybe_load_config": ("parser", "args"),
    "open_lm.train.wandb": None,
    "open_lm.data.group_by_keys_nothrow": ("data", "keys", "lcase", "suffixes", "handler"),
}
INSTALL = (
    "install it from its repository: git clone https://github.com/mlfoundations/open_lm && pip install --no-deps "
    "./open_lm, and what it imports (README, 'In open_lm itself')"
)
BALANCING = "train/load_balancing_loss"


def main(argv: Sequence[str]) -> int:
    """Runs open_lm's own command with our layers; `argv` holds its flags and ours. Raises `UserError`."""
    register_open_lm()
    try:
        importlib.import_module("open_lm.main").main(list(argv))
    finally:
        let_gloo_finish()
        unregister_open_lm()
    return 0


def register_open_lm(config: MoEConfig | None = None) -> None:
    """Puts our MoE layers into the installed open_lm, for every model that it builds from now on.

    config: defaults of our flags; what the command line or a model's JSON says wins. Raises `UserError` where open_lm
    is missing, cannot be imported, or has other names than this adapter was written for.
    """
    global _plugin
    if _plugin is not None:
        raise UserError("our layers are registered in open_lm already; call unregister_open_lm() first")
    modules = _import_upstream()
    _check_names(modules)
    _plugin = _Plugin(config or MoEConfig(), modules)
    _plugin.install()


def unregister_open_lm() -> None:
    """Puts every replaced name of open_lm back."""
    global _plugin
    if _plugin is not None:
        _plugin.restore()
    _plugin = None


_plugin: _Plugin | None = None


def _import_upstream() -> dict[str, Any]:
    names = sorted({full.rpartition(".")[0] for full in REPLACED})
    if importlib.util.find_spec("open_lm") is None:
        raise UserError(f"--host open_lm needs open_lm, which is not installed; {INSTALL}")
    try:
        return {name: importlib.import_module(name) for name in names}
    except ImportError as error:
        fix = {
            "xformers": "pip install --no-deps xformers==0.0.35",
            "webdataset": "pip install webdataset==0.2.86",
        }.get((error.name or "").partition(".")[0], f"pip install {error.name}")
        raise UserError(f"open_lm cannot be imported: {error}; {fix}") from None


def _check_names(modules: dict[str, Any]) -> None:
    for full, parameters in REPLACED.items():
        module, _, name = full.rpartition(".")
        if not hasattr(modules[module], name):
            raise UserError(
                f"the installed open_lm has no {full}; this adapter was written for commit {UPSTREAM_COMMIT[:7]}"
            )
        if parameters is None:
            continue
        found = tuple(inspect.signature(getattr(modules[module], name)).parameters)
        if found != parameters:
            raise UserError(
                f"{full} of the installed open_lm takes ({', '.join(found)}), not ({', '.join(parameters)}); this "
                f"adapter was written for commit {UPSTREAM_COMMIT[:7]}"
            )


class _Plugin:
    """What is registered: the settings, the modules of open_lm, and what their names were bound to before."""

    def __init__(self, config: MoEConfig, modules: dict[str, Any]) -> None:
        self.config = config
        self.modules = modules
        self.originals = {full: self._get(full) for full in REPLACED}
        self.expert_parallel: str | int = "off"
        self.seed = 0
        self.undo = contextlib.ExitStack()
        self.dests: dict[str, str] = {}  # MoEConfig field -> where the parsed flags hold it

    def _get(self, full: str) -> Any:
        module, _, name = full.rpartition(".")
        return getattr(self.modules[module], name)

    def _set(self, full: str, value: Any) -> None:
        module, _, name = full.rpartition(".")
        setattr(self.modules[module], name, value)

    def install(self) -> None:
        block = _block_class(self)
        replacements: dict[str, Any] = {
            "open_lm.model.Block": block,
            "open_lm.main.Block": block,
            "open_lm.model.create_params": self.create_params,
            "open_lm.model.checkpoint": checkpoint,  # the recompute reuses the routing
            "open_lm.main.FSDP": _fsdp_class(self),
            "open_lm.main.train_one_epoch": self.train_one_epoch,
            "open_lm.params.add_model_args": self.add_model_args,
            "open_lm.params.check_args": self.check_args,
            "open_lm.params.maybe_load_config": self.maybe_load_config,
            "open_lm.data.group_by_keys_nothrow": self.group_by_keys,
        }
        if not torch.cuda.is_available():
            log.info("no GPU: full state dicts are made without offload_to_cpu, which fails on a CPU")
            replacements["open_lm.main.FullStateDictConfig"] = self.full_state_dict_config
        for full, value in replacements.items():
            self._set(full, value)
        # open_lm's schedulers leave the learning rate in the optimizer as a NumPy number, which torch.load refuses.
        scalar = np.float64(0).__reduce__()[0]
        numbers = torch.serialization.safe_globals([scalar, np.dtype, type(np.dtype(np.float64))])
        self.undo.enter_context(numbers)

    def restore(self) -> None:
        self.undo.close()
        for full, value in self.originals.items():
            self._set(full, value)

    # ---- flags

    def add_model_args(self, parser: argparse.ArgumentParser) -> None:
        """open_lm's model flags and ours. A flag that both have keeps open_lm's place in the namespace."""
        self.originals["open_lm.params.add_model_args"](parser)
        known = parser._option_string_actions
        for option in MOE_OPTIONS:
            strings = (option.flag, *option.aliases)
            shared = [known[s] for s in strings if s in known]
            new = [s for s in strings if s not in known]
            keywords: dict[str, Any] = {"dest": shared[0].dest if shared else option.dest, "help": help_text(option)}
            if option.type is bool:
                keywords["action"] = "store_true"
            else:
                keywords.update(type=option.type, choices=option.choices)
            if new:
                parser.add_argument(*new, **keywords)
            parser.set_defaults(**{keywords["dest"]: getattr(self.config, option.field)})
            self.dests[option.field] = keywords["dest"]
        parser.add_argument("--expert-parallel", default="off", help="ranks that share one set of experts, auto or off")

    def maybe_load_config(self, parser: argparse.ArgumentParser, args: Sequence[str]) -> Any:
        """open_lm's, which would answer --help with its own parser's two lines; the whole parser answers it instead."""
        if {"-h", "--help"} & set(args):
            return None
        return self.originals["open_lm.params.maybe_load_config"](parser, args)

    def check_args(self, args: argparse.Namespace) -> None:
        """open_lm's checks, without its demand for megablocks; then our settings as the flags give them."""
        theirs = copy.copy(args)
        theirs.moe_freq, theirs.moe_num_experts = 0, None
        self.originals["open_lm.params.check_args"](theirs)
        for name, value in vars(theirs).items():
            if name not in ("moe_freq", "moe_num_experts"):
                setattr(args, name, value)
        if args.moe_weight_parallelism:
            raise UserError("--moe-weight-parallelism is gone: FSDP shards the experts' weights; leave the flag out")
        if args.experimental_meta_device:
            raise UserError("--experimental-meta-device loses open_lm's initial values; leave the flag out")
        self.seed = args.seed
        values = {option.field: getattr(args, self.dests[option.field]) for option in MOE_OPTIONS}
        if values["every"] == 0:  # open_lm's way to say dense
            values.update(every=1, num_experts=0)
        self.config = MoEConfig(**values)
        self.expert_parallel = "auto" if args.moe_expert_model_parallelism else args.expert_parallel
        if self.expert_parallel != "off" and not args.fsdp:
            raise UserError("--expert-parallel needs --fsdp under open_lm: its DDP would average different experts")

    # ---- model

    def create_params(self, args: argparse.Namespace) -> Any:
        """open_lm's parameters; MoE settings of the model's JSON go into ours, and its own loop builds dense blocks."""
        params = self.originals["open_lm.model.create_params"](args)
        if isinstance(params, dict):  # Mamba
            return params
        if params.moe_freq == 0 or not params.moe_num_experts:
            self.layers = dataclasses.replace(self.config, num_experts=0)
        else:
            self.layers = dataclasses.replace(
                self.config,
                every=params.moe_freq,
                num_experts=params.moe_num_experts,
                top_k=params.moe_top_k,
                loss_weight=params.moe_loss_weight,
                capacity_factor=params.moe_capacity_factor,
            )
        params.moe_freq = 0
        return params

    def full_state_dict_config(self, **settings: Any) -> Any:
        return self.originals["open_lm.main.FullStateDictConfig"](**{**settings, "offload_to_cpu": False})

    # ---- data

    def group_by_keys(self, data: Any, *args: Any, **settings: Any) -> Any:
        """webdataset ends a shard with a sample that holds no file, on which open_lm's grouping fails."""
        files = (sample for sample in data if "fname" in sample)
        return self.originals["open_lm.data.group_by_keys_nothrow"](files, *args, **settings)

    # ---- training

    def train_one_epoch(self, model: nn.Module, data: Any, loss: Any, **more: Any) -> Any:
        """open_lm's loop on cross-entropy alone, with our losses collected around each of its micro-batches."""
        args = copy.copy(more["args"])
        args.moe_freq = 0
        scaler = more.get("scaler")
        losses = _EpochLosses(model, more["optimizer"], args, scaler)
        tracker = self.modules["open_lm.train"]
        if tracker.wandb is not None:
            tracker.wandb = _Instead(tracker.wandb, log=losses.log_wandb(tracker.wandb))
        writer = more.get("tb_writer")
        if writer is not None:
            writer = _Instead(writer, add_scalar=losses.add_scalar(writer))
        try:
            with losses.open():
                original = self.originals["open_lm.main.train_one_epoch"]
                return original(model, data, loss, **{**more, "args": args, "tb_writer": writer})
        finally:
            tracker.wandb = self.originals["open_lm.train.wandb"]


def _block_class(plugin: _Plugin) -> type[nn.Module]:
    upstream = plugin.originals["open_lm.model.Block"]

    class Block(upstream):
        """open_lm's block whose feed-forward is our MoE layer where the settings place one."""

        def __init__(self, layer_id: int, args: Any) -> None:
            super().__init__(layer_id, args)
            if layer_id in plugin.layers.moe_layer_ids(args.n_layers):
                self.feed_forward = build_moe(args.dim, layer_id, plugin.layers)
                self.feed_forward.init_weights(plugin.seed)
                for left_over in ("_ff_w1", "_ff_w2"):  # the dense GELU block names its matrices twice
                    if hasattr(self, left_over):
                        delattr(self, left_over)
                self._ffn_type = "openlm_moe"  # open_lm's forward then takes one tensor from the feed-forward

    return Block


def _fsdp_class(plugin: _Plugin) -> type[FullyShardedDataParallel]:
    class FSDP(FullyShardedDataParallel):
        """FSDP1 whose units leave all-to-alls outside, and whose state dicts hold every expert whole."""

        def __init__(self, module: nn.Module, *, auto_wrap_policy: Any = None, **settings: Any) -> None:
            device = torch.device(settings["device_id"])
            hybrid = "sharding_strategy" in settings
            layout = make_layout(True, hybrid, plugin.expert_parallel, plugin.layers.num_experts, device)
            fsdp1_expert_parallel(module, layout)
            super().__init__(
                module,
                auto_wrap_policy=fsdp1_wrap_policy(module, list(module.layers)),
                ignored_states=fsdp1_ignored_states(module),
                **settings,
            )

        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
            return fsdp1_clip_grad_norm_(self, max_norm)

        def state_dict(self, *args: Any, **settings: Any) -> dict[str, Any]:
            return gather_experts(self, super().state_dict(*args, **settings))

        def load_state_dict(self, state_dict: Any, *args: Any, **settings: Any) -> Any:
            return super().load_state_dict(scatter_experts(self, state_dict), *args, **settings)

        @staticmethod
        def optim_state_dict(model: Any, optim: Any, *args: Any, **settings: Any) -> dict[str, Any]:
            state = FullyShardedDataParallel.optim_state_dict(model, optim, *args, **settings)
            return gather_expert_moments(model, optim, state)

        @staticmethod
        def optim_state_dict_to_load(model: Any, optim: Any, optim_state_dict: Any, **settings: Any) -> dict[str, Any]:
            state = scatter_expert_moments(model, optim_state_dict)
            return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, state, **settings)

    return FSDP


class _EpochLosses:
    """Opens a collector at each training forward, and knows the balancing loss of the last optimizer step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, scaler: Any) -> None:
        self.model, self.optimizer, self.args, self.scaler = model, optimizer, args, scaler
        self.collected: list[LossCollector] = []
        self.current = contextlib.ExitStack()
        self.last = torch.zeros(())
        self.steps = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        handles = [
            self.model.register_forward_pre_hook(self._next_micro_batch),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        try:
            yield
        finally:
            self.current.close()
            for handle in handles:
                handle.remove()

    def _next_micro_batch(self, model: nn.Module, inputs: Any) -> None:
        self.current.close()
        if model.training and torch.is_grad_enabled():
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            # open_lm's data parallelism averages over ranks, so a rank's share is that of its own step.
            opened = collect_losses(model, share=1 / self.args.accum_freq, scale=scale)
            self.collected.append(self.current.enter_context(opened))

    def _after_step(self, *unused: Any) -> None:
        self.current.close()
        with_layers = [c for c in self.collected if c.per_layer]
        self.collected = []
        if not with_layers:
            return
        self.last = torch.stack([c.load_balancing_loss for c in with_layers]).mean()
        counts = {
            name: torch.stack([c.per_layer[name].tokens_per_expert_E for c in with_layers]).sum(0)
            for name in with_layers[0].per_layer
        }
        if dist.is_initialized():
            dist.all_reduce(self.last)
            self.last /= dist.get_world_size()
            for counts_E in counts.values():
                dist.all_reduce(counts_E)
        update_expert_biases(self.model, counts)
        if self.args.rank == 0 and self.steps % self.args.log_every_n_steps == 0:
            logging.info(f"LB-Loss: {self.last.item():.4f}")
        self.steps += 1

    def add_scalar(self, writer: Any) -> Callable[..., Any]:
        """`writer.add_scalar` in which our balancing loss stands for open_lm's."""

        def add(name: str, value: Any, step: int) -> Any:
            return writer.add_scalar(name, self.last.item() if name == BALANCING else value, step)

        return add

    def log_wandb(self, wandb: Any) -> Callable[..., Any]:
        """`wandb.log` in which our balancing loss stands for open_lm's."""

        def send(values: dict[str, Any], *args: Any, **settings: Any) -> Any:
            ours = {BALANCING: self.last.item()} if BALANCING in values else {}
            return wandb.log({**values, **ours}, *args, **settings)

        return send


class _Instead(SimpleNamespace):
    """An object's stand-in: the named attributes are ours, every other is the object's own."""

    def __init__(self, original: Any, **ours: Any) -> None:
        super().__init__(**ours)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
