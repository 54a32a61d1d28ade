"""What every implementation of `pallas_kernels.residency_plan` must do: as the tables' own rules.

Random steps of a cache, in one compiled loop: plans, predictions and transfers. At each step
the tables of `moejax.memory.residency` are given to both, whose decisions must be equal, all
integers to the bit.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.ledger import EVENTS, Counts, no_counts
from moejax.memory import residency
from moejax.memory.residency import CacheSpec, Residency
from pallas_kernels import residency_plan as package

COLUMNS = {name: i for i, name in enumerate(EVENTS)}
KINDS = ("plan", "predict", "admit")
LISTED = 3  # experts that a transfer brings
START = 2**31 - 60  # of the clock: it wraps


class Case(NamedTuple):
    """Sizes of a cache, and what a step asks of it."""

    spec: CacheSpec
    tokens: int
    width: int
    limit: int = 2  # of a prediction
    steps: int = 250


class Given(NamedTuple):
    """Of one step, an operand of the loop."""

    kind: Any
    layer: Any
    ids: Any  # int32[N, A]
    active: Any  # bool[N]
    weights: Any  # float32[N, A]
    ahead: Any  # int32[limit]
    listed: Any  # int32[LISTED], of transfers


def spec(layers: int, experts: int, slots: int, transient: int, banks: int = 1) -> CacheSpec:
    return CacheSpec(
        num_layers=layers, num_experts=experts, slots=slots, transient=transient, banks=banks
    )


CASES = {
    "decode": Case(spec(3, 9, 4, 2, banks=2), 1, 4),
    "decode_in_one_bank": Case(spec(2, 12, 7, 2), 1, 3, limit=4),
    "qwen": Case(spec(2, 128, 48, 8), 1, 8, limit=8, steps=200),
    "scan": Case(spec(2, 8, 3, 2), 4, 2),
    "scan_in_banks": Case(spec(2, 7, 4, 3, banks=2), 5, 3, limit=3),
    "no_cache": Case(spec(2, 5, 0, 2), 2, 2),
    "one_slot": Case(spec(2, 4, 1, 1), 1, 1),
    "all_fit": Case(spec(2, 6, 6, 1), 3, 2),
    "many_pairs": Case(spec(1, 40, 20, 7), 16, 4, limit=8, steps=150),
}


def random_steps(case: Case, seed: int) -> Given:
    """What a program might ask, some experts more than others, some tokens done."""
    rng, sizes, n = np.random.default_rng(seed), case.spec, case.steps
    shares = np.array([10, 4, 3])
    shares[1:] *= sizes.slots > 0
    keys = rng.gumbel(size=(n, case.tokens, sizes.num_experts))
    keys -= rng.uniform(0, 1.5) * np.log(np.arange(1, sizes.num_experts + 1))
    ids = (-keys).argsort(2)[..., : case.width]
    ahead = (-keys[:, 0]).argsort(1)[:, 1 : 1 + case.limit]
    return Given(
        rng.choice(len(KINDS), n, p=shares / shares.sum()).astype(np.int32),
        rng.integers(sizes.num_layers, size=n, dtype=np.int32),
        ids.astype(np.int32),
        rng.random((n, case.tokens)) < 0.85,
        rng.integers(0, 9, (n, case.tokens, case.width)).astype(np.float32) / 8,
        np.where(rng.random(ahead.shape) < 0.2, -1, ahead).astype(np.int32),
        rng.integers(-1, sizes.num_experts, (n, LISTED), dtype=np.int32),
    )


def marked(ids: jax.Array, active: jax.Array, num_experts: int) -> jax.Array:
    places = jnp.where(active & (ids >= 0), ids, num_experts).reshape(-1)
    return jnp.zeros(num_experts, bool).at[places].set(True, mode="drop")


def by_tables(case: Case, given: Given, state: Residency, counts: Counts, row_of: Any) -> Any:
    """A plan by `moejax.memory.residency`, in the form of `package.plan`'s."""
    active = jnp.broadcast_to(given.active[:, None], given.ids.shape)
    needed = marked(given.ids, active, case.spec.num_experts)
    bound = min(given.ids.size, case.spec.num_experts)
    made, state, counts = residency.plan(case.spec, state, given.layer, needed, bound, counts)
    mass = jnp.sum(jnp.where(active, given.weights, 0.0)).reshape(1)
    counts = counts.add_gate_mass(given.layer, mass)

    def rows(experts: jax.Array) -> jax.Array:
        found = row_of[given.layer, jnp.maximum(experts, 0)]
        return jnp.where(experts >= 0, found, -1)

    placed = package.Placed(
        jnp.where(active, made.slot[given.ids], -1),
        jnp.where(active, made.wave[given.ids], -1),
        rows(made.admitted),
        made.admitted_slots,
        rows(made.streamed),
    )
    return placed, state, counts


def ahead_by_tables(case: Case, given: Given, state: Residency, counts: Counts, row_of: Any) -> Any:
    """The same of a prediction."""
    wanted = marked(given.ahead, jnp.any(given.active), case.spec.num_experts)
    made, state, counts = residency.predict(
        case.spec, state, given.layer, wanted, case.limit, counts
    )
    rows = row_of[given.layer, jnp.maximum(made.experts, 0)]
    return package.Fetch(jnp.where(made.experts >= 0, rows, -1), made.slots), state, counts


def by_package(case: Case, given: Given, state: Residency, counts: Counts, row_of: Any, **how: Any):
    """A plan, and a prediction on the same tables."""
    tables = package.Tables(state.table, state.clock, counts.events, counts.gate)
    bound = min(given.ids.size, case.spec.num_experts)
    waves = package.Waves(residency.num_waves(case.spec, bound), case.spec.transient)
    common = (tables, row_of, given.layer)
    planned = package.plan(
        *common, given.ids, given.active, given.weights, waves=waves,
        banks=case.spec.banks, columns=COLUMNS, **how,
    )  # fmt: skip
    if not case.spec.slots:
        return planned, None
    return planned, package.predict(
        *common, given.ahead, given.active, banks=case.spec.banks, columns=COLUMNS, **how
    )


def tables_of(state: Residency, counts: Counts) -> package.Tables:
    return package.Tables(state.table, state.clock, counts.events, counts.gate)


@functools.partial(jax.jit, static_argnums=(0, 2))
def replay(case: Case, steps: Given, how: Any, row_of: jax.Array) -> Any:
    """(found, expected) after each step, stacked; every step is also taken by the tables."""

    def step(carry: Any, given: Given) -> Any:
        state, counts = carry
        plan = by_tables(case, given, state, counts, row_of)
        expected = [(tables_of(*plan[1:]), plan[0])]
        branches = [lambda: plan[1:]]
        if case.spec.slots:
            ahead = ahead_by_tables(case, given, state, counts, row_of)
            expected.append((tables_of(*ahead[1:]), ahead[0]))
            branches.append(lambda: ahead[1:])
            listed = given.listed
            branches.append(
                lambda: residency.admit(case.spec, state, given.layer, listed, counts)[1:]
            )
        else:
            expected.append(None)
        found = by_package(case, given, state, counts, row_of, **dict(how))
        after = jax.lax.switch(jnp.minimum(given.kind, len(branches) - 1), branches)
        return tuple(after), (found, tuple(expected))

    state = residency.empty(case.spec)
    start = dataclasses.replace(state, clock=jnp.int32(START)), no_counts(case.spec.num_layers)
    return jax.lax.scan(step, start, steps)[1]


def check(case: Case, seed: int, **how: Any) -> Any:
    """Raises AssertionError at a difference; returns the tables after each plan."""
    shape = (case.spec.num_layers, case.spec.num_experts)
    row_of = np.random.default_rng(seed).permutation(np.prod(shape)).reshape(shape)
    row_of = jnp.asarray(np.where(row_of % 11 == 10, -1, row_of), jnp.int32)
    found, expected = replay(case, random_steps(case, seed), tuple(how.items()), row_of)
    for call, one, other in zip(("plan", "predict"), found, expected, strict=True):
        pairs = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
        for (path, array), wanted in pairs:
            np.testing.assert_array_equal(array, wanted, f"{call}{jax.tree_util.keystr(path)}")
    return found[0]
