"""Where experts are is not seen: no bit of tokens, logits, probabilities and caches differs.

One law over kinds of models, stored forms, slots, look-ahead, the disk, a policy; another one for a
chunk's layers, which run in a loop, or unrolled. A case or two run by default.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts import tier_step
from moejax.experts.cache_planner import CachePlanner
from moejax.inference import runner as runners
from moejax.inference import steps
from moejax.inference.generation import GenerationSettings
from moejax.inference.recorder import RecordSpec, recording
from moejax.inference.runner import Runner
from moejax.models import layer_index, transformer
from moejax.models.config import ModelConfig, RouterRule
from moejax.models.transformer import Transformer
from moejax.policies.base import AnyPolicy
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.make import make_policy
from moejax.routing.trace import read_trace
from moejax.weights import linear as ops
from tests import model_kinds, slow
from tests.cached_runners import CPU, MIXTRAL, PROMPTS, QWEN, answers, cached_runner, random_weights
from tests.numpy_model import RELATIVE_ERROR, relative_errors

# A sparse layer beside another; where the family has them, a dense one before both.
SMALL: dict[str, Any] = {"model_dim": 32, "num_experts": 8, "expert_dim": 16, "mlp_dim": 40}
WIDTHS: dict[str, dict[str, Any]] = {
    "shared": {"head_dim": 8, "shared_dim": 32},
    "latent": {
        "shared_dim": 32, "router": RouterRule(num_groups=4, top_groups=2, scale=1.5),
    },
    "sigmoid": {"shared_dim": 32},
    "biased": {"head_dim": 8, "rope_dim": 4, "shared_dim": 32},
    "joint": {"head_dim": 8, "num_layers": 2, "moe_layers": (0, 1)},
    "lite": {"shared_dim": 32},
    "sinks": {
        "head_dim": 8, "num_layers": 2, "moe_layers": (0, 1), "window_layers": (0,),
        "expert_dim": 32,  # a group of MXFP4
    },
} | {
    kind: {
        "head_dim": 8, "shared_dim": 16, "num_layers": 2, "moe_layers": (0, 1),
        "delta_net": dataclasses.replace(model_kinds.KINDS[kind]["delta_net"], layers=(0,)),
    }
    for kind in ("delta", "by_part")
}  # fmt: skip
KINDS = tuple(WIDTHS)


def of_layers(num_layers: int, config: ModelConfig = QWEN, **fields: Any) -> ModelConfig:
    return dataclasses.replace(
        config, num_layers=num_layers, moe_layers=tuple(range(num_layers)), **fields
    )


# Two periods of a layer without attention and one with it: two passes of a loop.
FOUR = model_kinds.config_of("delta", num_experts=8)
FOUR = dataclasses.replace(FOUR, delta_net=dataclasses.replace(FOUR.delta_net, layers=(0, 2)))
# Unrolled layers are compiled one by one: no more than show the loop. Of five with two banks, one
# is left after it.
CONFIGS = {
    "qwen3_moe": QWEN, "mixtral": MIXTRAL, "four": of_layers(4),
    "five": of_layers(5), "two periods": FOUR,
    "windowed": of_layers(4, MIXTRAL, attention_bias=True, sliding_window=9),
} | {kind: model_kinds.config_of(kind, **SMALL | WIDTHS[kind]) for kind in KINDS}  # fmt: skip


class Place(NamedTuple):
    """Where a layer's experts are."""

    slots: int
    transient: int = 2
    ahead: int = 0
    rows: int | None = None  # of the host; None: all. The others are on a disk
    by_policy: bool = False
    apart: int = 0  # of the transient slots
    longer: int = 0  # layers of a bank with one slot more


PLACES = {
    "all resident": Place(8, 1),
    "75 %": Place(6),
    "50 % and prefetch": Place(4, ahead=2),
    "25 %": Place(2),
    "25 % and prefetch": Place(2, 3, 1),
    "no cache": Place(0),
    "disk": Place(0, 1, rows=5),
    "disk and prefetch": Place(2, 3, 1, rows=0),
    "on_demand and prefetch": Place(2, 3, 1, by_policy=True),
    "apart": Place(2, 8, apart=2),
    "apart and prefetch": Place(1, 9, 1, apart=3),
}
LONGER = {
    "longer layers": Place(4, longer=2),
    "longer layers and prefetch": Place(3, 3, 1, longer=2),
    "all in longer layers": Place(7, 2, longer=3),
    "one in longer layers": Place(0, 8, longer=1, apart=2),
    "longer layers and the disk": Place(2, 2, rows=7, longer=4),
}
PLACES |= LONGER
# Kinds, forms and places; sequences are one where a step needs no waves else.
CASES = (
    *(("qwen3_moe", 16, place) for place in PLACES if place not in LONGER),
    *(("five", 16, place) for place in LONGER),
    ("mixtral", 16, "25 % and prefetch"), ("qwen3_moe", 3, "on_demand and prefetch"),
    *((kind, 16, "25 % and prefetch") for kind in KINDS),
    *((kind, 3, "no cache") for kind in KINDS),
    *(("sinks", "mxfp4", place) for place in ("no cache", "disk and prefetch")),
    *(("five", "int4_int4_ranks", place) for place in ("25 %", "50 % and prefetch")),
)  # fmt: skip
FAST = ("qwen3_moe", 16, "25 % and prefetch")
LENGTHS, NUM_NEW, CACHE, CHUNK = (16, 9, 3), 8, 32, 8
TEXTS = [np.random.default_rng(n).integers(0, QWEN.vocab_size, n).tolist() for n in LENGTHS]
SETTINGS = GenerationSettings.of(max_new_tokens=NUM_NEW)


@functools.cache
def resident(kind: str, form: int | str = 16) -> Runner:
    return Runner(CONFIGS[kind], random_weights(CONFIGS[kind], form), CPU)


class Answers(NamedTuple):
    """Answers to three prompts: tokens [B, n], log-probabilities [B, n, V], and the cache."""

    tokens: np.ndarray
    logprobs: np.ndarray
    cache: list[np.ndarray]


def answers_of(of: Runner) -> Answers:
    session = of.prefill(TEXTS, CACHE, SETTINGS.by_prompt(3), (), of.config.vocab_size)
    parts = [session.emitted]
    of.decode(session, NUM_NEW - 1, NUM_NEW - 1)
    parts.append(session.emitted)
    falling = np.concatenate([part.logprobs.top for part in parts], axis=1)
    ids = np.concatenate([part.logprobs.top_ids for part in parts], axis=1)
    logprobs = np.empty_like(falling)
    np.put_along_axis(logprobs, ids, falling, axis=-1)
    tokens = np.concatenate([part.tokens for part in parts], axis=1)
    return Answers(tokens, logprobs, [np.asarray(a) for a in jax.tree.leaves(session.state.cache)])


@functools.cache
def resident_answers(kind: str, form: int | str = 16) -> Answers:
    return answers_of(resident(kind, form))


@functools.cache
def whole_texts(kind: str, form: int | str = 16) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and answers, padded, and their logits as prompts at once."""
    longest = max(LENGTHS) + NUM_NEW
    rows = zip(TEXTS, resident_answers(kind, form).tokens.tolist(), strict=True)
    tokens = np.stack([np.pad(p + a, (0, longest - len(p + a))) for p, a in rows])
    return tokens.astype(np.int32), resident(kind, form).logits(tokens.astype(np.int32))


class InvisibleTest(parameterized.TestCase):
    def cached(self, kind: str, form: int | str, place: Place) -> tuple[Any, Any, list]:
        policy = make_policy("on_demand", prefetch=place.ahead) if place.by_policy else None
        how = {"transient": place.transient, "prefetch": place.ahead, "apart": place.apart}
        how["longer_layers"] = place.longer
        read: list[tuple[int, int]] = []
        if place.rows is not None:
            how |= {"num_rows": place.rows, "read": read}
        config = CONFIGS[kind]
        return *cached_runner(policy, (form,), (place.slots,), config=config, **how), read

    @slow.where(lambda kind, form, place: (kind, form, place) != FAST)
    @parameterized.parameters(*CASES)
    def test_answers_and_logits_are_those_of_a_resident_model(self, kind, form, place):
        tokens, logits = whole_texts(kind, form)
        runner, memory, read = self.cached(kind, form, PLACES[place])
        found, expected = answers_of(runner), resident_answers(kind, form)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)
        for a, b in zip(found.cache, expected.cache, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(runner.logits(tokens), logits)
        memory.read_counters()
        events = memory.tiers[0].ledger.as_dict()["totals"]
        self.assertEqual(events["unserved"], 0)
        self.assertEqual(events["misses"], events["admitted"] + events["streamed"])
        slots, rows = PLACES[place].slots, PLACES[place].rows
        self.assertEqual(events["streamed"] > 0, slots < CONFIGS[kind].num_experts)
        # An expert that no host row holds is not fetched ahead.
        self.assertEqual(events["prefetched"] > 0, "prefetch" in place and rows != 0)
        self.assertEqual(events["waits"], len(read))
        self.assertEqual(bool(read), "disk" in place)

    @parameterized.parameters((3, 1, 8), (3, 1, 1), (5, 2, 2), (4, 0, 2))
    @pytest.mark.slow
    def test_waves_of_one_sequence(self, transient, apart, unrolled):
        """Chunks pass in stages, some waves of them at a time; decode uses the bank alone."""
        place = Place(0, transient, apart=apart)
        with mock.patch.object(tier_step, "MOST_UNROLLED", unrolled):
            runner, memory, _ = self.cached("qwen3_moe", 16, place)
            expected = answers(resident("qwen3_moe"), PROMPTS[:1])
            self.assertEqual(answers(runner, PROMPTS[:1]), expected)
        chunk, token = (
            CachePlanner(memory.spec.tiers, None, is_prefill=is_chunk).forms(pairs)[0]
            for is_chunk, pairs in ((True, 16), (False, 2))
        )
        self.assertEqual(chunk.later_waves, -(-8 // transient))
        self.assertEqual(token.later_waves, 0)

    @parameterized.parameters("prefill", "decode")
    @pytest.mark.slow
    def test_one_phase_alone_looks_ahead(self, phase):
        runner, memory, _ = self.cached("qwen3_moe", 16, PLACES["50 % and prefetch"])
        pool = dataclasses.replace(memory.spec.tiers[0], prefetch_in=phase)
        memory.spec = dataclasses.replace(memory.spec, tiers=(pool,))
        runner = Runner(QWEN, runner.weights, CPU, memory=memory)
        came = []
        session = runner.prefill(PROMPTS[:1], 64, [SETTINGS], ())
        for _ in range(2):
            came.append(memory.read_counters().total("prefetched"))
            runner.decode(session, 4, 4)
        came.append(memory.read_counters().total("prefetched"))
        self.assertEqual(came[0] > 0, phase == "prefill")
        self.assertEqual(came[2] > came[0], phase == "decode")

    @pytest.mark.slow
    def test_a_step_neither_retraces_nor_copies_the_pool(self):
        runner, memory, _ = self.cached("qwen3_moe", 16, PLACES["50 % and prefetch"])
        answers(runner, PROMPTS)
        (tier,) = memory.tiers
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tier.pool.banks)]
        num_traces = runner.programs.num_traces
        for _ in range(3):
            answers(runner, PROMPTS)
        found = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tier.pool.banks)]
        self.assertEqual(found, places)
        self.assertEqual(runner.programs.num_traces, num_traces)
        pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tier.pool.banks))
        programs = runner.programs._programs
        (decode,) = [programs[key] for key in programs if key[0] is steps.decode]
        self.assertGreaterEqual(decode.memory_analysis().alias_size_in_bytes, pool_bytes)


class ChunksTest(parameterized.TestCase):
    """A text by chunks, and token by token, has the logits of the text at once.

    Prompts of a running batch (continuous_test.py) go by chunks of several sizes every day.
    """

    @parameterized.product(kind=KINDS, chunk=(CHUNK, 1))
    @pytest.mark.slow
    def test_chunks(self, kind, chunk):
        tokens, expected = whole_texts(kind)
        with mock.patch.object(runners, "longest_chunk", lambda *_: chunk):
            found = resident(kind).logits(tokens)
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)

    @parameterized.parameters(*KINDS)
    @pytest.mark.slow
    def test_decode(self, kind):
        _, logits = whole_texts(kind)
        expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
        found = resident_answers(kind)
        for row, length in enumerate(LENGTHS):
            of_row = expected[row, length - 1 : length - 1 + NUM_NEW]
            self.assertLess(relative_errors(found.logprobs[row], of_row).max(), RELATIVE_ERROR)
            np.testing.assert_array_equal(found.tokens[row], of_row.argmax(-1))


DYMOE = {"retention": 0.5, "schedule": "linear", "heavy_count": 3}
SHAPE = (5, QWEN.num_experts, QWEN.num_experts)
LISTS = buddy_lists(
    conditional_coactivation(np.random.default_rng(3).integers(0, 9, SHAPE)), 0.7, 3
)


class Looped(NamedTuple):
    """Layers that run in a loop."""

    kind: str
    forms: tuple[int | str, ...] = (16,)
    slots: tuple[int, ...] | None = None  # None: the model holds its experts
    policy: AnyPolicy | None = None
    dtype: Any = jnp.float32
    how: Mapping[str, Any] = MappingProxyType({})
    record: RecordSpec | None = None
    # Between passes of a loop a sum of float32 may end in another last bit (layer_index.py).
    rtol: float = 0.0


RECORD = RecordSpec(foreseen=2, probabilities=True)
LOOPS = {
    "resident": Looped(
        "windowed", ("int3_ranks",), record=RECORD._replace(importance=True)
    ),
    "resident in half precision": Looped("four", dtype=jnp.bfloat16),
    "ahead": Looped(
        "five", ("int4_int4_ranks",), (2,), how={"transient": 3, "prefetch": 2}, record=RECORD
    ),
    "cached and ahead": Looped(
        "four", ("int3_ranks",), (8,), dtype=jnp.bfloat16, how={"transient": 1, "prefetch": 2},
        record=RECORD,
    ),
    "waves": Looped("four", ("int4_symmetric",), (2,), dtype=jnp.bfloat16, how={"transient": 3}),
    "waves apart": Looped(
        "five", ("int4_int4_ranks",), (2,), how={"transient": 3, "prefetch": 2, "apart": 1}
    ),
    "on_demand": Looped(
        "five", (16,), (3,), make_policy("on_demand", prefetch=2), how={"prefetch": 2}
    ),
    "dymoe": Looped(
        "five", (4, 2), (3, 8), make_policy("dymoe", prefetch=2, **DYMOE), how={"prefetch": 2}
    ),
    "dymoe, one expert apart": Looped(
        "five", (4, 2), (7, 8), make_policy("dymoe", prefetch=0, **DYMOE),
        how={"transient": 4, "apart": 2},
    ),
    "buddymoe": Looped("five", (4,), (4,), BuddyMoe(lists=LISTS, rho=1), how={"first": 4}),
    "buddymoe and prefetch": Looped(
        "five", (4,), (4,), BuddyMoe(lists=LISTS, rho=1, prefetch=2),
        how={"first": 4, "prefetch": 2},
    ),
    "layers without attention": Looped(
        "two periods", (4, 2), (3, 8), make_policy("dymoe", prefetch=0, **DYMOE),
        record=RECORD._replace(importance=True), rtol=1e-3,
    ),
}  # fmt: skip


def outcome(runner: Runner, memory: Any, record: RecordSpec | None = None) -> Any:
    """A batch's cache and first tokens after two chunks, what is recorded, and the pools.

    Transient slots are left out: nothing is in them between layers.
    """
    prompts = [(TEXTS[0] * 2)[:27], TEXTS[0] * 2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with (
            mock.patch.object(runners, "longest_chunk", lambda *_: 16),
            recording(runner, path, record) if record else mock.MagicMock(),
        ):
            session = runner.prefill(prompts, 48, SETTINGS.by_prompt(2), ())
            said = jax.device_get((session.state.cache, session.emitted.tokens))
        trace = read_trace(path) if record else None
    fields = dataclasses.fields(trace) if trace else ()
    rows = {of.name: getattr(trace, of.name) for of in fields}
    rows = {name: value for name, value in rows.items() if isinstance(value, np.ndarray)}
    if memory is None:
        return said, rows, None
    pools = []
    for pool, spec in zip(memory.pool.tiers, memory.spec.tiers, strict=True):
        end, residency = spec.cache.first_transient(spec.cache.num_layers), pool.residency
        if spec.is_complete:  # of such a pool nobody asks when a slot was used last
            table = residency.table.at[:, 2 * spec.cache.num_experts :].set(0)
            residency = dataclasses.replace(residency, table=table)
        banks = jax.tree.map(lambda a, end=end: a[:end], pool.banks)
        pools.append(dataclasses.replace(pool, banks=banks, residency=residency, apart=None))
    pool = dataclasses.replace(memory.pool, tiers=tuple(pools))
    return said, rows, jax.device_get(pool)


def assert_trees_equal(test: Any, found: Any, expected: Any, rtol: float = 0.0) -> None:
    test.assertEqual(jax.tree.structure(found), jax.tree.structure(expected))
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        with test.subTest(jax.tree_util.keystr(path)):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


class LoopTest(parameterized.TestCase):
    @slow.where(lambda name: name != "resident in half precision")
    @parameterized.parameters(*LOOPS)
    def test_a_loop_is_what_it_is_unrolled(self, name):
        of, found, runs = LOOPS[name], [], {"kernels": ops.NO_KERNELS}  # as if for no CPU
        config = CONFIGS[of.kind]
        for loops in (False, True):
            if of.slots is None:
                weights = random_weights(config, of.forms[0], of.dtype)
                runner, memory = Runner(config, weights, CPU, **runs), None
            else:
                runner, memory = cached_runner(
                    of.policy,
                    of.forms,
                    of.slots,
                    config=config,
                    dtype=of.dtype,
                    runs=runs,
                    **of.how,
                )
            own_loops = Transformer.loops if loops else lambda *_: False
            with (
                mock.patch.object(Transformer, "loops", own_loops),
                mock.patch.object(transformer, "scan_plan", wraps=layer_index.scan_plan) as plans,
            ):
                found.append(outcome(runner, memory, of.record))
            self.assertEqual(plans.called, loops)
        for call in plans.call_args_list:
            self.assertGreater(layer_index.scan_plan(*call.args, **call.kwargs).num_passes, 1)
        assert_trees_equal(self, *found, of.rtol)
