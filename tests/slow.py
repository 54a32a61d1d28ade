"""Marks some cases of a parameterized test `slow`, which `scripts/run_tests.sh --all` runs.

A test that is slow in all cases has `@pytest.mark.slow` right above its `def`; these stand above
`@parameterized...`, and what they are given takes the test's parameters by name.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Mark = Callable[[Any], Iterable[Callable]]


def where(is_slow: Callable[..., Any]) -> Mark:
    """Marks the cases whose parameters `is_slow` accepts."""
    wanted = inspect.signature(is_slow).parameters

    def mark(cases: Any) -> list[Callable]:
        tests = list(cases)
        for given, test in zip(cases.testcases, tests, strict=True):
            parameters = parameters_of(given, test)
            if is_slow(**{name: parameters[name] for name in wanted}):
                pytest.mark.slow(test)
        return tests

    return mark


def repeats(key: Callable[..., Any] = lambda: None) -> Mark:
    """Marks the cases whose `key` an earlier one has: the first of each key stays fast."""
    seen: list[Any] = []

    def is_slow(**parameters: Any) -> bool:
        found = key(**parameters)
        seen.append(found)
        return found in seen[:-1]

    is_slow.__signature__ = inspect.signature(key)  # type: ignore[attr-defined]
    return where(is_slow)


def parameters_of(given: Any, test: Callable) -> dict[str, Any]:
    """The parameters by name with which absl calls a generated test."""
    of = inspect.signature(test)  # the written method's, `self` first
    if isinstance(given, Mapping):
        bound = of.bind(None, **{k: v for k, v in given.items() if k != "testcase_name"})
    else:
        values = given if isinstance(given, tuple | list) else (given,)
        bound = of.bind(None, *values[1 if hasattr(test, "__x_use_name__") else 0 :])
    bound.apply_defaults()
    return bound.arguments
