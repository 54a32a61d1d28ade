"""Operations: implementations in order of preference, their refusals, and the choice."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.target import SIMULATED, Choice, Target, current_target

REFERENCE = "reference"  # the implementation that serves every platform


class Implementation(NamedTuple):
    """A kernel of an operation."""

    name: str  # such as "triton"
    refusal: Callable[..., str | None]  # takes what `Operation.abstract` gives, then the target
    run: Callable[..., Any]  # takes the operands; by name `target`, static arguments and any tiles


@dataclasses.dataclass(frozen=True)
class Operation:
    """Kernels of one computation, and a reference in plain JAX that runs anywhere.

    Attributes:
      name: its name in errors.
      kernels: the best first.
      reference: takes the operands and the static arguments; it refuses nothing.
      abstract: takes the reference's arguments; returns arrays or shapes that refusals depend on.
      shared_refusals: reasons that apply to every kernel; takes the result of `abstract`.
    """

    name: str
    kernels: tuple[Implementation, ...]
    reference: Callable[..., Any]
    abstract: Callable[..., tuple[Any, ...]]
    shared_refusals: Callable[..., list[str]] = lambda *_: []

    @property
    def names(self) -> tuple[str, ...]:
        """Implementations in order of preference; the reference is the last."""
        return (*(kernel.name for kernel in self.kernels), REFERENCE)

    def refusal(
        self, implementation: str, *abstract: Any, target: Target | None = None
    ) -> str | None:
        """Returns all reasons why an implementation refuses, in one line, or None.

        Raises:
          ValueError: there is no such implementation.
        """
        if implementation == REFERENCE:
            return None
        kernel = self._kernel(implementation)
        reasons = self.shared_refusals(*abstract)
        if found := kernel.refusal(*abstract, target or current_target()):
            reasons = [*reasons, found]
        return "; ".join(reasons) or None

    def choose(self, *abstract: Any, target: Target | None = None) -> Choice:
        """Chooses the first implementation that does not refuse; keeps earlier refusals."""
        refusals: dict[str, str] = {}
        for kernel in self.kernels:
            reason = self.refusal(kernel.name, *abstract, target=target)
            if reason is None:
                return Choice(kernel.name, refusals)
            refusals[kernel.name] = reason
        return Choice(REFERENCE, refusals)

    def __call__(
        self,
        *operands: Any,
        implementation: str | None = None,
        tiles: Any = None,
        interpret: bool = False,
        **static: Any,
    ) -> Any:
        """Computes the operation.

        Args:
          implementation: one of `names`; None for the one that `choose` names.
          tiles: a kernel's; None for its own. The reference has none.

        Raises:
          ValueError: there is no such implementation, or it refuses; with all reasons.
        """
        target = SIMULATED if interpret else current_target()
        abstract = self.abstract(*operands, **static)
        chosen = implementation or self.choose(*abstract, target=target).implementation
        if chosen == REFERENCE:
            return self.reference(*operands, **static)
        kernel = self._kernel(chosen)
        if reason := self.refusal(chosen, *abstract, target=target):
            raise ValueError(f"{self.name} by {chosen} refuses: {reason}")
        if tiles is not None:
            static = {**static, "tiles": tiles}
        return kernel.run(*operands, target=target, **static)

    def _kernel(self, name: str) -> Implementation:
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise ValueError(f"implementation {name!r} is none of {', '.join(self.names)}")


def not_half(*operands: tuple[str, Any]) -> list[str]:
    """Lists a reason for each operand, such as ("x is", its dtype), that is not 16-bit float."""
    return [
        f"{name} {dtype}, not bfloat16 or float16"
        for name, dtype in operands
        if dtype not in (jnp.bfloat16, jnp.float16)
    ]


def byte_pairs(array: Any) -> Any:
    """Views uint8 [..., N] as uint16 [..., N / 2], the first in the low byte; all else as it is.

    XLA copies nothing. A kernel then loads half as often, and Pallas-Triton, whose offsets have 32
    bits up to 4 GiB (`offset_refusal`), reaches all of it. An odd N stays.

    Args:
      array: an array, or its shape.
    """
    if array.dtype != jnp.uint8 or array.shape[-1] % 2:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(byte_pairs, array)
    pairs = array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint16)


def offset_refusal(array: Any) -> str | None:
    """Reason why a Triton kernel cannot reach all of an array, or None.

    Pallas counts elements in 32 bits, signed in Triton, up to 4 GiB, in 64 beyond.
    """
    if array.size >= 2**31 and array.size * array.dtype.itemsize <= 2**32:
        return f"{array.dtype}{array.shape} has 2 to 4 Gi elements of a byte"
    return None
