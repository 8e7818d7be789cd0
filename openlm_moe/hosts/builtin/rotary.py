"""Rotary position embeddings (RoFormer, arXiv 2104.09864) in the three layouts that open_lm has."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Rotates queries and keys by angles position * theta^(-2i / head_dim), always in fp32 (fp64 for fp64 input).

    kind "rotary": pairs (i, i + head_dim / 2), as GPT-NeoX and Hugging Face. "llama_rotary": pairs (2i, 2i + 1).
    "head_rotary": as "rotary", but the "position" is the head's index, so it says nothing of order; open_lm's first
    7B model was trained so. "none": no rotation.

    A plain object without parameters or buffers: the table is made where and when it is needed, so that meta-device
    builds, casts of a model and FSDP's casts of a module's inputs leave it in fp32.
    """

    def __init__(self, kind: str, head_dim: int, theta: float = 10000.0) -> None:
        self.kind, self.head_dim, self.theta = kind, head_dim, theta
        self._cos = self._sin = torch.empty(0, head_dim // 2)

    def extend(self, length: int, device: torch.device) -> None:
        """Makes the table reach positions below `length` on `device`; later calls below that cost nothing."""
        if self._cos.shape[0] >= length and self._cos.device == device:
            return
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / self.theta**exponents)
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotates x (B, S, heads, head_dim), whose first position is `offset`; keeps its dtype."""
        if self.kind == "none":
            return x
        if self.kind == "head_rotary":
            axis, start, count = 2, 0, x.shape[2]
        else:
            axis, start, count = 1, offset, x.shape[1]
        self.extend(start + count, x.device)
        shape = [1, 1, 1, self.head_dim // 2]
        shape[axis] = count
        cos, sin = (table[start : start + count].view(shape) for table in (self._cos, self._sin))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "llama_rotary":
            first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            first, second = wide.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)
