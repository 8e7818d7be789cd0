"""--precision: what arithmetic a step runs in. Parameters, gradients and optimizer state are fp32 in all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

_MEANING = {
    "fp32": None,
    "amp_bf16": torch.bfloat16,
    "amp_bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "amp": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Precision:
    """`dtype`: autocast's, None for none. `scaled`: whether gradients need a loss scale (fp16)."""

    device_type: str
    dtype: torch.dtype | None

    @property
    def scaled(self) -> bool:
        return self.dtype == torch.float16

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matrix multiplies."""
        return self.dtype or torch.float32

    def autocast(self) -> AbstractContextManager[None]:
        """Context for forward passes."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


def make_precision(name: str | None, device: torch.device) -> Precision:
    """The arithmetic that --precision names; on a CPU `amp` is bf16, as in torch. None: bf16 on GPUs, fp32 on CPU."""
    if name is None:
        name = "fp32" if device.type == "cpu" else "amp_bf16"
    dtype = _MEANING[name]
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.bfloat16
    return Precision(device.type, dtype)


class LossScale:
    """Dynamic loss scale for fp16: halves when a gradient overflows, doubles after 2000 steps without.

    The decision comes from the global gradient norm, which is the same on every rank. Source: Micikevicius et al.,
    Mixed Precision Training (arXiv 1710.03740). Disabled, it is 1 and stays 1.
    """

    GROWTH_INTERVAL = 2000
    SMALLEST = 2.0**-14

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 65536.0 if enabled else 1.0
        self.good_steps = 0

    @torch.no_grad()
    def unscale_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Divides the gradients by the scale."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.scale)

    def update(self, finite: bool) -> None:
        """To be called once a step, with whether the step's gradients were finite."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps % self.GROWTH_INTERVAL == 0:
            self.scale *= 2

    def may_skip(self) -> bool:
        """Whether gradients that are not finite mean a scale too high, rather than a run gone wrong."""
        return self.enabled and self.scale > self.SMALLEST

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
