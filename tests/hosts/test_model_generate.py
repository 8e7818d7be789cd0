"""Sampling: the same seed gives the same text, the cache changes nothing, temperature and top-k do what they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from openlm_moe import MoEConfig, UserError
from openlm_moe.hosts.builtin.generate import continue_text, generate, sample
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams

VOCAB, CONTEXT = 29, 24


@pytest.fixture(scope="module")
def model() -> Transformer:
    built = Transformer(ModelParams(16, 2, 2, CONTEXT, VOCAB, qk_norm=True), MoEConfig(num_experts=4))
    built.init_weights(2)
    with torch.no_grad():
        for block in built.layers:
            for parameter in block.parameters():
                parameter *= 2  # an untrained model repeats its last token
    return built.double()


def test_greedy_equals_full_forwards(model: Transformer) -> None:
    ids = prompt = [3, 1, 4]
    for _ in range(12):
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    assert generate(model, prompt, 12, temperature=0) == ids[3:]
    assert len(set(ids[3:])) > 1


def test_the_seed_decides(model: Transformer) -> None:
    first, again, other = (generate(model, [1, 2], 16, seed=seed) for seed in (5, 5, 6))
    assert first == again != other
    assert all(0 <= token < VOCAB for token in first)


def test_top_k_one_is_greedy(model: Transformer) -> None:
    assert generate(model, [7], 10, top_k=1, seed=1) == generate(model, [7], 10, temperature=0)


def test_sample_follows_temperature_and_top_k() -> None:
    logits, generator = torch.tensor([0.0, 2.0, 1.0, -1.0]), torch.Generator().manual_seed(0)

    def frequencies(temperature: float, top_k: int | None) -> torch.Tensor:
        drawn = [sample(logits, temperature, top_k, generator) for _ in range(4000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 4000

    for temperature in (0.5, 2.0):
        torch.testing.assert_close(frequencies(temperature, None), (logits / temperature).softmax(0), atol=0.03, rtol=0)
    kept = torch.tensor([0.0, 2.0, 1.0, float("-inf")])
    kept[0] = float("-inf")
    torch.testing.assert_close(frequencies(1.0, 2), kept.softmax(0), atol=0.03, rtol=0)


def test_long_prompts_lose_their_beginning(model: Transformer) -> None:
    prompt = [token % VOCAB for token in range(100)]
    assert generate(model, prompt, 8, seed=2) == generate(model, prompt[-(CONTEXT - 8) :], 8, seed=2)


def test_text_in_text_out_and_mode_restored(model: Transformer) -> None:
    tokenizer = SimpleNamespace(
        encode=lambda text: SimpleNamespace(ids=[ord(letter) - ord("a") for letter in text]),
        decode=lambda ids: "".join(chr(ord("a") + token) for token in ids),
    )
    model.train()
    text = continue_text(model, tokenizer, "abc", 5, temperature=0)
    assert [ord(letter) - ord("a") for letter in text] == generate(model, [0, 1, 2], 5, temperature=0)
    assert model.training


@pytest.mark.parametrize(("prompt", "new"), [([], 3), ([1], CONTEXT)])
def test_refused(model: Transformer, prompt: list[int], new: int) -> None:
    with pytest.raises(UserError, match="context"):
        generate(model, prompt, new)
