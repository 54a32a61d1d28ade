"""The search for buddies by one kernel: every implementation equals the policy's own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.policies import buddy_gates
from pallas_kernels import buddy_search
from tests import slow


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
    gated: bool = False
    by_pair: bool = False  # whether pairs are allowed buddies, or tokens
    tables: bool = False  # whether tables say what is resident
    gate_off: bool = False  # by its settings


CASES = {
    "qwen": Case(1, 128, 8, 16, 0.5, 16, 8),
    "mixtral": Case(4, 8, 2, 7, 0.6, 7, 2),
    "budget": Case(5, 60, 6, 10, 0.4, 10, 2),
    "last_first": Case(5, 24, 4, 12, 0.5, 9, 1, last_first=True),
    "crowded": Case(9, 12, 5, 11, 0.8, 11, 5),
    "gated": Case(16, 32, 5, 11, 0.5, 11, 3, gated=True),
    "pairs": Case(6, 24, 5, 11, 0.5, 9, 2, last_first=True, gated=True, by_pair=True),
    "gated_one": Case(2, 4, 1, 1, 0.7, 1, 1, gated=True),
    "nobody": Case(3, 16, 3, 5, 0.0, 5, 3),
    "one": Case(2, 4, 1, 1, 0.7, 1, 1),
    "tables": Case(1, 128, 8, 16, 0.5, 16, 3, tables=True, gated=True, gate_off=True),
    "tables_last_first": Case(5, 24, 4, 12, 0.5, 9, 1, last_first=True, tables=True),
    "no_budget": Case(3, 24, 4, 12, 0.5, 9, 0, tables=True),
}

# One program for all seeds of a case: compiling is most of the time.
SEARCH = jax.jit(buddy_search.search, static_argnames=("last_first", "implementation", "interpret"))
SEARCH_PAIRS = jax.jit(buddy_search.search_pairs, static_argnames="last_first")


def random_gate(
    case: Case, ids: np.ndarray, layers: int, layer: int, rng: np.random.Generator
) -> buddy_search.Gate:
    """One that no rounding decides: tau lies between two tokens' entropies, far from both."""
    logits = rng.standard_normal((case.tokens, case.experts))
    # The chosen ones are the likeliest, by falling probability.
    falling = np.sort(rng.uniform(0, 1, ids.shape), axis=1)[:, ::-1]
    np.put_along_axis(logits, ids, 4 + falling * rng.uniform(0.5, 5, (case.tokens, 1)), axis=1)
    probabilities = jax.nn.softmax(jnp.asarray(logits, jnp.float32))
    temperature, margin = rng.uniform(0.8, 1.2), rng.uniform(0.2, 0.6)
    chosen = buddy_gates.chosen_probabilities(probabilities, jnp.asarray(ids), temperature)
    entropies = np.unique([0.0, *np.asarray(buddy_gates.activating_entropy(chosen)), 1.0])
    widest = np.argmax(np.diff(entropies[: len(entropies) * 3 // 4 + 1]))
    tau = np.full(layers, np.nan, np.float32)
    tau[layer] = entropies[widest : widest + 2].mean() if case.width > 1 else -1
    gaps = np.asarray(buddy_gates._probability_margin(chosen))
    while np.abs(gaps - margin).min() < 1e-4:
        margin += 3e-4
    if case.width == 1:
        margin = 2.0
    reals = map(jnp.float32, (margin, temperature))
    return buddy_search.Gate(probabilities, jnp.asarray(tau), *reals)


def tolerated(gate: buddy_search.Gate, ids: jax.Array, layer: int) -> jax.Array:
    """Applies the policy's gate."""
    chosen = buddy_gates.chosen_probabilities(gate.probabilities, ids, gate.temperature)
    return buddy_gates.tolerates(chosen, gate.tau[layer], gate.margin)


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
    allowed = jnp.asarray(
        rng.random(ids.shape[: 1 + case.by_pair]) < (0.6 if case.by_pair else 0.9)
    )
    gate = random_gate(case, np.asarray(ids), layers, layer, rng) if case.gated else None
    if gate is not None and case.gate_off:
        gate = gate._replace(tau=jnp.full(layers, -1.0), margin=jnp.float32(2))
    passes = allowed.reshape(case.tokens, -1)
    if gate is not None:
        passes &= tolerated(gate, ids, layer)[:, None]
    wanted = ~resident[ids] & passes
    counts = rng.integers(0, 9, (layers, case.experts)).astype(np.int32)
    limits = (jnp.int32(case.depth), jnp.int32(case.budget))

    held = resident
    if case.tables:  # of three layers, with more columns than experts
        held = jnp.asarray(rng.integers(-1, 5, (layers, case.experts + 8)), jnp.int32)
        held = held.at[layer, : case.experts].set(jnp.where(resident, ids[0, 0], -1))
    given = (ids, lists, jnp.int32(layer), held, allowed, *limits, gate, jnp.asarray(counts))
    found = SEARCH(*given, last_first=case.last_first, **how)
    listed = lists[layer, ids]
    expected = SEARCH_PAIRS(ids, listed, resident, wanted, *limits, last_first=case.last_first)
    np.testing.assert_array_equal(found.ids, expected[0])
    np.testing.assert_array_equal(found.searched, expected[1])
    replaced = np.asarray(found.ids != ids)
    np.add.at(counts[layer], np.asarray(ids)[replaced], 1)
    np.testing.assert_array_equal(found.replaced, counts)
    return replaced


class ContractTest(parameterized.TestCase):
    @slow.where(lambda case: case not in tuple(CASES)[:1])
    @parameterized.product(case=tuple(CASES), implementation=("triton", "reference"))
    def test_finds_whom_the_policy_finds(self, case, implementation):
        num = 0
        for seed in range(4):
            how = {"interpret": True} if implementation == "triton" else {}
            num += check(CASES[case], seed, implementation=implementation, **how).sum()
        self.assertEqual(num > 0, case not in ("nobody", "no_budget"))


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_the_compiled_kernel_finds_whom_the_policy_finds(self, case):
        for seed in range(4):
            check(CASES[case], seed, implementation="triton")


class ApiTest(absltest.TestCase):
    def test_what_does_not_fit_is_named(self):
        ids, flags, number = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, bool), jnp.int32(1)
        lists = jnp.zeros((1, 4, 2), jnp.int32)
        with self.assertRaisesRegex(ValueError, r"resident: bool\[5\], not bool\[4\]"):
            buddy_search.search(ids, lists, 0, jnp.zeros(5, bool), flags, number, number)
        given = (ids, lists, 0, jnp.zeros(4, bool), flags, number, number)
        gate = buddy_search.Gate(jnp.zeros((2, 5)), *(jnp.zeros(n) for n in ((1,), (), ())))
        with self.assertRaisesRegex(
            ValueError, r"probabilities: float32\[2, 5\], not float32\[2, 4\]"
        ):
            buddy_search.search(*given, gate)
        with self.assertRaisesRegex(ValueError, "replaced: float32"):
            buddy_search.search(*given, None, jnp.zeros((1, 4)))
