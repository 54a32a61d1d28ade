"""What every policy must do: cases, random traces, THE checks.

A policy enters by its cases in `CASES`; a budget of its own by `Case.within`. The checks compare
what is compiled with what is not, scans and a `vmap` over settings with loops of single calls, rows
beside padding with rows alone, and carry transfers out by the letter of `Requests`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.dymoe import FIGURE_3
from moejax.policies.interface import (
    SKIPPED,
    AnyPolicy,
    Decision,
    Observation,
    PolicySpec,
    Requests,
)
from moejax.policies.make import make_policy

M, E, A = 3, 8, 3
SPEC = PolicySpec(
    num_layers=M,
    num_experts=E,
    width=A,
    tiers=("int4", "int2"),
    expert_bytes=(200, 100),
    slots=(3, E),
)
EXCLUSIVE = dataclasses.replace(SPEC, slots=(3, E - 3))  # an expert is in one tier
# A product or sum in another order: a few units of the last place of float32.
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}

Within = Callable[[AnyPolicy, Observation, Decision], None]


class Case(NamedTuple):
    """A policy with settings that sweep; of the first one alone, the statics are compiled."""

    name: str
    settings: tuple[dict[str, Any], ...] = ({},)
    spec: PolicySpec = SPEC
    within: Within | None = None  # raises AssertionError for a decision over the policy's budget

    @property
    def policies(self) -> list[AnyPolicy]:
        return [make_policy(self.name, **settings) for settings in self.settings]


def _dymoe_within(policy: Any, observation: Observation, decision: Decision) -> None:
    """At most t_l of a lone token's experts, or of a prompt's, are critical."""
    layer, rows = int(observation.layer), np.asarray(observation.active)
    critical = np.asarray(decision.ids)[rows][np.asarray(decision.tier)[rows] == 0]
    if observation.is_prefill or rows.sum() == 1:
        requested = E if observation.is_prefill else A
        assert len(set(critical.tolist())) <= policy.counts(M, requested)[layer]
    if decision.ahead is not None:
        limit = policy.counts(M, E)[layer + 1] if layer + 1 < M else 0
        assert (np.asarray(decision.ahead) >= 0).sum() <= min(limit, SPEC.slots[0])


_TAUS = (
    {"period": 4, "max_requests": 4},
    {"period": 4, "max_requests": 4, "tau": "fixed", "alpha": 0.5, "n_hot": (2, 1, 3)},
    {"period": 3, "max_requests": 4, "hysteresis": 0.5, "warmup": 9, "n_hot": 1},
    {"period": 4, "max_requests": 4, "choice": "random", "seed": 3},
)
CASES = {
    "resident": Case("resident", ({}, {"tier": "int2"})),
    "on_demand": Case("on_demand", ({"prefetch": 2}, {"tier": "int2", "prefetch": 1}, {})),
    "dynaexq": Case("dynaexq", _TAUS),
    "dynaexq_exclusive": Case("dynaexq", _TAUS, EXCLUSIVE),
    "dymoe_4_2": Case(
        "dymoe",
        (
            {},
            {"retention": 0.9, "rounding": "ceil", "prefetch": 0, "heavy_count": 2},
            {"retention": 0.6, "schedule": "sensitivity", "sensitivity": (3.0, 2.0, 1.0)},
        ),
        within=_dymoe_within,
    ),
    "dymoe_4_0": Case(
        "dymoe",
        (
            {"low": "skip", "renormalise": True},
            {"low": "skip", "schedule": "linear", "prefetch": 1},
            {"high": "int2", "low": "skip", "schedule": "equal", "retention": 0.4},
        ),
    ),
    "dymoe_reuses": Case("dymoe", ({"low": "skip", "reuse_skipped": True, "selection": "load"},)),
    "dymoe_random": Case("dymoe", (FIGURE_3["random"], FIGURE_3["random"] | {"seed": 7})),
}

FIRST_CASES = {case.name: case for case in reversed(CASES.values())}


def random_trace(spec: PolicySpec, steps: int, tokens: int, *, prefill: bool, seed: int) -> Any:
    """Observations with leading axes [steps, M]; a few experts are hot, others as time goes on."""
    rng = np.random.default_rng(seed)
    shape = steps, spec.num_layers, tokens
    logits = rng.standard_normal((*shape, spec.num_experts))
    drift = np.arange(steps) // 4
    for step in range(steps):
        logits[step, ..., (drift[step] * 2) % spec.num_experts] += 2.0
    probabilities = _softmax(logits)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[..., : spec.width]
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    held = rng.random((*shape[:2], len(spec.tiers), spec.num_experts)) < 0.5
    return Observation(  # of numpy arrays, which are cheap to index
        layer=np.tile(np.arange(spec.num_layers, dtype=np.int32), (steps, 1)),
        probabilities=probabilities.astype(np.float32),
        ids=ids.astype(np.int32),
        weights=(weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32),
        active=np.ones(shape, bool),
        resident=held,
        importance=rng.random(shape, np.float32) if prefill else None,
        predicted=_softmax(rng.standard_normal(logits.shape)).astype(np.float32),
        is_prefill=prefill,
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits)
    return powers / powers.sum(axis=-1, keepdims=True)


def roll(policy: AnyPolicy, state: Any, trace: Any) -> tuple[Any, Any]:
    """The state after a trace, and its decisions [steps, M, ...]: scans over steps and layers."""

    def layer(state: Any, observation: Observation) -> tuple[Any, Decision]:
        decision, state = policy.decide(state, observation)
        return state, decision

    return jax.lax.scan(lambda s, step: jax.lax.scan(layer, s, step), state, trace)


@functools.cache
def compiled(function: str, policy: AnyPolicy) -> Any:
    """`roll` over stacked states, `decide` or `transfers` of a policy, jitted once."""
    if function == "roll":
        return jax.jit(jax.vmap(functools.partial(roll, policy), in_axes=(0, None)))
    return jax.jit(getattr(policy, function))


def rolled(case: Case, trace: Any) -> list[tuple[Any, Any]]:
    """`roll` of each setting from its first state, all in one call of the first one's program."""
    states = [policy.init(case.spec) for policy in case.policies]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    found = jax.device_get(compiled("roll", case.policies[0])(stacked, trace))
    return [at(found, i) for i in range(len(states))]


def at(tree: Any, *index: int) -> Any:
    """The entry of every leaf, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[index]), tree)


def assert_same(found: Any, expected: Any) -> None:
    """Trees of one structure: integers and flags equal, floats but for rounding."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise AssertionError(f"{jax.tree.structure(found)} is not {jax.tree.structure(expected)}")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, **CLOSE)
        else:
            np.testing.assert_array_equal(a, b)


def check_form(case: Case, trace: Any) -> None:
    """Shapes, dtypes and ranges of decisions and requests; the state's never change."""
    spec, policy = case.spec, case.policies[0]
    state = policy.init(spec)
    resident = jnp.zeros((spec.num_layers, len(spec.tiers), spec.num_experts), bool)
    observation = at(trace, 0, 0)
    decision, after = jax.eval_shape(policy.decide, state, observation)
    requests, later = jax.eval_shape(policy.transfers, state, resident)
    for new in (after, later):
        if jax.tree.structure(new) != jax.tree.structure(state):
            raise AssertionError("the state changes its structure")
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
            if (a.shape, a.dtype, a.weak_type) != (b.shape, b.dtype, b.aval.weak_type):
                raise AssertionError(f"a leaf of the state changes: {b.aval} to {a}")
    pairs, experts = observation.ids.shape, (spec.num_experts,)
    expected = {
        "ids": (pairs, "int32"),
        "tier": (pairs, "int32"),
        "weights": (pairs, "float32"),
        "at_least": (pairs, "bool"),
        "keep": (experts, "float32"),
        "ahead": (experts, "int32"),
    }
    for name, leaf in decision._asdict().items():
        if leaf is None and name in ("keep", "ahead"):
            continue
        assert (leaf.shape, leaf.dtype.name) == expected[name], f"{name} is {leaf}"
    assert len({leaf.shape for leaf in requests}) == 1, requests
    assert {leaf.dtype.name for leaf in requests} == {"int32"}, requests


def check_values(case: Case, trace: Any) -> None:
    """Ranges of a trace's decisions, and the policy's own budget."""
    spec = case.spec
    for policy, (_, decisions) in zip(case.policies, rolled(case, trace), strict=True):
        ids, tier, weights = (np.asarray(decisions[i]) for i in range(3))
        assert ids.min() >= 0
        assert ids.max() < spec.num_experts
        np.testing.assert_array_less(0, np.diff(np.sort(ids, axis=-1), axis=-1))
        assert tier.min() >= SKIPPED
        assert tier.max() < len(spec.tiers)
        assert np.isfinite(weights).all()
        assert weights.min() >= 0
        if decisions.ahead is not None:
            ahead = np.asarray(decisions.ahead)
            assert ahead.min() >= -1
            assert ahead.max() < len(spec.tiers)
            assert (ahead[:, -1] == -1).all(), "experts past the last layer are brought ahead"
        if case.within is not None:
            for index in np.ndindex(ids.shape[:2]):
                case.within(policy, at(trace, *index), at(decisions, *index))


def check_forms_agree(case: Case, trace: Any) -> None:
    """`vmap` over settings and scans equal loops of single calls; a second run equals the first.

    One program serves all settings, and for the first one a call that is not compiled equals it.
    """
    first, found = case.policies[0], rolled(case, trace)
    start, observation = first.init(case.spec), at(trace, 0, 0)
    program = str(jax.make_jaxpr(first.decide)(start, observation))
    for policy, (last, decisions) in zip(case.policies, found, strict=True):
        state = policy.init(case.spec)
        mine = str(jax.make_jaxpr(policy.decide)(state, observation))
        assert mine == program, f"a setting that sweeps is read from {policy}"
        for index in np.ndindex(jax.tree.leaves(trace)[0].shape[:2]):
            decision, state = compiled("decide", first)(state, at(trace, *index))
            assert_same(at(decisions, *index), decision)
        assert_same(last, state)
    jax.tree.map(np.testing.assert_array_equal, rolled(case, trace), found)
    if case is FIRST_CASES[case.name]:  # it is slow
        eager, _ = first.decide(start, jax.tree.map(jnp.asarray, observation))
        assert_same(at(found[0][1], 0, 0), eager)


def check_cost(case: Case, trace: Any) -> None:
    """A decode step has nothing that XLA does not fuse on a GPU, where each launch costs 1-2 us."""
    policy = case.policies[0]
    text = compiled("decide", policy).lower(policy.init(case.spec), at(trace, 0, 0)).as_text()
    for slow in ("stablehlo.sort", "top_k", "stablehlo.scatter", "stablehlo.while", "custom_call"):
        assert slow not in text, slow


def check_padding(case: Case, trace: Any) -> None:
    """Rows that are not active, before and after the others, change nothing and ask for nothing."""
    policy = case.policies[0]
    state = policy.init(case.spec)
    for step in range(4):
        observation = at(trace, step, 1)
        padded = _padded(observation)
        (decision, after), (found, later) = (
            jax.device_get(compiled("decide", policy)(state, seen))
            for seen in (observation, padded)
        )
        rows = np.asarray(padded.active)
        mine = found._replace(
            ids=found.ids[rows],
            tier=found.tier[rows],
            weights=found.weights[rows],
            at_least=found.at_least[rows],
        )
        assert_same(mine, decision)
        assert_same(later, after)
        np.testing.assert_array_equal(np.asarray(found.tier)[~rows], SKIPPED)
        state = after


def check_nothing_active(case: Case, trace: Any) -> None:
    """A step of padding alone brings nothing ahead, and leaves what the next ones decide alone."""
    policy = case.policies[0]
    state = policy.init(case.spec)
    _, state = compiled("decide", policy)(state, at(trace, 0, 0))
    idle = at(trace, 1, 0)
    idle = dataclasses.replace(idle, active=np.zeros_like(idle.active))
    decision, after = compiled("decide", policy)(state, idle)
    np.testing.assert_array_equal(decision.tier, SKIPPED)
    assert decision.ahead is None or (np.asarray(decision.ahead) == -1).all()
    moves = compiled("transfers", policy)
    resident = jnp.zeros((case.spec.num_layers, len(case.spec.tiers), case.spec.num_experts), bool)
    assert_same(moves(after, resident)[0], moves(state, resident)[0])


def _padded(observation: Observation) -> Observation:
    """With a row of noise before the others and two after them."""
    rng = np.random.default_rng(0)

    def pad(leaf: Any) -> Any:
        noise = 9 * rng.random((3, *leaf.shape[1:]))
        if leaf.dtype == np.int32:  # ids
            noise = np.stack([rng.permutation(E)[:A] for _ in range(3)])
        noise = noise.astype(leaf.dtype)
        return np.concatenate([noise[:1], leaf, noise[1:]])

    def some(leaf: Any) -> Any:
        return None if leaf is None else pad(leaf)

    return dataclasses.replace(
        observation,
        probabilities=pad(observation.probabilities),
        ids=pad(observation.ids),
        weights=pad(observation.weights),
        active=np.pad(observation.active, (1, 2)),
        importance=some(observation.importance),
        predicted=some(observation.predicted),
    )


class Moves(NamedTuple):
    """What a run asked for: experts that went up or down a tier, and what was there in the end."""

    promotions: int
    demotions: int
    resident: np.ndarray  # bool[M, T, E]


def check_transfers(case: Case, trace: Any, setting: int = 0) -> Moves:
    """Requests that are carried out at once, in their order, never take more than the slots.

    A pool of the exclusive spec may hold one expert of a layer more within a pair of requests, as
    one buffer for transfers allows.
    """
    spec, policy = case.spec, case.policies[setting]
    state, resident = policy.init(spec), first_resident(spec)
    up = down = 0
    for step in range(jax.tree.leaves(trace)[0].shape[0]):
        for layer in range(spec.num_layers):
            observation = at(trace, step, layer)
            observation = dataclasses.replace(observation, resident=resident[layer])
            _, state = compiled("decide", policy)(state, observation)
        requests, state = compiled("transfers", policy)(state, resident)
        done = list(entries(requests))
        for number, (layer, expert, tier) in enumerate(done):
            was = resident[layer, :, expert].copy()
            carry_out(spec, resident, layer, expert, tier)
            assert not (was == resident[layer, :, expert]).all(), "a request that moves nothing"
            up, down = up + (tier == 0), down + (tier > 0)
            over = resident[layer].sum(axis=1) - np.asarray(spec.slots)
            assert over[0] <= 0, f"{over[0]} hot experts over the budget after request {number}"
            assert over[1] <= 1, f"{over[1]} cold experts over the budget after request {number}"
        again, _ = compiled("transfers", policy)(state, resident)
        assert not set(done) & set(entries(again)), "what was carried out is asked for again"
    return Moves(up, down, resident)


def first_resident(spec: PolicySpec) -> np.ndarray:
    """bool[M, T, E]: nothing hot where the low tier holds all, else the first experts hot."""
    resident = np.zeros((spec.num_layers, len(spec.tiers), spec.num_experts), bool)
    if spec.slots[-1] < spec.num_experts:
        resident[:, 0, : spec.slots[0]] = True
        resident[:, -1, spec.slots[0] :] = True
    else:
        resident[:, -1] = True
    return resident


def carry_out(spec: PolicySpec, resident: np.ndarray, layer: int, expert: int, tier: int) -> None:
    """One request, in place."""
    resident[layer, :, expert] = False
    resident[layer, tier, expert] = True
    if spec.slots[-1] == spec.num_experts:
        resident[layer, -1, expert] = True


def entries(requests: Requests) -> Iterator[tuple[int, int, int]]:
    """Those that ask for something."""
    for entry in zip(*(np.asarray(field).tolist() for field in requests), strict=True):
        assert min(entry) >= 0 or entry == (-1, -1, -1), f"half a request: {entry}"
        if entry[0] >= 0:
            yield entry
