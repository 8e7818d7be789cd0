"""Parameters of the published sizes, counted by `openlm_moe.plan`'s counter, beside the published ones."""

from __future__ import annotations

from openlm_moe import MoEConfig
from openlm_moe.hosts.builtin.count import count_parameters, short_count
from openlm_moe.hosts.builtin.params import load_model_params
from openlm_moe.plan import published
from results.tables.markdown import table


def counted(model: str, experts: int) -> tuple[int, int]:
    """(parameters that are trained, parameters that a token uses) of a published size; 0 experts is the dense model."""
    params = load_model_params(model, {"model_norm": "gain_only_layer_norm"})
    count = count_parameters(params, MoEConfig(num_experts=experts))
    return count.total, count.active


def make() -> str:
    rows = []
    for model, told in published.MODELS.items():
        for experts, name in ((0, "1"), (8, "8"), (32, "32")):
            total, active = counted(model, experts)
            rows.append(
                [
                    model,
                    name,
                    f"{total:,}",
                    f"{short_count(total)} / {told['parameters'].get(name, '-')}",
                    f"{active:,}",
                    f"{short_count(active)} / {told['active_parameters'] if name == '8' else '-'}",
                ]
            )
    header = ["model", "experts", "trained", "trained, ours / published", "active", "active, ours / published"]
    return table(header, rows)
