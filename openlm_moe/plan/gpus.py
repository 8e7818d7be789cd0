"""Peaks and bandwidths of GPUs, from their makers' data sheets. Peaks are dense, without structured sparsity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """flops: per second; bandwidths: bytes per second and direction; network: one GPU's share of its node's."""

    name: str
    memory_bytes: float
    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    link_bandwidth: float  # to the other GPUs of the node
    network_bandwidth: float  # to other nodes
    source: str
