"""README.md: its generated table is current, and the flags, commands and files it names exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from openlm_moe.hosts.builtin.args import build_parser
from openlm_moe.options import MOE_OPTIONS, markdown_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_table_of_moe_flags_is_the_generated_one() -> None:
    """To update: paste `markdown_table(MOE_OPTIONS)` between the two comments."""
    found = re.search(r"<!-- MoE flags:.*?-->\n(.*?)\n<!-- end of MoE flags -->", README, re.DOTALL)
    assert found[1] == markdown_table(MOE_OPTIONS)
    assert len(MOE_OPTIONS) > 10
    for option in MOE_OPTIONS:
        assert f"| `{option.flag}`" in found[1]


def test_modules_named_in_commands_exist() -> None:
    modules = set(re.findall(r"python -m (openlm_moe[\w.]*)", README)) | {"openlm_moe.main"}
    assert len(modules) > 5
    assert [m for m in sorted(modules) if importlib.util.find_spec(m) is None] == []


def test_converters_that_are_named_exist() -> None:
    from openlm_moe.convert.__main__ import COMMANDS

    assert set(re.findall(r"openlm_moe\.convert ([a-z-]+)", README)) <= set(COMMANDS)


def test_trainer_flags_in_commands_are_known() -> None:
    known = set(build_parser().known_flags())
    for line in README.splitlines():
        command = re.search(r"(?:openlm_moe\.main|launch/local\.sh|launch/node\.sh|submit\.py .*? --) (--[^`|]*)", line)
        for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", command[1]) if command else ():
            assert flag in known, f"{flag} in: {line}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"make ([a-z-]+)", "\n".join(re.findall(r"`make [^`]*`|^    make .*", README, re.MULTILINE)))
    )
    assert {"train", "test"} <= named <= targets


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http|#)([^)]+)\)", README))
def test_links_lead_to_files(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    for extra in set(extras) - {"train", "test", "test-full"}:
        assert f"`{extra}`" in rows
