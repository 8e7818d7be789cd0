"""Peaks and bandwidths of GPUs, from their makers' data sheets. Peaks are dense, without structured sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from openlm_moe.errors import UserError

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """Rates of one GPU: FLOP/s, and bytes per second in one direction.

    `link` reaches the other GPUs of its node, `network` other nodes: one GPU's share of a usual fabric, which is the
    cluster's rather than the GPU's (`--network-gbps` replaces it).
    """

    name: str
    memory: float
    bf16_flops: float
    fp32_flops: float
    bandwidth: float
    link: float
    network: float
    source: str


_A100 = "NVIDIA A100 Tensor Core GPU datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4)"
_HDR, _NDR = 25 * GB, 50 * GB  # InfiniBand HDR (200 Gb/s) and NDR (400 Gb/s), one adapter a GPU, as in DGX systems

GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("A100-40", 40 * GB, 312e12, 19.5e12, 1555 * GB, 300 * GB, _HDR, _A100),
        GPU("A100-80", 80 * GB, 312e12, 19.5e12, 2039 * GB, 300 * GB, _HDR, _A100),
        GPU("H100", 80 * GB, 989.4e12, 66.9e12, 3350 * GB, 450 * GB, _NDR, "NVIDIA H100 datasheet, SXM5"),
        GPU("H200", 141 * GB, 989.4e12, 66.9e12, 4800 * GB, 450 * GB, _NDR, "NVIDIA H200 datasheet, SXM"),
        GPU("B200", 180 * GB, 2250e12, 80e12, 8000 * GB, 900 * GB, _NDR, "NVIDIA DGX B200 datasheet, HGX B200 at 1 kW"),
        GPU("MI300X", 192 * GB, 1307.4e12, 163.4e12, 5300 * GB, 448 * GB, _NDR, "AMD Instinct MI300X data sheet"),
    )
}


def find_gpu(name: str) -> GPU:
    """The GPU called `name`, in any case. Raises `UserError` with the list of known names."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise UserError(f"unknown GPU {name!r}; known are {', '.join(GPUS)}")
    return known[name.lower()]
