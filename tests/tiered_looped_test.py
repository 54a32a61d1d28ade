"""Under a policy: a chunk's layers in a loop, and the pairs of all tiers in one launch."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts import cache_plan as placing
from moejax.experts.cache_plan import CachePlanner
from moejax.experts.cached_experts import CachedExperts
from moejax.models import expert_products
from moejax.models.transformer import Transformer
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.make import make_policy
from moejax.weights import linear as ops
from pallas_kernels import cache_plan, grouped_dequant_matmul
from tests import tiny_engine
from tests.pooled_test import PROMPTS, answers
from tests.tiered_case import tiered_runner

pytestmark = pytest.mark.slow

TINY = tiny_engine.CONFIG
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (1, 16)).astype(np.int32)
# An odd number: with two banks, one layer is left after the loop. Unrolled layers of two tiers are
# the longest to compile.
LAYERS = {"on_demand": 5, "dymoe": 5, "buddymoe": 3}
SHAPE = (LAYERS["buddymoe"], TINY.num_experts, TINY.num_experts)
LISTS = buddy_lists(
    conditional_coactivation(np.random.default_rng(3).integers(0, 9, SHAPE)), 0.7, 3
)
DYMOE = {"retention": 0.5, "schedule": "linear", "heavy_count": 3}
# The policy, the bits of the tiers, slots of a layer in each, experts ahead.
CASES = {
    "on_demand": (make_policy("on_demand", prefetch=2), (16,), (3,), 2),
    "dymoe": (make_policy("dymoe", prefetch=2, **DYMOE), (4, 2), (3, 8), 2),
    "dymoe in two caches": (make_policy("dymoe", prefetch=0, **DYMOE), (4, 2), (3, 3), 0),
    "dynaexq": (make_policy("dynaexq", period=2), (4, 2), (3, 8), 0),
    "dymoe ahead in two caches": (make_policy("dymoe", prefetch=2, **DYMOE), (4, 2), (4, 4), 2),
    "buddymoe": (BuddyMoe(lists=LISTS, rho=1), (4,), (4,), 0),
}


def outcome(runner: Any, memory: Any, *, of_chunk: bool = False) -> Any:
    """Logits of a chunk or answers, and what is left of them; transient slots hold nothing."""
    said = runner.logits(TOKENS) if of_chunk else answers(runner, PROMPTS[:1], 6)
    pool = memory.pool
    pools = []
    for of, spec in zip(pool.tiers, memory.spec.tiers, strict=True):
        end, residency = spec.cache.first_transient, of.residency
        if spec.is_complete:  # of such a pool nobody asks when a slot was used last
            table = residency.table.at[:, 2 * spec.cache.num_experts :].set(0)
            residency = dataclasses.replace(residency, table=table)
        banks = jax.tree.map(lambda a, end=end: a[:end], of.banks)
        pools.append(dataclasses.replace(of, banks=banks, residency=residency))
    return jax.device_get((said, dataclasses.replace(pool, tiers=tuple(pools))))


class LoopTest(parameterized.TestCase):
    @parameterized.parameters("on_demand", "dymoe", "buddymoe")
    def test_bit_for_bit_what_it_is_unrolled(self, name):
        policy, bits, slots, ahead = CASES[name]
        num_layers, found = LAYERS[name], []
        config = dataclasses.replace(
            TINY, num_layers=num_layers, moe_layers=tuple(range(num_layers))
        )
        for loops in (False, True):
            how = {"prefetch": ahead, "first": min(slots) if name == "buddymoe" else -1}
            runner, memory = tiered_runner(policy, bits, slots, config=config, **how)
            own, taken = Transformer._looped, []

            def looped(*arguments, own=own, taken=taken):
                taken.append(arguments)
                return own(*arguments)

            with (
                mock.patch.object(Transformer, "loops", lambda *_, loops=loops: loops),
                mock.patch.object(Transformer, "_looped", looped),
            ):
                found.append(outcome(runner, memory, of_chunk=True))
            self.assertLen(taken, int(loops))
        unrolled, in_loop = found
        self.assertEqual(jax.tree.structure(unrolled), jax.tree.structure(in_loop))
        for (path, a), (_, b) in zip(
            *(jax.tree_util.tree_leaves_with_path(tree) for tree in found), strict=True
        ):
            with self.subTest(jax.tree_util.keystr(path)):
                np.testing.assert_array_equal(a, b)
        memory.read_counters()


class OneLaunchTest(parameterized.TestCase):
    @parameterized.parameters(
        "dymoe", "dynaexq", "dymoe in two caches", "dymoe ahead in two caches"
    )
    def test_all_tiers_at_once_give_what_each_alone_gives(self, name):
        policy, bits, slots, ahead = CASES[name]
        runs = {"kernels": ops.Kernels(implementation="reference"), "expert_impl": "grouped_kernel"}
        own, found, launched = grouped_dequant_matmul.moe_products, [], []

        def counted(x, assignments, tiers, *arguments, **options):
            launched[-1].append((len(x), len(tiers)))
            return own(x, assignments, tiers, *arguments, **options)

        def interpreted(*arguments, **options):
            if options["implementation"] == "triton":
                launched[-1].append("plan")
                options |= {"interpret": True}
            return plan(*arguments, **options)

        def predicted(*arguments, **options):
            options |= {"interpret": options["implementation"] == "triton"}
            return predict(*arguments, **options)

        in_one, plan, predict = CachedExperts.is_grouped, cache_plan.plan, cache_plan.predict
        refusal = CachePlanner.refusal

        def few(self, num_pairs):  # as if these were a GPU's
            return "waves" if any(form.later_waves for form in self.forms(num_pairs)) else None

        ways = ((lambda *_: False, refusal), (in_one, refusal), (in_one, few))
        for separate, refuses in ways:
            for cache in (expert_products._grouped, placing._planned, placing._predicted):
                cache.clear_cache()  # of traces, in which the calls are
            runner, memory = tiered_runner(
                policy, bits, slots, prefetch=ahead, transient=8, runs=runs
            )
            launched.append([])
            with (
                mock.patch.object(grouped_dequant_matmul, "moe_products", counted),
                mock.patch.object(cache_plan, "plan", interpreted),
                mock.patch.object(cache_plan, "predict", predicted),
                mock.patch.object(CachedExperts, "is_grouped", separate),
                mock.patch.object(CachePlanner, "refusal", refuses),
            ):
                found.append(outcome(runner, memory))
        for other in found[1:]:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found[0], other)
        self.assertEqual({number for _, number in launched[0]}, {1})
        self.assertIn((1, 2), launched[1])  # a chunk of these caches passes in waves
        self.assertNotIn("plan", launched[1])
        self.assertIn("plan", launched[2])


if __name__ == "__main__":
    absltest.main()
