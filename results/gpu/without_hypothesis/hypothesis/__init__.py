"""What the kernels' tests use of hypothesis, for machines without it: examples drawn at random, none made smaller.

Put on the path by `results/gpu/run.py` where hypothesis is not installed.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies

__all__ = ["HealthCheck", "given", "settings", "strategies"]

HealthCheck = SimpleNamespace(function_scoped_fixture=None)


def settings(max_examples: int = 100, **_: Any) -> Callable[[Callable], Callable]:
    """Sets the number of examples of the `given` below; deadlines and the like say nothing here."""

    def set_examples(test: Callable) -> Callable:
        test.max_examples = max_examples
        return test

    return set_examples


def given(**arguments: strategies.Strategy) -> Callable[[Callable], Callable]:
    """The test with `arguments` drawn for each example from a fixed seed; fixtures are left to pytest."""

    def wrap(test: Callable) -> Callable:
        @functools.wraps(test)
        def every_example(**fixtures: Any) -> None:
            generator = random.Random(0)
            for number in range(every_example.max_examples):
                drawn = {name: strategy.draw(generator) for name, strategy in arguments.items()}
                try:
                    test(**fixtures, **drawn)
                except Exception as error:
                    error.add_note(f"example {number}: {drawn}")
                    raise

        every_example.max_examples = 100
        own = inspect.signature(test).parameters.values()
        kept = [p for p in own if p.name not in arguments and p.kind is not p.VAR_KEYWORD]
        every_example.__signature__ = inspect.Signature(kept)
        del every_example.__wrapped__  # pytest would ask it for the arguments that are drawn here
        return every_example

    return wrap
