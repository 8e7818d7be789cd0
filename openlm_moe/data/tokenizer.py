"""Tokenizers: any file of the `tokenizers` package, its end-of-text token, and documents to ids."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openlm_moe.data.remote import read_bytes
from openlm_moe.errors import UserError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_PIECE_CHARACTERS = 4 * 2**20
_BATCH_CHARACTERS = 2**20
_SINGLE_LINE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")


def import_tokenizers() -> Any:
    """The `tokenizers` package. Raises `UserError` naming the extra where it is missing."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError('this needs the tokenizers package: pip install "openlm-moe[tokenizers]"') from error
    return tokenizers


class Encoder:
    """A tokenizer and the id that ends each document."""

    def __init__(self, tokenizer: Any, end_id: int, digest: str) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.digest = digest
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """For each document its token ids with the end token after them, in order.

        A document of more than 4 Mi characters is encoded in pieces, cut where a single line break stands between
        other characters.
        """
        batch: list[str] = []
        lasts: list[bool] = []
        size = 0
        for document in documents:
            for piece, last in _pieces(document):
                batch.append(piece)
                lasts.append(last)
                size += len(piece)
                if size >= _BATCH_CHARACTERS:
                    yield from self._encode_batch(batch, lasts)
                    batch, lasts, size = [], [], 0
        yield from self._encode_batch(batch, lasts)

    def _encode_batch(self, pieces: list[str], lasts: list[bool]) -> Iterator[np.ndarray]:
        for encoding, last in zip(
            self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False), lasts, strict=True
        ):
            yield np.array([*encoding.ids, self.end_id] if last else encoding.ids, dtype=self.dtype)


def load_encoder(path: str | os.PathLike[str], end_token: str | None = None) -> Encoder:
    """Opens a tokenizer file (tokenizer.json of the `tokenizers` package), local or remote.

    `end_token` (default: the first known one in the vocabulary) ends documents. Raises `UserError`.
    """
    tokenizers = import_tokenizers()
    data = read_bytes(os.fspath(path), "tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the package raises bare Exception for a malformed file
        raise UserError(f"tokenizer {path} is not a file of the tokenizers package: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    candidates = END_TOKENS if end_token is None else (end_token,)
    ids = [tokenizer.token_to_id(token) for token in candidates]
    found = [number for number in ids if number is not None]
    if not found:
        raise UserError(f"tokenizer {path} has no token {' or '.join(candidates)}; name its end token by --end-token")
    return Encoder(tokenizer, found[0], hashlib.sha256(data).hexdigest())


def train_byte_bpe(documents: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with `vocab_size` entries, id 0 being <|endoftext|>, and writes it to `path`.

    The same documents give the same file, for any number of threads.
    """
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while len(document) - start > _PIECE_CHARACTERS:
        cut = _SINGLE_LINE_BREAK.search(document, start + _PIECE_CHARACTERS)
        if cut is None:
            break
        yield document[start : cut.end()], False
        start = cut.end()
    yield document[start:], True
