"""Time of one optimizer step from rooflines: what no implementation beats at the makers' peaks, and what bounds it.

Each part of the model takes the longer of its arithmetic at peak rate and its memory traffic at full bandwidth. FSDP's
collectives hide behind computation as far as that reaches; the all-to-alls of a MoE layer have nothing to hide behind.
The host needs a few microseconds for every operation that it starts, and the device never runs ahead of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from openlm_moe.config import swiglu_hidden_dim
from openlm_moe.hosts.builtin.count import count_parameters, flops_per_token, forward_flops_per_token
from openlm_moe.plan.activations import norm_output_bytes
from openlm_moe.plan.communication import collectives
from openlm_moe.plan.gpus import GPU
from openlm_moe.plan.job import Job
from openlm_moe.plan.memory import local_parameters

# Operations that the host starts, forward and backward, counted by running the model; and what one costs the host.
DENSE_BLOCK_OPS, MOE_BLOCK_OPS, OTHER_OPS = 83, 160, 29
HOST_SECONDS_PER_OP = 6e-6
# AdamW reads weight, gradient and moments and writes three of them; clipping reads gradients and rescales them; the
# temporaries of the multi-tensor form make four more passes. All in fp32.
OPTIMIZER_PASSES = 14


@dataclass(frozen=True)
class Part:
    """One part of the model over a whole micro-batch, forward and backward."""

    name: str
    flops: float
    traffic: float  # bytes to and from memory

    def seconds(self, job: Job, gpu: GPU) -> float:
        return max(self.arithmetic(job, gpu), self.traffic / gpu.bandwidth)

    def arithmetic(self, job: Job, gpu: GPU) -> float:
        return self.flops / (gpu.bf16_flops if job.compute_bytes == 2 else gpu.fp32_flops)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step. `parts` by part of the model, all micro-batches together."""

    parts: dict[str, float]
    arithmetic: float  # of `parts`, at peak rate alone
    optimizer: float
    sharding: float  # FSDP's collectives, whether hidden or not
    all_to_all: float
    host: float
    tokens: int  # of the step, over all GPUs
    gpus: int
    flops: float  # active FLOPs of the step on one GPU

    @property
    def computation(self) -> float:
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        device = max(self.computation, self.sharding) + self.all_to_all + self.optimizer
        return max(device, self.host)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.gpus / self.total

    def mfu(self, job: Job, gpu: GPU) -> float:
        """Active FLOPs over what the GPU could do in the step's time."""
        return self.flops / self.total / (gpu.bf16_flops if job.compute_bytes == 2 else gpu.fp32_flops)

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        if self.host >= self.total:
            return "kernel launches"
        memory = self.computation - min(self.arithmetic, self.computation) + self.optimizer
        causes = {
            "arithmetic": self.arithmetic,
            "memory bandwidth": memory,
            "FSDP's collectives": max(self.sharding - self.computation, 0.0),
            "all-to-all": self.all_to_all,
        }
        if self.sharding > self.computation:  # then computation is what hides
            causes["FSDP's collectives"] = self.sharding
            causes["arithmetic"] = causes["memory bandwidth"] = 0.0
        return max(causes, key=lambda cause: causes[cause])


def estimate_step(job: Job, gpu: GPU) -> StepTime:
    """The step time of `job` on GPUs of the kind `gpu`, with balanced routing."""
    parts = model_parts(job)
    times = {part.name: part.seconds(job, gpu) * job.accum_freq for part in parts}
    moving = collectives(job)
    sharding = sum(c.seconds(gpu, job) for c in moving if c.kind != "all-to-all")
    exchanges = sum(c.seconds(gpu, job) for c in moving if c.kind == "all-to-all")
    n_moe = len(job.moe.moe_layer_ids(job.params.n_layers))
    ops = n_moe * MOE_BLOCK_OPS + (job.params.n_layers - n_moe) * DENSE_BLOCK_OPS + OTHER_OPS
    if job.checkpointing == "block":
        ops = ops * 4 // 3
    return StepTime(
        parts=times,
        arithmetic=sum(part.arithmetic(job, gpu) for part in parts) * job.accum_freq,
        optimizer=local_parameters(job) * 4 * OPTIMIZER_PASSES / gpu.bandwidth,
        sharding=sharding,
        all_to_all=exchanges,
        host=ops * job.accum_freq * HOST_SECONDS_PER_OP,
        tokens=job.global_batch_size * job.params.seq_len,
        gpus=job.gpus,
        flops=flops_per_token(job.params, job.moe) * job.tokens * job.accum_freq,
    )


def model_parts(job: Job) -> list[Part]:
    """Arithmetic and memory traffic of each part of the model for one micro-batch.

    Backward repeats each matrix multiply twice and each element-wise pass about twice; recomputation adds a forward.
    Traffic counts every operation's operands once, as unfused operations move them.
    """
    p, moe, c, r = job.params, job.moe, job.compute_bytes, job.residual_bytes
    count = count_parameters(p, moe)
    flops = forward_flops_per_token(p, moe, count)
    n_moe = len(moe.moe_layer_ids(p.n_layers))
    n_dense = p.n_layers - n_moe
    q, kv = p.n_heads * p.head_dim, p.kv_heads * p.head_dim
    out = norm_output_bytes(job, r)
    in_blocks = 4 if job.checkpointing == "block" else 3
    in_experts = 4 if job.checkpointing in ("block", "experts") else 3

    def part(name: str, flop: float, weights: float, per_token: float, passes: int) -> Part:
        return Part(name, flop * job.tokens * passes, (weights * c + per_token * job.tokens) * passes)

    norm = p.dim * (r + out)
    cast = p.dim * (out + c) if out != c else 0
    rotary = (q + kv) * (2 * c + 8 * 4) if p.positional_embedding_type != "none" else 0  # in fp32, pass by pass
    qk_norm = (q + kv) * (c + norm_output_bytes(job, c)) if p.qk_norm else 0
    residual = p.dim * (2 * r + c)
    projections = (p.dim + q + 2 * kv + q + p.dim) * c
    scores = (q + 2 * kv + q) * c
    hidden = 4 * p.dim if p.ffn_type == "gelu" else swiglu_hidden_dim(p.dim)
    dense = p.dim * c * 2 + hidden * c * (4 if p.ffn_type == "gelu" else 9)
    wide = moe.hidden_dim(p.dim) if moe.num_experts else 0
    # Gathered rows, hidden rows written and read, results combined; the kernels fuse activation and gather.
    routed = moe.top_k * (2 * p.dim + wide * (3 if moe.ffn == "swiglu" else 2)) * c + p.dim * c
    shared = moe.shared_experts * wide * c * (9 if moe.ffn == "swiglu" else 4)
    router = p.dim * (out + 4) + moe.num_experts * 4 * 10
    head_in, logits = p.dim * c, p.vocab_size * (c + 4 * 3)  # written, widened, log-softmax

    layers = p.n_layers
    found = [
        part("attention projections", flops["attention projections"], count.attention, projections * layers, in_blocks),
        part("attention scores", flops["attention scores"], 0, scores * layers, in_blocks),
        part("norms, rotary, residuals", 0, 0, (2 * (norm + cast + residual) + rotary + qk_norm) * layers, in_blocks),
        part("dense feed-forward", flops["dense feed-forward"], count.dense_ffn, dense * n_dense, in_blocks),
        part("router", flops["router"], count.router, router * n_moe, in_blocks),
        part(
            "experts",
            flops["experts"],
            count.experts / job.expert_parallel + count.shared_experts,
            (routed + shared) * n_moe,
            in_experts,
        ),
        part("embedding, head, loss", flops["head"], count.head, head_in + logits + norm + p.dim * r, 3),
    ]
    return [p for p in found if p.traffic > 0]
