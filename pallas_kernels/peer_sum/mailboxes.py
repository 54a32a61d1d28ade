"""Memory of each GPU that the others write their parts of a sum into."""

import ctypes
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

MOST = 64 * 4096  # numbers of a sum: 64 tokens of a wide model
NUMBERS_NBYTES = 4 * MOST  # each number's count of its sums
PART_NBYTES = 8 * MOST  # a device's part: float32, and the count beside each


def mailbox_nbytes(num_devices: int) -> int:
    """Bytes of each device's mailbox: counts, and every device's part twice."""
    return NUMBERS_NBYTES + 2 * num_devices * PART_NBYTES


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
        """Takes `mailbox_nbytes` of each device's memory; see `mailbox_refusal`."""
        count, split = mesh.size, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        zeros = jax.jit(
            lambda: jnp.zeros((count, mailbox_nbytes(count)), jnp.uint8), out_shardings=split
        )
        self._memory = jax.block_until_ready(zeros())
        shards = sorted(self._memory.addressable_shards, key=lambda of: of.index[0].start or 0)
        addresses = np.asarray([of.data.unsafe_buffer_pointer() for of in shards], np.uint64)
        rows = [[i, *addresses.view(np.int32)] for i in range(count)]
        self.peers = jax.device_put(np.asarray(rows, np.int32), split)
