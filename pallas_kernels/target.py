"""Targets of kernels: the platform and, for a GPU, its compute capability."""

import re
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """Platform and GPU on which a program will run."""

    platform: str  # "cpu", "gpu", ...
    capability: tuple[int, int] | None  # of an NVIDIA GPU, such as (9, 0)
    num_processors: int = 132  # multiprocessors; what a heuristic fills
    simulated: bool = False  # by the CPU, for tests

    def describe(self) -> str:
        """Describes the target, such as "gpu sm_90" or "cpu"."""
        if self.capability is None:
            return self.platform
        return f"{self.platform} sm_{self.capability[0]}{self.capability[1]}"


MIN_CAPABILITY = (8, 0)  # of Triton kernels
SIMULATED = Target("gpu", (9, 0), simulated=True)


def current_target() -> Target:
    """Target of the default device."""
    return target_of(jax.local_devices()[0])


def target_of(device: jax.Device) -> Target:
    """Target of a device."""
    if device.platform != "gpu":
        return Target(device.platform, None)
    # Of an AMD GPU this is a name, such as "gfx942".
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if capability is None:
        return Target("gpu", None)
    major, minor = map(int, capability.groups())
    return Target("gpu", (major, minor), getattr(device, "core_count", 132))


def platform_refusal(target: Target) -> str | None:
    """Reason why Triton does not run on a target, or None."""
    if target.platform != "gpu":
        return f"it runs on GPUs, this is {target.describe()}"
    if target.capability is None:
        return "it runs on NVIDIA GPUs, this one has no compute capability"
    if target.capability < MIN_CAPABILITY:
        return f"it needs sm_80, this is {target.describe()}"
    return None


class Choice(NamedTuple):
    """The chosen implementation, and the refusals of those before it."""

    implementation: str
    refusals: dict[str, str]  # of those that come before it in the order of preference

    def describe(self) -> str:
        """Describes the choice in one line for a report."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return self.implementation + (f" ({reasons})" if reasons else "")
