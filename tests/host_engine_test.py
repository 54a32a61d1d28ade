"""An engine whose host multiplies some misses: the same tokens, counts as simulated, no hang."""

import contextlib
import ctypes
import dataclasses
import functools
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental import io_callback

from moejax import Engine, MoejaxError
from moejax.checkpoints import save_hf_checkpoint
from moejax.experts import host_cores, load
from moejax.experts.budget import Limits, tiers
from moejax.experts.host_cores import _best_split
from moejax.experts.ledger import TierLedger
from moejax.experts.tiering import Tiering
from moejax.inference.generation import GenerationSettings
from moejax.models.config import ModelConfig, weight_shapes
from moejax.policies.baselines import OnDemand
from moejax.quantization.pipeline.recipe import Recipe, Scheme
from moejax.quantization.pipeline.run import Job, quantize_checkpoint
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.trace import read_trace
from pallas_kernels import host_job
from pallas_kernels import host_mailbox as mailbox
from tests.hf_checkpoints import TinyCheckpoint, write_random_checkpoint
from tests.random_checkpoints import TINY

CONFIG = ModelConfig(**TINY | {
    "model_dim": 64, "num_layers": 2, "head_dim": 16, "num_experts": 16, "expert_dim": 64,
    "mlp_dim": 64, "moe_layers": (0, 1), "experts_per_token": 4,
})  # fmt: skip
OSS = TinyCheckpoint(
    family="gpt_oss", mxfp4=True,
    fields={
        "num_hidden_layers": 2, "num_local_experts": 16, "num_experts_per_tok": 4,
        "swiglu_limit": 1.0,
    },
)  # fmt: skip
SPLIT, SLOTS = (0, 0, 1, 2, 3), 5
PROMPT = np.random.default_rng(5).integers(0, CONFIG.vocab_size, 9).tolist()
DIRECTORY: Path


def setUpModule():
    global DIRECTORY
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    DIRECTORY = Path(directory.name)
    rng = np.random.default_rng(0)
    weights = {
        leaf: (leaf.endswith("norm") + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        for leaf, shape in weight_shapes(CONFIG).items()
    }
    save_hf_checkpoint(DIRECTORY / "plain", CONFIG, weights, dtype=np.dtype(np.float32))


@functools.cache
def checkpoint(form: str) -> Path:
    """The model as it is, or in codes: int3 lies in two planes, int4 in one; or gpt-oss."""
    output = DIRECTORY / form
    if form == "mxfp4":
        write_random_checkpoint(OSS, output, seed=0)
    elif form != "plain":
        scheme = Scheme(
            method="rtn", bits=int(form[3:]), group_size=32, zero_kind="float",
            scale_dtype="float16", factor_bits=8,
        )  # fmt: skip
        job = Job(
            source=DIRECTORY / "plain", output=output,
            recipe=Recipe(default=scheme, rules=(), format="moejax"), rank_policy="Uniform-0",
            passes=1, calibration_text=None, calibration_samples=4, calibration_length=32,
            device=jax.devices("cpu")[0], progress=False,
        )  # fmt: skip
        with mock.patch("moejax.quantization.pipeline.run.draw_report"):
            quantize_checkpoint(job)
    return output


def _box(address: Any, model_dim: int) -> np.ndarray:
    start = int(np.asarray(address).view(np.uint64)[0])
    nbytes = mailbox.Mailbox(model_dim).nbytes
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), np.uint8)


def post(x, rows, weights, state, address):
    """`host_job.post` by a callback."""

    def write(x, rows, weights, state, address):
        state, box = np.array(state), _box(address, x.shape[1])
        if (np.asarray(rows) >= 0).any() and not state[1]:
            width, of = rows.shape[1], np.full(mailbox.MOST, -1, np.int32)
            of[:width] = rows
            box[mailbox.ROWS :][: of.nbytes].view(np.int32)[:] = of
            box[mailbox.WEIGHTS :][: 4 * width].view(np.float32)[:] = np.asarray(weights)[0]
            box[mailbox.X :][: 4 * x.shape[1]].view(np.float32)[:] = np.asarray(x)[0]
            state[0] += 1
            box[:4].view(np.int32)[0] = state[0]
        return state

    shape = jax.ShapeDtypeStruct((2,), jnp.int32)
    return io_callback(write, shape, x, rows, weights, state, address)


def add_reply(y, rows, state, address, dtype, wait_s=20.0):
    """`host_job.add_reply` by a callback."""

    def wait(y, rows, state, address):
        y, state, box = np.array(y), np.array(state), _box(address, y.shape[1])
        reply, until = box[mailbox.Mailbox(y.shape[1]).reply :], time.monotonic() + wait_s
        if not (np.asarray(rows) >= 0).any() or state[1]:
            return y, state
        while reply[:4].view(np.int32)[0] != state[0]:
            if time.monotonic() > until:
                reply[mailbox.LATE :][:4].view(np.int32)[0] = state[1] = 1
                return y, state
            time.sleep(1e-5)
        return y + reply[mailbox.Y :][: y.nbytes].view(np.float32), state

    shapes = jax.ShapeDtypeStruct(y.shape, y.dtype), jax.ShapeDtypeStruct((2,), jnp.int32)
    out, state = io_callback(wait, shapes, y, rows, state, address)
    return out.astype(dtype), state


def limited(form: str = "int4", **limits: Any) -> Engine:
    return Engine.from_pretrained(
        checkpoint(form), dtype="float32", platform="cpu", progress=False, context=128,
        limits=Limits(**{"slots": SLOTS, "transient": 12} | limits),
    )  # fmt: skip


@contextlib.contextmanager
def on_a_cpu(reply: Any = add_reply):
    """A CPU in the GPU's place: two callbacks for the kernels, and the same table each time."""
    with contextlib.ExitStack() as stack:
        for owner, name, made in (
            (host_job, "post", post), (host_job, "add_reply", reply),
            (load, "machine_refusal", lambda: None),
            (tiers._TierPlan, "check_host_threads", lambda plan: None),
            (host_cores, "_best_split", lambda *_: SPLIT),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, made))
        yield


def answers(engine: Engine, **how: Any) -> list[list[int]]:
    how = {"max_new_tokens": 40, "ignore_eos": True} | how
    return [engine.generate(PROMPT[i:], **how)[0].tokens for i in range(3)]


def logprobs(engine: Engine) -> tuple[list[int], np.ndarray]:
    """Tokens of two answers, and float[n, 4] of the likeliest at each."""
    settings = GenerationSettings.of(max_new_tokens=30, ignore_eos=True)
    batches = [engine.batch([PROMPT[i:]], [settings], top_logprobs=4) for i in range(2)]
    told = [one for batch in batches for (delta,) in batch.steps() for one in delta.logprobs]
    return [one.token for one in told], np.array([[value for _, value in one.top] for one in told])


class EngineTest(parameterized.TestCase):
    def host_engine(self, form: str = "int4") -> Engine:
        engine = limited(form, host_threads=2)
        self.addCleanup(engine.close)
        return engine

    def check_tokens(self, form: str, engine: Engine) -> None:
        """Compares answers and log-probabilities with those of an engine that holds all."""
        plain = Engine.from_pretrained(
            checkpoint(form), dtype="float32", platform="cpu", progress=False, context=128
        )
        with engine.recording(DIRECTORY / f"{form}.trace"):
            tokens, found = logprobs(engine)
        expected_tokens, expected = logprobs(plain)
        self.assertEqual(tokens, expected_tokens)
        ledger = engine.ledger.tiers["stored"]
        self.assertGreater(ledger.on_host, 50)
        self.check_ledger(ledger, DIRECTORY / f"{form}.trace")
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        self.assertLess(error, 1e-3)
        self.assertGreater(error, 0)

    def check_planned(self, engine: Engine) -> None:
        planned = [nbytes for name, nbytes in engine.budget.host.items() if "cores" in name]
        self.assertEqual(sum(planned), engine._runner.memory.tiers[0].host.nbytes)

    def check_ledger(self, ledger: TierLedger, trace: Path) -> None:
        run = Run(
            policy=OnDemand(), tiers=("stored",), expert_bytes=(ledger.expert_bytes,),
            slots=(SLOTS,), host=SPLIT,
        )  # fmt: skip
        (found,) = run_policies(read_trace(trace), [run])
        of = dict(zip(EVENTS, found.events.sum(axis=(0, 2)).tolist(), strict=True))
        for name in ("needed", "hits", "misses", "admitted", "streamed", "evictions"):
            self.assertEqual(of[name], ledger.total(name), name)
        on_host = of["misses"] - of["admitted"] - of["streamed"]
        self.assertEqual(on_host, ledger.on_host)
        # Of a token's misses the lightest, so less than their share.
        share = on_host / ledger.total("needed")
        self.assertBetween(ledger.host_mass / ledger.gate_mass, 0.05, share)
        said = ledger.as_dict()["host"]
        self.assertEqual(said["bytes_not_fetched"], on_host * ledger.expert_bytes)
        self.assertIn(f"on the host's cores: {on_host} of the misses", "\n".join(ledger.describe()))

    @pytest.mark.slow
    def test_table_bytes_tokens_logits_and_counts(self):
        split = mock.Mock(return_value=SPLIT)
        with on_a_cpu(), mock.patch.object(host_cores, "_best_split", split):
            engine = self.host_engine()
            self.check_tokens("int4", engine)
        (memory,) = engine._runner.memory.tiers
        fetch_s, job_s = split.call_args.args  # measured
        self.assertGreater(min(fetch_s, *job_s[1:]), 0)
        self.assertLen(job_s, len(SPLIT))
        np.testing.assert_array_equal(memory.store.jobs.split, SPLIT)
        self.assertRegex(
            engine.host_text, r"the host's cores \(2 threads, .* GiB/s; the link .*\) multiply"
        )
        self.check_planned(engine)
        tables = memory.pool.residency, memory.pool.counts, memory.pool.jobs
        tables = *tables, memory.store.row_of, memory.store.jobs
        found = sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
        self.assertEqual(engine.budget.device["residency tables"], found)

    @pytest.mark.slow
    def test_tokens_logits_and_counts_of_two_planes(self):
        with on_a_cpu():
            engine = self.host_engine("int3")
            self.check_tokens("int3", engine)
            before = engine.ledger.tiers["stored"].on_host, engine.ledger.total("misses")
            engine.generate([PROMPT, PROMPT[::-1]], max_new_tokens=8, ignore_eos=True)
        # Prompts, and steps of several sequences, fetch every miss.
        self.assertEqual(engine.ledger.tiers["stored"].on_host, before[0])
        self.assertGreater(engine.ledger.total("misses"), before[1])

    @pytest.mark.slow
    def test_tokens_logits_and_counts_of_gpt_oss(self):
        with on_a_cpu():
            engine = self.host_engine("mxfp4")
            self.check_tokens("mxfp4", engine)
        self.check_planned(engine)

    @pytest.mark.slow
    def test_a_reply_that_does_not_come_is_one_line(self):
        plain = limited()
        with on_a_cpu(reply=functools.partial(add_reply, wait_s=0.2)):
            engine = self.host_engine()
            memory = engine._runner.memory
            with mock.patch.object(memory.tiers[0].host, "wake") as wake:
                with memory.step():
                    wake.reset_mock()  # here a program would be compiled, for minutes
                wake.assert_called_once()
            memory.tiers[0].host._workers.stop()
            start = time.monotonic()
            with self.assertRaisesRegex(MoejaxError, "no answer in 2 seconds.*host_threads=0"):
                answers(engine)
            self.assertLess(time.monotonic() - start, 30)
            self.assertEqual(answers(engine), answers(plain))  # every miss is fetched


@pytest.mark.gpu
class DeviceTest(parameterized.TestCase):
    """The kernels and the threads themselves, on a machine with four cores or more."""

    def engine(self, threads: int, form: str = "int4") -> Engine:
        engine = Engine.from_pretrained(
            checkpoint(form), dtype="float32", platform="gpu", progress=False, context=128,
            limits=Limits(slots=SLOTS, transient=4, host_threads=threads),
        )  # fmt: skip
        self.addCleanup(engine.close)
        return engine

    @parameterized.parameters("int4", "mxfp4")
    def test_a_gpu_and_its_host_answer_as_the_gpu_alone(self, form):
        with mock.patch.object(host_cores, "_best_split", lambda *_: SPLIT):
            plain, engine = self.engine(0, form), self.engine(-1, form)
        (expected_tokens, expected), (tokens, found) = logprobs(plain), logprobs(engine)
        self.assertEqual(tokens, expected_tokens)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        self.assertLess(error, 1e-2)
        self.assertGreater(engine.ledger.tiers["stored"].on_host, 50)

    def test_threads_that_are_gone_are_one_line(self):
        with mock.patch.object(host_cores, "_best_split", lambda *_: SPLIT):
            plain, engine = self.engine(0), self.engine(-1)
        engine._runner.memory.tiers[0].host._workers.stop()
        with self.assertRaisesRegex(MoejaxError, "no answer in 2 seconds"):
            answers(engine)
        self.assertEqual(answers(engine), answers(plain))


class SplitTest(parameterized.TestCase):
    def test_link_and_host_end_together(self):
        # 52 us by the link and 22 us by the host, and 25 us around a job: by hand.
        self.assertEqual(
            _best_split(52e-6, [22e-6 * n for n in range(9)]), (0, 1, 1, 2, 3, 3, 4, 5, 5)
        )
        self.assertEqual(_best_split(1e-6, [0, 1, 2, 3]), (0, 0, 0, 0))
        self.assertEqual(_best_split(1.0, [0, 1e-6, 2e-6, 3e-6]), (0, 1, 2, 3))


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, "the run is on a CPU"),
        ({"prefetch": 2}, "memory.prefetch looks ahead"),
        ({"host_gib": 0.00018}, "some experts are on the disk alone"),
    )
    def test_limits(self, limits, said):
        gpu = mock.PropertyMock(return_value=False) if limits else contextlib.nullcontext()
        patched = mock.patch.object(tiers.RunSizes, "is_cpu", gpu) if limits else gpu
        with patched, self.assertRaisesRegex(MoejaxError, said) as caught:
            limited(host_threads=-1, **limits)
        self.assertNotIn("\n", str(caught.exception))
        self.assertIn("memory.host_threads=-1", str(caught.exception))

    def test_other_experts_machines_and_policies(self):
        with on_a_cpu():
            with self.assertRaisesRegex(MoejaxError, "not in INT2, .* or MXFP4"):
                limited("plain", host_threads=2)
            with (
                mock.patch.object(load, "machine_refusal", lambda: "it has 2 cores"),
                self.assertRaisesRegex(MoejaxError, "host_threads=2 cannot be: it has 2 cores"),
            ):
                limited(host_threads=2)
        with self.assertRaisesRegex(MoejaxError, "for experts without a policy"):
            Engine.from_pretrained(
                checkpoint("int4"), platform="cpu", progress=False,
                limits=Limits(host_threads=2), policy=Tiering(policy="on_demand"),
            )  # fmt: skip
        wide = dataclasses.replace(CONFIG, num_experts=32, experts_per_token=mailbox.MOST + 1)
        self.assertRegex(host_cores.job_refusal(wide), "up to 16 experts")
