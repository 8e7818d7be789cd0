"""Bytes that a forward keeps for its backward on one GPU, tensor by tensor.

Every line names a tensor that an operation of the model saves; tests compare the sums with what autograd really holds.
Letters: D model dim, F hidden size, E experts, K top-k; a row is a token on its way to one expert.
"""

from __future__ import annotations

from dataclasses import replace

from openlm_moe.config import swiglu_hidden_dim
from openlm_moe.hosts.builtin.count import count_parameters
from openlm_moe.plan.job import Job

INDEX = 8  # bytes of an int64


def saved_activations(job: Job, rows: float) -> dict[str, float]:
    """{part of the model: bytes kept after the forward of one micro-batch}, where each MoE layer gets `rows` rows."""
    p = job.params
    n_moe = len(job.moe.moe_layer_ids(p.n_layers))
    head = {"head and loss": job.tokens * head_bytes(job)}
    if job.checkpointing == "block":
        inputs = p.n_layers * job.tokens * p.dim * job.residual_bytes + n_moe * job.tokens * job.moe.top_k * INDEX
        return {"inputs of blocks": inputs, **head, "bf16 copies of weights": weight_copies(job)["head"]}
    copies = weight_copies(job)
    return {
        "attention": p.n_layers * job.tokens * attention_bytes(job),
        "dense feed-forward": (p.n_layers - n_moe) * job.tokens * dense_bytes(job),
        "router, losses, plan": n_moe * job.tokens * router_bytes(job),
        "experts": n_moe * expert_bytes(job, rows) + n_moe * job.tokens * shared_bytes(job),
        **head,
        "bf16 copies of weights": sum(copies.values()) - (copies["experts"] if job.checkpointing == "experts" else 0),
    }


def recomputed(job: Job, rows: float) -> float:
    """Bytes that backward makes again at a time, under activation checkpointing: those of the largest block."""
    if job.checkpointing == "off":
        return 0.0
    p, off = job.params, replace(job, checkpointing="off")
    n_moe = len(job.moe.moe_layer_ids(p.n_layers))
    copies = weight_copies(job)
    experts = expert_bytes(off, rows) + copies["experts"] / max(n_moe, 1)
    if job.checkpointing == "experts":
        return experts if n_moe else 0.0
    attention = job.tokens * attention_bytes(job) + copies["attention"] / p.n_layers
    dense = job.tokens * dense_bytes(job) + copies["dense"] / max(p.n_layers - n_moe, 1)
    moe = job.tokens * (router_bytes(job) + shared_bytes(job)) + experts + copies["shared"] / max(n_moe, 1)
    return attention + max(dense if n_moe < p.n_layers else 0.0, moe if n_moe else 0.0)


def norm_bytes(job: Job, width: int, in_bytes: int, input_kept: bool = False) -> int:
    """What a norm over `width` elements of `in_bytes` each keeps per token.

    input_kept: the input is a view of something that is kept anyway, so it counts only where the norm casts it.
    """
    itself = 0 if input_kept else width * in_bytes
    if job.params.model_norm == "rms_norm":  # the input in fp32, the normalised input, 1/rms
        return (itself if in_bytes == 4 else width * 4) + width * in_bytes + 4
    wanted = _layer_norm_bytes(job, in_bytes)
    return (itself if wanted == in_bytes else width * wanted) + 8  # mean and 1/deviation


def norm_output_bytes(job: Job, in_bytes: int) -> int:
    """Bytes of an element of a norm's output."""
    if job.params.model_norm == "rms_norm":
        return 2 if job.bf16_parameters and in_bytes == 2 else 4
    return _layer_norm_bytes(job, in_bytes)


def _layer_norm_bytes(job: Job, in_bytes: int) -> int:
    """Bytes of an element inside a layer norm: CUDA's autocast runs it in fp32, the low-precision kinds in bf16."""
    if not job.autocast:
        return in_bytes
    if "lp_" in job.params.model_norm:
        return 2
    return 4 if job.device == "cuda" else in_bytes


def attention_bytes(job: Job) -> int:
    """Attention with the norm before it, per token."""
    p, c = job.params, job.compute_bytes
    q, kv = p.n_heads * p.head_dim, p.kv_heads * p.head_dim
    kept = norm_bytes(job, p.dim, job.residual_bytes)
    kept += p.dim * c  # input of in_proj
    kept += (q + 2 * kv) * c  # output of in_proj, of which the values are a view
    if p.qk_norm:
        kept += norm_bytes(job, q, c, input_kept=True) + norm_bytes(job, kv, c, input_kept=True)
    if p.qk_norm or p.positional_embedding_type != "none":
        kept += (q + kv) * c  # queries and keys as they go into attention
    return kept + q * c + p.n_heads * 4  # attention's output, log-sum-exp of each head


def dense_bytes(job: Job) -> int:
    """A dense feed-forward with the norm before it, per token."""
    p, c = job.params, job.compute_bytes
    kept = norm_bytes(job, p.dim, job.residual_bytes) + p.dim * c
    if p.ffn_type == "gelu":
        return kept + 4 * p.dim * c * 2  # before and after the activation
    return kept + swiglu_hidden_dim(p.dim) * c * 4  # gate, up, activated gate, product


def router_bytes(job: Job) -> int:
    """Norm, router, losses and plan of a MoE layer, per token."""
    p, moe = job.params, job.moe
    kept = norm_bytes(job, p.dim, job.residual_bytes)
    kept += 0 if _router_shares_input(job) else p.dim * 4
    kept += moe.num_experts * 4 * (2 if moe.score == "softmax" else 3)  # logits, (scores,) probabilities
    kept += moe.top_k * (INDEX + 4) + 9  # choices and their weights; z-loss and mask
    return kept + moe.top_k * INDEX * 3  # the plan's permutations


def _router_shares_input(job: Job) -> bool:
    """Whether the router's fp32 input is also the tensor that the experts keep as theirs."""
    return job.compute_bytes == 4 and job.expert_parallel == 1


def expert_bytes(job: Job, rows: float) -> float:
    """The routed experts of one layer."""
    moe, c = job.moe, job.compute_bytes
    kept = 0.0
    if job.checkpointing != "experts":
        kept += rows * moe.hidden_dim(job.params.dim) * (2 if moe.ffn == "swiglu" else 1) * c  # before the activation
    if job.expert_parallel > 1:  # rows from all ranks with their weights, and the plan over them
        return kept + rows * (job.params.dim * c + 4 + 3 * INDEX)
    if job.checkpointing == "experts" and c == 2:
        return kept  # the router's fp32 input is what goes into the recomputed function
    return kept + job.tokens * job.params.dim * c


def shared_bytes(job: Job) -> int:
    """Shared experts of one layer, per token."""
    moe, c = job.moe, job.compute_bytes
    width = moe.shared_experts * moe.hidden_dim(job.params.dim)
    if not width:
        return 0
    cast = c == 2 and norm_output_bytes(job, job.residual_bytes) != 2
    return width * c * (4 if moe.ffn == "swiglu" else 2) + (job.params.dim * c if cast else 0)


def head_bytes(job: Job) -> int:
    """Embedding, last norm, head and cross-entropy, per token."""
    p = job.params
    kept = norm_bytes(job, p.dim, job.residual_bytes)
    kept += norm_bytes(job, p.dim, job.embedding_bytes) if p.post_embed_norm else 0
    kept += p.dim * job.compute_bytes  # input of the head
    kept += p.vocab_size * 4 * (2 if job.z_loss else 1)  # log-probabilities; the z-loss keeps the logits too
    return kept + 2 * INDEX  # tokens and targets


def weight_copies(job: Job) -> dict[str, float]:
    """bf16 copies of fp32 weights that autocast makes and backward keeps; none where FSDP hands out bf16 itself."""
    count = count_parameters(job.params, job.moe)
    size = 2 if job.autocast and not job.bf16_parameters else 0
    return {
        "attention": count.attention * size,
        "dense": count.dense_ffn * size,
        "experts": count.experts / job.expert_parallel * size,
        "shared": count.shared_experts * size,
        "head": count.head * size,
    }
