"""Peak matrix-multiply rates of devices, for MFU. From the vendors' data sheets, dense (no structured sparsity)."""

from __future__ import annotations

import torch

# device name fragment -> (bf16/fp16 FLOP/s, fp32-with-TF32 FLOP/s); the first fragment found in the name wins
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250e12, 1125e12),
    ("H200", 989.5e12, 494.7e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835e12, 417.5e12),
    ("H100", 989.5e12, 494.7e12),
    ("H800", 989.5e12, 494.7e12),
    ("A100", 312e12, 156e12),
    ("A800", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("A10G", 70e12, 35e12),
    ("A40", 149.7e12, 74.8e12),
    ("A6000", 154.8e12, 77.4e12),
    ("V100", 125e12, 15.7e12),
    ("MI300X", 1307e12, 653.7e12),
    ("MI250X", 191.5e12, 47.9e12),  # one of its two dies, which is what torch calls a device
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device for matrix multiplies in `dtype`; None where it is unknown (CPUs, unlisted devices).

    `device_name` is what `torch.cuda.get_device_name()` says.
    """
    for fragment, half, single in _PEAKS:
        if fragment.lower() in device_name.lower():
            return half if dtype in (torch.bfloat16, torch.float16) else single
    return None
