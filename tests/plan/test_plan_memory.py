"""The plan's memory against what a training step really allocates, on one rank and on two."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import NORMS, ModelParams, load_model_params
from openlm_moe.plan.activations import saved_activations
from openlm_moe.plan.communication import collectives
from openlm_moe.plan.gpus import GPUS
from openlm_moe.plan.job import Job
from openlm_moe.plan.memory import available, balanced_rows, estimate_memory, worst_rows

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("plan_measure", HERE / "measure.py")
measure = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(measure)

TOLERANCE = 0.10
SHAPE = ModelParams(dim=40, n_layers=3, n_heads=4, seq_len=32, vocab_size=301)
DENSE = MoEConfig(num_experts=0)
GELU = MoEConfig(num_experts=3, ffn_dim=70)
RICH = MoEConfig(num_experts=5, every=1, ffn="swiglu", ffn_dim=30, shared_experts=2, score="sigmoid")


def job_of(params: ModelParams, moe: MoEConfig, **more: object) -> Job:
    return Job(params, moe, **{"global_batch_size": 4, "device": "cpu", **more})


def measured_activations(job: Job) -> int:
    model = Transformer(job.params, job.moe)
    model.init_weights(0)
    model.set_grad_checkpointing(job.checkpointing)
    tokens = torch.randint(0, job.params.vocab_size, (job.sequences, job.params.seq_len))
    with measure.forward(model, tokens, job.precision, job.z_loss) as (_, saved):
        return saved.bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["off", "block", "experts"])
@pytest.mark.parametrize("moe", [DENSE, GELU, RICH], ids=["dense", "gelu", "rich"])
@pytest.mark.parametrize("norm", NORMS)
def test_saved_activations(norm: str, moe: MoEConfig, checkpointing: str, precision: str) -> None:
    for more in ({}, {"qk_norm": True, "ffn_type": "gelu", "n_kv_heads": 2, "post_embed_norm": True}):
        params = replace(SHAPE, model_norm=norm, **more)
        job = job_of(params, moe, precision=precision, checkpointing=checkpointing)
        planned = sum(saved_activations(job, balanced_rows(job)).values())
        assert planned == pytest.approx(measured_activations(job), rel=TOLERANCE / 2)


@pytest.mark.parametrize(
    "more",
    [
        {"positional_embedding_type": "none"},
        {"positional_embedding_type": "llama_rotary"},
        {"ffn_type": "gemma_geglu"},
        {"weight_tying": True, "vocab_size": 2000},
        {"n_heads": 3},  # 40 // 3 leaves a rest
        {"seq_len": 128},
    ],
    ids=lambda more: next(iter(more)),
)
def test_saved_activations_of_other_models(more: dict[str, object]) -> None:
    more = {"n_heads": 3, "positional_embedding_type": "none"} if more == {"n_heads": 3} else more
    job = job_of(replace(SHAPE, **more), GELU, precision="bf16")
    planned = sum(saved_activations(job, balanced_rows(job)).values())
    assert planned == pytest.approx(measured_activations(job), rel=TOLERANCE / 2)


def test_z_loss_keeps_the_logits() -> None:
    job = job_of(SHAPE, DENSE, precision="fp32", z_loss=True)
    assert sum(saved_activations(job, 0).values()) == pytest.approx(measured_activations(job), rel=TOLERANCE / 2)
    without = sum(saved_activations(replace(job, z_loss=False), 0).values())
    assert measured_activations(job) > 1.05 * without


@pytest.mark.parametrize("name", ["open_lm_11m", "open_lm_25m"])
@pytest.mark.parametrize("experts", [0, 8])
def test_open_lm_models(name: str, experts: int) -> None:
    params = replace(load_model_params(name), seq_len=64, vocab_size=5000)
    job = job_of(params, MoEConfig(num_experts=experts), global_batch_size=2)
    planned = sum(saved_activations(job, balanced_rows(job)).values())
    assert planned == pytest.approx(measured_activations(job), rel=TOLERANCE)


@pytest.mark.parametrize("moe", [DENSE, GELU, RICH], ids=["dense", "gelu", "rich"])
def test_state_and_peak_of_a_step(moe: MoEConfig) -> None:
    params = ModelParams(dim=64, n_layers=4, n_heads=4, seq_len=64, vocab_size=2048)
    job = job_of(params, moe, precision="bf16", global_batch_size=8)
    memory = estimate_memory(job)
    model = Transformer(params, moe)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, params.vocab_size, (job.sequences, params.seq_len))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with measure.forward(model, tokens, job.precision) as (loss, saved):
            saved._alive.clear()  # holding them would keep what backward frees
            loss.backward()
        optimizer.step()

    step()
    assert memory.weights == measure.held(model.parameters())
    assert memory.gradients == measure.held(p.grad for p in model.parameters())
    moments = [t for entry in optimizer.state.values() for t in entry.values() if t.dim() > 0]
    assert memory.optimizer == measure.held(iter(moments))
    assert memory.peak() - memory.state == pytest.approx(measure.peak_of(step), rel=TOLERANCE)


def two_rank_jobs() -> dict[str, tuple[Job, bool]]:
    """{name: (job, whether all tokens go to the experts of rank 0)}."""
    params = replace(SHAPE, model_norm="gain_only_layer_norm", n_layers=4)
    jobs = {}
    for fsdp in ("off", "fp32", "amp"):
        for expert_parallel in (1, 2):
            for worst in (False, True) if expert_parallel == 2 and fsdp != "off" else (False,):
                moe = MoEConfig(4, ffn_dim=96, every=1, uniform_routing=not worst, balance="bias" if worst else "none")
                laid = {"gpus": 2, "fsdp": fsdp, "expert_parallel": expert_parallel, "global_batch_size": 8}
                name = f"fsdp {fsdp}, ep {expert_parallel}{', worst' * worst}"
                jobs[name] = (job_of(params, moe, precision="bf16", **laid), worst)
    return jobs


@pytest.mark.distributed
def test_two_ranks(torchrun, tmp_path: Path) -> None:
    jobs = two_rank_jobs()
    asked = [
        {
            "params": asdict(job.params),
            "moe": job.moe.to_dict(),
            "fsdp": job.fsdp,
            "expert_parallel": job.expert_parallel,
            "precision": job.precision,
            "sequences": job.sequences,
            "worst": worst,
        }
        for job, worst in jobs.values()
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(asked))
    done = torchrun(2, HERE / "program_memory.py", path)
    assert done.returncode == 0, done.stderr
    per_rank = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(2)]
    for (name, (job, worst)), records in zip(jobs.items(), zip(*per_rank, strict=True), strict=True):
        memory = estimate_memory(job)
        for part in ("weights", "gradients", "optimizer"):
            for record in records:
                assert getattr(memory, part) == pytest.approx(record[part], rel=TOLERANCE), (name, part)
        fullest = max(record["activations"] for record in records)
        planned = memory.activations_worst if worst else memory.saved
        assert planned == pytest.approx(fullest, rel=TOLERANCE), name
        if not worst:
            assert moved(job) == {kind: tuple(sizes) for kind, sizes in records[0]["collectives"].items()}, name


def moved(job: Job) -> dict[str, tuple[int, float]]:
    """{kind: (calls, bytes)} as the plan has them."""
    totals: dict[str, tuple[int, float]] = {}
    for c in collectives(job):
        calls, size = totals.get(c.kind, (0, 0))
        totals[c.kind] = (calls + c.calls, size + c.payload)
    return totals


def test_worst_routing_is_the_bound_of_all_tokens_to_one_rank() -> None:
    job = job_of(SHAPE, MoEConfig(num_experts=8, top_k=2), gpus=4, fsdp="amp", expert_parallel=4, global_batch_size=8)
    assert balanced_rows(job) == job.tokens * 2
    assert worst_rows(job) == job.tokens * 4 * 2
    one_expert_each = replace(job, expert_parallel=4, moe=MoEConfig(num_experts=4, top_k=2))
    assert worst_rows(one_expert_each) == job.tokens * 4  # a token cannot go to the same expert twice
    capacity = replace(job, moe=MoEConfig(num_experts=8, moe_type="capacity", capacity_factor=1.25))
    assert worst_rows(capacity) == job.tokens * 2 * 1.25
    memory = estimate_memory(job)
    assert memory.activations_worst > memory.saved and memory.all_to_all_worst > memory.all_to_all
    assert memory.peak(worst=True) > memory.peak()


def test_sharding_divides_the_state() -> None:
    params, moe = load_model_params("open_lm_160m"), MoEConfig(num_experts=32)
    whole = estimate_memory(Job(params, moe, gpus=1)).state
    for fsdp, expert_parallel, expected in (("off", 1, 1.0), ("amp", 1, 1 / 8), ("amp", 8, 1 / 8)):
        job = Job(params, moe, gpus=8, fsdp=fsdp, expert_parallel=expert_parallel)
        assert estimate_memory(job).state / whole == pytest.approx(expected, rel=0.01)
    only_experts = Job(params, moe, gpus=8, expert_parallel=8)
    assert 1 / 8 < estimate_memory(only_experts).state / whole < 0.5
    hybrid = Job(params, moe, gpus=16, fsdp="amp", hybrid=True)
    assert estimate_memory(hybrid).state / whole == pytest.approx(1 / 8, rel=0.01)


def test_fitting_follows_the_gpu() -> None:
    job = Job(load_model_params("open_lm_830m"), MoEConfig(num_experts=8), gpus=8, fsdp="amp", global_batch_size=64)
    memory = estimate_memory(job)
    for gpu in GPUS.values():
        assert memory.fits(gpu) == (memory.peak() <= available(gpu))
    assert available(GPUS["A100-80"]) > 1.9 * available(GPUS["A100-40"])
