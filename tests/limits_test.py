"""An engine under limits of memory: from a checkpoint to tokens, with experts in other places."""

import dataclasses
import gc
import os
import tempfile
import threading
import time
import unittest
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moejax import Engine, MoejaxError
from moejax.checkpoints.experts import ExpertReader
from moejax.checkpoints.open import Checkpoint
from moejax.engine import STEPS_PER_CALL
from moejax.experts import pinned_memory as pinned
from moejax.experts.budget import PINNED_LIMIT, Limits
from moejax.experts.disk_cache import DiskExperts, _DiskReader
from moejax.experts.tiering import Tiering
from moejax.inference.generation import GenerationSettings
from pallas_kernels.cache_plan.operands import LayerTables
from tests import slow
from tests.tiny_engine import CONFIG, VOCAB_SIZE, load_tiny_engine

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB_SIZE, n).tolist() for n in (9, 21)]
ROW_NBYTES = 3 * 16 * 32 * 4  # of an expert of the tiny model in float32
GREEDY = [GenerationSettings(temperature=0.0)] * 2
DIRECTORY: Path
RESIDENT: list[list[int]]


def setUpModule():
    global DIRECTORY, RESIDENT
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    DIRECTORY = Path(directory.name)
    RESIDENT = tokens(load_tiny_engine(DIRECTORY))


def tokens(engine: Engine) -> list[list[int]]:
    return [answer.tokens for answer in engine.generate(PROMPTS, max_new_tokens=10)]


def limited(**limits: float) -> Engine:
    return Engine.from_pretrained(
        DIRECTORY, dtype="float32", platform="cpu", progress=False, batch=2, context=64,
        limits=Limits(**limits),
    )  # fmt: skip


def totals(engine: Engine) -> dict[str, int]:
    assert engine.ledger is not None
    return engine.ledger.as_dict()["totals"]


class LimitsTest(parameterized.TestCase):
    def test_without_tight_limits_nothing_moves(self):
        engine = limited(device_gib=1)
        self.assertIsNone(engine.ledger)
        self.assertEqual(tokens(engine), RESIDENT)

    @pytest.mark.slow
    def test_layers_of_two_banks_under_limits_that_fit_exactly(self):
        """A policy's own look-ahead gives each layer one of two banks."""
        config = dataclasses.replace(CONFIG, num_layers=4, moe_layers=(0, 1, 2, 3), num_experts=32)
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        expected = tokens(load_tiny_engine(directory, config=config))
        tiering = Tiering(policy="on_demand", settings={"prefetch": 2})

        def load(**limits: float) -> Engine:
            return Engine.from_pretrained(
                directory, dtype="float32", platform="cpu", progress=False, batch=2, context=64,
                policy=tiering, limits=Limits(transient=2, **limits),
            )  # fmt: skip

        three, found = load(slots=3).budget.total_device, []
        for room in range(0, 6 * ROW_NBYTES, ROW_NBYTES):
            engine = load(device_gib=(three + room + 64) / 2**30)
            (tier,) = engine.budget.tiers
            self.assertEqual(tier.banks, 2)
            self.assertEqual(tokens(engine), expected)
            found.append(tier.said_slots)
        self.assertEqual(found, ["3", "3", "3", "3 or 4", "3 or 4", "4"])

    @slow.where(lambda policy: policy is None)
    @parameterized.parameters(None, "on_demand")
    def test_what_a_limit_leaves_is_a_slot_of_the_first_layer(self, policy):
        two = limited(slots=2, transient=2).budget.total_device
        # A slot, and room for what a step brings to three at once.
        more = two + 2 * ROW_NBYTES + 64
        engine = Engine.from_pretrained(
            DIRECTORY, dtype="float32", platform="cpu", progress=False, batch=2, context=64,
            policy=policy and Tiering(policy=policy),
            limits=Limits(device_gib=more / 2**30, transient=2),
        )  # fmt: skip
        budget = engine.budget
        self.assertEqual(budget.tiers[0].said_slots, "2 or 3")
        self.assertEqual(tokens(engine), RESIDENT)
        (tier,) = engine._runner.memory.pool.tiers
        planned = budget.device["expert slots"] + budget.device["transient slots"]
        self.assertEqual(planned, sum(leaf.nbytes for leaf in jax.tree.leaves(tier.banks)))
        self.assertEqual(planned, (2 + 3 + 2) * ROW_NBYTES)
        owner = LayerTables.of(tier.residency.table, 8).owner
        self.assertEqual((np.asarray(owner) >= 0).sum(axis=1).tolist(), [3, 2])

    @pytest.mark.slow
    def test_what_steps_wait_for_takes_what_was_planned_and_its_time_is_measured(self):
        sizes, pauses = [], []
        read, read_now = DiskExperts.read, _DiskReader._read_now

        def told(disk: DiskExperts, *args: Any) -> Any:
            found = read(disk, *args)
            sizes.append(sum(array.nbytes for array in found))
            return found

        def slow(*args: Any) -> Any:
            pauses.append(0.01)
            time.sleep(pauses[-1])
            return read_now(*args)

        self.enter_context(mock.patch.object(DiskExperts, "read", told))
        self.enter_context(mock.patch.object(_DiskReader, "_read_now", slow))
        engine = limited(slots=3, transient=1, host_gib=15 * ROW_NBYTES / 2**30)
        self.assertEqual(tokens(engine), RESIDENT)
        self.assertEqual(engine.budget.tiers[0].host_rows, 15 - 8 - 4)
        planned = engine.budget.host["experts that a step waits for"]
        self.assertEqual(planned, max(sizes) + ROW_NBYTES)  # and what it read last
        self.assertEqual(max(sizes), 3 * ROW_NBYTES)
        self.assertGreater(len(pauses), 3)
        self.assertGreaterEqual(engine.ledger.tiers["stored"].disk["wait_seconds"], sum(pauses))
        self.assertRegex("\n".join(engine.ledger.describe()), r"stalls: .* ms for the disk\n")

    @pytest.mark.slow
    def test_a_disk_that_fails_is_one_line_and_the_engine_goes_on(self):
        engine = limited(slots=2, transient=2, host_gib=11 * ROW_NBYTES / 2**30)
        gone = mock.patch.object(ExpertReader, "read", side_effect=MoejaxError("the disk is gone"))
        with gone, self.assertRaisesRegex(MoejaxError, "the disk is gone"):
            tokens(engine)
        ledger = engine.ledger.tiers["stored"]
        self.assertLessEqual(ledger.disk["waits"], ledger.disk["reads"])
        self.assertEqual(tokens(engine), RESIDENT)
        self.assertBetween(engine.ledger.tiers["stored"].host_hit_rate, 0, 1)
        with self.assertRaises(KeyboardInterrupt), engine._runner.memory.step():
            session = engine._runner.prefill(PROMPTS, 64, GREEDY, ())
            jax.block_until_ready(session.emitted.tokens)
            for leaf in jax.tree.leaves(engine._runner.memory.pool):
                leaf.delete()  # its counts are lost
            raise KeyboardInterrupt
        self.assertEqual(tokens(engine), RESIDENT)
        self.assertBetween(engine.ledger.tiers["stored"].host_hit_rate, 0, 1)

        # All that ran at the time of a failure is told of it, whoever looks first; nobody else is.
        runner = engine._runner
        sessions = [runner.prefill(PROMPTS, 64, GREEDY, ()) for _ in range(2)]
        with gone:
            jax.block_until_ready(runner.decode(sessions[1], 9, STEPS_PER_CALL, False))
        self.assertIsNotNone(engine.ledger)
        for session in sessions:
            failures = session.failures_before
            with self.assertRaisesRegex(MoejaxError, "is gone"), runner.reading(failures):
                pass
            with self.assertRaisesRegex(MoejaxError, "is gone"):
                runner.decode(session, 9, STEPS_PER_CALL, False)
        self.assertEqual(tokens(engine), RESIDENT)

    @parameterized.product(has_checksums=[True, False], was_read=[True, False])
    @pytest.mark.slow
    def test_a_file_that_changed_is_an_error_and_no_wrong_token(self, has_checksums, was_read):
        (file,) = DIRECTORY.glob("*.safetensors")
        written = file.read_bytes()
        self.addCleanup(file.write_bytes, written)
        if not has_checksums:
            save_file(load_file(file), file)  # without metadata
        whole = file.read_bytes()
        engine = limited(slots=2, transient=2, host_gib=11 * ROW_NBYTES / 2**30)
        if was_read:
            self.assertEqual(tokens(engine), RESIDENT)
        with file.open("r+b") as opened:
            opened.seek(len(whole) // 2)
            opened.write(os.urandom(len(whole) - len(whole) // 2))
        for _ in range(2):
            said = "written to while it was in use"
            if was_read or has_checksums:
                said = "checksum" if has_checksums else "is not what was read before"
            with self.assertRaisesRegex(MoejaxError, said):
                tokens(engine)
        file.write_bytes(whole)  # at another time than it was opened with
        for _ in range(8):
            self.assertEqual(tokens(engine), RESIDENT)

    def test_experts_on_the_disk_are_waited_for_and_a_disk_may_fail_later(self):
        # The ring takes eight blocks of it, a step that waits three.
        engine = limited(slots=2, transient=2, host_gib=15 * ROW_NBYTES / 2**30)
        self.assertEqual(engine.budget.tiers[0].host_rows, 4)
        read, count = ExpertReader.read, iter(range(100))

        def sometimes(self: ExpertReader, *args: Any, **how: Any) -> None:
            if 3 <= next(count) <= 5:  # a read, and its two repetitions
                raise MoejaxError("a bad sector")
            read(self, *args, **how)

        with (
            mock.patch.object(ExpertReader, "read", sometimes),
            self.assertRaisesRegex(MoejaxError, "a bad sector"),
        ):
            tokens(engine)
        for _ in range(2):
            self.assertEqual(tokens(engine), RESIDENT)
        self.assertGreater(totals(engine)["waits"], 0)
        (tier,) = engine._runner.memory.tiers
        found, counted = engine.ledger.as_dict(), tier.disk.reader.counters
        self.assertGreater(found["disk_reads"], 0)
        self.assertEqual(found["disk_waits"], counted.waits)
        self.assertEqual(found["disk_trouble"], {"retries": 2, "errors": 1})

    @pytest.mark.slow
    def test_a_closed_engine_holds_nothing_and_says_so(self):
        before = set(threading.enumerate())
        with limited(slots=2, transient=2, host_gib=17 * ROW_NBYTES / 2**30, bulk=1) as engine:
            memory = engine._runner.memory
            memory.tiers[0].transfers.request(1, list(range(8)))
            self.assertEqual(tokens(engine), RESIDENT)
            self.assertNotEmpty(set(threading.enumerate()) - before)
            held = [weakref.ref(leaf) for leaf in jax.tree.leaves((memory.pool, memory.store))]
            held += [weakref.ref(leaf) for leaf in jax.tree.leaves(engine.weights)]
            stream = engine.stream(PROMPTS[0], max_new_tokens=10)
            next(stream)
            del memory
        engine.close()
        self.assertEmpty(set(threading.enumerate()) - before)
        for call in (
            stream.__next__,
            lambda: engine.generate(PROMPTS[0], max_new_tokens=2),
            lambda: next(engine.stream(PROMPTS[0])),
            lambda: engine.logits([PROMPTS[0]]),
            lambda: engine.ledger,
            lambda: engine.kernels,
        ):
            with self.assertRaises(MoejaxError) as caught:
                call()
            self.assertEqual(str(caught.exception), "the engine is closed: load it again")
        del stream, call, caught
        gc.collect()
        self.assertEqual([ref() for ref in held if ref() is not None], [])

    def test_more_prompts_than_planned_are_refused(self):
        engine = limited(device_gib=1)
        with self.assertRaisesRegex(MoejaxError, "batch=3"):
            engine.generate([*PROMPTS, [1]], max_new_tokens=1)

    def test_pinned_memory_is_refused_as_a_whole_before_the_first_allocation(self):
        planned = limited(slots=2, bulk=2).budget
        self.assertLess(planned.host["experts"], planned.total_host - 1)
        gib = (planned.total_host - 1) / 2**30
        with (
            mock.patch.object(pinned, "_is_pinned", return_value=True),
            mock.patch.dict(os.environ, {PINNED_LIMIT: repr(gib)}),
            mock.patch.object(Checkpoint, "load", side_effect=AssertionError),
            self.assertRaisesRegex(MoejaxError, "more than the 0 GiB of host memory that JAX may"),
        ):
            limited(slots=2, bulk=2)

    def test_another_model_on_the_disk_path_is_refused(self):
        with tempfile.TemporaryDirectory() as other:
            load_tiny_engine(Path(other))
            config = Path(other) / "config.json"
            config.write_text(
                config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 5.0')
            )
            with self.assertRaisesRegex(MoejaxError, "another model"):
                limited(slots=2, disk_path=other)
