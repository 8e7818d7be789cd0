"""`python -m openlm_moe.doctor`: what is installed, what will compute the experts, and whether it computes them right.

Give it the shapes that will train (`--model`, `--experts`, or `--hf-dir` of a Hugging Face model): every kernel that a
training step would use runs on this device with its real tile choice and is compared with the reference arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.hosts.builtin.params import MODEL_OPTIONS, load_model
from openlm_moe.interop.hf_model import TOP_K_NAMES
from openlm_moe.options import DTYPES, MOE_OPTIONS, Option, Parser, add_options, moe_config_from
from openlm_moe.telemetry.environment import environment
from openlm_moe_kernels import backend as backends
from openlm_moe_kernels.verify import Check, verify_expert_ffn

OPTIONS = (
    *MODEL_OPTIONS,
    Option("--hf-dir", "folder of a Hugging Face MoE model; its config.json gives the shapes", group="model"),
    Option("--dtypes", "precisions to verify", nargs="+", choices=tuple(DTYPES), default=["fp32", "bf16"]),
    *MOE_OPTIONS,
)
DEFAULT_MODEL = "open_lm_41m"
# Names that Hugging Face configs use for the sizes of a MoE layer, the first present wins.
HF_NAMES = {
    "dim": ("hidden_size",),
    "hidden_dim": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size", "ffn_dim"),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "top_k": TOP_K_NAMES,
}


@dataclass(frozen=True)
class ExpertShapes:
    """Sizes of one MoE layer's experts."""

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    activation: str

    @classmethod
    def of(cls, dim: int, config: MoEConfig) -> ExpertShapes:
        """Shapes of `config`'s experts in a model of width `dim`."""
        return cls(dim, config.hidden_dim(dim), config.num_experts, config.top_k, config.ffn)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 when a kernel is wrong, 2 for a mistake in the arguments."""
    parser = Parser(prog="python -m openlm_moe.doctor", description=__doc__.splitlines()[0])
    add_options(parser, OPTIONS)
    options = parser.parse_args(argv)
    try:
        config = moe_config_from(options)
        shapes = hf_shapes(Path(options.hf_dir)) if options.hf_dir else builtin_shapes(options, config)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print("\n".join(environment_lines(device)))
        print()
        return report_kernels(shapes, [DTYPES[name] for name in options.dtypes], device, config.backend)
    except UserError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2


def builtin_shapes(options: argparse.Namespace, config: MoEConfig) -> ExpertShapes:
    """Shapes of `--model` with the MoE flags. Raises `UserError` for a dense model, which has no experts to verify."""
    params, moe = load_model(options.model or DEFAULT_MODEL, vars(options), config)
    if not moe.moe_layer_ids(params.n_layers):
        raise UserError("this model has no MoE layer, so there is nothing to verify; give --experts 1 or more")
    return ExpertShapes.of(params.dim, moe)


def hf_shapes(folder: Path) -> ExpertShapes:
    """Shapes from a Hugging Face config.json. Raises `UserError` naming what it lacks."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise UserError(f"{path} cannot be read; give the folder of a Hugging Face model") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None
    config = {**config, **config.get("text_config", {})}
    sizes = {}
    for size, names in HF_NAMES.items():
        sizes[size] = next((config[name] for name in names if config.get(name) is not None), None)
        if sizes[size] is None:
            raise UserError(f"{path} has none of {', '.join(names)}; it does not look like a mixture of experts")
    return ExpertShapes(**sizes, activation="swiglu")


def environment_lines(device: torch.device) -> list[str]:
    """Versions, devices and collectives of this machine, one fact a line."""
    found = environment()
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in found["versions"].items())
    lines = [f"versions     {versions}", f"commit       {found['commit'] or 'unknown'}"]
    if device.type != "cuda":
        return [*lines, f"device       CPU, {torch.get_num_threads()} threads; no GPU is visible"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        lines.append(
            f"device {index}     {properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB memory"
        )
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "missing"
    return [*lines, f"collectives  NCCL {version}"]


def report_kernels(shapes: ExpertShapes, dtypes: Sequence[torch.dtype], device: torch.device, backend: str) -> int:
    """Prints one line a check; returns 1 when one failed."""
    print(
        f"experts      dim {shapes.dim}, hidden {shapes.hidden_dim}, {shapes.num_experts} experts, "
        f"top-{shapes.top_k}, {shapes.activation}"
    )
    failed: list[Check] = []
    used = set()
    for dtype in dtypes:
        try:
            chosen = backends.select(backend, device, dtype)
        except ValueError as error:
            raise UserError(f"--moe-backend {backend} on {device.type}: {error}") from None
        used.add(chosen)
        reason = backends.why_not("triton", device, dtype)
        because = "it runs here" if reason is None else f"triton cannot run: {reason}"
        print(f"{_name(dtype):<12} backend {chosen}" + (f" ({because})" if backend == "auto" else ""))
        for check in verify(shapes, dtype, device, backend):
            print(f"  {check.name:<10} error {check.error:.1e}  bound {check.bound:.0e}  {_verdict(check)}")
            failed += [] if check.passed else [check]
    if "triton" not in used:
        print(f"No Triton kernel was verified: backend {', '.join(sorted(used))} computes the experts on this machine.")
    if failed:
        print(f"{len(failed)} of the checks above FAILED: do not train with this backend on this device.")
        return 1
    print("All checks passed.")
    return 0


def verify(shapes: ExpertShapes, dtype: torch.dtype, device: torch.device, backend: str) -> list[Check]:
    """The kernels' checks for `shapes`; see `openlm_moe_kernels.verify`."""
    return verify_expert_ffn(
        shapes.dim,
        shapes.hidden_dim,
        shapes.num_experts,
        top_k=shapes.top_k,
        activation=shapes.activation,
        dtype=dtype,
        device=device,
        backend=backend,
    )


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value is dtype)


def _verdict(check: Check) -> str:
    return "ok" if check.passed else "WRONG"


if __name__ == "__main__":
    sys.exit(main())
