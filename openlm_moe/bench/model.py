"""Training steps of a whole model, dense against mixture of experts, on random tokens: tokens a second of both.

The models take turns within each round; each step is forward, backward and AdamW. For models that do not fit into
memory so: --pure holds parameters and optimizer in --dtype, --no-optimizer does forward and backward only.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from openlm_moe.bench.measure import in_own_process, interleaved, machine, summary, write_json
from openlm_moe.config import MoEConfig
from openlm_moe.errors import UserError
from openlm_moe.options import DTYPES, MOE_OPTIONS, add_options, moe_config_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (%(default)s)")
    parser.add_argument("--model", default="open_lm_41m", help="open_lm's model name, or a JSON file (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of autocast (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--sequences", type=int, default=2, help="sequences a step (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; medians are reported (%(default)s)")
    parser.add_argument("--pure", action="store_true", help="parameters and AdamW's moments in --dtype too")
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward only, parameters in --dtype")
    parser.add_argument("--json", metavar="FILE", help="also write the measurements there")
    add_options(parser, MOE_OPTIONS)


def run(arguments: argparse.Namespace) -> None:
    """Measures in a process of its own, and prints tokens a second."""
    moe = moe_config_from(arguments)
    if moe.num_experts == 0:
        raise UserError("bench model compares with the dense model; give --experts of at least 1")
    if min(arguments.rounds, arguments.seq_len, arguments.sequences) < 1:
        raise UserError("--rounds, --seq-len and --sequences must be 1 or more")
    names = ("device", "model", "dtype", "seq_len", "sequences", "rounds", "pure", "no_optimizer")
    request = {name: getattr(arguments, name) for name in names} | {"moe": moe.to_dict()}
    record = request | in_own_process(__name__, request, tuned_malloc=True)
    print(machine(arguments.device))
    print(table(record))
    write_json(arguments.json, record)


def measure(
    device: str,
    model: str,
    dtype: str,
    seq_len: int,
    sequences: int,
    rounds: int,
    moe: dict[str, Any],
    pure: bool = False,
    no_optimizer: bool = False,
) -> dict[str, Any]:
    """Times of forward, backward and optimizer step of both models on random tokens."""
    from openlm_moe.hosts.builtin.params import load_model_params

    torch.manual_seed(0)
    params = load_model_params(model, {"seq_len": seq_len})
    tokens = torch.randint(0, params.vocab_size, (sequences, seq_len + 1), device=device)
    config = MoEConfig.from_dict(moe)
    how = {"pure": pure or no_optimizer, "optimize": not no_optimizer}
    made = {"dense": _trainer(params, MoEConfig(num_experts=0), tokens, dtype, **how)}
    made["moe"] = _trainer(params, config, tokens, dtype, **how)
    results = summary(interleaved({name: step for name, (step, _) in made.items()}, rounds, device), "dense")
    for name, result in results.items():
        result["tokens_per_second"] = 1e3 * sequences * seq_len / result["ms"]
        result["parameters"] = made[name][1]
    return {"results": results}


def _trainer(params: Any, moe: MoEConfig, tokens: torch.Tensor, dtype: str, pure: bool, optimize: bool):
    """(one training step, number of parameters)."""
    from openlm_moe.hosts.builtin.model import Transformer
    from openlm_moe.layers.losses import collect_losses

    with torch.device("meta"):
        model = Transformer(params, moe)
    model.to_empty(device=tokens.device).init_weights(0)
    if pure:
        model.to(DTYPES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    autocast = torch.autocast(tokens.device.type, DTYPES[dtype], enabled=dtype != "fp32")

    def step() -> None:
        with collect_losses(model):
            with autocast:
                logits = model(inputs)
            F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        if optimize:
            optimizer.step()
        optimizer.zero_grad()

    return step, sum(p.numel() for p in model.parameters())


def table(record: dict[str, Any]) -> str:
    """One comparison as text."""
    lines = [
        f"{record['model']}: {record['sequences']} x {record['seq_len']} tokens a step, {record['dtype']}",
        f"  {'':8}{'parameters':>14}{'ms a step':>12}{'tokens/s':>12}{'of dense':>10}",
    ]
    for name, r in record["results"].items():
        lines.append(
            f"  {name:8}{r['parameters']:14,}{r['ms']:12.1f}{r['tokens_per_second']:12.0f}{1 / r['ratio']:10.3f}"
        )
    return "\n".join(lines)
