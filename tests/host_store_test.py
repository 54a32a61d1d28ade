"""Experts in host memory: filled in place, within the pinned limit; which rows stay."""

import os
import threading
import tracemalloc
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.errors import MoejaxError
from moejax.experts import machine
from moejax.experts import pinned_memory as pinned
from moejax.experts.budget import PINNED_LIMIT
from moejax.experts.disk_cache import _HostCache
from moejax.experts.host_store import HostStore

PARTS = (
    jax.ShapeDtypeStruct((6, 4), np.uint32),
    jax.ShapeDtypeStruct((6, 2), ml_dtypes.bfloat16),
    jax.ShapeDtypeStruct((5,), np.uint8),
)


class Source:
    """Rows of random bytes, the same for an expert at every read."""

    def __init__(self, num_layers=3, num_experts=4, row=PARTS):
        self.num_layers, self.num_experts, self.row = num_layers, num_experts, row
        self.row_nbytes = sum(part.size * part.dtype.itemsize for part in row)
        self.uses_jax = False
        self.checks, self.threads = [], set()

    def expert(self, layer, expert):
        rng = np.random.default_rng((layer, expert))
        return [
            rng.integers(0, 100, part.size, np.uint8).astype(part.dtype).reshape(part.shape)
            for part in self.row
        ]

    def read(self, layer, expert, into, *, check=True):
        self.checks.append(check)
        self.threads.add(threading.get_ident())
        for memory, values in zip(into, self.expert(layer, expert), strict=True):
            memory[...] = values

    def every(self):
        return list(np.ndindex(self.num_layers, self.num_experts))


class StoreTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.device = jax.devices("cpu")[0]
        self.enter_context(jax.default_device(self.device))

    def store(self, source, num_rows=None):
        num_rows = num_rows or source.num_layers * source.num_experts
        return HostStore(source, num_rows, self.device)

    def assert_holds(self, store, source, experts):
        """Exactly these experts, as a program sees them."""
        take = jax.jit(lambda arrays, row: tuple(array[row] for array in arrays))
        self.assertEqual((store.row_of >= 0).sum(), len(experts))
        for expert in experts:
            found = take(store.arrays, jnp.int32(store.row_of[expert]))
            for array, values in zip(found, source.expert(*expert), strict=True):
                self.assertEqual(array.dtype, values.dtype)
                np.testing.assert_array_equal(array, values)


class HostStoreTest(StoreTestCase):
    def test_all_in_order(self):
        source = Source()
        store = self.store(source)
        self.assertEqual(store.num_rows, 12)
        np.testing.assert_array_equal(store.row_of, np.full((3, 4), -1))
        store.fill(progress=False)
        np.testing.assert_array_equal(store.row_of, np.arange(12).reshape(3, 4))
        self.assertEqual(store.row_of.dtype, np.int32)
        self.assert_holds(store, source, source.every())
        self.assertEqual(set(source.checks), {False})  # each is read once
        self.assertNotIn(threading.get_ident(), source.threads)

    def test_nothing_moves_and_programs_see_what_is_written(self):
        source = Source()
        store = self.store(source, 3)
        pointers = [array.unsafe_buffer_pointer() for array in store.arrays]
        traces = []

        @jax.jit
        def total(arrays):
            traces.append(1)
            return sum(jnp.sum(array.astype(jnp.float32)) for array in arrays)

        for value in (1, 2):
            for row in range(3):
                for view in store.rows(row):
                    view[...] = value
            expected = 3 * value * sum(part.size for part in PARTS)
            self.assertEqual(float(total(store.arrays)), expected)
        self.assertLen(traces, 1)
        self.assertEqual(pointers, [array.unsafe_buffer_pointer() for array in store.arrays])

    def test_no_second_copy(self):
        part = jax.ShapeDtypeStruct((1 << 16,), np.uint8)
        source = Source(num_layers=4, num_experts=16, row=(part,))
        source.read = lambda layer, expert, into, *, check: into[0].fill(expert)
        store = self.store(source)
        tracemalloc.start()
        store.fill(progress=False)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertLess(peak_bytes, store.num_rows * source.row_nbytes / 8)

    def test_a_failed_read(self):
        source = Source()
        store = self.store(source)
        store.fill(progress=False)
        read = source.read

        def failing(layer, expert, into, **kwargs):
            if (layer, expert) == (1, 1):
                raise MoejaxError("the disk fails")
            read(layer, expert, into, **kwargs)

        source.read = failing
        with self.assertRaisesRegex(MoejaxError, "the disk fails"):
            store.fill(progress=False)
        self.assertTrue((store.row_of == -1).all())

    def test_arguments(self):
        store = self.store(Source(), 2)
        for row in (-1, 2):
            with self.assertRaises(IndexError):
                store.rows(row)

    @pytest.mark.gpu
    def test_pinned_on_a_gpu(self):
        source, self.device = Source(), jax.devices("gpu")[0]
        store = self.store(source)
        for array in store.arrays:
            self.assertEqual(array.sharding.memory_kind, "pinned_host")
        for _ in range(2):  # the second time into memory that a program has read
            store.fill(progress=False)
            for array, expected in zip(
                jax.device_put(store.arrays, jax.sharding.SingleDeviceSharding(self.device)),
                zip(*(source.expert(*expert) for expert in source.every()), strict=True),
                strict=True,
            ):
                np.testing.assert_array_equal(array, np.stack(expected))
            for row in range(store.num_rows):
                for view in store.rows(row):
                    view[...] = 0


class PinnedTest(StoreTestCase):
    def limit(self, gib):
        values = {} if gib is None else {PINNED_LIMIT: gib}
        self.enter_context(mock.patch.dict(os.environ, values))
        if gib is None:
            os.environ.pop(PINNED_LIMIT, None)

    @parameterized.parameters((None, 64), ("100", 100), ("0.5", 0.5), ("many", 64), ("inf", 64))
    def test_limit(self, said, gib):
        self.limit(said)
        self.assertEqual(machine.pinned_limit_nbytes(), gib * 2**30)

    def test_more_than_the_limit_is_refused_beforehand(self):
        self.limit("0.0001")
        self.store(Source(num_experts=400))  # ordinary memory has no limit
        with (
            mock.patch.object(pinned, "_is_pinned", return_value=True),
            mock.patch.object(pinned, "_allocate") as allocate,
            self.assertRaisesRegex(
                MoejaxError, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1 before it starts, or a lower"
            ),
        ):
            self.store(Source(num_experts=400))
        allocate.assert_not_called()

    def test_mains_let_jax_pin_what_is_left_where_nobody_set_a_limit(self):
        variable = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
        with mock.patch.dict("os.environ"), mock.patch.object(machine, "_has_gpu") as has_gpu:
            os.environ.pop(variable, None)
            for platform, left in (("cpu", 80 * 2**30), ("gpu", 64 * 2**30), ("gpu", None)):
                with mock.patch.object(machine, "_available_nbytes", return_value=left):
                    self.assertIsNone(machine.raise_pinned_limit(platform))
            with mock.patch.object(machine, "_available_nbytes", return_value=80 * 2**30):
                has_gpu.return_value = False
                self.assertIsNone(machine.raise_pinned_limit("auto"))
                has_gpu.return_value = True
                self.assertEqual(machine.this_machine("gpu").pinned_nbytes, 80 * 2**30)
                self.assertIn(f"{variable}=80 is set", machine.raise_pinned_limit("auto"))
                self.assertEqual(machine.pinned_limit_nbytes(), 80 * 2**30)
                os.environ[variable] = "70"
                self.assertIsNone(machine.raise_pinned_limit("auto"))
                self.assertEqual(machine.this_machine("gpu").pinned_nbytes, 70 * 2**30)

    @parameterized.parameters(
        MemoryError("no memory"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")
    )
    def test_an_allocation_that_fails(self, error):
        with (
            mock.patch.object(pinned, "_allocate", side_effect=error),
            self.assertRaisesRegex(
                MoejaxError, r"^0\.00 GiB of host memory for experts cannot be had .*no memory\)"
            ) as caught,
        ):
            self.store(Source())
        self.assertNotIn("\n", str(caught.exception))

    def test_on_a_gpu_nothing_is_made_on_the_device_first(self):
        """The program that allocates; with zeros in it XLA fills and copies a device array."""
        allocate = pinned._allocator(
            (8, 8), np.dtype(np.uint32), jax.sharding.SingleDeviceSharding(self.device)
        )
        text = allocate.trace().lower(lowering_platforms=("cuda",)).as_text()
        self.assertIn("@AllocateBuffer", text)
        self.assertNotIn("broadcast", text)


class ModelCache:
    """The cache as lists: the one that was used longest ago first."""

    def __init__(self, experts, num_rows):
        self.held, self.free = list(experts), num_rows - len(experts)
        self.reserved, self.pinned = [], set()
        self.evictions = 0

    def touch(self, expert):
        if expert in self.held:
            self.held.remove(expert)
            self.held.append(expert)

    def reserve(self, expert):
        if not self.free:
            allowed = [held for held in self.held if held not in self.pinned]
            if not allowed:
                return False
            self.held.remove(allowed[0])
            self.evictions += 1
        else:
            self.free -= 1
        self.reserved.append(expert)
        return True


ACTIONS = ("use", "use", "use", "publish", "publish", "cancel", "pin", "unpin")


class HostCacheTest(parameterized.TestCase):
    def cache(self, num_rows, experts=()):
        row_of = np.full((3, 4), -1, np.int32)
        for row, expert in enumerate(experts):
            row_of[expert] = row
        return _HostCache(row_of, num_rows)

    @settings(max_examples=150, deadline=None)
    @given(
        num_rows=st.integers(1, 8),
        num_held=st.integers(0, 8),
        actions=st.lists(
            st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 3)), max_size=120
        ),
    )
    def test_against_lists(self, num_rows, num_held, actions):
        experts = [(0, 3), (2, 1), (1, 1), (0, 0), (2, 2), (1, 0), (0, 1), (2, 0)]
        experts = experts[: min(num_held, num_rows)]
        cache = self.cache(num_rows, experts)
        model = ModelCache(experts, num_rows)
        for action, *expert in actions:
            expert = tuple(expert)
            if action == "use":
                if expert in model.reserved:
                    continue
                cache.touch(expert)
                model.touch(expert)
                if expert not in model.held:
                    row = cache.reserve(expert)
                    self.assertEqual(row is not None, model.reserve(expert))
            elif action in ("publish", "cancel"):
                if not model.reserved:
                    continue
                oldest = model.reserved.pop(0)
                getattr(cache, action)(oldest)
                if action == "publish":
                    model.held.append(oldest)
                else:
                    model.free += 1
            else:
                getattr(cache, action)(expert)
                (model.pinned.add if action == "pin" else model.pinned.discard)(expert)
            self.assert_equal(cache, model, num_rows)

    def assert_equal(self, cache, model, num_rows):
        held = {tuple(index) for index in np.argwhere(cache.row_of >= 0).tolist()}
        self.assertEqual(held, set(model.held))
        rows = cache.row_of[cache.row_of >= 0]
        self.assertLen(set(rows.tolist()), len(rows))
        self.assertTrue((rows < num_rows).all())
        self.assertEqual(cache.evictions, model.evictions)
