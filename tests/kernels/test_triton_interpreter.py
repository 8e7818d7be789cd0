"""Runs `triton_kernels/` in Triton's interpreter, in a process of its own: triton reads the mode at import."""

import importlib.util
import sys

import pytest


@pytest.mark.interpreter
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "chosen", ["not slow", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_the_kernels_tests_pass_in_the_interpreter(chosen, repo_root, run):
    folder = repo_root / "tests" / "kernels" / "triton_kernels"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", chosen, folder]
    result = run(command, timeout=3500, env={"TRITON_INTERPRET": "1"}, cwd=repo_root)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
