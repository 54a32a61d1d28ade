"""Memory of each GPU that the others write their parts of a sum into."""

import ctypes
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.sum_mailbox import mailbox_nbytes


class _Mailboxes:
    """Mailboxes of all devices of a mesh, for `peer_sum`; to be kept while its programs run.

    Attributes:
      peers: int32[P, 1 + 2 P], of which each device has a row: its number among the P devices, and
        the halves of all mailboxes' addresses.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        count, split = mesh.size, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        zeros = jax.jit(
            lambda: jnp.zeros((count, mailbox_nbytes(count)), jnp.uint8), out_shardings=split
        )
        self._memory = jax.block_until_ready(zeros())
        shards = sorted(self._memory.addressable_shards, key=lambda of: of.index[0].start or 0)
        addresses = np.asarray([of.data.unsafe_buffer_pointer() for of in shards], np.uint64)
        rows = [[i, *addresses.view(np.int32)] for i in range(count)]
        self.peers = jax.device_put(np.asarray(rows, np.int32), split)


def mailboxes_of(mesh: jax.sharding.Mesh) -> _Mailboxes | None:
    """Takes `mailbox_nbytes` of each device's memory for mailboxes.

    Returns:
      The mailboxes; None unless all are NVIDIA GPUs of one process that reach each other's memory.
    """
    return _Mailboxes(mesh) if _reach_each_other([*mesh.devices.flat]) else None


def _reach_each_other(devices: Sequence[jax.Device]) -> bool:
    processes = {device.process_index for device in devices}
    if len(processes) > 1 or any(device.platform != "gpu" for device in devices):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    can = ctypes.c_int()
    for pair in itertools.permutations(devices, 2):
        numbers = [ctypes.c_int(device.local_hardware_id) for device in pair]
        if driver.cuDeviceCanAccessPeer(ctypes.byref(can), *numbers) or not can.value:
            return False
    return True
