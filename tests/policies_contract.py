"""Contract of every policy: THE checks, over the cases of `tests.policies_cases`.

They compare compiled with eager functions, scans and a `vmap` over settings with loops of single
calls, rows beside padding with rows alone, and carry out transfers exactly as `Requests` defines
them.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.base import (
    SKIPPED,
    AnyPolicy,
    Decision,
    Observation,
    PolicySpec,
    Requests,
    vmap_decide,
)
from pallas_kernels.cache_plan import Rule
from pallas_kernels.cache_plan.reference import _wishes_of
from tests.policies_cases import FIRST_CASES, A, Case, E

# A product or sum in another order: a few units of the last place of float32.
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
WISHES = jax.jit(_wishes_of)


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
        "ahead": (experts, "int32"),
    }
    for name, leaf in decision._asdict().items():
        if leaf is None and name == "ahead":
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
    if case is FIRST_CASES.get(case.name, case):  # it is slow
        eager, _ = first.decide(start, jax.tree.map(jnp.asarray, observation))
        assert_same(at(found[0][1], 0, 0), eager)


def check_layers_apart(case: Case, trace: Any) -> None:
    """Where layers are said not to depend on one another: all at once is one after the other."""
    policy = case.policies[0]
    axes = policy.layer_axes
    if axes is None:
        said = (getattr(policy, name, None) for name in ("choose", "selection", "bypass_bytes"))
        of_all_layers = [word for word in said if word not in (None, "none", "buddies")]
        assert of_all_layers, "only draws are numbered, and a budget of bytes is of all layers"
        return
    one, state = compiled("decide", policy), policy.init(case.spec)
    together = jax.jit(functools.partial(vmap_decide, policy))
    for step in range(jax.tree.leaves(trace)[0].shape[0]):
        seen = at(trace, step)
        decisions, after = jax.device_get(together(state, seen))
        for layer in range(case.spec.num_layers):
            decision, state = one(state, at(seen, layer))
            assert_same(at(decisions, layer), decision)
        assert_same(after, state)
        if decisions.ahead is not None:
            elsewhere = dataclasses.replace(seen, resident=~seen.resident)
            np.testing.assert_array_equal(together(state, elsewhere)[0].ahead, decisions.ahead)


def check_rules(case: Case, trace: Any) -> int:
    """Compares the rule of a decode step's tiers with the decisions; counts rules."""
    found = [policy.decode_rule(policy.init(case.spec)) for policy in case.policies]
    for policy, rule in zip(case.policies, found, strict=True):
        if rule is not None:
            _check_rule(case.spec, policy, rule, trace)
    return sum(rule is not None for rule in found)


def _check_rule(spec: PolicySpec, policy: AnyPolicy, rule: Rule, trace: Any) -> None:
    state = policy.init(spec)
    for step in range(jax.tree.leaves(trace)[0].shape[0]):
        for layer in range(spec.num_layers):
            o = dataclasses.replace(at(trace, step, layer), is_prefill=False, importance=None)
            decision, state = jax.device_get(compiled("decide", policy)(state, o))
            by_rule = WISHES(rule, decision.ids, o.active, layer, o.resident)
            active = np.asarray(o.active)
            np.testing.assert_array_equal(np.asarray(by_rule.tier)[active], decision.tier[active])
            runs = decision.tier != SKIPPED
            np.testing.assert_array_equal(
                np.asarray(by_rule.at_least)[runs], decision.at_least[runs]
            )
            if not policy.substitutes:
                np.testing.assert_array_equal(decision.ids, o.ids)
            own = runs & (decision.ids == o.ids)
            np.testing.assert_array_equal(decision.weights[own], np.asarray(o.weights)[own])


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
    """Transfers of a run: promotions, demotions, and the final residents."""

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


def check_rest(case: Case, trace: Any, setting: int = 0) -> int:
    """Asked only where it may ask for something, a policy asks for what it asks else.

    A request is carried out a step, so that others wait. Returns in how many steps it rested.
    """
    spec, policy = case.spec, case.policies[setting]
    always = rests = policy.init(spec)
    resident, late = first_resident(spec), collections.deque[tuple[int, int, int]]()
    said, passed, known, left_out = 0, 0, resident.copy(), 0
    for step in range(jax.tree.leaves(trace)[0].shape[0]):
        for layer in range(spec.num_layers):
            observation = dataclasses.replace(at(trace, step, layer), resident=resident[layer])
            _, always = compiled("decide", policy)(always, observation)
            _, rests = compiled("decide", policy)(rests, observation)
        passed += int(observation.active.sum())
        requests, always = compiled("transfers", policy)(always, resident)
        if passed >= said or (known != resident).any():
            mine, rests = compiled("transfers", policy)(rests, resident)
            known, passed = resident.copy(), 0
            said = int(jax.jit(policy.tokens_until_change)(rests, resident))
            assert_same(mine, requests)
            said = 0 if any(True for _ in entries(mine)) else said
        else:
            left_out += 1
            assert not list(entries(requests)), f"step {step}: it rests, but asks"
        if late:
            carry_out(spec, resident, *late.popleft())
        late.extend(entry for entry in entries(requests) if entry not in late)
    return left_out


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
    """Yields the entries that request something."""
    for entry in zip(*(np.asarray(field).tolist() for field in requests), strict=True):
        assert min(entry) >= 0 or entry == (-1, -1, -1), f"half a request: {entry}"
        if entry[0] >= 0:
            yield entry
