"""The run without any data flag: a small MoE on the embedded corpus, compared with what n-grams achieve on it."""

from __future__ import annotations

import argparse

from openlm_moe import UserError
from openlm_moe.data.corpus import VOCAB_SIZE, Corpus, embedded_corpus
from openlm_moe.data.evaluation import open_evaluation
from openlm_moe.data.ngram import perplexities
from openlm_moe.hosts.builtin.architecture import Architecture


def use_embedded_corpus(args: argparse.Namespace, architecture: Architecture) -> Corpus:
    """Names the corpus as training and validation data in `args`. Raises `UserError` if the model cannot read it."""
    if architecture.vocab_size < VOCAB_SIZE:
        raise UserError(
            f"the embedded corpus has {VOCAB_SIZE} token ids, but {args.model} has a vocabulary of "
            f"{architecture.vocab_size}; choose another --model, or give --train-data or --dataset-manifest"
        )
    corpus = embedded_corpus(architecture.seq_len, args.data_cache_dir)
    args.dataset_manifest, args.val_data = [corpus.train], [corpus.validation]
    return corpus


def ngram_baselines(corpus: Corpus, seq_len: int, cache_dir: str | None) -> dict[str, float]:
    """{"unigram": ..., "bigram": ...}: validation perplexity of models counted on the training part."""
    train, validation = (
        data.taker.batch(data.places(range(data.num_samples)))["tokens"].numpy()
        for data in open_evaluation([corpus.train, corpus.validation], seq_len=seq_len, cache_dir=cache_dir)
    )
    return perplexities(train, validation, VOCAB_SIZE)
