"""Rows that join and leave a running batch answer as they would alone; prefixes are reused."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.errors import MoejaxError
from moejax.experts.budget import GIB, Limits
from moejax.inference import steps
from moejax.inference.batch import RowBatch, RowDelta
from moejax.inference.chunking import FixedSizes, PlannedSizes
from moejax.inference.continuous import ContinuousBatch
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.config import PAGE as PAGE_SLOTS
from moejax.models.config import ModelConfig, Pages, RopeScaling
from moejax.policies.make import make_policy
from tests import cached_runners, model_kinds, slow, tiny_engine
from tests.buddymoe_cases import random_lists
from tests.random_checkpoints import TINY
from tests.runner_test import recorded_programs

CPU = jax.devices("cpu")[0]
SIZES = FixedSizes((16, 32), (100,))  # S is no multiple of a chunk, nor of a page
ONE_SIZE = FixedSizes((32,), (100,))
PAGE = 16
WINDOWS = ModelConfig(**TINY | {
    "num_layers": 2, "moe_layers": (0,), "sliding_window": 7, "window_layers": (1,),
})  # fmt: skip


def two_layers(kind: str) -> ModelConfig:
    """A delta rule, and attention."""
    delta = dataclasses.replace(model_kinds.KINDS[kind]["delta_net"], layers=(0,))
    return model_kinds.config_of(kind, num_layers=2, moe_layers=(0, 1), delta_net=delta)


KINDS = {
    "windows": WINDOWS, "latent": model_kinds.config_of("latent"),
    "delta": two_layers("delta"), "by_part": two_layers("by_part"),
    "sigmoid": model_kinds.config_of("sigmoid"), "joint": model_kinds.config_of("joint"),
    "biased": model_kinds.config_of("biased"), "sinks": model_kinds.config_of("sinks"),
}  # fmt: skip
VOCAB = TINY["vocab_size"]
NEVER = (VOCAB,)  # ends no row, by the programs of a token that does
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 7}
# Lengths of prompts, and settings of their answers.
ROWS: tuple[tuple[int, dict[str, Any]], ...] = (
    (5, {"max_new_tokens": 21}), (90, {"max_new_tokens": 40}), (17, {"max_new_tokens": 1}),
    (40, SAMPLED | {"max_new_tokens": 9}), (3, {"max_new_tokens": 12, "repetition_penalty": 1.4}),
    (33, SAMPLED | {"max_new_tokens": 14, "repetition_penalty": 1.2, "seed": 3}),
    (16, {"max_new_tokens": 6}),
)  # fmt: skip


def rows_of(rows: Any = ROWS) -> list[tuple[list[int], GenerationSettings]]:
    """Prompts of random tokens, and their settings."""
    return [
        (np.random.default_rng(n).integers(1, VOCAB, n).tolist(), GenerationSettings(**how))
        for n, how in rows
    ]


def greedy_rows() -> list[tuple[list[int], GenerationSettings]]:
    """Rows whose tokens three programs give: two chunks, and decode."""
    return rows_of([ROWS[i] for i in (0, 1, 2, 6)])


@functools.cache
def resident_runner(config: ModelConfig = WINDOWS) -> Runner:
    """A runner of random weights on the CPU, one for the file: most of the time is compiling."""
    return Runner(config, cached_runners.random_weights(config), CPU)


def running(runner: Runner, num_lanes: int = 3, **how: Any) -> ContinuousBatch:
    """A batch of small sizes, with pages for whole rows and one more."""
    whole = Pages(1 + num_lanes * Pages(0, PAGE).of(SIZES.kv_lengths[-1]), PAGE)
    how = {"pages": whole, "eos_ids": NEVER, "sizes": SIZES, **how}
    return ContinuousBatch(runner, None, num_lanes=num_lanes, **how)


def alone(
    runner: Runner,
    prompt: list[int],
    settings: GenerationSettings,
    eos_ids: tuple[int, ...] = NEVER,
) -> list[int]:
    """The tokens of a prompt in a batch of its own."""
    length = SIZES.kv_lengths[-1]
    batch = RowBatch(runner, None, [prompt], [settings], length, eos_ids, steps_per_call=4)
    return [token for [delta] in batch.steps() if delta for token in delta.tokens]


def answers(
    batch: ContinuousBatch, rows: list[tuple[list[int], GenerationSettings]], every: int = 2
) -> list[list[int]]:
    """Tokens of rows of which one arrives every so many steps."""
    found: dict[int, list[int]] = {}

    def step() -> None:
        for number, delta in batch.step():
            assert not delta.error, delta.error
            found[number] += delta.tokens

    for prompt, settings in rows:
        found[batch.submit(prompt, settings)] = []
        for _ in range(every):
            step()
    while batch.num_rows:
        step()
    return list(found.values())


def one_row(batch: ContinuousBatch, prompt: list[int], **how: Any) -> list[int]:
    """Tokens of a row that is answered before anything else joins."""
    return answers(batch, [(prompt, GenerationSettings(**how))])[0]


class AloneTest(parameterized.TestCase):
    @slow.where(lambda kind: kind != "windows")
    @parameterized.parameters(*((kind,) for kind in KINDS))
    def test_each_answer_is_what_it_would_be_alone(self, kind: str):
        """Prompts of one chunk and of several join while others run, in lanes that were used."""
        runner, rows = resident_runner(KINDS[kind]), rows_of()
        expected = [alone(runner, *row) for row in rows]
        self.assertEqual([len(tokens) for tokens in expected], [21, 11, 1, 9, 12, 14, 6])
        self.assertEqual(answers(running(runner), rows), expected)

    @slow.where(lambda kind: kind != "windows")
    @parameterized.parameters("windows", "delta")
    def test_rows_wait_for_pages_and_kept_ones_are_given_away(self, kind: str):
        """Rows join in the order of arrival; the longest takes seven of eight pages."""
        runner, rows = resident_runner(KINDS[kind]), [*greedy_rows(), *greedy_rows()[:2]]
        batch = running(runner, pages=Pages(8, PAGE))
        joined, take = [], batch.pool.take

        def taken(found: Any, num_shared: int, limit: int) -> Any:
            pages = take(found, num_shared, limit)
            joined.append((limit, pages is not None))
            return pages

        self.assertEqual(batch.num_free, 3)
        with mock.patch.object(batch.pool, "take", taken):
            found = answers(batch, rows, every=0)
        self.assertEqual(found, [alone(runner, *row) for row in rows])
        limits = [min(len(prompt) + how.max_new_tokens - 1, 100) for prompt, how in rows]
        self.assertIn((100, False), joined)
        self.assertEqual([limit for limit, has in joined if has], limits)
        self.assertEqual((batch.pool.num_used, batch.num_free), (0, 3))
        self.assertGreater(batch.pool.num_kept, 0)
        with self.assertRaisesRegex(ValueError, "7 pages: a row of 100 slots takes 7"):
            running(runner, pages=Pages(7, PAGE))
        # No more rows are asked for while one waits for pages; if it is ended, they are.
        batch.submit([1] * 9, GenerationSettings(max_new_tokens=60))
        waits = batch.submit([2] * 9, GenerationSettings(max_new_tokens=90))
        batch.step()
        self.assertEqual(batch.num_free, 0)
        batch.end(waits)
        self.assertEqual(batch.num_free, 2)

    @pytest.mark.slow
    def test_with_experts_in_slots(self):
        one_layer = dataclasses.replace(cached_runners.QWEN, num_layers=1, moe_layers=(0,))
        resident, rows = resident_runner(one_layer), greedy_rows()
        expected = [alone(resident, *row) for row in rows]
        runner, memory = cached_runners.cached_runner(
            None, (16,), (3,), config=one_layer, transient=5
        )  # without waves: half of the compiling
        self.assertEqual(answers(running(runner, sizes=ONE_SIZE), rows), expected)
        self.assertGreater(memory.read_counters().total("misses"), 0)

    @parameterized.parameters("dymoe", "dynaexq", "buddymoe")
    @pytest.mark.slow
    def test_under_a_policy_every_row_is_answered_to_its_end(self, name: str):
        lists = random_lists(np.random.default_rng(0), 2, cached_runners.QWEN.num_experts)
        how = {"dymoe": {}, "dynaexq": {"period": 3}, "buddymoe": {"lists": lists}}[name]
        policy, rows = make_policy(name, **how), greedy_rows()
        forms, slots = ((16,), (5,)) if name == "buddymoe" else ((4, 2), (3, 8))
        runner, memory = cached_runners.cached_runner(policy, forms, slots)
        found = answers(running(runner, sizes=ONE_SIZE), rows)
        self.assertEqual([len(tokens) for tokens in found], [21, 11, 1, 6])
        self.assertTrue(all(token >= 0 for tokens in found for token in tokens))
        self.assertGreater(memory.read_counters().total("needed"), 0)

    @pytest.mark.slow
    def test_an_end_of_sequence_ends_a_row_and_its_lane_is_free(self):
        runner = resident_runner()
        rows = [
            (prompt, dataclasses.replace(how, max_new_tokens=9)) for prompt, how in greedy_rows()
        ]
        eos = (alone(runner, *rows[0])[4],)
        expected = [alone(runner, *row, eos) for row in rows]
        self.assertLess(len(expected[0]), 9)
        self.assertEqual(answers(running(runner, eos_ids=eos), rows), expected)

    @pytest.mark.slow
    def test_log_probabilities_are_told_to_all_and_change_nothing(self):
        runner, rows = resident_runner(), rows_of()[:3]
        batch = running(runner, top_logprobs=2)
        numbers = [batch.submit(*row, wants_logprobs=i == 1) for i, row in enumerate(rows)]
        told: dict[int, list[RowDelta]] = {number: [] for number in numbers}
        while batch.num_rows:
            for number, delta in batch.step():
                told[number].append(delta)
        self.assertEqual(
            [[t for delta in told[number] for t in delta.tokens] for number in numbers],
            [alone(runner, *row) for row in rows],
        )
        pairs = [pair for delta in told[numbers[1]] for pair in delta.logprobs]
        self.assertEqual([pair.token for pair in pairs], [pair.top[0][0] for pair in pairs])
        self.assertEqual(told[numbers[1]][-1].finish_reason, "length")


class TurnsTest(absltest.TestCase):
    def test_prompts_run_between_calls_and_no_longer_than_the_longest_chunk(self):
        runner = resident_runner()
        batch, calls = running(runner), []
        chunk, decode = runner.run_prompt_chunk, runner.decode

        def run_chunk(
            session: Any, lane: int, source: Any, pages: Any, prompt: Any, start: int, size: int,
            *rest: Any,
        ) -> None:  # fmt: skip
            calls.append((lane, size))
            chunk(session, lane, source, pages, prompt, start, size, *rest)

        def run_decode(*arguments: Any) -> Any:
            calls.append("decode")
            return decode(*arguments)

        with (
            mock.patch.object(runner, "run_prompt_chunk", run_chunk),
            mock.patch.object(runner, "decode", run_decode),
        ):
            batch.submit([1] * 3, GenerationSettings(max_new_tokens=60))
            [(_, first)] = batch.step()  # nobody else waits: its first token is told at once
            self.assertLen(first.tokens, 1)
            batch.submit([2] * 90, GenerationSettings(max_new_tokens=5))
            batch.submit([3] * 30, GenerationSettings(max_new_tokens=5))
            for _ in range(5):
                batch.step()
        self.assertEqual(
            calls,
            [(0, 16), (2, 32), "decode", (1, 32), "decode", (1, 32), "decode", (1, 32),
             "decode", "decode"],
        )  # fmt: skip

    def test_a_short_prompt_waits_for_no_long_one_and_no_client_for_another_ones_prompts(self):
        batch, first = running(resident_runner()), []
        for n, (length, client) in enumerate(((90, "a"), (80, "b"), (20, "a"))):
            row = GenerationSettings(max_new_tokens=30)
            batch.submit([n + 1] * length, row, client=client)
        while len(first) < 3:
            first += [number for number, delta in batch.step() if delta.tokens]
            first = list(dict.fromkeys(first))
        self.assertEqual(first, [1, 2, 0])

    def test_the_host_is_one_chunk_ahead_of_a_prompt(self):
        """So a row that comes, or one that is ended, does not wait for the whole prompt."""
        batch = running(resident_runner())
        batch.submit(list(range(1, 90)), GenerationSettings(max_new_tokens=2))
        for chunks in (1, 2):
            batch.step()
            self.assertEqual((batch.counts.chunks, len(batch._unread)), (chunks, 1))

    def test_what_a_cut_off_turn_shared_is_kept(self):
        batch, turn = running(resident_runner()), list(range(1, 60))
        one_row(batch, turn, max_new_tokens=1)
        number = batch.submit([*turn, *range(60, 98)], GenerationSettings(max_new_tokens=1))
        batch.step()
        batch.end(number)
        before = batch.counts.prefix_tokens
        one_row(batch, [*turn, 7, 8], max_new_tokens=1)
        self.assertEqual(batch.counts.prefix_tokens - before, len(turn))

    def test_short_prompts_share_the_time_of_a_chunk(self):
        batch = running(resident_runner())
        for _ in range(3):
            batch.submit([4] * 9, GenerationSettings(max_new_tokens=30))
        self.assertLen(batch.step(), 2)
        self.assertEqual(batch.counts.chunks, 2)  # 16 positions each
        batch.step()
        self.assertEqual((batch.counts.chunks, batch.counts.decode_rows), (3, 3))

    def test_a_lane_is_free_when_the_last_call_of_its_row_is_dispatched(self):
        runner, rows = resident_runner(), [rows_of()[0], rows_of()[6]]
        batch = running(runner)
        batch._lanes[1:] = []
        first = batch.submit(rows[0][0], dataclasses.replace(rows[0][1], max_new_tokens=5))
        told = [*batch.step(), *batch.step()]
        self.assertEqual(
            [(len(delta.tokens), delta.finish_reason) for _, delta in told], [(1, None)]
        )
        self.assertEqual((batch.num_rows, batch.num_free), (1, 1))
        second = batch.submit(*rows[1])
        self.assertEqual(batch.num_free, 0)
        while batch.num_rows:
            told += batch.step()
            self.assertTrue(all(lane.row.number == second for lane in batch._lanes))
        for number, row in ((first, rows[0]), (second, rows[1])):
            tokens = [token for one, delta in told if one == number for token in delta.tokens]
            self.assertEqual(tokens, alone(runner, *row)[: len(tokens)])
        self.assertEqual(batch.counts.decode_calls, 1 + 2)

    def test_after_an_error_it_can_be_used_again(self):
        runner = resident_runner()
        batch, [row, *_] = running(runner), rows_of()
        batch.submit(*row)
        batch.step()
        failing = mock.patch.object(runner, "decode", side_effect=MoejaxError("no disk"))
        with failing, self.assertRaisesRegex(MoejaxError, "no disk"):
            batch.step()
        batch.reset()
        self.assertEqual((batch.num_rows, batch.num_free), (0, 3))
        self.assertEqual(answers(batch, [row]), [alone(runner, *row)])

    @pytest.mark.slow
    def test_a_row_without_finite_logits_leaves_nothing_to_the_next_in_its_lane(self):
        runner, prompt = resident_runner(), rows_of()[0][0]
        row, bad = (prompt, GenerationSettings(max_new_tokens=40)), 159
        expected = alone(runner, *row)
        self.assertNotIn(bad, [*prompt, *expected])
        poisoned = {"embed": runner.weights["embed"].at[bad].set(np.nan)}
        self.enterContext(mock.patch.dict(runner.weights, poisoned))
        batch = running(runner)
        batch._lanes[1:] = []
        # It has values that are not finite in three pages, and the next row takes the same.
        batch.submit([*prompt, bad, *[3] * 40], row[1])
        [(_, delta)] = [told for _ in range(2) for told in batch.step()]
        self.assertIn("NaN", delta.error)
        self.assertEqual(answers(batch, [row]), [expected])
        self.assertEqual(batch.counts.prefix_hits, 0)
        # Nor to one that shares its beginning while nobody knows.
        batch = running(runner)
        prompts = [[*row[0], bad, *[3] * 40], [*row[0], 4]]
        numbers = [batch.submit(prompt, GenerationSettings(max_new_tokens=2)) for prompt in prompts]
        self.assertNotIn(bad, alone(runner, prompts[1], GenerationSettings(max_new_tokens=2)))
        ends: dict[int, RowDelta] = {}
        while batch.num_rows:
            ends |= dict(batch.step())
        self.assertEqual(batch.counts.prefix_hits, 0)
        self.assertIn("NaN", ends[numbers[0]].error)
        self.assertEqual(ends[numbers[1]].finish_reason, "length")

    def test_a_cache_that_was_not_planned_is_refused(self):
        apart, running = PlannedSizes(3, 100, 32), PlannedSizes(3, 100, 32, 8)
        apart.check(3, 100)
        running.check(3, 100, Pages(8, PAGE))
        running.check(1, 100)
        for planned, pages, mend in (
            (apart, Pages(8, PAGE), "come and go: load with running=True"),
            (running, None, "begin together: load with running=False"),
        ):
            with self.assertRaisesRegex(MoejaxError, mend):
                planned.check(3, 100, pages)

    def test_prompts_that_do_not_fit_are_refused(self):
        batch = running(resident_runner())
        for length in (0, 100):
            with self.assertRaisesRegex(MoejaxError, f"of {length} tokens: a row takes 1 to 99"):
                batch.submit([1] * length, GenerationSettings())


class ProgramsTest(absltest.TestCase):
    @pytest.mark.slow
    def test_the_cache_stays_in_place_and_a_chunk_copies_its_lane_alone(self):
        runner, temporary, lane = resident_runner(), [], 0
        for num_lanes in (2, 16):
            batch = running(runner, num_lanes)
            with recorded_programs(runner) as programs:
                answers(batch, rows_of()[:1])
            assert batch._session is not None
            cache = batch._session.state.cache
            nbytes = cache.keys.nbytes + cache.values.nbytes
            for function in (steps.prompt_chunk, steps.decode):
                memory = programs[function].memory_analysis()
                self.assertGreaterEqual(memory.alias_size_in_bytes, nbytes)
            memory = programs[steps.prompt_chunk].memory_analysis()
            temporary.append(memory.temp_size_in_bytes)
            lane = nbytes // num_lanes
        self.assertLess(temporary[1] - temporary[0], lane)

    def test_pages_are_those_that_were_planned(self):
        how: dict[str, Any] = {"tokenizer": False, "batch": 3, "running": True, "context": 250}
        directory = Path(self.enter_context(tempfile.TemporaryDirectory()))

        def load(gib: float) -> Engine:
            limits = Limits(device_gib=gib)
            return self.enter_context(tiny_engine.load_tiny_engine(directory, limits=limits, **how))

        engine = load(0.1)
        assert engine.budget is not None
        self.assertEqual(engine.budget.run.num_pages, 3 * 2 + 1)  # all slots
        expected = engine.generate([list(range(1, 60))], max_new_tokens=9)[0].tokens
        page = PAGE_SLOTS * engine.budget.run.slot_nbytes
        engine = load((engine.budget.total_device - 2 * page) / GIB)
        batch = engine.continuous_batch(3)
        self.assertEqual(batch.pool.number, 3 * 2 - 1)
        for _ in range(3):
            self.assertEqual(one_row(batch, list(range(1, 60)), max_new_tokens=9), expected)
        assert batch._session is not None and engine.budget is not None
        cache = batch._session.state.cache
        copied = 2 * page  # of a chunk's row
        planned = engine.budget.device["KV cache"]
        self.assertEqual(cache.keys.nbytes + cache.values.nbytes + copied, planned)
        with self.assertRaisesRegex(MoejaxError, "4 prompts, but memory was planned for 3"):
            one_row(engine.continuous_batch(4), [1, 2], max_new_tokens=2)


class PrefixTest(parameterized.TestCase):
    def test_the_next_turn_of_a_conversation_runs_what_is_new(self):
        runner = resident_runner()
        batch, prompt = running(runner), rows_of()[3][0]
        first = one_row(batch, prompt, max_new_tokens=9)
        turn = [*prompt, *first, 5, 6, 7]
        one_row(batch, [8, 9, 10], max_new_tokens=2)  # of somebody else
        expected = alone(runner, turn, GenerationSettings(max_new_tokens=9))
        self.assertEqual(one_row(batch, turn, max_new_tokens=9), expected)
        self.assertEqual(batch.counts.prefix_tokens, len(prompt) + len(first) - 1)
        self.assertEqual(batch.counts.prefix_hits, 1)

    def test_a_prompt_shares_the_beginning_of_a_row_that_runs(self):
        runner = resident_runner()
        batch, system = running(runner), rows_of()[5][0]
        rows = [
            ([*system, 7, 8], GenerationSettings(max_new_tokens=40)),
            ([*system, 9], GenerationSettings(max_new_tokens=30)),
            ([*system, 9, 11], GenerationSettings(max_new_tokens=20)),
            (system, GenerationSettings(max_new_tokens=4)),  # its last token is run
        ]
        self.assertEqual(answers(batch, rows), [alone(runner, *row) for row in rows])
        shared = 2 * len(system) + 1 + len(system) - 1
        self.assertEqual((batch.counts.prefix_tokens, batch.counts.prefix_hits), (shared, 3))

    @pytest.mark.slow
    def test_several_answers_to_a_prompt_run_it_once_and_others_pass_them(self):
        runner, prompt = resident_runner(), rows_of()[1][0]
        how = SAMPLED | {"max_new_tokens": 5}
        rows = [(prompt, GenerationSettings(**how | {"seed": seed})) for seed in (1, 2, 3)]
        rows += rows_of()[4:5]
        batch = running(runner)
        self.assertEqual(answers(batch, rows, every=0), [alone(runner, *row) for row in rows])
        self.assertEqual(batch.counts.prefix_tokens, 2 * (len(prompt) - 1))
        self.assertEqual(batch.counts.chunks, 3 + 2 + 1)

    def test_a_row_whose_leader_ends_runs_the_prompt_itself(self):
        runner, row = resident_runner(), rows_of()[1]
        batch = running(runner)
        leader, follower = (batch.submit(*row) for _ in range(2))
        batch.step()
        self.assertLen(batch._waiting, 1)
        batch.end(leader)
        found = []
        while batch.num_rows:
            for number, delta in batch.step():
                self.assertEqual(number, follower)
                found += delta.tokens
        self.assertEqual(found, alone(runner, *row))

    @parameterized.parameters("latent", "delta")
    @pytest.mark.slow
    def test_other_kinds_of_layers(self, kind: str):
        """The state of a delta rule continues after all its tokens, or not at all."""
        runner, prompt = resident_runner(KINDS[kind]), rows_of()[3][0]
        batch = running(runner, sizes=ONE_SIZE)
        first = one_row(batch, prompt, max_new_tokens=9)
        for turn in ([*prompt, *first, 5, 6, 7], [*prompt, 5]):
            expected = alone(runner, turn, GenerationSettings(max_new_tokens=9))
            self.assertEqual(one_row(batch, turn, max_new_tokens=9), expected)
        shared = len(prompt) + len(first) - 1
        is_delta = kind == "delta"
        self.assertEqual(batch.counts.prefix_tokens, shared + (0 if is_delta else len(prompt)))

    @pytest.mark.slow
    def test_a_state_serves_no_turn_once_some_of_its_pages_are_gone(self):
        runner, prompt = resident_runner(KINDS["delta"]), rows_of()[3][0]
        batch = running(runner, sizes=ONE_SIZE, pages=Pages(8, PAGE))
        turn = [*prompt, *one_row(batch, prompt, max_new_tokens=9), 5]
        one_row(batch, rows_of()[1][0][:80], max_new_tokens=9)  # takes two of three
        expected = alone(runner, turn, GenerationSettings(max_new_tokens=9))
        self.assertEqual(one_row(batch, turn, max_new_tokens=9), expected)
        self.assertEqual(batch.counts.prefix_tokens, 0)

    @pytest.mark.slow
    def test_no_keys_are_shared_that_the_length_of_a_prompt_turns(self):
        scaling = RopeScaling(kind="dynamic", factor=2.0, original_positions=64)
        layer = {"num_layers": 1, "moe_layers": (0,), "rope_scaling": scaling}
        runner = resident_runner(ModelConfig(**TINY | layer))
        batch, prompt = running(runner), rows_of()[3][0]
        one_row(batch, prompt, max_new_tokens=2)
        long = prompt + prompt
        expected = alone(runner, long, GenerationSettings(max_new_tokens=9))
        self.assertEqual(one_row(batch, long, max_new_tokens=9), expected)
        self.assertEqual(batch.counts.prefix_hits, 0)
