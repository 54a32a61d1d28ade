"""A chunk's layers in a loop: bit for bit what they are unrolled, and compiled once."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts.residency import CacheSizes, empty, no_counts
from moejax.experts.state import CacheSpec, ExpertCache, HostRows, TierSlots, TierSpec
from moejax.inference import steps
from moejax.inference.recorder import RecordSpec
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.kv_cache import empty_cache
from moejax.models.transformer import ChunkSpec, Transformer, model_definition
from moejax.weights.qtensor import QTensor, Weight
from tests import packed_weights, slow, tiny_engine
from tests.pooled_test import EXPERTS, rows_of, without_experts

QWEN = tiny_engine.CONFIG


def of_layers(num_layers: int, **fields: Any) -> ModelConfig:
    return dataclasses.replace(
        QWEN, num_layers=num_layers, moe_layers=tuple(range(num_layers)), **fields
    )


# Unrolled layers are compiled one by one: no more than show the loop. Of five with two banks, one
# is left after it.
CONFIGS = {
    "qwen3_moe": of_layers(4),
    "five": of_layers(5),
    "mixtral": of_layers(
        4, family="mixtral", num_experts=4, qk_norm=False, attention_bias=True, sliding_window=9
    ),
}
# Slots of a layer, transient ones, experts ahead; None: the model holds its experts.
PLACES = {"resident": None, "waves": (2, 3, 0), "cached and ahead": (8, 1, 2), "ahead": (2, 3, 2)}
LENGTH, CHUNK = 48, 16


def random_weights(config: ModelConfig, kind: str, dtype: Any) -> dict[str, Weight]:
    """Plain, or in codes of a `packed_weights.SPECS`; norms around one."""
    rng = np.random.default_rng(0)
    weights: dict[str, Weight] = {}
    for name, shape in weight_shapes(config).items():
        plain = 0.3 * rng.standard_normal(shape) + name.endswith("norm")
        if kind != "plain" and name in (*EXPERTS, "attention.qkv_proj"):
            of = packed_weights.SPECS[kind if name in EXPERTS else "int3"]
            weights[name] = packed_weights.draw(rng, shape, of)[0]
        else:
            weights[name] = jnp.asarray(plain, dtype)
    return weights


def pool_and_store(
    config: ModelConfig, weights: dict[str, Weight], place: tuple[int, int, int]
) -> tuple[CacheSpec, ExpertCache, tuple[HostRows]]:
    slots, transient, ahead = place
    num_layers, num_experts = config.num_layers, config.num_experts
    cache = CacheSizes(
        num_layers=num_layers, num_experts=num_experts, slots=min(slots, num_experts),
        transient=transient, banks=2 if ahead else 1,
    )  # fmt: skip
    terms = [w.compensators if isinstance(w, QTensor) else () for w in map(weights.get, EXPERTS)]
    bare = [
        dataclasses.replace(weight, compensators=()) if isinstance(weight, QTensor) else weight
        for weight in (weights[name] for name in EXPERTS)
    ]
    rows = rows_of(bare[0]), rows_of(bare[1])

    def bank(weight: Weight) -> Weight:
        return jax.tree.map(lambda a: jnp.zeros((cache.num_slots, *a.shape[1:]), a.dtype), weight)

    pool = TierSlots(
        tuple((bank(rows[0]), bank(rows[1])) for _ in range(cache.banks)),
        empty(cache), no_counts(num_layers),
    )  # fmt: skip
    row_of = jnp.arange(num_layers * num_experts, dtype=jnp.int32).reshape(num_layers, -1)
    spec = CacheSpec(None, ("stored",), (TierSpec(cache, ahead),))
    store = HostRows(*rows, row_of, (terms[0], terms[1]))
    return spec, ExpertCache((pool,), (), None), (store,)


@functools.cache
def two_chunks(
    config: ModelConfig, kind: str, dtype: Any, place: str, record: RecordSpec | None, loops: bool
) -> tuple[Any, list[int]]:
    """Runs two chunks; returns the cache, and each program's mentions of routing.

    Transient slots are left out: nothing is in them between layers.
    """
    weights = random_weights(config, kind, dtype)
    spec = pool = store = None
    if (slots := PLACES[place]) is not None:
        spec, pool, store = pool_and_store(config, weights, slots)
        weights = without_experts(weights)
    definition = model_definition(config, holds_experts=spec is None)
    program = steps.Program(definition, spec, record)
    state = steps.PrefillState(
        empty_cache(config, 2, LENGTH, dtype), jnp.zeros((2, config.model_dim), dtype)
    )
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 2 * CHUNK), np.int32)
    lengths, found, num_routers = jnp.array([27, 32], jnp.int32), [], []
    for first in (0, CHUNK):
        chunk = ChunkSpec(0 if first == 0 else LENGTH, first == 0, "block", "xla")
        part = steps.Chunk(tokens[:, first : first + CHUNK], jnp.int32(first), lengths)
        operands = state, pool, steps.StepInputs(weights, store), part
        with mock.patch.object(Transformer, "loops", Transformer.loops if loops else no_loop):
            step = functools.partial(steps.prefill_chunk, program, chunk)
            lowered = jax.jit(step).lower(*operands)
        num_routers.append(lowered.as_text().count("chlo.top_k"))
        state, pool, _, recorded = lowered.compile()(*operands)
        found.append((state.last_hidden, recorded))
    if spec is not None:
        end = spec.cache.first_transient
        (tier,) = pool.tiers
        tier = dataclasses.replace(tier, banks=jax.tree.map(lambda a: a[:end], tier.banks))
        pool = dataclasses.replace(pool, tiers=(tier,))
    return (state.cache, pool, found), num_routers


def no_loop(*_: Any) -> bool:
    return False


class LoopTest(parameterized.TestCase):
    @slow.where(lambda place, records: place != "resident" or not records)
    @parameterized.parameters(
        ("qwen3_moe", "plain", jnp.bfloat16, "resident", False),
        ("mixtral", "int3_ranks", jnp.float32, "resident", True),
        ("five", "int4_int4_ranks", jnp.float32, "ahead", True),
        ("qwen3_moe", "int3_ranks", jnp.bfloat16, "cached and ahead", True),
        ("qwen3_moe", "int4_symmetric", jnp.bfloat16, "waves", False),
        ("qwen3_moe", "plain", jnp.bfloat16, "ahead", False),
    )
    def test_bit_for_bit_what_it_is_unrolled(self, name, kind, dtype, place, records):
        config = CONFIGS[name]
        what = RecordSpec(foreseen=2, probabilities=True, importance=place == "resident")
        record = what if records else None
        looped, num_looped = two_chunks(config, kind, dtype, place, record, True)
        unrolled, num_unrolled = two_chunks(config, kind, dtype, place, record, False)
        self.assertLess(max(num_looped), min(num_unrolled))
        self.assertEqual(jax.tree.structure(looped), jax.tree.structure(unrolled))
        for (path, a), (_, b) in zip(
            *(jax.tree_util.tree_leaves_with_path(tree) for tree in (looped, unrolled)), strict=True
        ):
            with self.subTest(jax.tree_util.keystr(path)):
                np.testing.assert_array_equal(a, b)

    @parameterized.product(place=("ahead", "waves"), dtype=(jnp.bfloat16, jnp.float32))
    @pytest.mark.slow
    def test_where_the_experts_are_makes_no_difference(self, place, dtype):
        config, kind = CONFIGS["five"], "int4_int4_ranks"
        record = RecordSpec(foreseen=2, probabilities=True)
        resident, _ = two_chunks(config, kind, dtype, "resident", record, True)
        pooled, _ = two_chunks(config, kind, dtype, place, record, True)
        for a, b in zip(*(jax.tree.leaves((r[0], r[2])) for r in (resident, pooled)), strict=True):
            np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    absltest.main()
