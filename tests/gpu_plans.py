"""Programs that plan where a layer's experts run, by Triton."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moejax.experts import residency
from moejax.experts.residency import CacheSizes, no_counts
from pallas_kernels import buddy_search, cache_plan
from pallas_kernels.buddy_search import triton as buddy_triton
from pallas_kernels.cache_plan import triton as plan_triton
from pallas_kernels.target import Target
from tests.gpu_targets import Program, leaf


def plan(
    slots: tuple[int, ...], *, num_experts: int, pairs: int, num_layers: int = 48, waves: int = 0,
    by_rule: bool = False, tokens: int = 1, by_host: bool = False,
) -> Program:  # fmt: skip
    """Where a layer's pairs run, of pools of so many slots: one pool, or the tiers of a policy.

    By a rule tiers hold nothing but by plans; else experts come by other ways too.
    """
    specs = [
        CacheSizes(num_layers=num_layers, num_experts=num_experts, slots=size, transient=pairs)
        for size in slots
    ]

    def empty() -> list[Any]:
        states = [(residency.empty(spec), no_counts(num_layers)) for spec in specs]
        rows = jnp.zeros((num_layers, num_experts), jnp.int32)
        return [
            cache_plan.TierOperands(
                cache_plan.Tables(of.table, of.clock, counts.events, counts.gate), rows
            )
            for of, counts in states
        ]

    tiers = jax.eval_shape(empty)
    shape = tokens, pairs // tokens
    ids, weights = (leaf(*shape, dtype=dtype) for dtype in ("int32", "float32"))
    layer = leaf(dtype="int32")

    def function(tiers: Any, layer: Any, ids: Any, weights: Any, target: Target) -> Any:
        forms = [
            cache_plan.TierShape(
                slots=size, transient=8 if waves else pairs, waves=waves if size else 1,
                is_full=size == num_experts, is_complete=size == num_experts,
                may_be_promoted_elsewhere=not by_rule,
            )
            for size in slots
        ]  # fmt: skip
        gate, by, routed = None, None, None
        if len(slots) > 1:
            gate, routed = jnp.zeros((num_layers, len(slots) + 3), jnp.float32), ids
            by = cache_plan.Wishes(ids % len(slots), ids > 0)
        if by_rule:
            critical, low = jnp.zeros(num_layers, jnp.int32), jnp.int32(len(slots) - 1)
            by = cache_plan.Rule(critical, low - low, low, low > 1, at_least=True)
        host = jnp.arange(pairs + 1, dtype=jnp.int32) // 2 if by_host else None
        return plan_triton.plan_triton(
            tuple(tiers), gate, layer, cache_plan.Asked(ids, weights, by, routed, host),
            jnp.ones(tokens, bool), forms=forms, target=target,
        )  # fmt: skip

    return Program(function, (tiers, layer, ids, weights), (), 1)


def planes(
    slots: int, *, num_experts: int, pairs: int, tokens: int = 1, waves: int = 0, ahead: int = 0,
    num_layers: int = 48,
) -> Program:  # fmt: skip
    """Where a layer's pairs run, of two tiers of planes in one pool; or what it brings ahead."""
    sizes = CacheSizes(
        num_layers=num_layers, num_experts=num_experts, slots=slots, transient=16, planes=2
    )
    forms = [
        cache_plan.TierShape(
            slots=slots, transient=16, waves=waves * number, refines=is_first,
            shares_slots=is_first, planes=2,
        )
        for is_first, number in ((True, 2), (False, 1))
    ]  # fmt: skip

    def empty() -> list[Any]:
        of, counts = residency.empty(sizes), no_counts(num_layers)
        rows = jnp.zeros((num_layers, num_experts), jnp.int32)
        tables = cache_plan.Tables(of.table, of.clock, counts.events, counts.gate)
        first = tables._replace(table=of.table[:, :0])
        return [cache_plan.TierOperands(one, rows) for one in (first, tables)]

    tiers, layer = jax.eval_shape(empty), leaf(dtype="int32")
    ids, weights = (leaf(tokens, pairs // tokens, dtype=dtype) for dtype in ("int32", "float32"))

    def function(tiers: Any, layer: Any, ids: Any, weights: Any, target: Target) -> Any:
        active = jnp.ones(tokens, bool)
        if ahead:
            wanted = ids.reshape(-1)[:ahead]
            return plan_triton.predict_triton(
                tuple(tiers), layer, wanted, active, wanted > 3, forms=forms, target=target
            )
        critical, high = jnp.zeros(num_layers, jnp.int32), jnp.int32(0)
        by = cache_plan.Rule(critical, high, high + 1, high > 0, at_least=True)
        gate = jnp.zeros((num_layers, len(tiers) + 3), jnp.float32)
        return plan_triton.plan_triton(
            tuple(tiers), gate, layer, cache_plan.Asked(ids, weights, by), active, forms=forms,
            target=target,
        )  # fmt: skip

    return Program(function, (tiers, layer, ids, weights), (), 1)


def buddies(
    pairs: int, num_experts: int, places: int, *, num_layers: int = 48, by_pair: bool = False
) -> Program:
    """Substitutes of a token's experts; pairs are allowed them, or the token is."""
    ids, number = leaf(1, pairs, dtype="int32"), leaf(dtype="int32")
    lists = leaf(num_layers, num_experts, places, dtype="int32")

    def function(*operands: Any, target: Target) -> Any:
        return buddy_triton.search_triton(*operands, last_first=False, target=target)

    real = functools.partial(leaf, dtype="float32")
    gate = buddy_search.Gate(real(1, num_experts), real(num_layers), real(), real())
    counts = leaf(num_layers, num_experts, dtype="int32")
    operands = (
        ids, lists, number, leaf(num_experts, dtype="bool"),
        leaf(1, *[pairs] * by_pair, dtype="bool"), number,
        number, gate, counts,
    )  # fmt: skip
    return Program(function, operands, (), 1)
