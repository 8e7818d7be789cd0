"""open_lm's own reader reads what `data.prepare` writes, and ours what open_lm's scripts write."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from openlm_moe.data.evaluation import open_evaluation
from openlm_moe.data.loader import open_data
from openlm_moe.data.prepare import prepare
from openlm_moe.data.tokenizer import train_byte_bpe

pytestmark = pytest.mark.open_lm


@pytest.fixture
def open_lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """open_lm as installed or from OPEN_LM_SOURCE, with a webdataset that its reader can use."""
    if "OPEN_LM_SOURCE" in os.environ:
        monkeypatch.setattr(sys, "path", [os.environ["OPEN_LM_SOURCE"], *sys.path])
    webdataset = pytest.importorskip("webdataset")
    if tuple(map(int, webdataset.__version__.split(".")[:3])) >= (0, 2, 96):
        pytest.skip(f"open_lm's reader cannot use webdataset {webdataset.__version__}; it needs one before 0.2.96")
    try:
        import open_lm.data
        import open_lm.file_utils
    except ImportError as error:
        pytest.skip(f"no importable open_lm ({error}); name a checkout by OPEN_LM_SOURCE")
    return open_lm


def test_open_lm_reads_prepared_data(open_lm: ModuleType, tmp_path: Path) -> None:
    documents = [f"text {n}: " + " ".join(f"word{n * k % 17}" for k in range(n % 40)) for n in range(200)]
    train_byte_bpe(documents, 300, tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare(
        [str(tmp_path / "a.jsonl")],
        tmp_path / "out",
        tokenizer=str(tmp_path / "tokenizer.json"),
        seq_len=16,
        shard_size=20,
    )
    manifest = str(tmp_path / "out" / "manifest.jsonl")
    total = sum(json.loads(line)["num_sequences"] for line in Path(manifest).read_text().splitlines())
    patterns, numbers, _ = open_lm.file_utils.get_string_for_epoch(total, [0], [manifest], None, 1, 1)
    assert numbers == [total]
    settings = argparse.Namespace(
        train_data=patterns,
        train_num_samples=total,
        train_data_mix_weights=None,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        disable_buffer=False,
        ignore_parse_errors=False,
        per_gpu_batch_size=1,
        vocab_size=300,
        seq_len=16,
        workers=0,
        world_size=1,
        rank=0,
        seed=0,
    )
    reader = open_lm.data.get_wds_dataset(settings, is_train=True, data_key="json.gz", force_num_samples=numbers)
    theirs = sorted(row for (batch,) in reader.dataloader for row in batch)
    (data,) = open_evaluation([manifest], seq_len=16, vocab_size=300)
    ours = sorted(row for batch in data.batches(8) for row in batch["tokens"].tolist())
    assert len(theirs) == total and theirs == ours


def test_what_open_lms_scripts_write_is_read(open_lm: ModuleType, tmp_path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "00000001.tar")) as tar:  # as its ray script does
        for number in range(5):
            text = json.dumps([number, 1, 2, 3, -1])
            tar.write({"__key__": hashlib.md5(text.encode()).hexdigest(), "json.gz": text})
    (tmp_path / "manifest.jsonl").write_text('{"shard": "00000001", "num_sequences": 5}\n')
    with webdataset.ShardWriter(str(tmp_path / "shard-%07d.tar"), maxcount=3) as tar:  # as make_2048.py does
        for number in range(5):
            tar.write({"__key__": f"{number:012d}", "txt": str([number, 1, 2, 3, "<|endoftext|>"])})
    for source, last in [("manifest.jsonl", 9), ("shard-{0000000..0000001}.tar", 0)]:
        data = open_data([f"{tmp_path}/{source}"], seq_len=4, vocab_size=10)
        rows = [row for batch in data.batches(5) for row in batch["tokens"].tolist()]
        assert sorted(rows) == [[number, 1, 2, 3, last] for number in range(5)]
