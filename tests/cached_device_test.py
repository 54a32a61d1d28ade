"""Residency is invisible on a GPU: kernels, pinned host rows, tiers, pools that never move."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.shapes import SHAPES
from moejax.policies.base import SKIPPED, AnyPolicy, Decision, Observation, Policy, PolicySpec
from moejax.policies.baselines import OnDemand, as_routed
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight
from pallas_kernels.target import target_of
from tests import tiny_engine

NUM_EXPERTS, CONTEXT = 16, 512
QWEN = dataclasses.replace(
    SHAPES["Qwen3-30B-A3B"], vocab_size=1024, model_dim=1024, num_layers=4, num_heads=16,
    num_kv_heads=2, head_dim=64, num_experts=NUM_EXPERTS, experts_per_token=4, expert_dim=256,
    moe_layers=(0, 1, 2, 3),
)  # fmt: skip
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", qk_norm=False, norm_topk_prob=True, experts_per_token=2
)
CONFIGS = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}
ATTENTION = ("attention.qkv_proj", "attention.o_proj")
# Slots of a layer, transient ones, experts brought ahead.
PLACES = {
    "all resident": (16, 1, 0),
    "75 %": (12, 4, 0),
    "50 % and prefetch": (8, 4, 4),
    "25 %": (4, 4, 0),
    "no cache": (0, 4, 0),
}


@dataclasses.dataclass(frozen=True)
class ByNumber(Policy[jax.Array]):
    """Expert e in tier e % T, every fifth left out: whatever is resident."""

    name = "by_number"
    num_tiers: int

    def init(self, spec: PolicySpec) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def decide(self, state: jax.Array, observation: Observation) -> tuple[Decision, jax.Array]:
        ids = observation.ids
        tier = jnp.where(ids % 5 == 4, SKIPPED, ids % self.num_tiers)
        return as_routed(observation, tier.astype(jnp.int32)), state


def random_tiers(config: ModelConfig, bits: Sequence[int]) -> list[dict[str, Weight]]:
    """Makes a model for each width, whose experts are the tier."""
    device, attention = jax.devices("gpu")[0], bits[0] if len(bits) == 1 else 4
    return [random_weights(config, Packing(bits=b, attention_bits=attention), device) for b in bits]


def tier_of(
    config: ModelConfig,
    weights: dict[str, Weight],
    place: tuple[int, int, int],
    held: int | None = None,
    asked: list[int] | None = None,
    apart: int = 0,
) -> TierMemory:
    """A tier whose first `held` rows (None: all) are in pinned host memory, the others on a disk.

    `asked` takes the experts that are read from there.
    """
    device, (slots, transient, prefetch) = jax.devices("gpu")[0], place
    cache = CacheSizes(
        num_layers=config.num_layers, num_experts=NUM_EXPERTS, slots=slots, transient=transient,
        banks=2 if prefetch else 1, apart=apart,
    )  # fmt: skip
    rows = [
        jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights[leaf])
        for leaf in EXPERT_LEAVES
    ]
    number, read = np.arange(config.num_layers * NUM_EXPERTS), None
    if asked is not None:
        kept = jax.device_get([jax.tree.leaves(stack) for stack in rows])

        def read(layer: Any, experts: Any) -> tuple[np.ndarray, ...]:
            asked.extend(int(expert) for expert in np.asarray(experts) if expert >= 0)
            index = int(layer) * NUM_EXPERTS + np.maximum(np.asarray(experts), 0)
            return tuple(np.asarray(leaf)[index] for stack in kept for leaf in stack)

    held = len(number) if held is None else held
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    hosts = jax.tree.map(lambda leaf: jax.device_put(leaf[:held], pinned), rows)
    row_of = np.where(number < held, number, -1).reshape(-1, NUM_EXPERTS)
    return TierMemory(TierSpec(cache, prefetch, read), *hosts, row_of, device)


def memory_of(
    config: ModelConfig,
    policy: AnyPolicy,
    slots: Sequence[int],
    bits: Sequence[int],
    weights: list[dict[str, Weight]],
    prefetch: int = 0,
) -> ExpertMemory:
    """Tiers with so many slots of a layer; one that has room for all holds all from the start."""
    tiers = []
    for size, stored in zip(slots, weights, strict=True):
        memory = tier_of(config, stored, (size, 4, prefetch))
        if size == NUM_EXPERTS:
            everyone = np.tile(np.arange(NUM_EXPERTS, dtype=np.int32), (config.num_layers, 1))
            kernels = ops.Kernels(target_of(jax.devices("gpu")[0]))
            preload(memory, config, kernels, everyone)
        tiers.append(memory)
    names = [f"int{width}" for width in bits]
    return ExpertMemory(tiers, names, policy, width=config.experts_per_token)


def runner_of(config: ModelConfig, weights: dict[str, Weight], memory: ExpertMemory) -> Runner:
    dense = {leaf: array for leaf, array in weights.items() if leaf not in EXPERT_LEAVES}
    return Runner(config, dense, jax.devices("gpu")[0], memory=memory)


def inputs(
    config: ModelConfig, lengths: Sequence[int] = (9, 40), num_tokens: int = 48
) -> tuple[list[list[int]], np.ndarray]:
    """Prompts and tokens. Few sizes: programs of several tiers take long to compile."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in lengths]
    return prompts, rng.integers(0, config.vocab_size, (2, num_tokens)).astype(np.int32)


def answers(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    return tiny_engine.answers(runner, prompts, CONTEXT, num_tokens=24, per_call=8)


class DeviceTestCase(parameterized.TestCase):
    def check_answers(self, runner: Runner, resident: Runner, prompts: list[list[int]]) -> None:
        for batch in (prompts[:1], prompts):
            self.assertEqual(answers(runner, batch), answers(resident, batch))

    def check_memory(self, runner: Runner) -> None:
        """Compiled steps alias all pools, and need little beside them.

        Of plain attention matrices that no kernel serves XLA copies each layer's out of the stack.
        """
        banks = [pool.banks for pool in runner.memory.pool.tiers]
        attention = [leaf for name, leaf in runner.weights.items() if name in ATTENTION]
        served = [ops._choose_product(1, runner.dtype, w, runner.kernels) for w in attention]
        copied = [
            w for w, of in zip(attention, served, strict=True) if of.implementation == "plain"
        ]
        most = 4 * 2**20 + sum(w.nbytes for w in copied)
        for key, program in runner.programs._programs.items():
            if key[0] is steps.decode:
                memory = program.memory_analysis()
                pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(banks))
                self.assertGreaterEqual(memory.alias_size_in_bytes, pool_bytes)
                self.assertLess(memory.temp_size_in_bytes, most, key)
                self.assertEqual(memory.host_temp_size_in_bytes, 0)


@pytest.mark.gpu
class InvisibleTest(DeviceTestCase):
    @parameterized.parameters(
        *itertools.product(CONFIGS, (16, 4), PLACES),
        ("qwen3_moe", 3, "25 %"),
        ("mixtral", 3, "50 % and prefetch"),
    )
    def test_tokens_and_logits_are_those_of_a_resident_model(self, name, bits, place):
        config, (slots, _, prefetch) = CONFIGS[name], PLACES[place]
        [weights] = random_tiers(config, (bits,))
        prompts, tokens = inputs(config, (9, 130, 33, 70), 96)
        tier = tier_of(config, weights, PLACES[place])
        memory = ExpertMemory([tier])
        resident = Runner(config, weights, jax.devices("gpu")[0])
        runner = runner_of(config, weights, memory)
        places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tier.pool.banks)]
        np.testing.assert_array_equal(runner.logits(tokens), resident.logits(tokens))
        self.check_answers(runner, resident, prompts)
        events = memory.read_counters().as_dict()["totals"]
        self.assertEqual(events["unserved"], 0)
        self.assertEqual(events["streamed"] > 0, slots < NUM_EXPERTS)
        self.assertEqual(events["prefetched"] > 0, prefetch > 0)
        found = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tier.pool.banks)]
        self.assertEqual(found, places)
        self.check_memory(runner)

    @parameterized.product(
        place=((4, 6, 0), (0, 5, 0), (4, 4, 4), (4, 3, 0)), bits=(4, 16), num_tokens=(96, 512)
    )
    def test_waves_fetched_beside_products_to_slots_apart(self, place, bits, num_tokens):
        """Chunks of several waves, again and again: a copy that comes too soon shows by chance."""
        config = CONFIGS["qwen3_moe"]
        [weights] = random_tiers(config, (bits,))
        tier = tier_of(config, weights, place, apart=place[1] // 2)
        runner = runner_of(config, weights, ExpertMemory([tier]))
        resident = Runner(config, weights, jax.devices("gpu")[0])
        for number in range(10):
            rng = np.random.default_rng(number)
            tokens = rng.integers(0, config.vocab_size, (1, num_tokens)).astype(np.int32)
            np.testing.assert_array_equal(runner.logits(tokens), resident.logits(tokens))
        self.assertGreater(runner.memory.read_counters().as_dict()["totals"]["streamed"], 0)

    @parameterized.parameters(
        *itertools.product(["qwen3_moe"], ("50 % and prefetch", "25 %", "no cache"), (0, 24)),
        ("mixtral", "25 %", 24),
    )
    def test_what_no_host_row_holds_the_step_waits_for(self, name, place, held):
        config, asked = CONFIGS[name], []
        [weights] = random_tiers(config, (4,))
        memory = ExpertMemory([tier_of(config, weights, PLACES[place], held, asked)])
        resident = Runner(config, weights, jax.devices("gpu")[0])
        prompts, _ = inputs(config, (9, 70))
        self.check_answers(runner_of(config, weights, memory), resident, prompts)
        waits = memory.read_counters().as_dict()["totals"]["waits"]
        self.assertEqual(waits, len(asked))
        self.assertGreater(waits, 0)


@pytest.mark.gpu
class TiersTest(DeviceTestCase):
    @parameterized.parameters(
        ("qwen3_moe", (4, 2), (8, 4)), ("qwen3_moe", (4, 2), (4, 16)),
        ("qwen3_moe", (16, 4), (8, 8)), ("mixtral", (4, 2), (8, 4)),
        ("mixtral", (4, 2), (0, 0)), ("mixtral", (16, 4), (4, 16)),
    )  # fmt: skip
    def test_where_experts_are_does_not_show(self, name, bits, slots):
        config = CONFIGS[name]
        weights = random_tiers(config, bits)
        prompts, tokens = inputs(config)
        found = []
        for sizes in ((NUM_EXPERTS,) * 2, slots):
            memory = memory_of(config, ByNumber(len(bits)), sizes, bits, weights)
            runner = runner_of(config, weights[0], memory)
            logits = runner.logits(tokens)
            found.append((logits.tobytes(), answers(runner, prompts)))
            ledger = memory.read_counters().as_dict()
            self.check_memory(runner)
        self.assertTrue(np.isfinite(logits).all())
        self.assertEqual(found[0], found[1])
        streamed = [tier["totals"]["streamed"] for tier in ledger["tiers"].values()]
        asked = [sum(e % len(bits) == t and e % 5 != 4 for e in range(NUM_EXPERTS)) for t in (0, 1)]
        self.assertEqual(
            [n > 0 for n in streamed], [size < n for size, n in zip(slots, asked, strict=True)]
        )

    @parameterized.parameters(("qwen3_moe", 8), ("mixtral", 4))
    def test_one_tier_on_demand_is_the_resident_model(self, name, slots):
        config = CONFIGS[name]
        [weights] = random_tiers(config, (4,))
        prompts, tokens = inputs(config)
        memory = memory_of(config, OnDemand(), (slots,), (4,), [weights])
        runner = runner_of(config, weights, memory)
        resident = Runner(config, weights, jax.devices("gpu")[0])
        np.testing.assert_array_equal(runner.logits(tokens), resident.logits(tokens))
        self.check_answers(runner, resident, prompts)

    @parameterized.parameters(
        ("qwen3_moe", DynaExq(period=8)),
        ("qwen3_moe", DyMoE(retention=0.75, low="skip", prefetch=2)),
        ("mixtral", DyMoE(retention=0.75, prefetch=0)),
    )
    def test_a_policy_runs_and_says_the_same_again(self, name, policy):
        config, bits = CONFIGS[name], (4, 2)
        weights = random_tiers(config, bits)
        prompts, tokens = inputs(config)
        found = []
        for _ in range(2):
            ahead = 2 if policy.needs.predicted else 0
            memory = memory_of(config, policy, (4, NUM_EXPERTS), bits, weights, ahead)
            runner = runner_of(config, weights[0], memory)
            logits = runner.logits(tokens)
            self.assertTrue(np.isfinite(logits).all())
            found.append((logits.tobytes(), answers(runner, prompts)))
            gate = memory.read_counters().shares
            self.assertAlmostEqual(sum(gate[t] for t in ("int4", "int2", "skipped")), 1, places=3)
        self.assertEqual(found[0], found[1])
