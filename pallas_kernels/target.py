"""What a kernel is chosen for: the platform and, of a GPU, its compute capability."""

from typing import NamedTuple

import jax


class Target(NamedTuple):
    """Where a program will run."""

    platform: str  # "cpu", "gpu", ...
    capability: tuple[int, int] | None  # of an NVIDIA GPU, such as (9, 0)
    num_processors: int = 132  # multiprocessors; what a heuristic fills
    simulated: bool = False  # by the CPU, for tests

    def describe(self) -> str:
        """Such as "gpu sm_90" or "cpu"."""
        if self.capability is None:
            return self.platform
        return f"{self.platform} sm_{self.capability[0]}{self.capability[1]}"


SIMULATED = Target("gpu", (9, 0), simulated=True)


def current_target() -> Target:
    """The default device's."""
    return target_of(jax.local_devices()[0])


def target_of(device: jax.Device) -> Target:
    """What a device is to a kernel."""
    if device.platform != "gpu":
        return Target(device.platform, None)
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return Target("gpu", None)
    major, minor = str(capability).split(".")
    return Target("gpu", (int(major), int(minor)), getattr(device, "core_count", 132))


class Choice(NamedTuple):
    """Which implementation serves a call, and why those before it did not."""

    implementation: str
    refusals: dict[str, str]  # of those that come before it in the order of preference

    def describe(self) -> str:
        """One line for a report."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return self.implementation + (f" ({reasons})" if reasons else "")
