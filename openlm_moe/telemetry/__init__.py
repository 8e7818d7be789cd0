"""Meters, metric names and sinks; `report`, `watch` and `dashboard` are commands that read what the sinks wrote."""

from openlm_moe.telemetry.meters import StepMeter, expert_loads, perplexity
from openlm_moe.telemetry.sinks import Sinks, parse_report_to

__all__ = ["Sinks", "StepMeter", "expert_loads", "parse_report_to", "perplexity"]
