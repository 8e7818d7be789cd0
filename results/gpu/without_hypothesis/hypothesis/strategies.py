"""Strategies as functions of a generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any


class Strategy:
    """Something that values are drawn from."""

    def __init__(self, draw: Callable[[Random], Any]) -> None:
        self.draw = draw

    def map(self, function: Callable[[Any], Any]) -> Strategy:
        return Strategy(lambda generator: function(self.draw(generator)))

    def filter(self, condition: Callable[[Any], bool]) -> Strategy:
        def draw(generator: Random) -> Any:
            while not condition(value := self.draw(generator)):
                pass
            return value

        return Strategy(draw)


def just(value: Any) -> Strategy:
    return Strategy(lambda generator: value)


def booleans() -> Strategy:
    return sampled_from((False, True))


def integers(min_value: int, max_value: int) -> Strategy:
    return Strategy(lambda generator: generator.randint(min_value, max_value))


def sampled_from(values: Sequence[Any]) -> Strategy:
    return Strategy(lambda generator: generator.choice(values))


def one_of(*strategies: Strategy) -> Strategy:
    return Strategy(lambda generator: generator.choice(strategies).draw(generator))


def lists(elements: Strategy, min_size: int = 0, max_size: int = 10) -> Strategy:
    def draw(generator: Random) -> list[Any]:
        return [elements.draw(generator) for _ in range(generator.randint(min_size, max_size))]

    return Strategy(draw)


def builds(target: Callable[..., Any], **arguments: Strategy) -> Strategy:
    return Strategy(lambda generator: target(**{name: s.draw(generator) for name, s in arguments.items()}))
