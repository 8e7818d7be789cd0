"""A dense open_lm epoch_N.pt to a mixture of experts that computes the same before training (sparse upcycling).

Each chosen SwiGLU feed-forward is copied into every expert (arXiv 2212.05055). With --split s a feed-forward is cut
into s slices and each slice is an expert; the s slices of a copy share their router row, so a top-k that s divides
takes whole copies (virtual groups, arXiv 2410.07524). The outputs equal the dense ones with --moe-normalize-weights.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch import Tensor

from openlm_moe.config import MoEConfig
from openlm_moe.convert.open_lm_format import OUR_STATE, load_pt, model_tensors, save_pt
from openlm_moe.errors import UserError
from openlm_moe.layers.init import truncated_normal

_LAYER = re.compile(r"layers\.(\d+)\.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", type=Path, help="dense epoch_N.pt")
    parser.add_argument("output", type=Path, help="the .pt file to write")
    parser.add_argument("--experts", type=int, default=8, help="experts per MoE layer, all slices counted (default 8)")
    parser.add_argument("--moe-every", type=int, default=2, help="MoE in blocks with layer_id %% n == 0 (default 2)")
    parser.add_argument("--split", type=int, default=1, help="slices that each feed-forward is cut into (default 1)")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of noise on the experts, over their own")
    parser.add_argument("--seed", type=int, default=0, help="seed of routers and noise")


def run(arguments: argparse.Namespace) -> None:
    """Converts, and says with which flags the result trains."""
    if arguments.output.exists():
        raise UserError(f"{arguments.output} exists already; name another file")
    checkpoint = load_pt(arguments.weights)
    config = MoEConfig(num_experts=arguments.experts, top_k=1, every=arguments.moe_every)
    source = model_tensors(checkpoint)
    tensors, hidden = upcycle(source, config, arguments.split, arguments.noise, arguments.seed)
    kept = {key: value for key, value in checkpoint.items() if key != OUR_STATE}  # which resumes the dense model
    save_pt({**kept, "state_dict": tensors}, arguments.output)
    print(f"{arguments.output}: each of {len(source)} tensors used, {len(tensors)} written; train it with")
    top_k = arguments.split * max(1, min(2, arguments.experts // arguments.split))
    print(
        f"  --moe-every {config.every} --experts {config.num_experts} --top-k {top_k} --moe-ffn swiglu "
        f"--moe-ffn-dim {hidden} --moe-normalize-weights"
    )


def upcycle(
    source: dict[str, Tensor], config: MoEConfig, split: int = 1, noise: float = 0.0, seed: int = 0
) -> tuple[dict[str, Tensor], int]:
    """Tensors of the mixture of experts, and one expert's hidden size. Raises `UserError` where it cannot be."""
    if split < 1 or config.num_experts % split:
        raise UserError(f"--split {split} does not divide --experts {config.num_experts}")
    n_layers = 1 + max((int(m.group(1)) for name in source if (m := _LAYER.match(name))), default=-1)
    chosen = config.moe_layer_ids(n_layers)
    if not chosen:
        raise UserError("the file has no layers.N weights, or --experts is 0; there is nothing to do")
    out, hidden = dict(source), 0
    for layer in chosen:
        prefix = f"layers.{layer}.feed_forward"
        if f"{prefix}.w12.weight" not in source:
            raise UserError(
                f"{prefix} is no dense SwiGLU (no w12.weight): only open_lm's swiglu feed-forwards become experts"
            )
        w12, w3 = out.pop(f"{prefix}.w12.weight"), out.pop(f"{prefix}.w3.weight")
        dim, whole = w3.shape
        if whole % split:
            raise UserError(f"--split {split} does not divide the hidden size {whole} of {prefix}")
        hidden = whole // split
        w1, w2 = zip(*(_expert(w12, w3, e % split, split) for e in range(config.num_experts)), strict=True)
        out[f"{prefix}.experts.w1"] = _with_noise(torch.stack(w1), noise, seed, layer, "w1")
        out[f"{prefix}.experts.w2"] = _with_noise(torch.stack(w2), noise, seed, layer, "w2")
        rows = truncated_normal((config.num_experts // split, dim), dim**-0.5, seed, "layers", layer, "router")
        out[f"{prefix}.router.weight"] = rows.repeat_interleave(split, dim=0)
    return out, hidden


def _expert(w12: Tensor, w3: Tensor, part: int, split: int) -> tuple[Tensor, Tensor]:
    """Slice `part` of a dense SwiGLU as one expert: w1 (D, 2F), gate half first, and w2 (F, D)."""
    gate, up = (half.chunk(split)[part] for half in w12.chunk(2))
    # `split` slices with weights 1/split each add up to the whole again
    return torch.cat([gate, up]).t().contiguous(), split * w3.chunk(split, dim=1)[part].t().contiguous()


def _with_noise(stack: Tensor, noise: float, seed: int, layer: int, matrix: str) -> Tensor:
    if noise == 0:
        return stack
    deviation = noise * stack.float().std().item()
    return stack + truncated_normal(tuple(stack.shape), deviation, seed, "upcycle", layer, matrix).to(stack.dtype)
