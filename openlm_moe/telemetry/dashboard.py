"""`python -m openlm_moe.telemetry.dashboard --entity E --project P`: the project's wandb workspace, as code.

Saves a view of its own; what people have arranged in other views stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from openlm_moe.errors import UserError
from openlm_moe.options import Parser
from openlm_moe.telemetry import metrics

VIEW = "Mixture of experts"
RECENT_RUNS = 20  # in which MoE layers are looked for
MISSING = 'the dashboard needs: pip install "openlm-moe[dashboard]"'
ALL_PERPLEXITIES = r"^(train|valid/.+)/perplexity$"


def workspace(entity: str, project: str, layers: Sequence[int], name: str = VIEW) -> Any:
    """The workspace, unsaved. `layers`: ids of the MoE layers that get a heat map each. Raises `UserError`."""
    try:
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports import v2 as wr
    except ImportError:
        raise UserError(MISSING) from None

    def lines(title: str, y: Sequence[str] = (), x: str = metrics.TOKENS, **more: Any) -> Any:
        return wr.LinePlot(title=title, x=x, y=list(y), title_x=x.rpartition("/")[2].replace("_", " "), **more)

    def section(title: str, *panels: Any) -> Any:
        return ws.Section(name=title, panels=list(panels), is_open=True)

    def per_layer(title: str, what: str) -> Any:
        return lines(title, metric_regex=rf"^experts/layer_\d+/{what}$")

    # A histogram that is alone in a panel is drawn as a heat map: steps across, one bin an expert.
    heat_maps = [lines(f"Load per expert, layer {i}", [metrics.layer_metric(i, "load")]) for i in layers]
    sections = [
        section(
            "Perplexity",
            lines("Perplexity over tokens", metric_regex=ALL_PERPLEXITIES, log_y=True),
            lines("Perplexity over active FLOPs", x=metrics.ACTIVE_FLOPS, metric_regex=ALL_PERPLEXITIES, log_y=True),
            lines("Cross-entropy", [metrics.LOSS]),
        ),
        section(
            "Speed",
            lines("Tokens/s per GPU", [metrics.TOKENS_PER_SECOND_PER_GPU]),
            lines("MFU", [metrics.MFU]),
            lines("Peak memory (GiB)", [metrics.PEAK_MEMORY]),
        ),
        section(
            "Balance",
            lines("Load-balancing loss", [metrics.LOAD_BALANCING_LOSS]),
            lines("Router z-loss", [metrics.ROUTER_Z_LOSS]),
            lines("Max violation", [metrics.MAX_VIOLATION]),
            per_layer("Max violation per layer", "max_violation"),
            per_layer("Routing entropy per layer", "entropy"),
            lines("Dropped slots", [metrics.DROPPED_FRACTION]),
        ),
        section("Expert load", *heat_maps),
        section(
            "Optimisation",
            lines("Gradient norm", [metrics.GRAD_NORM], log_y=True),
            lines("Learning rate", [metrics.LR]),
        ),
    ]
    settings = ws.WorkspaceSettings(x_axis=metrics.TOKENS)
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def spec(made: Any) -> dict[str, Any]:
    """What wandb would store of a workspace, without the panels' random ids."""
    return _without_ids(json.loads(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)))


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key not in ("__id__", "id")}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


def moe_layers(entity: str, project: str) -> list[int]:
    """Ids of all layers whose load any of the project's recent runs has logged, asked of wandb. Raises `UserError`."""
    try:
        import wandb
    except ImportError:
        raise UserError(MISSING) from None
    try:
        runs = wandb.Api().runs(f"{entity}/{project}", order="-created_at", per_page=RECENT_RUNS)
        names = [name for run, _ in zip(runs, range(RECENT_RUNS), strict=False) for name in dict(run.summary)]
    except Exception as error:  # wandb's errors have no common base
        raise _refused(entity, project, error) from None
    found = {layer[0] for layer in map(metrics.parse_layer_metric, names) if layer}
    if not found:
        raise UserError(f"no run of {entity}/{project} has logged expert load; name the layers: --layers 0,2,4")
    return sorted(found)


def _refused(entity: str, project: str, error: Exception) -> UserError:
    return UserError(f"wandb refuses {entity}/{project}: {' '.join(str(error).split())}")


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Saves the workspace and prints its address; returns the exit code: 0, or 2 with one line on stderr."""
    parser = Parser("python -m openlm_moe.telemetry.dashboard", description="The project's wandb workspace, as code.")
    parser.add_argument("--entity", required=True, help="wandb user or team")
    parser.add_argument("--project", required=True, help="wandb project")
    parser.add_argument("--name", default=VIEW, help=f"name of the saved view (default {VIEW!r})")
    parser.add_argument("--layers", type=_ids, metavar="I,J", help="MoE layers; default: those that runs have logged")
    parser.add_argument("--dry-run", action="store_true", help="print the spec instead of saving it")
    args = parser.parse_args(arguments)
    try:
        layers = args.layers if args.layers is not None else moe_layers(args.entity, args.project)
        made = workspace(args.entity, args.project, layers, args.name)
        if args.dry_run:
            print(json.dumps(spec(made), indent=2))
        else:
            print(_save(made))
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _save(made: Any) -> str:
    try:
        made.save()
    except Exception as error:
        raise _refused(made.entity, made.project, error) from None
    return made.url


if __name__ == "__main__":
    sys.exit(main())
