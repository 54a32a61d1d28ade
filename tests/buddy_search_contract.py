"""What every implementation of `pallas_kernels.buddy_search` must do: as the policy does."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies import substitution
from moejax.policies.substitution import Candidates
from pallas_kernels import buddy_search as package


class Case(NamedTuple):
    """Sizes, and the share of experts that are resident."""

    tokens: int
    experts: int
    width: int
    places: int
    resident: float
    depth: int
    budget: int
    last_first: bool = False


CASES = {
    "qwen": Case(1, 128, 8, 16, 0.5, 16, 8),
    "mixtral": Case(4, 8, 2, 7, 0.6, 7, 2),
    "budget": Case(5, 60, 6, 10, 0.4, 10, 2),
    "last_first": Case(5, 24, 4, 12, 0.5, 9, 1, last_first=True),
    "crowded": Case(9, 12, 5, 11, 0.8, 11, 5),
    "nobody": Case(3, 16, 3, 5, 0.0, 5, 3),
    "one": Case(2, 4, 1, 1, 0.7, 1, 1),
}


def check(case: Case, seed: int, **how: Any) -> np.ndarray:
    """Raises AssertionError at a difference; returns which pairs were replaced."""
    rng, layers, layer = np.random.default_rng(seed), 3, seed % 3
    keys = rng.random((case.tokens, case.experts))
    ids = jnp.asarray(keys.argsort(1)[:, : case.width], jnp.int32)
    order = rng.random((layers, case.experts, case.experts))
    order[:, np.arange(case.experts), np.arange(case.experts)] = 2
    lists = order.argsort(2)[..., : case.places]
    ends = rng.integers(0, case.places + 1, (layers, case.experts, 1))
    lists = jnp.asarray(np.where(np.arange(case.places) < ends, lists, -1), jnp.int32)
    resident = jnp.asarray(rng.random(case.experts) < case.resident)
    wanted = ~resident[ids] & jnp.asarray(rng.random(ids.shape) < 0.9)
    depth, budget = jnp.int32(case.depth), jnp.int32(case.budget)
    found = jax.jit(
        lambda: package.search(
            ids, lists, layer, resident, wanted, depth, budget, last_first=case.last_first, **how
        )
    )()
    candidates = Candidates(substitution.candidates_of(ids, lists[layer], resident, depth))
    expected = substitution.substitute(
        ids, candidates, wanted, budget, last_first=case.last_first, form="ranks"
    )
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.searched, expected.searched)
    replaced = np.asarray(found.ids != ids)
    np.testing.assert_array_equal(replaced, expected.replaced)
    return replaced
