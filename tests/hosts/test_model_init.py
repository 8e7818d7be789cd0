"""open_lm's initial values: the rule for every parameter, and independence of seed, layout and depth."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin import initialise as module
from openlm_moe.hosts.builtin.initialise import ROWS_PER_BLOCK, initialise
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams

# Deviation of a unit normal that is cut at 3 deviations.
CUT = math.sqrt(1 - 2 * 3 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))
DIM, LAYERS = 200, 3  # 200 // 12 leaves a rest: attention is 192 wide, and open_lm's rule still says dim


def build(seed: int = 0, moe: MoEConfig | None = None, **changes: object) -> Transformer:
    p = ModelParams(**{"dim": DIM, "n_layers": LAYERS, "n_heads": 12, "seq_len": 8, "vocab_size": 300, **changes})
    with torch.device("meta"):
        model = Transformer(p, moe or MoEConfig(num_experts=4))
    model.to_empty(device="cpu").init_weights(seed)
    return model


def rule(name: str, ffn_type: str) -> float:
    """The deviation that open_lm gives the matrix `name`."""
    depth = math.sqrt(2 * (int(name.split(".")[1]) + 1)) if name.startswith("layers.") else 1
    hidden = 4 * DIM if ffn_type == "gelu" or "experts" in name else 768
    if name.endswith("out_proj.weight"):
        return 1 / math.sqrt(DIM) / depth
    if name.endswith(("w3.weight", "feed_forward.2.weight", "down_proj.weight", "experts.w2")):
        return 1 / math.sqrt(hidden) / depth
    return 1 / math.sqrt(DIM)


@pytest.mark.parametrize("ffn_type", ["swiglu", "gelu", "gemma_geglu"])
def test_rule(ffn_type: str) -> None:
    model = build(ffn_type=ffn_type, qk_norm=True, post_embed_norm=True)
    matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == (0 if name.endswith("bias") else 1)), name
        elif "router" not in name:
            std = rule(name, ffn_type)
            assert float(parameter.detach().std()) == pytest.approx(CUT * std, rel=0.02), name
            assert float(parameter.detach().abs().max()) <= 3 * std * (1 + 1e-6), name
            assert abs(float(parameter.detach().mean())) < 0.02 * std, name
            matrices += 1
    assert matrices == 2 + LAYERS * 4 + (ffn_type == "gemma_geglu")


def test_values_depend_on_seed_and_name_alone() -> None:
    one, same, other = build(0), build(0), build(1)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or not torch.equal(a, c), name
    deeper = dict(build(0, n_layers=4, moe=MoEConfig(num_experts=8)).named_parameters())
    for name, a in one.named_parameters():  # more layers and experts leave what was there
        b = deeper[name]
        if "router" not in name:
            assert torch.equal(a, b[:4] if "experts" in name else b), name
    matrices = [p.flatten()[:50] for p in one.parameters() if p.dim() > 1]
    assert len({tuple(m.tolist()) for m in matrices}) == len(matrices)


@pytest.fixture
def rank_of_fake_world():
    """`start(rank, world)` makes this process that rank of a world that is not there: no collective can run."""

    def start(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [10, 3 * ROWS_PER_BLOCK + 7])
def test_shards_are_parts_of_the_whole(rank_of_fake_world, dim: int, rows: int) -> None:
    whole = nn.Parameter(torch.empty(rows, 6))
    initialise(whole, "output.weight", 6, seed=3)
    shards = []
    for rank in range(4):
        rank_of_fake_world(rank, 4)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(f"of_rank_{rank}",))  # equal meshes are cached
        share = whole.chunk(4, dim)[rank] if rank < len(whole.chunk(4, dim)) else whole.narrow(dim, 0, 0)
        local = torch.full_like(share, float("nan"))
        sharded = DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        initialise(nn.Parameter(sharded), "output.weight", 6, seed=3)
        shards.append(local)
    assert torch.equal(torch.cat(shards, dim), whole)
    assert len({tuple(row) for row in whole.tolist()}) == rows  # no block repeats another


def test_a_rank_makes_only_the_blocks_it_needs(rank_of_fake_world, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(module, "truncated_normal", lambda shape, *rest: made.append(shape) or torch.zeros(shape))
    rank_of_fake_world(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows = 4 * ROWS_PER_BLOCK
    local = torch.empty(rows // 2, 3)
    sharded = DTensor.from_local(
        local, mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
    )
    initialise(nn.Parameter(sharded), "output.weight", 3, seed=0)
    assert made == [(ROWS_PER_BLOCK, 3)] * 2
