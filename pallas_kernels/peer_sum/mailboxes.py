"""Memory of each GPU that the others write their parts of a sum into."""

import ctypes
import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

MOST = 64 * 4096  # numbers of a short sum: 64 tokens of a wide model
NUM_PROGRAMS = 264  # of a long sum: two on each multiprocessor of an H100
TILE = 2048  # numbers that one of them sends at a time


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Layout of a device's mailbox, in bytes; zeros at first.

    Of a short sum it holds for each number how many sums it had, then the devices' parts twice,
    pairs of a number and its count; of a long one the tiles that each program had, the counts that
    the devices sent it, and their tiles twice.
    """

    num_devices: int

    pairs = 4 * MOST  # where they begin
    pairs_of_device = 8 * MOST
    tiles_of_device = 2 * 4 * NUM_PROGRAMS * TILE

    @property
    def counts(self) -> int:
        """Where the counts of programs begin."""
        return self.pairs + 2 * self.num_devices * self.pairs_of_device

    @property
    def sent(self) -> int:
        """Where the counts that devices sent begin."""
        return self.counts + 4 * NUM_PROGRAMS

    @property
    def tiles(self) -> int:
        """Where the tiles begin."""
        return self.sent + 4 * self.num_devices * NUM_PROGRAMS

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.tiles + self.num_devices * self.tiles_of_device


def mailbox_refusal(devices: Sequence[jax.Device]) -> str | None:
    """Reason why devices cannot have mailboxes, or None."""
    if any(device.platform != "gpu" for device in devices):
        return "they are no GPUs"
    if any(device.process_index != devices[0].process_index for device in devices):
        return "they belong to several processes"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the driver was not found ({error})"
    can = ctypes.c_int()
    for one, other in itertools.permutations(devices, 2):
        numbers = [ctypes.c_int(device.local_hardware_id) for device in (one, other)]
        status = driver.cuDeviceCanAccessPeer(ctypes.byref(can), *numbers)
        if status or not can.value:
            return f"{one} does not reach the memory of {other}"
    return None


class Mailboxes:
    """Mailboxes of all devices of a mesh, for `peer_sum`; to be kept while its programs run.

    Attributes:
      peers: int32[P, 1 + 2 P], of which each device has a row: its number among the P devices, and
        the halves of all mailboxes' addresses.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        """Takes `Mailbox.nbytes` of each device's memory; see `mailbox_refusal`."""
        count, split = mesh.size, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        zeros = jax.jit(
            lambda: jnp.zeros((count, Mailbox(count).nbytes), jnp.uint8), out_shardings=split
        )
        self._memory = jax.block_until_ready(zeros())
        shards = sorted(self._memory.addressable_shards, key=lambda of: of.index[0].start or 0)
        addresses = np.asarray([of.data.unsafe_buffer_pointer() for of in shards], np.uint64)
        rows = [[i, *addresses.view(np.int32)] for i in range(count)]
        self.peers = jax.device_put(np.asarray(rows, np.int32), split)
