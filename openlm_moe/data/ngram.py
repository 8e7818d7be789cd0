"""What counting alone achieves on the same data: unigram and interpolated Kneser-Ney bigram perplexity.

Both predict exactly the targets that the model predicts: in a sample of seq_len + 1 tokens each but the first, the
bigram from the token before it. Absolute discounting with D = n1 / (n1 + 2 n2) (Ney, Essen, Kneser 1994; Chen and
Goodman 1998), interpolated with the lower order; the lowest is the uniform distribution, so that no token has
probability zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Unigram:
    """P(w) of every token, (vocab_size,) float64."""

    probabilities: np.ndarray

    def probability(self, tokens: np.ndarray) -> np.ndarray:
        """P(tokens), of the same shape."""
        return self.probabilities[tokens]


@dataclass(frozen=True)
class Bigram:
    """P(w | v) = max(c(v, w) - D, 0) / c(v) + D * N1+(v, .) / c(v) * Pcont(w); Pcont alone where v was never seen.

    `pairs`: sorted v * vocab_size + w of the seen bigrams; `discounted` their max(c - D, 0) / c(v); `backoff`
    (vocab_size,) the weight of the continuation probability after each v.
    """

    vocab_size: int
    pairs: np.ndarray
    discounted: np.ndarray
    backoff: np.ndarray
    continuation: np.ndarray

    def probability(self, previous: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """P(tokens | previous), element by element."""
        keys = previous.astype(np.int64) * self.vocab_size + tokens
        places = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
        seen = np.where(self.pairs[places] == keys, self.discounted[places], 0.0)
        return seen + self.backoff[previous] * self.continuation[tokens]


def fit_unigram(samples: np.ndarray, vocab_size: int) -> Unigram:
    """Counts the targets of `samples` (n, seq_len + 1)."""
    counts = np.bincount(samples[:, 1:].ravel(), minlength=vocab_size)
    return Unigram(_discounted_distribution(counts))


def fit_bigram(samples: np.ndarray, vocab_size: int) -> Bigram:
    """Counts the pairs (token, target) of `samples` (n, seq_len + 1)."""
    keys = samples[:, :-1].astype(np.int64).ravel() * vocab_size + samples[:, 1:].ravel()
    pairs, counts = np.unique(keys, return_counts=True)
    previous, following = pairs // vocab_size, pairs % vocab_size
    totals = np.bincount(previous, weights=counts, minlength=vocab_size)
    successors = np.bincount(previous, minlength=vocab_size)
    discount = _discount(counts)
    backoff = np.where(totals > 0, discount * successors / np.maximum(totals, 1), 1.0)
    continuation = _discounted_distribution(np.bincount(following, minlength=vocab_size))
    return Bigram(vocab_size, pairs, (counts - discount) / totals[previous], backoff, continuation)


def perplexities(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> dict[str, float]:
    """{"unigram": ..., "bigram": ...}: perplexity on `validation` of models counted on `train`.

    Both arrays are (n, seq_len + 1) token ids below `vocab_size`.
    """
    previous, targets = validation[:, :-1].ravel(), validation[:, 1:].ravel()
    unigram = fit_unigram(train, vocab_size).probability(targets)
    bigram = fit_bigram(train, vocab_size).probability(previous, targets)
    return {"unigram": _perplexity(unigram), "bigram": _perplexity(bigram)}


def _discount(counts: np.ndarray) -> float:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _discounted_distribution(counts: np.ndarray) -> np.ndarray:
    """Absolute discounting of `counts`, interpolated with the uniform distribution."""
    discount = _discount(counts)
    freed = discount * np.count_nonzero(counts)
    return (np.maximum(counts - discount, 0.0) + freed / len(counts)) / counts.sum()


def _perplexity(probabilities: np.ndarray) -> float:
    return float(np.exp(-np.log(probabilities).mean()))
