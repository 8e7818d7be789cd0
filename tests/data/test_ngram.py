"""The counting baselines against their definition, written out token by token."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from openlm_moe.data.ngram import fit_bigram, fit_unigram, perplexities

VOCAB = 11


def text(samples: int, seed: int) -> np.ndarray:
    """Skewed tokens below VOCAB - 1: the last one is never seen, token 9 never before another."""
    generator = np.random.default_rng(seed)
    tokens = np.minimum(generator.geometric(0.3, size=(samples, 6)) - 1, 8)
    tokens[::3, -1] = 9
    return tokens


def distribution(counts: Counter[int]) -> dict[int, float]:
    """Absolute discounting, interpolated with the uniform distribution."""
    once, twice = (sum(count == n for count in counts.values()) for n in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    total = sum(counts.values())
    return {
        token: max(counts[token] - discount, 0) / total + discount * len(counts) / total / VOCAB
        for token in range(VOCAB)
    }


def kneser_ney(train: np.ndarray, previous: int, token: int) -> float:
    pairs = Counter((int(row[i]), int(row[i + 1])) for row in train for i in range(len(row) - 1))
    once, twice = (sum(count == n for count in pairs.values()) for n in (1, 2))
    discount = once / (once + 2 * twice)
    continuation = distribution(Counter(w for _, w in pairs))
    total = sum(count for (v, _), count in pairs.items() if v == previous)
    if total == 0:
        return continuation[token]
    kinds = sum(v == previous for v, _ in pairs)
    return max(pairs[previous, token] - discount, 0) / total + discount * kinds / total * continuation[token]


def test_bigram_is_the_definition_and_sums_to_one() -> None:
    train = text(40, seed=0)
    model = fit_bigram(train, VOCAB)
    for previous in range(VOCAB):
        row = model.probability(np.full(VOCAB, previous), np.arange(VOCAB))
        assert row.sum() == pytest.approx(1, abs=1e-12) and (row > 0).all()
        assert row.tolist() == pytest.approx([kneser_ney(train, previous, token) for token in range(VOCAB)], rel=1e-12)


def test_unigram_is_the_definition_and_sums_to_one() -> None:
    train = text(7, seed=1)
    model = fit_unigram(train, VOCAB)
    expected = distribution(Counter(train[:, 1:].ravel().tolist()))
    assert model.probabilities.tolist() == pytest.approx([expected[token] for token in range(VOCAB)], rel=1e-12)
    assert model.probabilities.sum() == pytest.approx(1, abs=1e-12)


def test_perplexity_is_over_all_targets_but_the_first() -> None:
    train, validation = text(40, seed=0), text(9, seed=2)
    found = perplexities(train, validation, VOCAB)
    logs = [math.log(kneser_ney(train, int(row[i]), int(row[i + 1]))) for row in validation for i in range(5)]
    assert found["bigram"] == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-12)
    unigram = distribution(Counter(train[:, 1:].ravel().tolist()))
    logs = [math.log(unigram[int(token)]) for token in validation[:, 1:].ravel()]
    assert found["unigram"] == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-12)


def test_known_value_without_rare_counts() -> None:
    # Two tokens in turns, 100 times: every discount is 0.5 (no count is 1), so P(1 | 0) can be written down.
    train = np.array([[0, 1] * 51])
    model = fit_bigram(train, 2)
    # c(0, 1) = 51, one successor; each token has one predecessor, so Pcont = 1/2.
    assert model.probability(np.array([0]), np.array([1]))[0] == pytest.approx(50.5 / 51 + 0.5 / 51 * 0.5, rel=1e-14)
