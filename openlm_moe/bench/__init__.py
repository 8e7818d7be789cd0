"""Timings and counts: `python -m openlm_moe.bench`."""
