"""`python -m openlm_moe.telemetry.report RUN... --out DIR`: one HTML page and PNGs from the metrics.jsonl of runs."""
