"""The bandwidth of a device's memory: known by name, or measured."""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

# Bytes a second as the makers state them, by the words of `jax.Device.device_kind`; the first line
# whose words are all in the name counts.
STATED = (
    ("B200", 8.0e12),
    ("H200", 4.8e12),
    ("GH200", 4.0e12),
    ("H100 NVL", 3.9e12),
    ("H100 PCIe", 2.0e12),
    ("H100", 3.35e12),
    ("A100 SXM4 80GB", 2.039e12),
    ("A100 80GB PCIe", 1.935e12),
    ("A100", 1.555e12),
    ("RTX 5090", 1.792e12),
    ("RTX 4090", 1.008e12),
    ("RTX 3090 Ti", 1.008e12),
    ("RTX 3090", 0.936e12),
    ("RTX 6000 Ada", 0.960e12),
    ("RTX A6000", 0.768e12),
    ("L40S", 0.864e12),
    ("L40", 0.864e12),
    ("L4", 0.300e12),
    ("A10G", 0.600e12),
    ("A10", 0.600e12),
    ("V100", 0.900e12),
    ("T4", 0.320e12),
)
COPIED_BYTES = 2**28  # more than a last-level cache, and little beside a model


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of a device's memory."""

    bytes_per_s: float  # read; where it was copied, read and written together
    source: str  # in words, "stated for NVIDIA H200" or "measured by a copy"


def _stated(kind: str) -> float | None:
    """Bytes a second of a device by its name; None where the table lacks it."""
    words = set(kind.replace("-", " ").replace("_", " ").split())
    if "MIG" in words:  # a part of the card
        return None
    for name, bytes_per_s in STATED:
        if set(name.split()) <= words:
            return bytes_per_s
    return None


def bandwidth_of(device: jax.Device) -> Bandwidth:
    """The stated bandwidth, else that of a copy of `COPIED_BYTES` on the device."""
    found = _stated(device.device_kind) if device.platform != "cpu" else None
    if found is not None:
        return Bandwidth(found, f"stated for {device.device_kind}")
    return Bandwidth(_copy_bandwidth(device), f"measured by a copy of {COPIED_BYTES >> 20} MiB")


def _copy_bandwidth(device: jax.Device) -> float:
    """Bytes a second, those that are read and those that are written, of the median of seven."""
    x = jnp.zeros(COPIED_BYTES // 4, jnp.float32, device=device)
    num_bytes = 2 * x.nbytes
    # In place: memory that is new to the process is slow to write the first time.
    copied = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = copied(x).block_until_ready()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        x = copied(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times)
