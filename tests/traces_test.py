"""Traces: what is written is read, what is wrong is said, and what the engine ran is recorded."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.routing.trace import (
    DECODE,
    PREFILL,
    Trace,
    TraceWriter,
    read_trace,
    replay_of_trace,
    trace_of_replay,
    write_trace,
)
from tests.folder_case import FolderTestCase
from tests.simulated_traces import random_trace
from tests.tiny_engine import CONFIG, load_tiny_engine

SHAPE: dict[str, Any] = {"num_layers": 3, "num_experts": 16, "width": 3, "foreseen": 4}


class FileTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.path = self.directory / "x.safetensors"

    def same(self, found: Trace, expected: Trace) -> None:
        self.assertEqual(found.num_experts, expected.num_experts)
        self.assertEqual(found.tensors().keys(), expected.tensors().keys())
        for name, array in expected.tensors().items():
            self.assertEqual(found.tensors()[name].dtype, array.dtype)
            np.testing.assert_array_equal(found.tensors()[name], array)

    @parameterized.parameters(16, 300)
    def test_what_is_written_is_read(self, num_experts):
        trace = random_trace(step_sizes=[9, 1, 1, 2], **SHAPE | {"num_experts": num_experts})
        write_trace(self.path, trace)
        found = read_trace(self.path)
        self.same(found, trace)
        self.assertEqual(found.facts, {"model": "random"})
        self.assertEqual(found.ids.dtype, np.uint8 if num_experts == 16 else np.uint16)

    def test_rows_are_appended(self):
        trace = random_trace(step_sizes=[9, 1, 1, 2], **SHAPE)
        with TraceWriter(self.path, 16) as writer:
            for rows in (slice(0, 4), slice(4, 5), slice(5, 13)):
                writer.append(**{n: array[rows] for n, array in trace.tensors().items()})
            self.assertFalse(self.path.exists())
        self.same(read_trace(self.path), trace)
        self.assertEqual([p.name for p in self.directory.iterdir()], [self.path.name])

    def test_the_callers_array_may_change_and_a_fact_may_be_no_text(self):
        trace = random_trace(step_sizes=[2], **SHAPE)
        rows = {name: array.copy() for name, array in trace.tensors().items()}
        with TraceWriter(self.path, 16, {"command": "run \udcff"}) as writer:
            writer.append(**rows)
            rows["step"][:] = 7
        found = read_trace(self.path)
        self.same(found, trace)
        self.assertEqual(found.facts["command"], "run ?")

    def test_it_is_small(self):
        replay = np.tile(np.arange(8, dtype=np.int32), (1000, 48, 1))
        write_trace(self.path, trace_of_replay(replay, 128))
        self.assertLess(self.path.stat().st_size, 1000 * 1200)

    def test_what_fails_leaves_nothing(self):
        trace = random_trace(step_sizes=[1, 1], **SHAPE)
        with self.assertRaises(KeyboardInterrupt), TraceWriter(self.path, 16) as writer:
            writer.append(**trace.tensors())
            raise KeyboardInterrupt
        with self.assertRaisesRegex(MoejaxError, "nothing ran"), TraceWriter(self.path, 16):
            pass
        with self.assertRaisesRegex(ValueError, "rows of"), TraceWriter(self.path, 16) as writer:
            writer.append(**trace.tensors())
            writer.append(**{**trace.tensors(), "weights": trace.weights[..., :1]})
        with self.assertRaisesRegex(MoejaxError, "not there"):
            TraceWriter(self.directory / "no" / "x", 16)
        self.assertEmpty(list(self.directory.iterdir()))

    @parameterized.parameters(
        ({"format": "other"}, {}, "no trace of routing"),
        ({"version": "3"}, {}, "of version 3; this reads 1 and 2"),
        ({"version": "2"}, {}, "x.safetensors is not what was written .* none by its header"),
        ({"num_experts": "many"}, {}, "cannot be read"),
        ({"num_experts": "4294967296"}, {}, "there are 4294967296 experts; ids have 16 bits"),
        ({}, {"weights": None}, "lacks weights"),
        ({}, {"phase": np.full(13, 2, np.uint8)}, "phase 2 is neither"),
        ({}, {"step": np.arange(13, 0, -1, dtype=np.int32)}, "smaller than the one before"),
        ({}, {"weights": np.zeros((13, 3, 2), np.float16)}, r"expected float16\[13, 3, 3\]"),
        ({}, {"ids": np.full((13, 3, 3), 16, np.uint8)}, "holds 16, there are 16"),
        ({}, {"ids": np.full((13, 3, 3), 1, np.uint8)}, "an expert twice"),
        ({}, {"predicted_probabilities": None}, "go together"),
        ({}, {"weights": np.full((13, 3, 3), np.nan, np.float16)}, "weights hold numbers that"),
        ({}, {"weights": np.full((13, 3, 3), -1, np.float16)}, "weights hold numbers that"),
        ({}, {"weights": np.zeros((13, 3, 3), np.float16)}, "weights of a token are all 0"),
        ({}, {"importance": np.full((13, 3), np.nan, np.float16)}, "importance hold numbers that"),
        ({}, {"importance": np.full((13, 3), -1, np.float16)}, "importance hold numbers that"),
        ({}, {"probabilities": np.full((13, 3, 16), np.inf, np.float16)}, "probabilities hold"),
    )
    def test_what_is_wrong_is_said(self, facts, tensors, said):
        trace = random_trace(step_sizes=[9, 1, 1, 2], **SHAPE)
        metadata = {"format": "moejax-trace", "version": "1", "num_experts": "16"} | facts
        arrays = {n: a for n, a in (trace.tensors() | tensors).items() if a is not None}
        safetensors.numpy.save_file(arrays, self.path, metadata)
        with self.assertRaisesRegex(MoejaxError, said):
            read_trace(self.path)

    def test_old_traces_are_read(self):
        trace = random_trace(step_sizes=[9, 1, 1, 2], **SHAPE)
        facts = {"format": "moejax-trace", "version": "1", "num_experts": "16", "model": "random"}
        safetensors.numpy.save_file(trace.tensors(), self.path, facts)
        self.same(read_trace(self.path), trace)
        self.assertEqual(read_trace(self.path).facts, {"model": "random"})

    def test_flipped_bits_are_seen(self):
        trace = random_trace(step_sizes=[9, 1, 1, 2], **SHAPE)
        with TraceWriter(self.path, 16, {"model": "random", "tiers": "a=9"}) as writer:
            for rows in (slice(0, 4), slice(4, 13)):
                writer.append(**{n: array[rows] for n, array in trace.tensors().items()})
        self.same(read_trace(self.path), trace)
        whole = self.path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        draw = np.random.default_rng(0)
        bits = [*range(0, 8 * header, 11), *draw.integers(8 * header, 8 * len(whole), 99).tolist()]
        loaded = []
        for bit in bits:
            content = bytearray(whole)
            content[bit // 8] ^= 1 << (bit % 8)
            self.path.write_bytes(content)
            try:
                read_trace(self.path)
            except MoejaxError as error:
                self.assertNotIn("\n", str(error))
            else:
                loaded.append((bit // 8, whole[bit // 8 : bit // 8 + 1]))
        self.assertEmpty(loaded)

    def test_no_file_and_no_safetensors(self):
        with self.assertRaisesRegex(MoejaxError, "there is no trace"):
            read_trace(self.path)
        self.path.write_text("{}")
        with self.assertRaisesRegex(MoejaxError, "cannot be read as a trace"):
            read_trace(self.path)

    def test_replay_operand(self):
        replay = random_trace(step_sizes=[1] * 7, **SHAPE).ids.astype(np.int32)
        np.testing.assert_array_equal(replay_of_trace(trace_of_replay(replay, 16)), replay)
        mixed = random_trace(step_sizes=[9, 1, 1], **SHAPE)
        self.assertEqual(replay_of_trace(mixed).shape, (2, 3, 3))
        batch = dataclasses.replace(mixed, phase=np.full(11, DECODE, np.uint8))
        with self.assertRaisesRegex(MoejaxError, "several sequences a step"):
            replay_of_trace(batch)
        with self.assertRaisesRegex(MoejaxError, "no decoded token"):
            replay_of_trace(dataclasses.replace(mixed, phase=np.full(11, PREFILL, np.uint8)))


class RecordingTest(FolderTestCase):
    """Records a resident model; `simulation_test` records one whose experts move."""

    @pytest.mark.slow
    def test_what_the_routers_said(self):
        engine = load_tiny_engine(self.directory / "model")
        prompts = [list(range(20)), list(range(50, 57))]
        settings: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
        plain = engine.generate(prompts, **settings)
        path = self.directory / "trace"
        what: dict[str, Any] = {"foreseen": 2, "probabilities": True, "importance": True}
        with engine.recording(path, about={"model": "tiny"}, **what):
            answers = engine.generate(prompts, **settings)
            engine.generate(prompts, **settings)
        self.assertEqual([a.tokens for a in answers], [a.tokens for a in plain])
        trace = read_trace(path)
        weights = 3 * CONFIG.model_dim * CONFIG.expert_dim  # of an expert, in float32
        facts = {"model": "tiny", "steps_per_call": "16", "tiers": f"stored={4 * weights}"}
        self.assertEqual(trace.facts, facts)
        # The last token of an answer never runs.
        self.assertEqual(len(trace), 2 * (20 + 7 + 2 * 5))
        self.assertLen(np.unique(trace.step), 2 * (1 + 5))
        self.assertEqual((trace.phase == PREFILL).sum(), 2 * (20 + 7))
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            mine = trace.sequence == row
            ids = [*prompt, *answer.tokens[:-1]]
            np.testing.assert_array_equal(trace.position[mine], np.arange(len(ids)))
            again = trace.sequence == row + 2
            np.testing.assert_array_equal(trace.weights[again], trace.weights[mine])
        # A query gives 1 to all tokens: 20 in all, each token's by the queries that see it.
        received = trace.importance[(trace.sequence == 0) & (trace.phase == PREFILL)]
        seen_by = np.arange(20, 0, -1)[:, None]
        np.testing.assert_allclose((received * seen_by).sum(axis=0), 20, rtol=2e-3)
        self.assertGreater(np.ptp(received), 0.05)
        self.assertFalse(trace.importance[trace.phase == DECODE].any())
        self.check(engine, trace, trace.sequence == 0, [*prompts[0], *answers[0].tokens[:-1]])
        lost = self.directory / "lost"
        with self.assertRaises(KeyboardInterrupt), engine.recording(lost):
            raise KeyboardInterrupt
        engine.generate(prompts, **settings)  # recorded by nobody
        self.assertFalse(lost.exists())

    def check(self, engine: Any, trace: Trace, mine: np.ndarray, ids: list[int]) -> None:
        """The rows of a sequence are what the model says of it in one pass."""
        path = self.directory / "again"
        with engine.recording(path, foreseen=2, probabilities=True):
            engine.logits([ids])
        whole = read_trace(path)
        # `logits` pads its input, and pads run too.
        whole = dataclasses.replace(whole, **{n: a[: len(ids)] for n, a in whole.tensors().items()})
        np.testing.assert_array_equal(trace.ids[mine], whole.ids)
        np.testing.assert_array_equal(trace.predicted_ids[mine], whole.predicted_ids)
        for name in ("weights", "probabilities", "predicted_probabilities"):
            found, expected = trace.tensors()[name][mine], whole.tensors()[name]
            np.testing.assert_allclose(found, expected, atol=2e-3)
        shares = whole.probabilities.astype(np.float32)
        best = np.argsort(-shares, axis=-1, kind="stable")[..., : CONFIG.experts_per_token]
        top = np.take_along_axis(shares, best, -1)
        chosen = np.take_along_axis(shares, whole.ids.astype(np.int64), -1)
        np.testing.assert_allclose(chosen, top, atol=1e-3)
        weights = top / top.sum(-1, keepdims=True)
        np.testing.assert_allclose(whole.weights, weights, atol=2e-3)
