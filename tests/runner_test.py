"""Chunks, the cache and its memory, retraces, transfers, whole calls: how a runner answers."""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine
from moejax.experts.budget import RunSizes, workspace_nbytes
from moejax.inference import steps
from moejax.inference.chunking import (
    MIN_PREFILL_LENGTH,
    FixedSizes,
    PlannedSizes,
    kv_bucket,
    length_bucket,
    longest_chunk,
    prefill_chunks,
)
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner, Session
from moejax.models import kv_cache as cache
from moejax.models.shapes import SHAPES
from tests.cached_runners import QWEN, cached_runner
from tests.tiny_engine import VOCAB_SIZE, answers, load_tiny_engine

CONTEXT = 256
ENGINE: Engine


def setUpModule():
    """One engine for the file: most of the time is compiling."""
    global ENGINE
    with tempfile.TemporaryDirectory() as directory:
        ENGINE = load_tiny_engine(Path(directory), tokenizer=False)


def random_tokens(*shape: int) -> np.ndarray:
    """int[shape]."""
    return np.random.default_rng(shape).integers(0, VOCAB_SIZE, shape)


def start(
    serving: Runner, prompts: list[list[int]], cache_length: int = CONTEXT, **how: Any
) -> Session:
    return serving.prefill(
        prompts, cache_length, GenerationSettings.of(**how).by_prompt(len(prompts)), ()
    )


class BucketTest(parameterized.TestCase):
    @parameterized.parameters((1, 16), (16, 16), (17, 32), (100, 128), (129, 200), (200, 200))
    def test_length_bucket(self, length, expected):
        self.assertEqual(length_bucket(length, 16, 200), expected)

    @parameterized.parameters(
        (5, 256, [(0, 16)]),
        (5, 6, [(0, 6)]),
        (1024, 4096, [(0, 1024)]),
        (1025, 4096, [(0, 1024), (1024, 16)]),
        (3000, 4096, [(0, 1024), (1024, 1024), (2048, 1024)]),
        (1500, 1600, [(0, 1024), (1024, 512)]),
        (1590, 1600, [(0, 1024), (1024, 576)]),
        (1025, 1026, [(0, 1024), (1024, 2)]),
    )
    def test_prefill_chunks(self, length, cache_length, expected):
        self.assertEqual(list(prefill_chunks(length, cache_length, 1024)), expected)

    def test_chunks_cover_any_prompt_and_stay_in_the_cache(self):
        for cache_length in (17, 64, 65, 100, 256):
            for length in range(1, cache_length):
                found = list(prefill_chunks(length, cache_length, 64))
                ends = [begin + size for begin, size in found]
                self.assertEqual([begin for begin, _ in found], [0, *ends[:-1]])
                self.assertBetween(ends[-1], length, cache_length)

    @parameterized.parameters((1, 2048, 1024), (1, 40960, 128), (16, 40960, 16), (8, 2048, 512))
    def test_the_scores_of_a_chunk_are_bounded(self, batch, cache_length, expected):
        longest = longest_chunk(SHAPES["Qwen3-30B-A3B"], batch, cache_length)
        self.assertEqual(longest, expected)  # 32 heads, 4 bytes a score, 2**30 bytes

    @parameterized.product(name=tuple(SHAPES), platform=("gpu", "cpu"))
    def test_a_shorter_call_takes_no_more_than_was_planned(self, name, platform):
        shape, itemsize = SHAPES[name], {"gpu": 2, "cpu": 4}[platform]

        def nbytes(batch, context, chunk):
            wide, plain = shape.state_values
            cached = itemsize * (context * shape.cached_values + plain)
            run = RunSizes(
                config=shape, weights_nbytes={}, batch=batch, context=context, chunk=chunk,
                itemsize=itemsize, platform=platform,
            )  # fmt: skip
            return batch * (cached + 4 * wide) + workspace_nbytes(run)

        for batch, context in itertools.product((1, 4, 16), (512, 2048, 4096, 16384)):
            chunk = longest_chunk(shape, batch, context)
            planned = PlannedSizes(batch, context, chunk)
            most = nbytes(batch, context, chunk)
            for fewer, shorter in itertools.product((1, 2, 8, 16), (256, 1024, 4096, 16384)):
                if fewer <= batch and shorter <= context:
                    longest = min(shorter, longest_chunk(shape, fewer, shorter, planned))
                    for tokens in {MIN_PREFILL_LENGTH, longest}:
                        self.assertLessEqual(nbytes(fewer, shorter, tokens), most)

    @parameterized.parameters(
        ("gpu", 1024, 8192, (64, 1024)), ("gpu", 4096, 8192, (64, 1024, 4096)),
        ("gpu", 4096, 3000, (64, 1024, 3000)), ("gpu", 512, 8192, (64, 512)),
        ("cpu", 1024, 8192, (64, 256)), ("gpu", 4096, 500, (64, 500)),
    )  # fmt: skip
    def test_chunks_of_a_running_batch(self, platform, longest, context, chunks):
        sizes = FixedSizes.of(platform, longest, context)
        self.assertEqual(sizes.chunks, chunks)
        self.assertEqual(sizes.next_chunk(0, context - 1), chunks[-1])

    @parameterized.parameters(
        ((64, 1024), 128, 64), ((64, 1024), 129, 1024), ((64, 256), 129, 256), ((16, 32), 17, 32),
        ((64, 1024, 4096), 2048, 1024), ((64, 1024, 4096), 2049, 4096), ((1024,), 3, 1024),
    )  # fmt: skip
    def test_few_chunks_and_little_padding(self, chunks, left, expected):
        self.assertEqual(FixedSizes(chunks, (8192,)).next_chunk(512, 512 + left), expected)

    def test_a_planned_chunk_may_be_longer(self):
        shape, planned = SHAPES["Qwen3-30B-A3B"], PlannedSizes(1, 8192, 4096)
        self.assertEqual(longest_chunk(shape, 1, 8192, planned, stores_scores=False), 4096)
        self.assertEqual(longest_chunk(shape, 1, 8192, planned), 1024)  # by the scores
        any_size = PlannedSizes(chunk=4096)
        self.assertEqual(longest_chunk(shape, 2, 8192, any_size, stores_scores=False), 2048)
        found = list(prefill_chunks(5000, 8192, 4096))
        self.assertEqual(found, [(0, 4096), (4096, 1024)])

    @parameterized.parameters((1, 256), (256, 256), (257, 1024), (1025, 2000), (2000, 2000))
    def test_kv_bucket(self, length, expected):
        self.assertEqual(kv_bucket(length, 2000), expected)


class ChunkTest(parameterized.TestCase):
    def test_a_row_that_ended_emits_nothing_and_keeps_its_place(self):
        serving = ENGINE._runner
        prompt = random_tokens(20).tolist()
        free = start(serving, [prompt])
        tokens = np.asarray(serving.decode(free, 6, 16))[0, :6].tolist()
        session = serving.prefill([prompt], CONTEXT, [GenerationSettings()], (tokens[2],))
        emitted = np.asarray(serving.decode(session, 6, 16))[0]
        end = tokens.index(tokens[2]) + 1
        np.testing.assert_array_equal(emitted, tokens[:end] + [-1] * (16 - end))
        self.assertEqual(int(session.state.positions[0]), 20 + end)


class CacheTest(parameterized.TestCase):
    SHAPE = (2, 3, 2, 8, 4)  # L, B, K, S, C

    def _full_of(self, value: float) -> cache.KVCache:
        return cache.KVCache(jnp.full(self.SHAPE, value), jnp.full(self.SHAPE, -value))

    def test_a_chunk_lands_where_it_belongs(self):
        new = np.random.default_rng(0).standard_normal((2, 3, 3, 2, 4)).astype(np.float32)
        expected = np.full(self.SHAPE, 9.0, np.float32)
        expected[1, :, :, 4:7] = new[0].swapaxes(1, 2)
        found = self._full_of(9.0).write_chunk(1, *jnp.asarray(new), jnp.int32(4))
        np.testing.assert_array_equal(found.keys, expected)
        np.testing.assert_array_equal(found.values[1, :, :, 4:7], new[1].swapaxes(1, 2))
        np.testing.assert_array_equal(found.values[0], -9.0)

    def test_a_token_lands_at_its_position_and_outside_nowhere(self):
        new = np.random.default_rng(1).standard_normal((2, 3, 1, 2, 4)).astype(np.float32)
        positions = jnp.asarray([0, 7, 8], jnp.int32)
        found = self._full_of(9.0).write_token(0, *jnp.asarray(new), positions)
        expected = np.full(self.SHAPE, 9.0, np.float32)
        expected[0, 0, :, 0], expected[0, 1, :, 7] = new[0, 0, 0], new[0, 1, 0]
        np.testing.assert_array_equal(found.keys, expected)


@contextlib.contextmanager
def recorded_programs(serving: Runner) -> Iterator[dict[Any, Any]]:
    """The compiled programs that were called meanwhile, by function."""
    programs: dict[Any, Any] = {}
    get = serving.programs.get

    def recording(function: Any, *arguments: Any, **how: Any) -> Any:
        programs[function] = get(function, *arguments, **how)
        return programs[function]

    with mock.patch.object(serving.programs, "get", recording):
        yield programs


class FewProgramsTest(parameterized.TestCase):
    """On a CPU, where compiling takes seconds."""

    def setUp(self):
        super().setUp()
        if ENGINE.device.platform != "cpu":
            self.skipTest("a GPU's programs are others")

    def test_the_next_turns_of_a_conversation_compile_nothing(self):
        config = dataclasses.replace(ENGINE.config, max_positions=4096)
        engine = Engine(config, ENGINE.weights, device=ENGINE.device)
        engine.generate(random_tokens(9).tolist(), max_new_tokens=40, ignore_eos=True)
        num_programs = engine.num_traces
        for length, new in ((64, 100), (190, 60), (256, 128)):
            prompt = random_tokens(length).tolist()
            engine.generate(prompt, max_new_tokens=new, ignore_eos=True)
            self.assertEqual(engine.num_traces, num_programs)


class MemoryTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        config = dataclasses.replace(ENGINE.config, max_positions=4096)
        self.runner = Runner(config, ENGINE.weights, ENGINE.device)
        self.prompts = [random_tokens(25).tolist(), random_tokens(7).tolist()]

    def _cache_bytes(self, length: int) -> int:
        shape = cache.cache_shape(ENGINE.config, len(self.prompts), length)
        return 2 * int(np.prod(shape)) * 4

    def test_the_cache_is_donated_and_unused_slots_cost_nothing(self):
        # Like on a GPU: a step that chooses how many slots it reads has room for all.
        self.enter_context(mock.patch.object(self.runner, "_chooses_kv_length", False))
        temporary = {}
        for length in (256, 2048):
            with recorded_programs(self.runner) as programs:
                session = start(self.runner, self.prompts, length)
                self.runner.decode(session, 4, 16)
            state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(session.state))
            for function in (steps.prefill_chunk, steps.first_token, steps.decode):
                memory = programs[function].memory_analysis()
                self.assertGreaterEqual(memory.alias_size_in_bytes, self._cache_bytes(length))
                temporary[function, length] = memory.temp_size_in_bytes
            # The whole state aliases, not the cache alone.
            decode = programs[steps.decode].memory_analysis()
            self.assertGreaterEqual(
                decode.alias_size_in_bytes, state_bytes - 16 * len(self.prompts)
            )
        for function in (steps.prefill_chunk, steps.first_token, steps.decode):
            # A copy of the unused slots, of one layer's keys even, would be far more.
            grown = temporary[function, 2048] - temporary[function, 256]
            unused = self._cache_bytes(2048) - self._cache_bytes(256)
            self.assertLess(grown, unused / ENGINE.config.num_layers / 2 / 10)
        self.assertLess(temporary[steps.decode, 2048], self._cache_bytes(256))

    @pytest.mark.slow
    def test_a_step_that_chooses_its_slots_copies_no_cache(self):
        with recorded_programs(self.runner) as programs:
            self.runner.decode(start(self.runner, self.prompts, 8192), 4, 16)
        memory = programs[steps.decode].memory_analysis()
        self.assertLess(memory.temp_size_in_bytes, self._cache_bytes(8192))

    def test_the_buffers_stay_where_they_are(self):
        session = start(self.runner, self.prompts)
        places = self._places(session)
        for _ in range(3):
            before = session.state
            self.runner.decode(session, 4, 16)
            self.assertEqual(self._places(session), places)
            self.assertTrue(before.cache.keys.is_deleted())
            self.assertTrue(before.tokens.is_deleted())

    def _places(self, session: Session) -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(session.state.cache)]


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Names of JAX's own tracing and compiling events meanwhile."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class RetraceTest(parameterized.TestCase):
    def test_nothing_is_traced_after_the_warm_up(self):
        def generate(length: int, **how: Any) -> Any:
            return ENGINE.generate(random_tokens(length).tolist(), **how)[0]

        with counted_compilations() as events:
            jax.jit(lambda x: x + 1)(1)
        self.assertNotEmpty(events)
        for how in (
            {"temperature": 0.0},
            {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 1},
        ):
            before = ENGINE.compile_seconds
            warm_up = generate(20, max_new_tokens=18, **how)
            self.assertAlmostEqual(warm_up.timing.compile_s, ENGINE.compile_seconds - before)
            ENGINE.logits(random_tokens(1, 20))
            traces, seconds = ENGINE.num_traces, ENGINE.compile_seconds
            self.assertGreater(seconds, 0)
            self.assertGreater(traces, 0)
            with counted_compilations() as events:
                for length in (17, 25, 32):  # the bucket of 20
                    generate(length, max_new_tokens=18, **how)
                    ENGINE.logits(random_tokens(1, length))
                generate(20, **{**how, "max_new_tokens": 40, "seed": 7})
                if how["temperature"]:
                    changed = {"temperature": 0.3, "repetition_penalty": 1.5, "top_k": 4}
                    generate(20, **changed, top_p=0.5, min_p=0.1)
                again = generate(20, max_new_tokens=18, **how)
            self.assertEqual(events, [])
            self.assertEqual((ENGINE.num_traces, ENGINE.compile_seconds), (traces, seconds))
            self.assertEqual(again.timing.compile_s, 0)
            self.assertEqual(again.tokens, warm_up.tokens)


class TransferTest(parameterized.TestCase):
    PROMPT = tuple(random_tokens(20).tolist())
    SAMPLED: ClassVar = {"max_new_tokens": 20, "temperature": 1.0, "repetition_penalty": 1.1}

    def test_nothing_is_put_in_silence(self):
        def run() -> list[Any]:
            stream = ENGINE.stream(self.PROMPT, **self.SAMPLED)
            return [
                ENGINE.generate(self.PROMPT, max_new_tokens=20)[0].tokens,
                ENGINE.generate(self.PROMPT, **self.SAMPLED)[0].tokens,
                [chunk.token for chunk in stream],
                ENGINE.logits([self.PROMPT]).tolist(),
            ]

        expected = run()  # compiles
        with jax.transfer_guard("disallow"):
            self.assertEqual(run(), expected)

    def test_the_guard_would_notice(self):
        session = start(ENGINE._runner, [self.PROMPT])
        with (
            mock.patch.object(ENGINE._runner, "_put", lambda array: array),
            jax.transfer_guard("disallow"),
            self.assertRaisesRegex(Exception, "Disallowed host-to-device transfer"),
        ):
            ENGINE._runner.decode(session, 15, 16)

    @parameterized.parameters((40, 1 + 3), (1, 1), (17, 1 + 1), (18, 1 + 2))
    def test_one_read_a_call_of_16_steps(self, max_new_tokens, expected):
        ENGINE.generate(self.PROMPT, max_new_tokens=max_new_tokens)
        with self._counted_reads() as reads:
            ENGINE.generate(self.PROMPT, max_new_tokens=max_new_tokens)
        self.assertLen(reads, expected)
        self.assertLessEqual(max(shape[1] for shape in reads), 16)

    def test_one_read_a_streamed_token(self):
        list(ENGINE.stream(self.PROMPT, **self.SAMPLED))
        with self._counted_reads() as reads:
            list(ENGINE.stream(self.PROMPT, **self.SAMPLED))
        self.assertEqual(reads, [(1, 1)] * 20)

    @contextlib.contextmanager
    def _counted_reads(self) -> Iterator[list[tuple[int, ...]]]:
        """Shapes of the device arrays that were read by `np.asarray`; other ways raise.

        On a CPU the transfer guard lets reads pass, so the conversions themselves are patched.
        """
        reads: list[tuple[int, ...]] = []
        asarray = np.asarray

        def counting(array: Any, *args: Any, **how: Any) -> np.ndarray:
            if isinstance(array, jax.Array):
                reads.append(array.shape)
            return asarray(array, *args, **how)

        def refuse(array: jax.Array) -> None:
            raise AssertionError(f"{array.shape} was read from the device")

        array_type = type(jnp.zeros(()))
        with (
            mock.patch.object(array_type, "_value", property(refuse)),
            mock.patch.object(np, "asarray", counting),
        ):
            yield reads

    def test_other_reads_would_be_noticed(self):
        array = jnp.arange(3)
        with self._counted_reads() as reads:
            for read in (int, float, bool):
                with self.assertRaisesRegex(AssertionError, "was read"):
                    read(array[0])
            with self.assertRaisesRegex(AssertionError, "was read"):
                array.tolist()
            np.asarray(array)
        self.assertEqual(reads, [(3,)])


class WholeCallsTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_steps_that_were_not_asked_for_change_nothing(self):
        prompts = [random_tokens(20).tolist(), random_tokens(9).tolist()]
        how = {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.2, "seed": 3}
        found = []
        for whole in (False, True):
            serving = Runner(ENGINE.config, ENGINE.weights, ENGINE.device)
            serving._whole_calls = whole
            session = start(serving, prompts, **how)
            emitted = [np.asarray(serving.decode(session, n, 8)) for n in (3, 8, 1, 5)]
            state = session.state
            keys = jax.random.key_data(state.keys)
            found.append((emitted, state.tokens, state.positions, state.done, keys, state.seen))
        jax.tree.map(np.testing.assert_array_equal, *found)
        counts = [(np.asarray(part) >= 0).sum(axis=1).tolist() for part in found[1][0]]
        self.assertEqual(counts, [[n, n] for n in (3, 8, 1, 5)])

    @pytest.mark.slow
    def test_rows_that_rest_are_no_steps_of_the_ledger(self):
        runner, memory = cached_runner(None, (16,), (4,))
        runner._whole_calls = True
        prompts = [random_tokens(7).tolist(), random_tokens(5).tolist()]
        session = start(runner, prompts, 64)
        first = memory.read_counters().total("steps")
        self.assertEqual(first, QWEN.num_layers)
        runner.decode(session, 3, 8)  # five steps more pad the call
        self.assertEqual(memory.read_counters().total("steps") - first, 3 * QWEN.num_layers)
        state = session.state._replace(done=np.asarray([True, False]))
        session.state = jax.device_put(state, runner.device)
        runner.decode(session, 2, 8)
        self.assertEqual(memory.read_counters().total("steps") - first, 5 * QWEN.num_layers)
        state = session.state._replace(done=np.ones(2, bool))
        session.state = jax.device_put(state, runner.device)
        runner.decode(session, 8, 8)
        self.assertEqual(memory.read_counters().total("steps") - first, 5 * QWEN.num_layers)

    @pytest.mark.slow
    def test_an_answer_of_which_much_would_be_waste_is_not_run_whole(self):
        serving = Runner(ENGINE.config, ENGINE.weights, ENGINE.device)
        serving._whole_calls = True
        for num_new, expected in ((2, False), (4, False), (17, True), (20, True)):
            serving.programs._programs.clear()
            [answer] = answers(serving, [random_tokens(12).tolist()], 64, num_new, per_call=4)
            self.assertLen(answer, num_new)
            (key,) = (key for key in serving.programs._programs if key[0] is steps.decode)
            self.assertEqual(key[1][-1], expected, num_new)
