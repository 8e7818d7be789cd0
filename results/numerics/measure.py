"""How far each kernel is from float64, into record.jsonl: backend torch, and Triton's kernels, interpreted on a CPU.

    python -m results.numerics.measure                       both, on this CPU
    python -m results.numerics.measure --backend triton --device cuda

Errors are ||got - want|| / ||want||, of the whole result and of its worst row, which counts as at least a mean row.
What is wanted comes from plain loops in float64 over the same, already rounded numbers. The shapes of a public report
on MegaBlox are among them, where K is no multiple of the tile and experts have few rows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openlm_moe.options import DTYPES
from openlm_moe_kernels import expert_ffn, grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad, route_plan
from results import records

RECORDS = Path(__file__).parent / "record.jsonl"
# name -> rows of each group, K, N
PRODUCTS: dict[str, tuple[list[int], int, int]] = {
    "MegaBlox report 1: M 32, K = N = 96, one row each": ([1] * 32, 96, 96),
    "MegaBlox report 2, 8 of its 160 experts: M 28, K 4096, N 2048, 3 or 4 rows each": (
        [4, 4, 4, 4, 3, 3, 3, 3],
        4096,
        2048,
    ),
    "odd: M 151, K 176, N 65, one group empty": ([0, 33, 7, 111], 176, 65),
    "41m: M 512, K 288, N 1152": ([64] * 8, 288, 1152),
    "160m: M 512, K 768, N 3072": ([64] * 8, 768, 3072),
}
# The report's second case as it is: 5.4 GB of weights in fp32, and twice that in float64.
ON_GPU = {"MegaBlox report 2: M 512, K 4096, N 2048, E 160, 3 or 4 rows each": ([4] * 32 + [3] * 128, 4096, 2048)}
# name -> tokens, D, F, experts, top-k
LAYERS = {
    "odd: T 37, D 40, F 72, E 5, top-2": (37, 40, 72, 5, 2),
    "41m: T 256, D 288, F 1152, E 8, top-2": (256, 288, 1152, 8, 2),
}
INTERPRETED = ("MegaBlox report 1", "odd")  # small enough for the interpreter; bfloat16 it does not compute rightly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("torch", "triton"), help="default: torch, then triton in the interpreter")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    if options.backend is None:
        for backend in ("torch", "triton"):
            command = [sys.executable, "-m", __spec__.name, "--backend", backend, "--records", options.records]
            more = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
            subprocess.run(command, check=True, env={**os.environ, **more})
        return
    for record in measure(options.backend, options.device):
        records.append(options.records, record)
        print(f"{record['kernel']:15}{record['dtype']:6}{record['shape']:82}{record['error']:.1e}", flush=True)


def measure(backend: str, device: str) -> list[dict[str, Any]]:
    """A record for each kernel, shape and dtype that `backend` computes on `device`."""
    interpreted = backend == "triton" and device == "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    origin = {"backend": "triton, interpreted" if interpreted else backend, "device": device, **records.origin()}
    found = []
    for dtype_name, dtype in DTYPES.items():
        if interpreted and dtype is torch.bfloat16:
            continue
        more = ON_GPU if device == "cuda" else {}
        for shapes, compute in ((PRODUCTS | more, products), (LAYERS, layer)):
            for shape, sizes in shapes.items():
                if interpreted and not shape.startswith(INTERPRETED):
                    continue
                for kernel, (got, want) in compute(*sizes, dtype, backend, device).items():
                    whole, row = errors(got, want)
                    what = {"kernel": kernel, "dtype": dtype_name, "shape": shape}
                    found.append({**what, "error": whole, "worst_row": row, **origin})
    return found


Pairs = dict[str, tuple[Tensor, Tensor]]


def products(rows: list[int], inner: int, columns: int, dtype: torch.dtype, backend: str, device: str) -> Pairs:
    """{kernel: (its result, the same in float64)} of one grouped product and its gradients."""
    torch.manual_seed(0)
    x, dy = (torch.randn(sum(rows), n).to(device, dtype) for n in (inner, columns))
    w = torch.randn(len(rows), inner, columns).to(device, dtype)
    offsets = torch.tensor(rows, device=device).cumsum(0).int()
    groups = list(zip(x.double().split(rows), w.double(), dy.double().split(rows), strict=True))
    return {
        "forward": (grouped_gemm(x, w, offsets, backend=backend), torch.cat([a @ b for a, b, _ in groups])),
        "dgrad": (grouped_gemm_dgrad(dy, w, offsets, backend=backend), torch.cat([c @ b.t() for _, b, c in groups])),
        "wgrad": (grouped_gemm_wgrad(x, dy, offsets, backend=backend), torch.stack([a.t() @ c for a, _, c in groups])),
    }


def layer(
    tokens: int, dim: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype, backend: str, device: str
) -> Pairs:
    """{result: (ours, the same in float64)} of a whole GELU layer after its router, forward and backward."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).topk(top_k).indices.to(device)
    values = (
        torch.randn(tokens, dim).to(device, dtype),
        torch.rand(tokens, top_k).to(device),
        (torch.randn(experts, dim, hidden) * dim**-0.5).to(device, dtype),
        (torch.randn(experts, hidden, dim) * hidden**-0.5).to(device, dtype),
    )
    dout = torch.randn(tokens, dim).to(device, dtype)
    plan = route_plan(ids, experts)

    def run(cast: torch.dtype | None, function: Any) -> list[Tensor]:
        leaves = [(v if cast is None else v.to(cast)).detach().requires_grad_() for v in values]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    def plain(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        every = torch.stack([F.gelu(x @ a, approximate="tanh") @ b for a, b in zip(w1, w2, strict=True)], dim=1)
        return (every.gather(1, ids[..., None].expand(-1, -1, dim)) * weights[..., None]).sum(1)

    got = run(None, lambda x, weights, w1, w2: expert_ffn(x, weights, w1, w2, plan, backend=backend))
    names = ("layer", "layer dx", "layer dweights", "layer dw1", "layer dw2")
    return dict(zip(names, zip(got, run(torch.float64, plain), strict=True), strict=True))


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(error of the whole, error of the worst row), relative."""
    got, want = (t.detach().double().flatten(0, -2) for t in (got, want))
    difference, sizes = (got - want).norm(dim=1), want.norm(dim=1)
    worst = (difference / sizes.clamp(min=float(sizes.square().mean().sqrt()))).max()
    return float(difference.norm() / sizes.norm()), float(worst)


if __name__ == "__main__":
    main()
