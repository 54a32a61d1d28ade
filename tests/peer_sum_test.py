"""The contract of the sum over a mesh: reference on CPU devices, kernel on two GPUs."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import peer_sum, sum_mailbox
from tests.host_test_case import HostTestCase

ROOT = Path(__file__).parents[1]
SIZES = ((1, 2048), (3, 2880), (5, 37), (64, 4096))  # the last one is the longest
# Of two GPUs one alone runs the kernel, which waits for a tenth of a second.
ALONE = """
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels import peer_sum
from pallas_kernels.peer_sum import triton
triton.TIMEOUT_NS = 100_000_000
mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("shares",))
memory = peer_sum.mailboxes_of(mesh)
row = memory.peers.addressable_shards[0].data
how = {"axis": "", "dtype": jnp.float32, "implementation": "triton"}
try:
    print(jax.jit(lambda x, row: peer_sum.peer_sum(x, row, **how))(jnp.ones(256), row))
except jax.errors.JaxRuntimeError as error:
    print("ended:", str(error).splitlines()[0], flush=True)
"""


def mesh_of(count: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("shares",))


def summed(mesh, parts, *, times=1, peers=None, dtype=jnp.float32):
    """Returns each device's sum, [P, ...]; of several one after the other the last."""
    split = PartitionSpec("shares")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False
    )
    def run(x, row):
        x = x[0]
        row = None if peers is None else row
        for turn in range(times):
            kind = dtype if turn == times - 1 else jnp.float32
            x = peer_sum.peer_sum(
                x, row, axis="shares", dtype=kind,
                implementation="triton" if peers is not None else None,
            )  # fmt: skip
        return x[None]

    given = jax.device_put(parts, NamedSharding(mesh, split))
    row = jnp.zeros((mesh.size, 1), jnp.int32) if peers is None else peers
    return np.asarray(jax.jit(run)(given, row))


def drawn(count, sizes):
    return np.random.default_rng(sum(sizes)).normal(size=(count, *sizes)).astype(np.float32)


class PeerSumTest(HostTestCase):
    @parameterized.parameters(2, 4, 8)
    def test_the_reference_is_the_sum_on_every_device(self, count):
        if jax.default_backend() != "cpu":
            self.skipTest("meshes of CPU devices")
        parts = drawn(count, (3, 40))
        found = summed(mesh_of(count), parts)
        wanted = np.broadcast_to(parts.astype(np.float64).sum(0), found.shape)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))

    def test_a_cpu_has_no_mailboxes(self):
        if jax.default_backend() != "cpu":
            self.skipTest("meshes of CPU devices")
        self.assertIsNone(peer_sum.mailboxes_of(mesh_of(1)))

    def test_a_mailbox_holds_counts_and_each_part_twice(self):
        self.assertEqual(sum_mailbox.mailbox_nbytes(2), (4 + 2 * 2 * 8) * sum_mailbox.MOST)


@pytest.mark.gpu
class GpuPeerSumTest(HostTestCase):
    """Two GPUs of one host."""

    def setUp(self):
        super().setUp()
        if len(jax.devices()) < 2:
            self.skipTest("needs two GPUs")
        self.mesh = mesh_of(2)

    @parameterized.product(sizes=SIZES, dtype=("float32", "bfloat16"))
    def test_the_sum_is_that_of_float64_on_both(self, sizes, dtype):
        memory, parts = peer_sum.mailboxes_of(self.mesh), drawn(2, sizes)
        wanted = parts.astype(np.float64).sum(0)
        error = 2.0**-23 if dtype == "float32" else 2.0**-8
        for _ in range(3):  # the count goes on from program to program
            found = summed(self.mesh, parts, peers=memory.peers, dtype=dtype)
            self.assertEqual(str(found.dtype), dtype)
            np.testing.assert_array_equal(found[0], found[1])
            bound = error * np.abs(wanted) + 1e-6 * np.abs(parts).sum(0)
            self.assertTrue((np.abs(found[0].astype(np.float64) - wanted) <= bound).all())

    def test_many_sums_of_other_lengths_follow_one_another(self):
        memory = peer_sum.mailboxes_of(self.mesh)
        for turn in range(5):
            for sizes in SIZES:
                parts = drawn(2, sizes) + turn
                found = summed(self.mesh, parts, times=9, peers=memory.peers)
                wanted = 2.0**8 * parts.astype(np.float64).sum(0)  # eight times two equal parts
                np.testing.assert_array_equal(found[0], found[1])
                np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-3)

    def test_a_device_that_waits_in_vain_ends_in_an_error(self):
        done = subprocess.run(
            [sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        # What `devices.plain_memory_errors` looks for.
        self.assertRegex(done.stdout, "ended: .*CUDA_ERROR", done.stderr[-2000:])
