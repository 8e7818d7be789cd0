"""Runs the adapter's tests against an installed open_lm and writes results/open_lm/record.json."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ADAPTER = ROOT / "openlm_moe" / "hosts" / "open_lm.py"
RECORD = ROOT / "results" / "open_lm" / "record.json"
PACKAGES = ("torch", "numpy", "webdataset", "transformers", "xformers", "open_lm")


def adapter_hash() -> str:
    """SHA-256 of the adapter's source."""
    return hashlib.sha256(ADAPTER.read_bytes()).hexdigest()


def main(source: str) -> int:
    """Runs the tests; writes the record whatever their outcome, and returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code = subprocess.run([*tests, "tests/hosts/open_lm"], cwd=ROOT).returncode
        cases = ElementTree.parse(report).iter("testcase")
        outcomes = {case.get("name"): _outcome(case) for case in cases}
    commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "adapter_sha256": adapter_hash(),
        "open_lm_commit": commit or None,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "tests": outcomes,
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return code


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
