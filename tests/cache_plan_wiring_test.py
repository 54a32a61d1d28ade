"""A layer of pooled experts with the kernel that plans: the same outputs, pools and counts."""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts import cache_planner as placing
from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.experts.cached_experts import CachedExperts
from moejax.experts.residency import CacheSizes, empty, no_counts
from moejax.experts.state import CacheSpec, ExpertCache, HostRows, TierSlots, TierSpec, no_gate
from moejax.inference.runner import Runner
from moejax.models.layer_index import layer_indices
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import MoeInputs, routing_of
from moejax.policies.base import PolicySpec
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import DyMoE
from moejax.weights import linear as ops
from pallas_kernels import buddy_search, cache_plan, expert_fetch
from pallas_kernels.target import Target
from tests import slow, tiny_engine
from tests.buddymoe_cases import random_lists
from tests.refining_tiers_test import shared_memory

CONFIG = tiny_engine.CONFIG
NUM_LAYERS, NUM_EXPERTS, WIDTH = 2, CONFIG.num_experts, 16


@contextlib.contextmanager
def interpreted() -> Any:
    """The kernels run on the CPU; yields the names of those that were called."""
    calls = []

    def run(name: str, call: Any, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return call(*args, **options, interpret=options.get("implementation") != "reference")

    patches = [
        mock.patch.object(package, name, functools.partial(run, name, getattr(package, name)))
        for package, name in (
            (cache_plan, "plan"), (cache_plan, "predict"), (expert_fetch, "fetch"),
            (buddy_search, "search"),
        )
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for cache in (placing._call, placing._planned_by_expert):
            cache.clear_cache()
            stack.callback(cache.clear_cache)
        for patch in patches:
            stack.enter_context(patch)
        yield calls


def steps(
    slots: int, ahead: int, tokens: int, kernels: ops.Kernels, policy: BuddyMoe | None = None
) -> Any:
    """Outputs of some steps of both layers, and the cache after them."""
    cache = CacheSizes(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, slots=slots, transient=2,
        banks=2 if ahead else 1,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    rows = NUM_LAYERS * NUM_EXPERTS

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    store = HostRows(
        normal(rows, 2 * WIDTH, WIDTH), normal(rows, WIDTH, WIDTH),
        jnp.asarray(rng.permutation(rows).reshape(NUM_LAYERS, -1), jnp.int32),
    )  # fmt: skip
    spec = TierSpec(cache, ahead)

    @jax.jit
    def step(cache: ExpertCache, x: jax.Array, logits: jax.Array, mask: jax.Array) -> Any:
        cached, outputs = CacheSpec(policy, ("stored",), (spec,)), []
        experts = CachedExperts(cached, CONFIG, cache, (store,), ("row",), kernels)
        routings, carry = [routing_of(layer, CONFIG) for layer in logits], experts.init()
        for layer, routing in zip(layer_indices(CONFIG), routings, strict=True):
            ahead = (lambda: routings[1]) if layer.next_moe else None
            found, carry, _ = experts(carry, MoeInputs(layer, x, routing, mask, ahead, None))
            outputs.append(jnp.where(mask[:, None], found, 0.0))
        return carry.cache, outputs

    pool = TierSlots(
        tuple(
            tuple(jnp.zeros((cache.num_slots, n, WIDTH)) for n in (2 * WIDTH, WIDTH))
            for _ in range(cache.banks)
        ),
        empty(cache), no_counts(NUM_LAYERS),
    )  # fmt: skip
    state, outputs, gate = (), [], None
    if policy is not None:
        facts = PolicySpec(
            num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, width=CONFIG.experts_per_token,
            tiers=("stored",), expert_bytes=(1,), slots=(slots,),
        )  # fmt: skip
        state, gate = policy.init(facts), no_gate(NUM_LAYERS, 1)
    held = ExpertCache((pool,), state, gate)
    for number in range(6):
        mask = jnp.arange(tokens) != (number % 3 if tokens > 1 else -1)
        held, out = step(held, normal(tokens, WIDTH), normal(2, tokens, NUM_EXPERTS), mask)
        outputs.append(out)
    return outputs, held


class WiringTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(
        (6, 0, 1), (4, 2, 1), (3, 2, 4), (0, 0, 2), (8, 2, 5), (5, 2, 9), (3, 0, 9)
    )
    def test_a_layer_gives_what_it_gave(self, slots, ahead, tokens):
        expected = steps(slots, ahead, tokens, ops.NO_KERNELS)
        with interpreted() as calls:
            found = steps(slots, ahead, tokens, ops.Kernels(Target("gpu", (9, 0))))
        self.assertEqual(calls.count("plan"), 1)  # traced once for both layers
        self.assertEqual(calls.count("predict"), int(ahead > 0))
        self.check(found, expected)

    @pytest.mark.slow
    def test_experts_of_a_chunk_are_planned_like_its_pairs(self):
        found = steps(3, 0, 9, ops.NO_KERNELS)
        by_pair = functools.partial(placing._call, cache_plan.plan)
        with mock.patch.object(placing, "_planned_by_expert", by_pair):
            expected = steps(3, 0, 9, ops.NO_KERNELS)
        self.check(found, expected)
        counts = [of[1].tiers[0].counts.gate for of in (found, expected)]
        np.testing.assert_array_equal(*counts)

    @parameterized.parameters(1, 3)
    @pytest.mark.slow
    def test_buddies_replace_what_the_prefetch_missed(self, tokens):
        lists = random_lists(np.random.default_rng(1), NUM_LAYERS, NUM_EXPERTS)
        policy = BuddyMoe(lists=lists, prefetch=2, rho=1, max_requests=0)
        expected = steps(4, 2, tokens, ops.NO_KERNELS, policy)
        with interpreted() as calls:
            policy = dataclasses.replace(policy, form="kernel")
            found = steps(4, 2, tokens, ops.Kernels(Target("gpu", (9, 0))), policy)
        self.assertEqual(set(calls), {"plan", "predict", "fetch", "search"})
        self.check(found, expected)
        cache = found[1]
        jax.tree.map(np.testing.assert_array_equal, cache.state, expected[1].state)
        np.testing.assert_allclose(cache.gate, expected[1].gate, rtol=1e-6)
        self.assertGreater(int(cache.tiers[0].counts.prefetch_hits.sum()), 0)
        self.assertGreater(int(cache.state.replaced.sum()), 0)

    def check(self, found, expected):
        (outputs, cache), (wanted, wanted_cache) = found, expected
        pool, wanted_pool = cache.tiers[0], wanted_cache.tiers[0]
        jax.tree.map(np.testing.assert_array_equal, outputs, wanted)
        np.testing.assert_allclose(pool.counts.gate, wanted_pool.counts.gate, rtol=1e-6)
        np.testing.assert_array_equal(pool.counts.events, wanted_pool.counts.events)
        self.assertGreater(int(pool.counts.misses.sum()), 0)
        jax.tree.map(np.testing.assert_array_equal, pool.residency, wanted_pool.residency)
        jax.tree.map(np.testing.assert_array_equal, pool.banks, wanted_pool.banks)

    @pytest.mark.slow
    def test_planes_in_shared_slots(self):
        memory = shared_memory(DyMoE(prefetch=2), 9, prefetch=2)
        rng, pools = np.random.default_rng(2), [tier.pool for tier in memory.tiers]
        rows, width = [tier.store.row_of for tier in memory.tiers], CONFIG.experts_per_token
        ids = jnp.asarray(rng.permutation(NUM_EXPERTS)[: 2 * width].reshape(2, width), jnp.int32)
        wishes = cache_plan.Wishes(ids % 2, ids > 3)
        asked = cache_plan.Asked(ids, jnp.ones(ids.shape), wishes)

        def plans(target: Target | None) -> Any:
            planner = placing.CachePlanner(memory.spec.tiers, target)
            ahead, mask = jnp.arange(3, dtype=jnp.int32), jnp.ones(2, bool)
            gate = no_gate(NUM_LAYERS, 2)
            jobs, tiers = planner.plan_prefetch(pools, rows, 1, ahead, mask, ahead > 1)
            made, _, gate, tiers = planner.plan_layer(tiers, rows, gate, 1, asked, mask)
            fetches = [(of.rows, of.slots) for of in (*jobs, *made.fetch) if of is not None]
            return fetches, made.tier, made.slot, made.base.slot, gate, tiers

        expected = jax.jit(plans, static_argnums=0)(None)
        with interpreted() as calls:
            found = jax.jit(plans, static_argnums=0)(Target("gpu", (9, 0)))
        self.assertEqual(calls, ["predict", "plan"])
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        self.assertGreater(int(found[-1][1].counts.misses.sum()), 0)

    def test_what_the_kernel_does_not_plan(self):
        cache = CacheSizes(num_layers=2, num_experts=NUM_EXPERTS, slots=3, transient=2)
        gpu, cpu = (Target(name, (9, 0)) for name in ("gpu", "cpu"))

        def serves(spec: TierSpec, target: Target | None, pairs: int) -> bool:
            return placing.CachePlanner((spec,), target).refusal(pairs) is None

        self.assertTrue(serves(TierSpec(cache), gpu, 256))
        self.assertFalse(serves(TierSpec(cache), gpu, 257))
        self.assertFalse(serves(TierSpec(cache), cpu, 8))
        self.assertFalse(serves(TierSpec(cache), None, 8))
        self.assertFalse(serves(TierSpec(cache, read=lambda layer, experts: ()), gpu, 8))
        planes = dataclasses.replace(cache, planes=2)
        shared = TierSpec(planes, refines=2, shares_slots=True), TierSpec(planes)
        self.assertIsNone(placing.CachePlanner(shared, gpu).refusal(8))

    def test_an_engine_says_where_the_kernel_does_not_plan(self):
        cpu = jax.devices("cpu")[0]
        weights = {name: jnp.asarray(a) for name, a in tiny_engine.random_weights(CONFIG).items()}
        stacks = [weights.pop(name) for name in EXPERT_LEAVES]
        hosts = [stack.reshape(-1, *stack.shape[2:]) for stack in stacks]
        row_of = np.arange(2 * NUM_EXPERTS).reshape(2, NUM_EXPERTS)
        cache = CacheSizes(num_layers=2, num_experts=NUM_EXPERTS, slots=3, transient=2)

        def lines(kernels: ops.Kernels, read: Any) -> list[str]:
            tier = TierMemory(TierSpec(cache, 0, read), *hosts, row_of, cpu)
            memory = ExpertMemory([tier])
            runner = Runner(CONFIG, weights, cpu, kernels=kernels, memory=memory)
            return [line for line in runner._kernel_warnings() if "found and placed" in line]

        gpu, disk = ops.Kernels(Target("gpu", (9, 0))), lambda layer, experts: ()
        self.assertEmpty(lines(gpu, None))
        self.assertEmpty(lines(ops.NO_KERNELS, disk))
        self.assertRegex("".join(lines(gpu, disk)), "kernel: experts may be on the disk")
