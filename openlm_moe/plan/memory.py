"""Bytes on one GPU: weights, gradients, optimizer, activations, buffers, and whether they fit.

Weights, gradients, optimizer state and saved activations are exact up to a few percent (tests measure them); buffers
and the reserve are bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from openlm_moe.hosts.builtin.count import ParameterCount, build_on_meta, count_parameters
from openlm_moe.plan.activations import recomputed, saved_activations
from openlm_moe.plan.gpus import GPU
from openlm_moe.plan.job import Job

FP32 = 4
GIB = 2**30
# CUDA context, NCCL's channels and compiled kernels, and what the allocator cannot use for fragmentation.
CONTEXT_BYTES = 1.5 * GIB
USABLE = 0.95


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. `balanced` routing spreads rows evenly; `worst` sends every token to one rank's experts."""

    weights: float
    gradients: float
    optimizer: float
    activations: dict[str, float]  # balanced, by part of the model
    activations_worst: float
    all_to_all: float
    all_to_all_worst: float
    workspace: float  # logits' gradient, recomputed blocks or the experts' backward, whichever is largest
    workspace_worst: float
    gathered: float  # parameters that FSDP holds whole, and gradients on their way
    optimizer_step: float  # AdamW's temporaries, when no activation is alive

    @property
    def state(self) -> float:
        """What is there all the time: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def saved(self) -> float:
        """Activations kept for backward, balanced routing."""
        return sum(self.activations.values())

    def peak(self, worst: bool = False) -> float:
        """The most that is alive at a time."""
        if worst:
            step = self.activations_worst + self.all_to_all_worst + self.workspace_worst
        else:
            step = self.saved + self.all_to_all + self.workspace
        return self.state + max(step + self.gathered, self.optimizer_step)

    def fits(self, gpu: GPU, worst: bool = False) -> bool:
        return self.peak(worst) <= available(gpu)


def available(gpu: GPU) -> float:
    """Bytes of `gpu` that tensors can have."""
    return gpu.memory * USABLE - CONTEXT_BYTES


def estimate_memory(job: Job) -> Memory:
    """The memory of `job` on its fullest GPU."""
    count = count_parameters(job.params, job.moe)
    balanced, worst = balanced_rows(job), worst_rows(job)
    saved = saved_activations(job, balanced)
    held = local_parameters(job)
    return Memory(
        weights=held * FP32,
        gradients=held * FP32,
        optimizer=held * FP32 * 2,
        activations=saved,
        activations_worst=sum(saved_activations(job, worst).values()),
        all_to_all=all_to_all_buffers(job, balanced),
        all_to_all_worst=all_to_all_buffers(job, worst),
        workspace=_workspace(job, balanced),
        workspace_worst=_workspace(job, worst),
        gathered=_gathered(job, count),
        optimizer_step=held * FP32,  # the square roots of the second moments
    )


def local_parameters(job: Job) -> int:
    """Parameters that one GPU holds: FSDP pads dim 0 to a multiple of the ranks, experts divide on some dim."""
    held = 0
    for name, parameter in build_on_meta(job.params, job.moe).named_parameters():
        if ".experts.w" in name:
            held += parameter.numel() // job.expert_parallel // job.expert_shards
        else:
            held += math.ceil(parameter.shape[0] / job.shards) * (parameter.numel() // parameter.shape[0])
    return held


def balanced_rows(job: Job) -> float:
    """Rows that one rank's experts get per layer and micro-batch when every expert gets as many."""
    return job.tokens * job.moe.top_k if job.moe.num_experts else 0.0


def worst_rows(job: Job) -> float:
    """The same when every token of all partners goes to experts of one rank. Capacity limits cut it."""
    moe = job.moe
    if not moe.num_experts:
        return 0.0
    local = moe.num_experts // job.expert_parallel
    rows = job.tokens * job.expert_parallel * min(moe.top_k, local)
    if moe.moe_type == "capacity":
        rows = min(rows, job.tokens * moe.top_k * moe.capacity_factor)
    return float(rows)


def all_to_all_buffers(job: Job, rows: float) -> float:
    """Rows that leave and arrive, and results that go back, beyond the received rows that are kept as activations."""
    if job.expert_parallel == 1:
        return 0.0
    sent = job.tokens * job.moe.top_k
    return (sent + rows) * job.params.dim * job.compute_bytes


def _workspace(job: Job, rows: float) -> float:
    """The largest of what backward (and the forward of the head) makes for a moment."""
    moe, c = job.moe, job.compute_bytes
    logits = job.tokens * job.params.vocab_size * FP32 * 2  # gradients of log-probabilities and of logits
    hidden = moe.hidden_dim(job.params.dim) if moe.num_experts else 0
    # Of the experts' backward: the hidden rows, their gradients before and after the activation, and rows of D.
    experts = rows * (hidden * (4 if moe.ffn == "swiglu" else 3) + 2 * job.params.dim) * c
    return max(logits, recomputed(job, rows) + experts)


def _gathered(job: Job, count: ParameterCount) -> float:
    """Whole parameters under FSDP (this block's and the next one's, head, routers) and one block's gradients."""
    if job.gpus == 1:
        return 0.0
    n_layers, n_moe = job.params.n_layers, len(job.moe.moe_layer_ids(job.params.n_layers))
    attention = count.attention / n_layers
    dense = attention + count.dense_ffn / max(n_layers - n_moe, 1)
    experts = count.experts / max(n_moe, 1) / job.expert_parallel
    block = max(dense if n_moe < n_layers else 0.0, attention + experts + count.shared_experts / max(n_moe, 1))
    if job.reshard_after_forward:
        whole = 2 * block + count.head + count.router
    else:
        whole = count.matrices + count.router + count.experts / job.expert_parallel
    largest = max(block, count.head)
    return whole * job.gather_bytes + largest * (job.gather_bytes + job.reduce_bytes)
