"""Budgets: every byte counted once, limits kept and filled, what cannot run refused by name."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.experts.budget import (
    GIB,
    BudgetError,
    Limits,
    MachineMemory,
    PolicyDemands,
    RunSizes,
    TierSize,
    describe,
    make_budget,
    table_nbytes,
    warnings,
)
from moejax.experts.budget.planned import RING_BLOCKS
from moejax.experts.residency import CacheSizes, empty, no_counts
from moejax.models.config import Pages, weight_shapes
from moejax.models.kv_cache import empty_cache
from moejax.models.shapes import SHAPES
from pallas_kernels import cache_plan
from tests.packed_weights import num_bytes

QWEN, MIXTRAL = SHAPES["Qwen3-30B-A3B"], SHAPES["Mixtral-8x7B"]
MACHINE = MachineMemory(host_nbytes=100 * GIB, pinned_nbytes=64 * GIB)


def weights_nbytes(config, itemsize=2):
    """Bytes of all leaves but the experts'."""
    return {
        name: itemsize * math.prod(shape)
        for name, shape in weight_shapes(config).items()
        if name not in ("moe.gate_up", "moe.down")
    }


# Qwen3-30B-A3B with attention in INT4 and the head in INT8: all but the experts, 1.25 GiB, of which
# the embeddings lie in host memory.
PACKED = {
    "embed": 151936 * 2048 * 2, "head": 151936 * 2080, "attention": 48 * 20971520 * 9 // 16,
}  # fmt: skip


def int4(config):
    """Half a byte a weight, and a float16 scale and zero point for 64 of them."""
    weights = 3 * config.model_dim * config.expert_dim
    return TierSize(name="int4", expert_nbytes=weights // 2 + weights // 64 * 4)


def run_budget(
    config=QWEN, *, batch=1, context=4096, chunk=1024, platform="gpu", is_running=False, **limits
):  # fmt: skip
    """A run without a policy."""
    run = RunSizes(
        config=config, weights_nbytes=weights_nbytes(config), batch=batch, context=context,
        chunk=chunk, platform=platform, is_running=is_running,
    )  # fmt: skip
    return make_budget(run, [int4(config)], Limits(**limits))


def budget_of(config=QWEN, **how):
    """The only tier of `run_budget`, which has all parts."""
    budget = run_budget(config, **how)
    (tier,) = budget.tiers
    assert (budget.device, budget.host, budget.disk) == (tier.device, tier.host, tier.disk)
    return tier


class PartsTest(parameterized.TestCase):
    @parameterized.parameters({}, {"device_gib": 12}, {"device_gib": 20.0}, {"device_gib": 24})
    def test_a_running_batch_has_pages_of_what_experts_leave(self, **limits):
        """Without a limit of all slots; else of a quarter at least, and then as many as fit."""
        budget = run_budget(batch=16, chunk=64, is_running=True, **limits)
        run, page = budget.run, 128 * 96 * 2**10
        paged = Pages(run.num_pages)
        caches = jax.eval_shape(
            lambda: (
                empty_cache(QWEN, 16, 4096, jnp.bfloat16, paged),
                empty_cache(QWEN, 1, 4096, jnp.bfloat16),  # a chunk's copy
            )
        )
        tables = caches[0].table.size * 4
        self.assertEqual(budget.device["KV cache"], num_bytes(caches) - tables)
        if not limits:
            self.assertEqual(run.num_pages, 16 * 32 + 1)
            return
        spare = limits["device_gib"] * GIB - budget.total_device
        self.assertGreaterEqual(spare, 0)
        self.assertBetween(run.num_pages, 4 * 32 + 1, 16 * 32 + 1)
        if run.num_pages < run.batch * Pages(0).of(run.context) + 1:
            self.assertLess(spare, page)
        if budget.pooled:  # a slot in each layer would not have fit in place of the pages beyond
            more = (run.num_pages - run.least_pages) * page
            self.assertLess(more + spare, 48 * int4(QWEN).expert_nbytes + 4096)
            whole = run_budget(batch=17, chunk=64, **limits).tiers[0]
            self.assertGreater(budget.tiers[0].slots, whole.slots)

    def test_parts_are_what_is_allocated(self):
        budget = budget_of(slots=5, transient=7)
        weights = {k: v for k, v in budget.device.items() if k.startswith("weights ")}
        expected = weights_nbytes(QWEN)
        embeddings = expected.pop("embed")
        self.assertEqual(weights, {f"weights {k}": v for k, v in expected.items()})
        cache = jax.eval_shape(lambda: empty_cache(QWEN, 1, 4096, jnp.bfloat16))
        self.assertEqual(budget.device["KV cache"], num_bytes(cache))
        expert = int4(QWEN).expert_nbytes
        self.assertEqual(budget.device["expert slots"], 48 * 5 * expert)
        self.assertEqual(budget.device["transient slots"], 7 * expert)
        self.assertEqual(budget.host, {"experts": 48 * 128 * expert, "embeddings": embeddings})
        self.assertEmpty(budget.disk)
        self.assertEqual(budget.total_device, sum(budget.device.values()))

    def test_embeddings_stay_on_the_device(self):
        """Where they are the head too, packed, cut for a mesh, or host memory has a limit."""
        for changed, limits in (
            ({"config": dataclasses.replace(QWEN, tied_embeddings=True)}, {}),
            ({"weights_nbytes": weights_nbytes(QWEN) | {"embed": 1000}}, {}),
            ({"num_devices": 2}, {}),
            ({}, {"host_gib": 60}),
        ):
            run = dataclasses.replace(run_budget(slots=5).run, **changed)
            budget = make_budget(run, [int4(QWEN)], Limits(slots=5, **limits))
            self.assertIn("weights embed", budget.device)
            self.assertEqual(list(budget.host), ["experts"])

    # JAX's memory, and whether rows come and go; tokens of a chunk, and slots of a layer.
    @parameterized.parameters(
        (6.4, False, 4096, 36), (11.4, False, 2048, 81), (20.0, False, 4096, 128),
        (6.4, True, 2048, 35), (20.0, True, 1024, 128),
    )  # fmt: skip
    def test_a_longer_chunk_costs_few_slots(self, gib, is_running, chunk, slots):
        """By slots of the same run with each chunk alone."""

        def run(chunk, longer=()):
            return RunSizes(
                config=QWEN, weights_nbytes=PACKED, batch=1, context=4096, chunk=chunk,
                longer_chunks=longer, platform="gpu", stores_scores=False, copies_cache=False,
                is_running=is_running,
            )  # fmt: skip

        def plan(of):
            return make_budget(of, [int4(QWEN)], Limits(device_gib=gib))

        found = plan(run(1024, (2048, 4096)))
        self.assertEqual((found.run.chunk, found.tiers[0].slots), (chunk, slots))
        self.assertEqual(found.device, plan(run(chunk)).device)
        usual = 48 * 128 - plan(run(1024)).tiers[0].total_slots
        for longer in (2048, 4096):
            missing = 48 * 128 - plan(run(longer)).tiers[0].total_slots
            if usual:
                self.assertEqual(missing <= 1.052 * usual, longer <= chunk)

    def test_a_longer_chunk_fits_the_room_of_a_device_without_a_limit(self):
        run = RunSizes(
            config=QWEN, weights_nbytes=PACKED, batch=1, context=4096, chunk=1024,
            longer_chunks=(2048, 4096), platform="gpu", stores_scores=False,
        )  # fmt: skip

        def plan(room):
            of = dataclasses.replace(run, room_nbytes=room)
            return make_budget(of, [int4(QWEN)], Limits())

        longest = plan(None)
        self.assertEqual(longest.run.chunk, 4096)
        room = math.ceil(longest.total_device / 0.9)
        self.assertEqual(plan(room).run.chunk, 4096)
        self.assertEqual(plan(room - 2).run.chunk, 2048)
        self.assertEqual(plan(1).run.chunk, 1024)  # `check_room` says what is too much

    def test_a_chunk_is_no_longer_where_steps_fetch_nothing(self):
        """Under a policy whose transfers are between steps, or with a slot for every expert."""
        tiers = [int4(QWEN), TierSize(name="int2", expert_nbytes=int4(QWEN).expert_nbytes // 2)]
        run = RunSizes(
            config=QWEN, weights_nbytes={}, batch=1, context=4096, chunk=1024,
            longer_chunks=(4096,), platform="gpu", stores_scores=False,
        )  # fmt: skip
        demands = PolicyDemands(slots=(20, 128), bulk=None, between_steps=(0,))
        self.assertEqual(make_budget(run, tiers, Limits(), demands).run.chunk, 1024)
        demands = dataclasses.replace(demands, between_steps=())
        self.assertEqual(make_budget(run, tiers, Limits(), demands).run.chunk, 4096)

    @parameterized.parameters((3, 8, 2), (1, 4, 0), (48, 128, 65))
    def test_tables_are_those_of_residency_and_counters(self, layers, experts, slots):
        spec = CacheSizes(num_layers=layers, num_experts=experts, slots=slots, transient=1)
        held = jax.eval_shape(lambda: (empty(spec), no_counts(layers)))
        row_of = 4 * layers * experts
        self.assertEqual(table_nbytes(layers, experts, slots), num_bytes(held) + row_of)

    def test_low_rank_factors_stay_on_the_device(self):
        run = RunSizes(
            config=QWEN, weights_nbytes={}, batch=1, context=64, chunk=16, platform="gpu"
        )
        high = dataclasses.replace(int4(QWEN), low_rank_nbytes=1000)
        low = TierSize(name="int2", expert_nbytes=high.expert_nbytes // 2, low_rank_nbytes=3000)
        budget = make_budget(run, [high], Limits(slots=2))
        self.assertEqual(budget.device["low-rank factors of experts"], 1000)
        budget = make_budget(run, [high, low], Limits(), PolicyDemands())
        self.assertEqual(budget.device["low-rank factors of experts, int4"], 1000)
        self.assertEqual(budget.device["low-rank factors of experts, int2"], 3000)

    @parameterized.parameters(
        # Where copies of the first tier serve for the second one, more room is more of them.
        (True, 8, 0), (True, 12, 0), (True, 24, 0), (True, 32, 0), (False, 14, 128),
        (False, 6, None),
    )  # fmt: skip
    def test_slots_of_two_tiers_under_a_limit(self, first_alone, gib, lower):
        run = dataclasses.replace(run_budget(chunk=1024).run, longer_chunks=(2048, 4096))
        high = int4(QWEN)
        low = TierSize(name="int2", expert_nbytes=high.expert_nbytes * 5 // 9)
        demands = PolicyDemands(first_alone=first_alone)
        first, second = make_budget(run, [high, low], Limits(device_gib=gib), demands).tiers
        self.assertEqual(second.slots, first.slots if lower is None else lower)
        if first_alone:
            more = make_budget(run, [high, low], Limits(device_gib=gib + 2), demands)
            self.assertGreaterEqual(more.tiers[0].slots, min(128, first.slots + 1))
            # A longer chunk may cost 5.2 % of what the first tier lacks, and no more.
            usual = dataclasses.replace(run, longer_chunks=())
            most = make_budget(usual, [high, low], Limits(device_gib=gib), demands).tiers[0]
            every = 48 * 128
            missing = every - first.total_slots
            self.assertLessEqual(missing, 1.052 * (every - most.total_slots))

    @parameterized.product(prefetch=(0, 2), gib=(8.0, 11.32, 14.36, 14.4), host_gib=(0, 16))
    def test_longer_layers_are_some_of_each_bank(self, prefetch, gib, host_gib):
        """Under a policy, too, whose own look-ahead gives a tier two banks."""
        run = run_budget(MIXTRAL).run
        low = TierSize(name="int2", expert_nbytes=int4(MIXTRAL).expert_nbytes * 5 // 9)
        demands = PolicyDemands(prefetch=prefetch, first_alone=True)
        limits = Limits(device_gib=gib, host_gib=host_gib)
        budget = make_budget(run, [int4(MIXTRAL), low], limits, demands)
        first, second = budget.tiers
        self.assertEqual(first.banks, 1 + (prefetch > 0 and first.slots > 0))
        self.assertBetween(first.longer_layers, 0, 32 // first.banks - 1)
        self.assertEqual(first.total_slots, 32 * first.slots + first.banks * first.longer_layers)
        self.assertEqual((second.slots, second.longer_layers), (0, 0))
        self.assertLessEqual(budget.total_device, gib * GIB)
        more = first.banks * 2 * first.tier.expert_nbytes  # a slot, and what a step brings with it
        self.assertGreater(budget.total_device + more, gib * GIB)

    def test_a_running_batch_has_pages_of_what_is_left(self):
        for batch, gib in ((4, 12), (8, 16)):
            budget = run_budget(MIXTRAL, batch=batch, is_running=True, device_gib=gib)
            self.assertEqual(budget.tiers[0].longer_layers, 0)

    def test_without_limits_all_experts_are_among_the_weights(self):
        budget = budget_of()
        self.assertFalse(budget.pooled)
        self.assertEqual((budget.slots, budget.transient), (128, 0))
        self.assertEqual(budget.device["experts"], 48 * 128 * int4(QWEN).expert_nbytes)
        self.assertEqual((budget.total_host, budget.link_nbytes(10)), (0, 0))
        machine = MachineMemory(host_nbytes=0, pinned_nbytes=0)
        self.assertEmpty(warnings(run_budget(), machine))

    def test_a_layer_that_is_being_loaded_counts_where_it_is_the_most(self):
        budget = budget_of(MIXTRAL, context=256, chunk=16)
        layer = 8 * int4(MIXTRAL).expert_nbytes
        later = budget.device["KV cache"] + budget.device["activations and workspace"]
        self.assertEqual(budget.device["staging of a layer while it is loaded"], layer - later)

    def test_a_model_without_experts(self):
        config = dataclasses.replace(QWEN, moe_layers=())
        run = RunSizes(
            config=config, weights_nbytes=weights_nbytes(config), batch=1, context=64, chunk=16,
            platform="gpu",
        )  # fmt: skip
        none = [TierSize(name="none", expert_nbytes=0)]
        budget = make_budget(run, none, Limits(device_gib=40))
        self.assertFalse(budget.pooled)
        self.assertIn("no sparse layer", describe(budget)[-1])
        with self.assertRaisesRegex(BudgetError, "no experts to move"):
            make_budget(run, none, Limits(device_gib=1))

    def test_a_gpu_takes_a_host_row_as_it_is_but_not_the_disk(self):
        part = "experts on their way in a step"
        self.assertNotIn(part, budget_of(slots=5, transient=7).device)
        expert = int4(QWEN).expert_nbytes
        # A chunk can need 128 experts, of which 40 go to slots at once.
        budget = budget_of(slots=40, transient=7, host_gib=4)
        self.assertEqual(budget.device[part], 40 * expert)
        self.assertEqual(budget_of(slots=0, transient=7, platform="cpu").device[part], 7 * expert)


class LimitsTest(parameterized.TestCase):
    @parameterized.parameters(
        *itertools.product(("Qwen3-30B-A3B", "Mixtral-8x7B"), range(40)),
        *itertools.product(sorted(SHAPES), range(40, 42)),
    )
    def test_limits_are_kept_and_filled(self, name, seed):
        """For random limits: never above, no slot to spare, and errors name what would do."""
        config, rng = SHAPES[name], np.random.default_rng(seed)
        limits = {
            "device_gib": float(rng.uniform(0.5, 32)),
            "host_gib": float(rng.choice([0.0, rng.uniform(0.1, 30)])),
            "transient": int(rng.integers(0, 5)),
            "prefetch": int(rng.integers(0, 3)),
        }
        how = {"batch": int(rng.integers(1, 5)), "chunk": int(2 ** rng.integers(4, 10))}
        platform = str(rng.choice(["gpu", "cpu"]))
        try:
            budget = budget_of(config, platform=platform, **how, **limits)
        except BudgetError as error:
            name = "host_gib" if "host_gib=" in str(error) else "device_gib"
            least = float(str(error).partition("would do is ")[2].split(" GiB")[0])
            self.assertGreater(least, limits[name])
            try:  # the other limit may be too little as well
                budget = budget_of(config, platform=platform, **how, **{**limits, name: least})
            except BudgetError as second:
                self.assertNotIn(f"{name}=", str(second))
                return
            with self.assertRaises(BudgetError):
                budget_of(config, platform=platform, **how, **{**limits, name: least * 0.989})
            limits[name] = least
        self.assertLessEqual(budget.total_device, limits["device_gib"] * GIB)
        if limits["host_gib"]:
            self.assertLessEqual(budget.total_host, limits["host_gib"] * GIB)
        if budget.pooled and budget.slots < config.num_experts:
            asked = {**limits, "slots": budget.slots + 1, "transient": budget.transient}
            with self.assertRaises(BudgetError):
                budget_of(config, platform=platform, **how, **asked)
            self.assertGreaterEqual(budget.slots, limits["prefetch"])

    @parameterized.parameters(
        (QWEN, 8, 34), (QWEN, 12, 68), (QWEN, 24, 128), (MIXTRAL, 12, 2), (MIXTRAL, 16, 3),
        (MIXTRAL, 24, 6),
    )  # fmt: skip
    def test_slots_by_hand(self, config, gib, slots):
        """(limit - rest) / (M expert bytes), the rest summed here from the shapes.

        What that leaves is slots of some layers.
        """
        budget = budget_of(config, device_gib=gib)
        self.assertEqual(budget.slots, slots)
        if not budget.pooled:
            return
        rest = sum(n for name, n in weights_nbytes(config).items() if name != "embed")
        rest += budget.device["KV cache"] + budget.device["activations and workspace"] + 2**27
        expert = int4(config).expert_nbytes
        transient = max(config.experts_per_token, -(-(2**26) // expert))
        self.assertEqual(budget.transient, transient)
        room = gib * GIB - rest - transient * expert
        self.assertEqual(slots, room // (len(config.moe_layers) * expert))
        tables = budget.device["residency tables"]
        self.assertEqual(budget.total_slots, (room - tables) // expert)

    def test_transient_slots_give_way_before_a_run_is_refused(self):
        with self.assertRaises(BudgetError) as caught:
            budget_of(device_gib=1)
        least = float(str(caught.exception).partition("would do is ")[2].split(" GiB")[0])
        budget = budget_of(device_gib=least)
        self.assertEqual(budget.slots, 0)
        self.assertBetween(budget.transient, 1, 4)

    def test_the_least_is_the_whole_model_where_slots_take_more(self):
        how = {"transient": 128, "prefetch": 128, "host_gib": 60}
        with self.assertRaisesRegex(BudgetError, "all experts: the smallest") as caught:
            budget_of(device_gib=1, **how)
        least = float(str(caught.exception).partition("would do is ")[2].split(" GiB")[0])
        self.assertFalse(budget_of(device_gib=least, **how).pooled)

    def test_host_rows_leave_room_for_the_ring(self):
        expert = int4(MIXTRAL).expert_nbytes
        budget = budget_of(MIXTRAL, slots=2, host_gib=10)
        # A step brings two to slots at once, and the host reads one more.
        self.assertEqual(budget.host_rows, 10 * GIB // expert - RING_BLOCKS - 3)
        self.assertEqual(budget.host["ring of blocks from the disk"], RING_BLOCKS * expert)
        self.assertEqual(budget.host["experts that a step waits for"], 3 * expert)
        self.assertEqual(budget.disk, {"experts": 32 * 8 * expert})
        self.assertEqual(budget.host_share, budget.host_rows / 256)
        whole = budget_of(MIXTRAL, slots=2, host_gib=24)
        self.assertEqual((whole.host_rows, whole.host_share), (256, 1.0))
        self.assertEqual(list(whole.host), ["experts"])

    def test_host_memory_has_what_a_step_waits_for(self):
        """Host memory holds the experts of one fetch: of the largest chunk, to slots or a wave."""
        expert, part = int4(QWEN).expert_nbytes, "experts that a step waits for"
        for at_once, how in (
            (40, {"slots": 40, "transient": 7}),
            (7, {"slots": 5, "transient": 7}),
            (16, {"slots": 40, "transient": 7, "chunk": 2}),
        ):
            budget = budget_of(host_gib=4, **how)
            self.assertEqual(budget.at_once, at_once)
            self.assertEqual(budget.host[part], (at_once + 1) * expert)
            self.assertEqual(budget.device["experts on their way in a step"], at_once * expert)
            self.assertEqual(budget.host_rows, 4 * GIB // expert - 8 - at_once - 1)
        self.assertNotIn(part, budget_of(slots=40).host)

    @parameterized.parameters("gpu", "cpu")
    def test_no_plan_fetches_more_at_once(self, platform):
        """Plans of a layer are compared, whatever its slots, transient ones and pairs."""
        config, most = dataclasses.replace(QWEN, experts_per_token=1), 0
        size = TierSize(name="int4", expert_nbytes=1)
        sizes = itertools.product(range(8), range(1, 9), (1, 3, 8, 20), (False, True))
        for slots, transient, pairs, more in sizes:
            run = RunSizes(
                config=config, weights_nbytes={}, batch=1, context=64, chunk=pairs,
                platform=platform, handed_out=8,
            )  # fmt: skip
            form = cache_plan.TierShape(
                slots=slots, transient=transient, beside=run.apart(size, slots, transient) > 0,
                waves=cache_plan.num_waves(min(pairs, 8), 8, slots, transient),
                longer_layers=int(more),
            )  # fmt: skip
            jobs, planned = form.num_jobs(pairs, 8), run.most_at_once(size, slots, transient, more)
            self.assertLessEqual(max(jobs, form.later_waves and transient), planned)
            if not form.beside:
                self.assertLessEqual(planned, max(jobs, transient))
            most = max(most, jobs)
        self.assertEqual(most, 8)

    @parameterized.parameters(
        ({"slots": 40}, 13),
        ({"slots": 0}, 13),
        ({"slots": 12, "batch": 2}, 10),  # 16 experts of a decode step pass
        ({"slots": 12, "batch": 4}, 0),
        ({"slots": 40, "batch": 4}, 13),
        ({"slots": 40, "prefetch": 8}, 13),
        ({"slots": 40, "platform": "cpu"}, 0),
    )
    def test_transient_slots_that_decode_does_not_need_lie_apart(self, how, apart):
        budget = budget_of(**how)
        self.assertEqual((budget.transient, budget.apart), (26, apart))
        expert = int4(QWEN).expert_nbytes
        size = budget.banks * (26 - apart) + apart
        self.assertEqual(budget.device["transient slots"], size * expert)

    def test_transfers_between_steps_take_room_on_both_sides(self):
        expert, tables = int4(MIXTRAL).expert_nbytes, "residency tables"
        quiet, busy = (budget_of(MIXTRAL, slots=2, host_gib=10, bulk=n) for n in (0, 3))
        room = busy.device["experts on their way between steps"]
        self.assertBetween(room, 4 * expert, 4.01 * expert)
        self.assertEqual(busy.total_device, quiet.total_device + room)
        self.assertEqual(busy.host["blocks of transfers between steps"], room - expert)
        self.assertBetween(quiet.host_rows - busy.host_rows, 3, 4)
        self.assertLessEqual(busy.total_host, 10 * GIB)
        whole = budget_of(MIXTRAL, slots=2)
        last_uses = quiet.device[tables] - whole.device[tables]
        self.assertEqual(last_uses, 4 * 32 * 8)
        self.assertGreater(budget_of(MIXTRAL, device_gib=16, bulk=1).slots, 0)

    @parameterized.parameters(
        ("Qwen3-30B-A3B", 83, 113),  # 128 MiB
        ("Qwen3-Next-80B-A3B", 139, 128),  # no more than DynaExq asks for
        ("Qwen3-30B-A3B", 8, 32),  # one for twelve slots
        ("Mixtral-8x7B", 5, 8),  # no fewer
    )
    def test_experts_in_flight_by_default(self, shape, slots, expected):
        config = SHAPES[shape]
        run = RunSizes(
            config=config, weights_nbytes={}, batch=1, context=64, chunk=16, platform="gpu"
        )
        plane = 3 * config.model_dim * config.expert_dim // 4  # two bits a weight
        tiers = (
            TierSize(name="int4", expert_nbytes=plane),
            TierSize(name="int2", expert_nbytes=5 * plane // 4),
        )
        demands = PolicyDemands(slots=(slots, config.num_experts), bulk=None, between_steps=(0,))
        hot, cold = make_budget(run, tiers, Limits(), demands).tiers
        self.assertEqual((hot.limits.bulk, cold.limits.bulk), (expected, 0))

    @parameterized.parameters(
        ({"slots": 0, "bulk": 1}, "memory.bulk=1 must be 0 (none) or a number of experts, which"),
        ({"slots": 1, "bulk": -1}, "memory.bulk=-1 must be 0"),
        ({"slots": 1, "bulk": 6145}, "memory.bulk=6145 is more than the 6144 experts of the model"),
        ({"device_gib": 1e300}, "memory.device_gib=1e+300 must be 0 (no limit) or a number of GiB"),
        ({"slots": 1, "host_gib": 1e300}, "memory.host_gib=1e+300 must be 0 (no limit)"),
        ({"slots": 129}, "memory.slots=129 is more than the 128 experts"),
        ({"transient": 200}, "memory.transient=200 is more than the 128 experts"),
        ({"slots": 2, "prefetch": 3}, "memory.prefetch=3 needs as many slots"),
        ({"prefetch_in": "prompt"}, "memory.prefetch_in='prompt' is none of both, prefill, decode"),
        ({"slots": 100, "device_gib": 12}, "memory.device_gib=12 is too little for 100 slots"),
        (
            {"slots": 2, "host_gib": 0.01},
            "memory.host_gib=0.01 is too little for the ring of 8 experts on their way from the "
            "disk and 27 that a step waits for: the smallest that would do is 0.0866 GiB",
        ),
    )
    def test_what_cannot_be_is_said_in_one_line(self, limits, said):
        with self.assertRaises(BudgetError) as caught:
            budget_of(**limits)
        self.assertIn(said, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class AdviceTest(parameterized.TestCase):
    def test_bytes_over_the_link_in_the_worst_case(self):
        expert = int4(QWEN).expert_nbytes
        self.assertEqual(budget_of(slots=8).link_nbytes(1), 48 * 8 * expert)
        self.assertEqual(budget_of(slots=8).link_nbytes(1000), 48 * 120 * expert)
        self.assertEqual(budget_of(slots=125).link_nbytes(1), 48 * 3 * expert)

    @parameterized.parameters(
        ({"slots": 8}, {"host_nbytes": 10 * GIB}, "host memory for experts is 15.77 GiB, but this"),
        ({"slots": 8}, {"pinned_nbytes": 8 * GIB}, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=17"),
        ({"slots": 8, "host_gib": 8}, {}, "48 % of the experts are not in host memory"),
        ({"slots": 8, "host_gib": 8}, {}, "with a full one 172, and 2759 in a full prefill chunk"),
        ({"slots": 8, "host_gib": 8}, {}, "; every decode step is expected to wait"),
        ({"slots": 0}, {}, "no expert is cached"),
        ({"slots": 7}, {}, "a layer caches 7 experts, but a decode step can need 8"),
        ({"slots": 9, "prefetch": 4}, {}, "4 that are fetched ahead evict"),
        ({"slots": 8, "device_gib": 12}, {}, "one more slot in each layer takes 0.119 GiB"),
    )
    def test_what_hurts_is_said(self, limits, machine, said):
        found = warnings(run_budget(**limits), dataclasses.replace(MACHINE, **machine))
        self.assertLen(found, 1)
        self.assertIn(said, found[0])

    def test_what_is_well_is_not_spoken_of(self):
        self.assertEmpty(warnings(run_budget(slots=60), MACHINE))
        self.assertEmpty(warnings(run_budget(slots=60), MachineMemory()))

    def test_described_totals_are_the_sums(self):
        budget = run_budget(MIXTRAL, device_gib=16, host_gib=20)
        text = "\n".join(describe(budget))
        self.assertIn(f"= {budget.total_device / GIB:.3f} GiB of 16", text)
        self.assertIn(f"= {budget.total_host / GIB:.3f} GiB of 20", text)
        share = 100 * budget.tiers[0].total_slots / 256
        self.assertIn(
            f"slots: 3 or 4 of 8 a layer ({share:.1f} % of the experts), and 2 transient", text
        )
        rows = budget._table()
        self.assertEqual(
            sum(n for place, part, n in rows if place == "device" and part != "total"),
            budget.total_device,
        )
