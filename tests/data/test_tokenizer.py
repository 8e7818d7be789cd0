"""Tokenizer files and documents to ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from openlm_moe.data import tokenizer
from openlm_moe.data.tokenizer import load_encoder, train_byte_bpe
from openlm_moe.errors import UserError

tokenizers = pytest.importorskip("tokenizers")
TEXTS = [f"line {n} of the text\nwith some words, and others\n\n    indented {n * n}\n" for n in range(50)]


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    train_byte_bpe(TEXTS, 300, tmp_path / "bpe.json")
    return tmp_path / "bpe.json"


def test_each_document_ends_with_the_end_token(bpe: Path) -> None:
    encoder = load_encoder(bpe)
    arrays = list(encoder.encode([*TEXTS, ""]))
    assert len(arrays) == 51 and arrays[-1].tolist() == [0]
    for text, array in zip(TEXTS, arrays, strict=False):
        assert array[-1] == 0 and 0 not in array[:-1] and array.dtype == np.uint16
        assert encoder.tokenizer.decode(array[:-1].tolist()) == text


def test_batches_and_pieces_change_no_token(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder(bpe)
    whole = [array.tolist() for array in encoder.encode(["".join(TEXTS), *TEXTS])]
    monkeypatch.setattr(tokenizer, "_PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer, "_BATCH_CHARACTERS", 30)
    pieces = list(encoder.encode(["".join(TEXTS), *TEXTS]))
    assert len(pieces) > 60
    assert np.concatenate(pieces).tolist() == [token for array in whole for token in array]


def test_training_is_deterministic(bpe: Path, tmp_path: Path) -> None:
    train_byte_bpe(iter(TEXTS), 300, tmp_path / "again.json")
    assert bpe.read_bytes() == (tmp_path / "again.json").read_bytes()


def test_end_token_is_found_or_asked_for(bpe: Path, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2, "stop": 3}, "[UNK]"))
    words.enable_truncation(2)
    words.save(str(tmp_path / "words.json"))
    assert load_encoder(tmp_path / "words.json").end_id == 2
    assert load_encoder(tmp_path / "words.json", "stop").end_id == 3
    with pytest.raises(UserError, match=r"has no token gone; name its end token by --end-token"):
        load_encoder(tmp_path / "words.json", "gone")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    words.save(str(tmp_path / "bare.json"))
    with pytest.raises(UserError, match=r"has no token <\|endoftext\|> or"):
        load_encoder(tmp_path / "bare.json")


def test_truncation_that_the_file_asks_for_is_off(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=9)
    words.save(str(tmp_path / "words.json"))
    assert [array.tolist() for array in load_encoder(tmp_path / "words.json").encode(["a a a a"])] == [[0, 0, 0, 0, 1]]


def test_large_vocabularies_get_wider_ids(tmp_path: Path) -> None:
    vocabulary = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (array,) = load_encoder(tmp_path / "words.json").encode(["w69999 w1"])
    assert array.tolist() == [69_999, 1, 70_000]


def test_what_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json is not a file of the tokenizers package"):
        load_encoder(tmp_path / "x.json")
    with pytest.raises(UserError, match=r"tokenizer .*none\.json does not exist"):
        load_encoder(tmp_path / "none.json")
