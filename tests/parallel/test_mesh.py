"""Sizes of meshes that fit, and words for those that do not."""

from __future__ import annotations

import pytest
import torch

from openlm_moe import UserError
from openlm_moe.parallel import make_layout
from openlm_moe.parallel.mesh import expert_parallel_size

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "experts", "span", "node", "size"),
    [
        ("off", 8, 4, 4, 1),
        ("auto", 8, 16, 8, 8),  # within a node
        ("auto", 12, 8, 8, 4),
        ("auto", 3, 8, 8, 1),
        ("auto", 32, 8, 8, 8),
        ("auto", 0, 8, 8, 1),  # a dense model
        (4, 8, 8, 2, 4),
        ("2", 8, 8, 8, 2),
        (1, 3, 2, 2, 1),
        (4, 0, 8, 8, 1),
    ],
)
def test_expert_parallel_size(wanted, experts, span, node, size):
    assert expert_parallel_size(wanted, experts, span, node) == size


@pytest.mark.parametrize(
    ("wanted", "experts", "span", "fits"),
    [(3, 8, 4, "1, 2, 4"), (8, 8, 4, "1, 2, 4"), (2, 3, 2, "1"), (4, 6, 8, "1, 2"), (0, 8, 8, "1, 2, 4, 8")],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(wanted, experts, span, fits):
    with pytest.raises(UserError, match=rf"--expert-parallel {wanted} does not fit .*; {fits} would fit"):
        expert_parallel_size(wanted, experts, span, span)


def test_no_number():
    with pytest.raises(UserError, match="it must be a number, auto or off"):
        expert_parallel_size("many", 8, 8, 8)


def test_one_process_needs_no_process_group(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    layout = make_layout(False, False, "auto", 8, CPU)
    assert (layout.world_size, layout.rank, layout.expert_parallel, layout.is_main) == (1, 0, 1, True)
    assert layout.dense_mesh is layout.expert_mesh is layout.ep_mesh is None
    assert not torch.distributed.is_initialized()


def test_hybrid_needs_fsdp():
    with pytest.raises(UserError, match="--fsdp-hybrid needs --fsdp"):
        make_layout(False, True, "off", 8, CPU)
