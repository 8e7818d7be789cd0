"""From a sample's number to exactly seq_len + 1 tokens, and from such samples to a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np
import torch

from openlm_moe.data.manifest import Source
from openlm_moe.data.order import below
from openlm_moe.data.reader import ShardReader
from openlm_moe.errors import UserError

log = logging.getLogger(__name__)


class Batch(TypedDict):
    """`tokens` (b, seq_len + 1) int64; `mask` of that shape, False on padding, or None; `provenance`: b strings."""

    tokens: torch.Tensor
    mask: torch.Tensor | None
    provenance: list[str]


class SampleTaker:
    """Turns (source, shard, member) into exactly seq_len + 1 tokens. Picklable."""

    def __init__(
        self,
        sources: Sequence[Source],
        reader: ShardReader,
        seq_len: int,
        vocab_size: int | None,
        seed: int,
        pad_short: bool,
        ignore_parse_errors: bool,
    ) -> None:
        self.sources = tuple(sources)
        self.reader = reader
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.pad_short = pad_short
        self.ignore_parse_errors = ignore_parse_errors

    def take(self, source: int, shard: int, member: int, turn: int = 0) -> np.ndarray:
        """At most seq_len + 1 token ids, int64. A longer sample is cropped at a place fixed by seed, sample and turn.

        Negative ids count from the end of the vocabulary, as open_lm writes its padding. Raises `UserError` for a
        malformed sample (unless parse errors are ignored: then it is empty), an id beyond the vocabulary, and a
        sample that is too short (unless short ones are padded).
        """
        where = self.sources[source].shards[shard]
        try:
            tokens = self.reader.read(where, member)
        except UserError as error:
            if not self.ignore_parse_errors:
                raise UserError(f"{error}; or leave out what cannot be read: --ignore-parse-errors") from error
            log.warning("left out: %s", error)
            return np.empty(0, dtype=np.int64)
        wanted = self.seq_len + 1
        if len(tokens) < wanted and not self.pad_short:
            raise UserError(
                f"sample {member} of shard {where.url} has {len(tokens)} tokens, but seq_len {self.seq_len} needs "
                f"{wanted}; use a sequence length of at most {len(tokens) - 1}, or --pad-short-samples"
            )
        if len(tokens) > wanted:
            start = int(below(np.array(len(tokens) - self.seq_len), self.seed, source, shard, member, turn))
            tokens = tokens[start : start + wanted]
        if self.vocab_size is not None and len(tokens):
            for outside in (tokens.max(), tokens.min()):
                if not -self.vocab_size <= outside < self.vocab_size:
                    raise UserError(
                        f"sample {member} of shard {where.url} has token id {outside}, but the vocabulary has "
                        f"{self.vocab_size} entries; check the model's vocab_size and the data's tokenizer"
                    )
            tokens = np.where(tokens < 0, tokens + self.vocab_size, tokens)
        return tokens

    def batch(self, samples: Iterable[tuple[int, int, int, int]], rows: int | None = None) -> Batch:
        """The batch of these (source, shard, member, turn); missing rows up to `rows` are all padding."""
        taken, provenance = [], []
        for source, shard, member, turn in samples:
            taken.append(self.take(source, shard, member, turn))
            provenance.append(f"{self.sources[source].shards[shard].url} sample {member}")
        rows = len(taken) if rows is None else rows
        tokens = np.zeros((rows, self.seq_len + 1), dtype=np.int64)
        mask = np.zeros((rows, self.seq_len + 1), dtype=bool)
        for row, sample in enumerate(taken):
            tokens[row, : len(sample)] = sample
            mask[row, : len(sample)] = True
        full = bool(mask.all())
        return Batch(
            tokens=torch.from_numpy(tokens), mask=None if full else torch.from_numpy(mask), provenance=provenance
        )
