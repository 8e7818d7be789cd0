"""The open_lm adapter without open_lm: what it says, what it refuses, and that its record is of this very file."""

import hashlib
import importlib
import importlib.util
import json
import types

import pytest

import openlm_moe
from openlm_moe.hosts import open_lm as adapter

MISSING = importlib.util.find_spec("open_lm") is None


def names(**changed):
    """Modules like open_lm's with every replaced name; `changed` gives some another value (None: absent)."""
    modules = {}
    for full, parameters in adapter.REPLACED.items():
        module, _, name = full.rpartition(".")
        namespace = modules.setdefault(module, types.SimpleNamespace())
        made = eval(f"lambda {', '.join(parameters)}: None") if parameters else object()
        if full in changed:
            made = changed[full]
        if made is not None:
            setattr(namespace, name, made)
    return modules


def test_the_signature_table_accepts_what_it_was_written_for():
    adapter._check_names(names())


def test_a_missing_name_is_named():
    with pytest.raises(openlm_moe.UserError, match=r"has no open_lm\.model\.Block; .* commit 9bb92ef"):
        adapter._check_names(names(**{"open_lm.model.Block": None}))


def test_another_signature_is_named():
    with pytest.raises(
        openlm_moe.UserError, match=r"open_lm\.params\.check_args .* takes \(args, more\), not \(args\)"
    ):
        adapter._check_names(names(**{"open_lm.params.check_args": lambda args, more: None}))


@pytest.mark.skipif(not MISSING, reason="open_lm is installed here")
def test_without_open_lm_one_line_says_how_to_install_it(capsys):
    assert importlib.import_module("openlm_moe.main").main(["--host", "open_lm", "--experts", "8"]) == 2
    printed = capsys.readouterr().err
    assert "open_lm, which is not installed" in printed
    assert "git clone https://github.com/mlfoundations/open_lm" in printed
    assert printed.count("\n") == 1
    with pytest.raises(openlm_moe.UserError, match="not installed"):
        openlm_moe.register_open_lm()
    openlm_moe.unregister_open_lm()


def test_the_record_of_the_tests_in_open_lm_is_of_this_adapter_and_green(repo_root):
    record = json.loads((repo_root / "results" / "open_lm" / "record.json").read_text())
    source = (repo_root / "openlm_moe" / "hosts" / "open_lm.py").read_bytes()
    assert record["adapter_sha256"] == hashlib.sha256(source).hexdigest(), (
        "the adapter changed since its tests ran in open_lm: run make test-open-lm OPEN_LM_SOURCE=<checkout>"
    )
    assert set(record["tests"].values()) == {"passed"}
    assert len(record["tests"]) >= 20
    assert record["open_lm_commit"] == adapter.UPSTREAM_COMMIT
