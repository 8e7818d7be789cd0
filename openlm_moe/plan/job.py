"""One training job as `plan` sees it: a model, a batch, and how both are laid over GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from openlm_moe import MoEConfig, UserError
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel.mesh import expert_parallel_size


@dataclass(frozen=True)
class Job:
    """Raises `UserError` where batch, experts and GPUs do not divide.

    fsdp: "off", "fp32" (--fsdp), "amp" (--fsdp --fsdp-amp) or "pure_bf16" (--fsdp --fsdp-pure-bf16).
    precision: "fp32" or "bf16" (autocast).
    device: "cuda" or "cpu"; their autocasts treat norms differently.
    """

    params: ModelParams
    moe: MoEConfig
    gpus: int = 1
    gpus_per_node: int = 8
    global_batch_size: int = 64  # sequences per optimizer step
    accum_freq: int = 1
    precision: str = "bf16"
    fsdp: str = "off"
    hybrid: bool = False
    reshard_after_forward: bool = True
    expert_parallel: int = 1
    checkpointing: str = "off"
    z_loss: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        if min(self.gpus, self.gpus_per_node, self.global_batch_size, self.accum_freq) < 1:
            raise UserError("GPUs, GPUs per node, batch size and accumulation must all be 1 or more")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise UserError(f"{self.gpus} GPUs are no whole number of nodes of {self.gpus_per_node}")
        pieces = self.gpus * self.accum_freq
        if self.global_batch_size % pieces:
            raise UserError(
                f"a global batch of {self.global_batch_size} does not divide into {self.gpus} GPUs x "
                f"{self.accum_freq} micro-batches; use a multiple of {pieces}"
            )
        expert_parallel_size(self.expert_parallel, self.moe.num_experts, self.span, self.local_gpus)

    @property
    def local_gpus(self) -> int:
        """GPUs of one node that take part."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def span(self) -> int:
        """GPUs within which parameters may be split."""
        return self.local_gpus if self.hybrid else self.gpus

    @property
    def shards(self) -> int:
        """GPUs over which a dense parameter is sharded."""
        return self.span if self.fsdp != "off" else 1

    @property
    def expert_shards(self) -> int:
        """GPUs over which a rank's experts are sharded further, beyond expert parallelism."""
        return self.span // self.expert_parallel if self.fsdp != "off" else 1

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch on one GPU."""
        return self.global_batch_size // (self.gpus * self.accum_freq)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one GPU."""
        return self.sequences * self.params.seq_len

    @property
    def autocast(self) -> bool:
        return self.precision == "bf16"

    @property
    def bf16_parameters(self) -> bool:
        """Whether FSDP hands bf16 parameters to the forward."""
        return self.fsdp in ("amp", "pure_bf16")

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in matrix multiplies."""
        return 2 if self.autocast or self.bf16_parameters else 4

    @property
    def embedding_bytes(self) -> int:
        """Bytes of an element of the embeddings: they come in the parameters' dtype."""
        return 2 if self.bf16_parameters else 4

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element between blocks: the embeddings', unless a low-precision norm casts those first."""
        low = self.params.post_embed_norm and self.autocast and "lp_" in self.params.model_norm
        return 2 if low else self.embedding_bytes

    @property
    def gather_bytes(self) -> int:
        """Bytes of an element in FSDP's all-gathers."""
        return 2 if self.bf16_parameters else 4

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient element on its way between GPUs."""
        return 2 if self.fsdp == "pure_bf16" else 4
