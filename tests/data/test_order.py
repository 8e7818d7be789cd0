"""The global order: bijective, fair, and the same whichever way it is asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openlm_moe.data import order
from openlm_moe.data.order import Mixture, SourceOrder, below, hash64, permutation


def test_hash_is_splitmix64() -> None:
    # The published generator: state += golden; output = mix(state), from seed 1234567.
    def splitmix(state: int) -> int:
        mask = 2**64 - 1
        z = (state + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert splitmix(1234567) == 6457827717110365317
    golden = 0x9E3779B97F4A7C15
    assert int(hash64(5, 7)) == splitmix(splitmix(golden ^ 7) ^ 5)


def test_order_is_pinned() -> None:
    # A checkpoint resumes with a later version only if these never change.
    assert permutation(8, 1, 2).tolist() == [0, 3, 6, 7, 1, 5, 2, 4]
    sources, indices = Mixture((0.7, 0.3), 3).split(np.arange(8))
    assert sources.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert indices.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    located = [part.tolist() for part in SourceOrder((3, 2), 9, 0).locate(np.arange(6))]
    assert located == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1], [1, 0, 2, 0, 1, 0]]


@given(n=st.integers(0, 500), key=st.integers(-(2**31), 2**31))
@settings(max_examples=30, deadline=None)
def test_permutation_is_one(n: int, key: int) -> None:
    assert sorted(permutation(n, key)) == list(range(n))


def test_permutation_and_below_are_uniform() -> None:
    firsts = Counter(int(permutation(4, key)[0]) for key in range(4000))
    assert all(abs(firsts[value] - 1000) < 130 for value in range(4))  # 4.7 standard deviations
    drawn = Counter(below(np.full(4000, 5), np.arange(4000), 7).tolist())
    assert sorted(drawn) == [0, 1, 2, 3, 4] and all(abs(count - 800) < 120 for count in drawn.values())


@pytest.mark.parametrize("weights", [(1.0,), (0.725, 0.275), (1, 1), (5.0, 3.0, 2.0), (0.001, 0.999), (1e-3, 1, 1e3)])
def test_mixture_is_a_bijection_with_the_right_shares(weights: tuple[float, ...]) -> None:
    mixture = Mixture(weights, seed=11)
    sources, indices = mixture.split(np.arange(4096))
    for source, weight in enumerate(weights):
        mine = indices[sources == source]
        assert sorted(mine) == list(range(len(mine)))
        assert abs(len(mine) - 4096 * weight / sum(weights)) <= len(weights) / 2


def test_mixture_is_shuffled_within_its_blocks() -> None:
    sources, _ = Mixture((1, 1), seed=0).split(np.arange(1024))
    assert len(set(np.diff(np.flatnonzero(sources == 0)))) > 3  # in turns, they would all be 2
    assert (sources[:64] != sources[64:128]).any()
    assert (Mixture((1, 1), seed=1).split(np.arange(1024))[0] != sources).any()


@given(start=st.integers(0, 3000), length=st.integers(1, 300))
@settings(max_examples=25, deadline=None)
def test_mixture_does_not_depend_on_how_it_is_asked(start: int, length: int) -> None:
    mixture = Mixture((0.6, 0.3, 0.1), seed=5)
    whole = np.stack(mixture.split(np.arange(4000)))
    assert (np.stack(mixture.split(np.arange(start, start + length))) == whole[:, start : start + length]).all()


@pytest.mark.parametrize("stop", [0, 1, 7, 63, 64, 65, 2500])
def test_streams_are_taken_in_order(stop: int) -> None:
    mixture = Mixture((0.6, 0.3, 0.1), seed=5)
    sources, indices = mixture.split(np.arange(stop))
    for source, taken in enumerate(mixture.taken(stop)):
        assert indices[sources == source].tolist() == list(range(taken))


@pytest.fixture(params=[10, 65_536])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(order, "WINDOW", request.param)
    return request.param


def test_a_pass_takes_every_sample_once(window: int) -> None:
    counts = (7, 0, 3, 12, 1, 5)
    source = SourceOrder(counts, seed=3, source=0)
    passes, shards, members = source.locate(np.arange(3 * 28))
    everything = {(shard, member) for shard, count in enumerate(counts) for member in range(count)}
    orders = []
    for number in range(3):
        mine = list(zip(shards[passes == number].tolist(), members[passes == number].tolist(), strict=True))
        assert passes[number * 28 : (number + 1) * 28].tolist() == [number] * 28
        assert len(mine) == 28 and set(mine) == everything
        orders.append(tuple(mine))
    assert len(set(orders)) == 3


def test_samples_of_a_window_come_from_its_shards(window: int) -> None:
    counts = (4,) * 12
    source = SourceOrder(counts, seed=1, source=0)
    _, shards, _ = source.locate(np.arange(48))
    index = seen = 0
    while index < 48:
        edge, of_window = source.window(index)
        assert set(shards[index:edge].tolist()) == set(of_window)
        assert source.window(edge - 1) == (edge, of_window)
        index, seen = edge, seen + len(of_window)
    assert seen == 12 and index == 48
    if window == 10:
        assert len(source.window(0)[1]) == 3
    else:
        assert len(source.window(0)[1]) == 12


def test_each_pass_takes_the_shards_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW", 4)
    source = SourceOrder((4,) * 12, seed=1, source=0)
    shards = source.locate(np.arange(3 * 48))[1].reshape(3, 12, 4)[:, :, 0].tolist()
    assert all(sorted(of_pass) == list(range(12)) for of_pass in shards)
    assert len(set(map(tuple, shards))) == 3


@pytest.mark.parametrize("resampled", [False, True])
@given(start=st.integers(0, 200), length=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_location_does_not_depend_on_how_it_is_asked(resampled: bool, start: int, length: int) -> None:
    counts = (7, 3, 12, 1, 5)
    whole = np.stack(SourceOrder(counts, 3, 0, resampled).locate(np.arange(300)))
    part = np.stack(SourceOrder(counts, 3, 0, resampled).locate(np.arange(start, start + length)))
    assert (part == whole[:, start : start + length]).all()


def test_seed_and_source_number_change_the_order() -> None:
    orders = {
        tuple(np.stack(SourceOrder((20, 20), seed, source).locate(np.arange(40))).ravel().tolist())
        for seed in (0, 1)
        for source in (0, 1)
    }
    assert len(orders) == 4


def test_resampling_draws_shards_with_replacement() -> None:
    source = SourceOrder((10,) * 8, seed=2, source=0, resampled=True)
    passes, shards, _ = source.locate(np.arange(80 * 50))
    drawn = Counter(shards.tolist())
    assert set(passes.tolist()) == set(range(50))
    assert all(abs(count / 10 - 50) < 33 for count in drawn.values())
    assert any(len(set(shards[passes == number].tolist())) < 8 for number in range(50))
