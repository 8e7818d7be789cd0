"""The suite catches the mistakes it is there for: each one, put into a copy of the project, makes its tests fail."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in `file`; then `tests` (a path, or path::name) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "gate halves swapped",
        "kernels/openlm_moe_kernels/formulas.py",
        "gate, up = pre.chunk(2, dim=-1)\n    return",
        "up, gate = pre.chunk(2, dim=-1)\n    return",
        "tests/layers/test_moe.py::test_equals_a_loop_over_experts",
    ),
    Mutation(
        "combine weight dropped",
        "openlm_moe/layers/experts.py",
        "                weights_SK,\n",
        "                torch.ones_like(weights_SK),\n",
        "tests/layers/test_moe.py::test_equals_a_loop_over_experts",
    ),
    Mutation(
        "auxiliary loss counted twice",
        "openlm_moe/layers/losses.py",
        "torch.full_like(ctx.like, ctx.coefficient)",
        "torch.full_like(ctx.like, 2 * ctx.coefficient)",
        "tests/layers/test_losses.py::test_injected_gradient_equals_the_sum_of_task_and_weighted_losses",
    ),
    Mutation(
        "f not divided by k",
        "openlm_moe/layers/losses.py",
        "counts_BE / counts_BE.sum(dim=1, keepdim=True).clamp(min=1)",
        "counts_BE / valid_BS.sum(dim=1, keepdim=True).clamp(min=1)",
        "tests/layers/test_losses.py::test_uniform_routing_scores_one",
    ),
    Mutation(
        "recompute records a second time",
        "openlm_moe/layers/losses.py",
        "return torch._C._current_graph_task_id() != -1",
        "return False",
        "tests/layers/test_recompute.py",
    ),
    Mutation(
        "routing recomputed",
        "openlm_moe/layers/router.py",
        "remember(lambda: select_experts(scores_TE.detach(), config, bias_E))",
        "select_experts(scores_TE.detach(), config, bias_E)",
        "tests/layers/test_recompute.py",
    ),
    Mutation(
        "padding routed",
        "openlm_moe/layers/router.py",
        "experts_TK.masked_fill(~mask_T[:, None], logits_TE.shape[1])",
        "experts_TK",
        "tests/layers/test_losses.py::test_padding_counts_in_nothing",
    ),
    Mutation(
        "router in the input's dtype",
        "openlm_moe/layers/router.py",
        "torch.float64 if x_TD.dtype == torch.float64 else torch.float32",
        "x_TD.dtype",
        "tests/layers/test_router.py",
    ),
    Mutation(
        "fan-in of the stacked tensor",
        "openlm_moe/layers/init.py",
        "return 1 / math.sqrt(dim)",
        "return 1 / math.sqrt(64 * dim)",
        "tests/layers/test_init.py",
    ),
    Mutation(
        "gradients averaged over a mesh's ranks",
        "openlm_moe/parallel/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "pass",
        "tests/distributed/test_exact.py::test_equals_one_process[2-2-fsdp]",
    ),
    Mutation(
        "a step counted before the first",
        "openlm_moe/parallel/state.py",
        "value.zero_()",
        "pass",
        "tests/parallel/test_checkpoint.py::test_step_counters_start_at_0",
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_is_caught(mutation: Mutation, repo_root: Path, tmp_path: Path, run):
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("openlm_moe", "kernels", "tests"):
        shutil.copytree(repo_root / part, tmp_path / part, ignore=ignore)
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    target = tmp_path / mutation.file
    text = target.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has no single {mutation.old!r} any more"
    target.write_text(text.replace(mutation.old, mutation.new))

    # pytest puts the copy's own sources first: `pythonpath` in its pyproject.toml.
    result = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutation.tests], cwd=tmp_path)
    assert result.returncode == 1, f"not caught:\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
    assert " failed" in result.stdout, result.stdout[-2000:]
