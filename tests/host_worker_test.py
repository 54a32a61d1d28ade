"""Experts on the host's cores: the library beside float64, and threads that sleep."""

import dataclasses
import shutil
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.experts import host_worker
from moejax.experts.pinned_memory import allocate_host_arrays
from moejax.weights.qtensor import CodesKind, QTensor
from pallas_kernels import host_mailbox
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.packed import PackedMatrices, dequantize

EXPERTS = 5
# Bits, group size, zeros, scales, model and expert dims: rows of whole blocks, with a rest, shorter
# than a block, and groups of several blocks. Scales of uint8 are MXFP4's.
FORMS = (
    (4, 64, "float", "float16", 512, 256), (4, 32, "integer", "float16", 288, 64),
    (2, 128, "float", "float32", 384, 128), (3, 64, "symmetric", "float16", 320, 64),
    (3, 512, "float", "float16", 1024, 512), (8, 64, "integer", "float32", 256, 192),
    (8, 2000, "symmetric", "float16", 544, 96), (4, 32, "symmetric", "uint8", 352, 512),
    (4, 32, "symmetric", "uint8", 320, 288),
)  # fmt: skip
# As gpt-oss has it, with a limit that gates and ups exceed.
CLAMPED = Gating(alpha=1.702, limit=0.4, up_offset=1.0)


def random_matrices(rng: np.random.Generator, kind: CodesKind, outputs: int, inputs: int):
    """QTensor [EXPERTS, outputs, inputs] of numpy arrays, values about 1 / sqrt(inputs)."""
    kind, made = dataclasses.replace(kind, group_size=min(kind.group_size, inputs)), {}
    for name, of in kind.arrays((EXPERTS, outputs, inputs)).items():
        if name == "words":
            made[name] = rng.integers(0, 2**32, of.shape, np.uint32)
        elif name == "scales" and kind.is_mxfp4:
            middle = 126 - round(np.log2(3 * inputs**0.5))
            made[name] = rng.integers(middle - 1, middle + 2, of.shape, np.uint8)
        elif of.dtype == np.uint8:
            made[name] = rng.integers(0, 2**kind.bits, of.shape, np.uint8)
        else:
            middle = 2 ** (kind.bits - 1) if name == "zeros" else 2**-kind.bits * inputs**-0.5
            made[name] = (middle * (0.8 + 0.4 * rng.random(of.shape))).astype(of.dtype)
    return QTensor(
        **{"zeros": None, **made}, num_inputs=inputs, bits=kind.bits, group_size=kind.group_size
    )


def float64(m: QTensor) -> np.ndarray:
    packed = PackedMatrices(
        words=jnp.asarray(m.words), scales=jnp.asarray(m.scales),
        zeros=None if m.zeros is None else jnp.asarray(m.zeros), num_inputs=m.num_inputs,
        bits=m.bits, group_size=m.group_size,
    )  # fmt: skip
    return np.asarray(jax.jit(dequantize)(packed, jnp.arange(EXPERTS)), np.float64)


class WorkersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if refusal := host_worker._cpu_facts() is None or shutil.which("c++") is None:
            self.skipTest(f"no AVX2 or no compiler: {refusal}")

    def start(
        self, kind: CodesKind, model_dim: int, expert_dim: int, count: int = 2,
        gating: Gating = SWIGLU,
    ):  # fmt: skip
        rng = np.random.default_rng(0)
        self.gate_up = random_matrices(rng, kind, 2 * expert_dim, model_dim)
        self.down = random_matrices(rng, kind, model_dim, expert_dim)
        self.layout = host_mailbox.Mailbox(model_dim)
        (held,) = allocate_host_arrays(
            [jax.ShapeDtypeStruct((self.layout.nbytes,), np.uint8)], jax.devices("cpu")[0]
        )
        self.mailbox = held.views[0]
        self.mailbox[:] = 0
        self.biases = [
            (gating != SWIGLU) * rng.normal(0, 0.3, (EXPERTS, of.words.shape[1])).astype(np.float32)
            for of in (self.gate_up, self.down)
        ]
        biases = () if gating == SWIGLU else self.biases
        workers = host_worker.Workers(count, self.mailbox, self.gate_up, self.down, gating, biases)
        self.addCleanup(workers.stop)
        return workers

    def numbers(self, at: int, count: int) -> np.ndarray:
        return self.mailbox[at : at + 4 * count].view(np.float32)

    @parameterized.parameters(
        *((SWIGLU, *form) for form in FORMS), *((CLAMPED, *form) for form in (FORMS[0], FORMS[-1]))
    )
    def test_a_job_is_the_sum_of_its_experts(
        self, gating, bits, group, zeros, scales, model, expert
    ):
        kind = CodesKind(bits=bits, group_size=group, zero_kind=zeros, scale_dtype=scales)
        workers = self.start(kind, model, expert, count=3, gating=gating)
        self.assertIsNone(host_worker.form_refusal(self.gate_up))
        rng, rows = np.random.default_rng(1), np.array([[4, -1, 0, 2]], np.int32)
        x, weights = rng.standard_normal(model).astype(np.float32), [0.5, 9.0, 0.25, -1.0]
        self.numbers(192, model)[:] = x
        self.numbers(128, 4)[:] = weights
        for _ in range(2):
            workers.run_jobs(rows)
        found = self.numbers(self.layout.reply + 64, model)
        sums = float64(self.gate_up) @ x.astype(np.float64) + self.biases[0]
        gate, up = np.split(sums, 2, axis=1)
        if gating.limit:
            self.assertGreater(min(gate.max(), up.max(), -up.min()), gating.limit)
            gate, up = np.minimum(gate, 0.4), np.clip(up, -0.4, 0.4) + 1
        hidden = gate / (1 + np.exp(-gating.alpha * gate)) * up
        each = np.einsum("edf,ef->ed", float64(self.down), hidden) + self.biases[1]
        expected = 0.5 * each[4] + 0.25 * each[0] - each[2]
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        # Inputs in 16 bits are off by half of 1 / 32000 of the largest at most.
        self.assertLess(error, 2e-3)
        self.assertGreater(np.linalg.norm(found - each[4]) / np.linalg.norm(expected), 0.01)

    def test_threads_sleep_until_a_step_is_dispatched(self):
        workers = self.start(CodesKind(bits=4, group_size=64), 256, 64)
        rows = np.array([[1]], np.int32)
        for pause in np.random.default_rng(0).uniform(0, 0.012, 60):  # some sleep, some spin
            time.sleep(pause)
            workers.run_jobs(rows)
        time.sleep(0.1)
        used = time.process_time()
        time.sleep(0.5)
        # One looks every 50 us, the other sleeps; both at work would take 1 s.
        self.assertLess(time.process_time() - used, 0.25)
        done = threading.Thread(target=workers.run_jobs, args=(rows,), daemon=True)
        done.start()
        done.join(10)
        self.assertFalse(done.is_alive())

    @pytest.mark.slow
    def test_a_job_long_after_a_call_is_served(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        source = Path(host_worker.__file__).with_suffix(".cpp").read_text()
        short = source.replace("kAwake = std::chrono::seconds(60)", "kAwake = kPoll * 20000")  # 1 s
        self.assertNotEqual(short, source)
        (folder / "short.cpp").write_text(short)
        with (
            mock.patch.object(host_worker, "__file__", str(folder / "short.py")),
            mock.patch.object(host_worker, "user_cache", lambda name: folder / name),
        ):
            workers = self.start(CodesKind(bits=4, group_size=64), 256, 64)
        workers.run_jobs(np.array([[1]], np.int32))
        for _ in range(2):  # the job comes 1.4 s after the last one, and 0.7 s after the call
            workers.wake()
            time.sleep(0.7)
        done = threading.Thread(target=workers.run_jobs, args=(np.array([[2]], np.int32),))
        done.daemon = True
        with mock.patch.object(workers, "wake"):
            done.start()
            done.join(5)
        workers.wake()
        self.assertFalse(done.is_alive())

    @pytest.mark.slow
    def test_the_library_is_compiled_once(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        host_worker._built(folder)
        with mock.patch.object(host_worker.subprocess, "run", side_effect=AssertionError):
            host_worker._built(folder)
        self.assertLen(list(folder.iterdir()), 1)

    def test_what_cannot_be_compiled_is_one_line(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        with (
            mock.patch.object(host_worker, "_FLAGS", ["-fno-such-flag"]),
            self.assertRaisesRegex(MoejaxError, "memory.host_threads: .*no-such-flag.*"),
        ):
            host_worker._built(folder)
        with (
            mock.patch.object(host_worker, "_COMPILERS", ("no-such-compiler",)),
            self.assertRaisesRegex(MoejaxError, "no C.. compiler .no-such-compiler. is here"),
        ):
            host_worker._built(folder)


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(
        (CodesKind(bits=4, group_size=64, zero_kind="float", by_planes=True), "one piece"),
        (CodesKind(bits=4, group_size=96), "rows of 288 in groups of 96"),
    )
    def test_forms(self, kind, said):
        arrays = {name: jax.ShapeDtypeStruct(of.shape, of.dtype)
                  for name, of in kind.arrays((2, 64, 288)).items()}  # fmt: skip
        self.assertRegex(host_worker.form_refusal(kind.tensor(288, arrays)), said)

    def test_machines(self):
        with mock.patch.object(host_worker, "cores", return_value=3):
            self.assertRegex(host_worker.machine_refusal(), "3 cores, and 4 are needed")
        with (
            mock.patch.object(host_worker, "cores", return_value=4),
            mock.patch.object(host_worker, "_cpu_facts", return_value=None),
        ):
            self.assertRegex(host_worker.machine_refusal(), "AVX2")
