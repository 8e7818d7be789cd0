"""Bad input: one clear line, exit code 2, nothing half-written. And who runs under which --host."""

import json
import os
import shutil

import pytest

from openlm_moe.main import main
from openlm_moe.parallel.checkpoint import MARKER


def refused(tiny, capsys, *flags, name="run"):
    """The one line that a command is refused with."""
    assert tiny.start(*flags, name=name) == 2
    said = capsys.readouterr()
    assert said.err.startswith("openlm_moe.main: error: ") and said.err.count("\n") == 1, said.err
    assert not tiny.run_folder(name).exists()
    return said.err


def test_more_experts_per_token_than_experts(tiny, capsys):
    assert "lower --top-k to at most 1" in refused(tiny, capsys, "--experts", 1)


def test_sequences_longer_than_samples(tiny, capsys, tmp_path):
    values = json.loads(tiny.model.read_text())
    (tmp_path / "long.json").write_text(json.dumps({**values, "seq_len": 32}))
    line = refused(tiny, capsys, "--model", tmp_path / "long.json")
    assert "has 17 tokens, but seq_len 32 needs 33" in line


def test_a_missing_shard(tiny, capsys):
    assert "/no/such.tar" in refused(tiny, capsys, "--val-data", "/no/such.tar")


def copy_of_data(tiny, tmp_path):
    shutil.copytree(tiny.train.parent, tmp_path / "data")
    return tmp_path / "data"


def test_a_manifest_that_names_a_missing_shard(tiny, capsys, tmp_path):
    data = copy_of_data(tiny, tmp_path)
    (data / "00000001.tar").unlink()
    assert "00000001.tar" in refused(tiny, capsys, "--dataset-manifest", data / "manifest.jsonl")


def test_a_truncated_shard(tiny, capsys, tmp_path):
    data = copy_of_data(tiny, tmp_path)
    shard = data / "00000001.tar"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    line = refused(tiny, capsys, "--dataset-manifest", data / "manifest.jsonl")
    assert "00000001.tar" in line


def test_fewer_samples_than_the_run_needs(tiny, capsys):
    line = refused(tiny, capsys, "--epochs", 3)
    assert "needs 144 samples" in line and "120" in line


def test_fewer_tokens_than_one_batch(tiny, capsys):
    assert "less than one global batch of 8" in refused(tiny, capsys, "--train-num-samples", 32, "--epochs", 1)


def test_endless_data_need_a_length(tiny, capsys):
    flags = tiny.flags("--multiple-data-passes")
    at = flags.index("--train-num-samples")
    assert main(flags[:at] + flags[at + 2 :]) == 2
    assert "give --train-num-samples" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_log_folder_without_permission(tiny, capsys, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    assert "cannot write" in refused(tiny, capsys, "--logs", tmp_path / "locked")


def test_a_log_folder_that_is_a_file(tiny, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file, so" in refused(tiny, capsys, "--logs", tmp_path / "file")


def test_a_log_folder_on_a_read_only_file_system(tiny, capsys):
    assert "cannot write /proc/runs/run" in refused(tiny, capsys, "--logs", "/proc/runs")


def test_an_experiment_that_exists(tiny, capsys):
    assert tiny.start() == 0
    before = {path: path.read_bytes() for path in tiny.run_folder().rglob("*") if path.is_file()}
    assert tiny.start() == 2
    assert "already exists; choose another --name, or go on with it by --resume latest" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tiny.run_folder().rglob("*") if path.is_file()}


def test_checkpoints_that_do_not_exist_or_are_not_whole(tiny, capsys, tmp_path):
    assert "does not exist" in refused(tiny, capsys, "--resume", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "holds no complete checkpoint" in refused(tiny, capsys, "--resume", tmp_path / "empty")
    (tmp_path / "epoch_1.pt").write_bytes(b"")
    assert "convert it first" in refused(tiny, capsys, "--resume", tmp_path / "epoch_1.pt")
    (tmp_path / "empty" / MARKER).write_text("{}")
    assert "cannot be read" in refused(tiny, capsys, "--resume", tmp_path / "empty")


def test_evaluation_without_a_checkpoint(tiny, capsys):
    assert main(["--model", str(tiny.model), "--val-data", str(tiny.validation), "--logs", str(tiny.logs)]) == 2
    assert "name it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "open_lm_5b"), "unknown model 'open_lm_5b'"),
        (("--moe-layers", "0,7"), "--moe-layers names layer 7"),
        (("--global-batch-size", 9, "--accum-freq", 2), "use 8 or 10"),
        (("--report-to", "mlflow"), "--report-to names 'mlflow'"),
        (("--name", "a/b"), "it must be a plain folder name"),
        (("--averagers", "sma"), "--averagers names 'sma'"),
        (("--expert-parallel", 2), "1 would fit"),
        (("--val-num-samples", 3), "less than one sample of 16"),
        (("--remote-sync", "nowhere://x", "--resume", "latest"), "--remote-sync nowhere://x"),
    ],
)
def test_other_values_that_cannot_be(tiny, capsys, flags, message):
    assert message in refused(tiny, capsys, *flags)


def test_the_embedded_corpus_needs_its_vocabulary(tiny, capsys):
    assert main(["--model", str(tiny.model), "--logs", str(tiny.logs), "--name", "run"]) == 2
    assert "the embedded corpus has 4096 token ids" in capsys.readouterr().err
    assert not tiny.run_folder().exists()


def test_unknown_flags_and_hosts(tiny, capsys):
    with pytest.raises(SystemExit) as caught:
        tiny.start("--expertz", 4)
    assert caught.value.code == 2
    assert "did you mean --experts?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--host", "megatron"])


def test_the_host_gets_every_other_flag(monkeypatch):
    import importlib

    seen = []

    class Host:
        @staticmethod
        def main(argv):
            seen.append(list(argv))
            return 7

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: Host)
    assert main(["--moe-every", "2", "--host", "open_lm", "--any-flag", "x"]) == 7
    assert seen == [["--moe-every", "2", "--any-flag", "x"]]
