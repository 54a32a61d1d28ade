"""The fetch kernel lowered and compiled without a GPU, and its contract on one."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental import topologies

from pallas_kernels.expert_fetch import CopyTiles, api, fetch
from pallas_kernels.target import Target
from tests.expert_fetch_contract import (
    GPU_CASES,
    QWEN3,
    Operands,
    random_operands,
    violation,
)
from tests.gpu_targets import GPUS, described

HOPPER = Target("gpu", (9, 0))
COPY = r"= \S+ copy(-start)?\("


def in_memory(arrays: Any, kind: str) -> Any:
    device = jax.devices()[0]
    return jax.device_put(arrays, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def abstract(num_slots: int, num_rows: int, num_jobs: int) -> Operands:
    def shapes(count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct((count, *row), dtype) for row, dtype in QWEN3)

    index = jax.ShapeDtypeStruct((num_jobs,), jnp.int32)
    return Operands(shapes(num_slots), shapes(num_rows), index, index)


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(api, "current_target", lambda: HOPPER))

    def test_one_launch_and_nothing_else(self):
        with described(GPUS["H100"]):
            traced = jax.jit(fetch, donate_argnums=0).trace(*abstract(2048, 6144, 8))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        operations = re.findall(r"= stablehlo\.(\w+)", text)
        self.assertEqual(operations, ["custom_call"])
        self.assertIn("expert_fetch_6x8_128x16384", text)
        aliased = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d+)\]", text)
        self.assertEqual(aliased, [*"012345"])
        donated = re.findall(r"tf\.aliasing_output = (\d+)", text)
        self.assertEqual(donated, [*"012345"])


H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class CompilationTest(parameterized.TestCase):
    """The whole compiler; with JAX's CUDA plugin it needs no GPU."""

    def compile(self, run: Callable[..., Any], *operands: Any) -> tuple[Any, str]:
        """Memory and program of a function whose first argument is donated."""
        self.enter_context(mock.patch.object(api, "current_target", lambda: HOPPER))
        try:
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H100
            )
        except NotImplementedError:
            self.skipTest(
                "needs JAX's CUDA plugin, and without a GPU JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"
            )
        # Programs of a topology cannot be read back from the cache.
        name = "jax_persistent_cache_min_compile_time_secs"
        self.addCleanup(jax.config.update, name, jax.config.values[name])
        jax.config.update(name, 1e9)
        mesh = jax.sharding.Mesh(np.array(topology.devices), "x")
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        jitted = jax.jit(run, donate_argnums=0, in_shardings=everywhere, out_shardings=everywhere)
        with described(GPUS["H100"]):
            lowered = jitted.trace(*operands).lower()
        program = lowered.compile()
        return program.memory_analysis(), program.as_text()

    def test_the_pools_alias_and_nothing_is_copied(self):
        operands = abstract(512, 1024, 8)
        memory, text = self.compile(fetch, *operands)
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in operands.pools)
        self.assertEqual(memory.alias_size_in_bytes, num_bytes)
        self.assertLess(memory.temp_size_in_bytes, 4096)
        self.assertNotRegex(text, COPY)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="tiles")
def compiled(pools: Any, hosts: Any, src: Any, dst: Any, tiles: CopyTiles | None = None) -> Any:
    return fetch(pools, hosts, src, dst, implementation="triton", tiles=tiles)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled, the store in pinned host memory."""

    @parameterized.product(name=sorted(GPU_CASES), kind=("pinned_host", "device"))
    def test_pools_are_those_of_numpy(self, name, kind):
        case = GPU_CASES[name]
        operands = random_operands(case, seed=len(name))
        hosts = in_memory(operands.hosts, kind)
        for _ in range(2):  # the same bits every time
            pools = in_memory(operands.pools, "device")
            places = [pool.unsafe_buffer_pointer() for pool in pools]
            found = compiled(pools, hosts, *operands[2:], tiles=case.tiles)
            self.assertIsNone(violation(found, operands))
            self.assertEqual([pool.unsafe_buffer_pointer() for pool in found], places)
            self.assertTrue(all(pool.is_deleted() for pool in pools))

    def test_the_compiled_step_has_no_temporary_and_no_copy(self):
        operands = random_operands(GPU_CASES["qwen3_30b"], seed=13)
        placed = operands._replace(
            pools=in_memory(operands.pools, "device"),
            hosts=in_memory(operands.hosts, "pinned_host"),
        )
        program = compiled.lower(*placed).compile()
        memory = program.memory_analysis()
        self.assertEqual(memory.alias_size_in_bytes, sum(pool.nbytes for pool in operands.pools))
        self.assertEqual(memory.temp_size_in_bytes, 0)
        self.assertEqual(memory.host_temp_size_in_bytes, 0)
        self.assertEqual(
            memory.host_argument_size_in_bytes, sum(host.nbytes for host in operands.hosts)
        )
        self.assertNotRegex(program.as_text(), COPY)

    def test_arrays_beyond_four_gib(self):
        length, slots = 2**20, 1100  # of 4 MiB

        @jax.jit
        def numbered(offset: jax.Array) -> jax.Array:
            row = jax.lax.broadcasted_iota(jnp.uint32, (slots, length), 0)
            return row * jnp.uint32(7) + offset

        pool, host = numbered(jnp.uint32(0)), numbered(jnp.uint32(1))
        src, dst = jnp.asarray([1099, 1, 1030], jnp.int32), jnp.asarray([1099, 1098, 0], jnp.int32)
        [found] = compiled((pool,), (host,), src, dst)
        wanted = np.arange(slots, dtype=np.uint32) * 7
        wanted[np.asarray(dst)] = np.asarray(src) * 7 + 1
        np.testing.assert_array_equal(jnp.min(found, axis=1), wanted)
        np.testing.assert_array_equal(jnp.max(found, axis=1), wanted)


if __name__ == "__main__":
    absltest.main()
