"""Operations: implementations in order of preference, their refusals, and the choice."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.target import SIMULATED, Choice, Target, current_target

_DTYPES = ("bool", "int32", "float32")  # that forms of operands name
REFERENCE = "reference"  # the implementation that serves every platform


class Implementation(NamedTuple):
    """A kernel of an operation."""

    name: str  # such as "triton"
    refusal: Callable[..., str | None]  # takes what `Operation.abstract` gives, then the target
    run: Callable[..., Any]  # takes the operands; by name `target`, static arguments and any tiles


@dataclasses.dataclass(frozen=True)
class Operation:
    """Kernels of one computation, and a reference in plain JAX that runs anywhere."""

    name: str  # its name in errors
    kernels: tuple[Implementation, ...]  # the best first
    reference: Callable[..., Any]  # takes the operands and the static arguments; it refuses nothing
    # takes the reference's arguments; returns arrays or shapes that refusals depend on
    abstract: Callable[..., tuple[Any, ...]]
    # reasons that apply to every kernel; takes the result of `abstract`
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
        """Computes the operation; `tiles` are a kernel's, None for its own."""
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


def check_operands(
    operation: str, operands: Mapping[str, tuple[Any, str]], **sizes: int
) -> dict[str, int]:
    """Sizes of the axes that operands name, such as B of "int32[B]".

    An axis has one size, at least 1, in all operands; "." is any axis, a number that size. A dtype
    beyond bool, int32 and float32, such as x of "x[N, D]", is that of its first operand.

    Args:
      operation: its name, for the error.
      operands: arrays and their forms, by name; an array that is None fits.
      sizes: of axes that no form alone decides.

    Raises:
      ValueError: one line names each operand that does not fit, and its form.
    """
    dtypes, reasons = {name: name for name in _DTYPES}, []
    for name, (array, form) in operands.items():
        if array is None:
            continue
        kind, _, axes = form.removesuffix("]").partition("[")
        own, letters = jnp.dtype(array.dtype).name, axes.split(", ") if axes else []
        wanted = [int(axis) if axis.isdigit() else sizes.get(axis, axis) for axis in letters]
        pairs = list(zip(array.shape, wanted, strict=False))
        alike = all(size == axis if isinstance(axis, int) else size > 0 for size, axis in pairs)
        if array.ndim != len(letters) or not alike or dtypes.get(kind, own) != own:
            expected = f"{dtypes.get(kind, '')}[{', '.join(map(str, wanted))}]"
            reasons.append(f"{name}: {own}{list(array.shape)}, not {expected}")
            continue
        if kind != ".":
            dtypes[kind] = own
        sizes |= {axis: size for size, axis in pairs if isinstance(axis, str) and axis != "."}
    refuse(operation, reasons)
    return sizes


def refuse(operation: str, reasons: Sequence[str]) -> None:
    """Raises ValueError with the operation's name and all reasons, if there are any."""
    if reasons:
        raise ValueError(f"{operation}: {'; '.join(reasons)}")


def not_half(*operands: tuple[str, Any]) -> list[str]:
    """Lists a reason for each operand, such as ("x is", its dtype), that is not 16-bit float."""
    return [
        f"{name} {dtype}, not bfloat16 or float16"
        for name, dtype in operands
        if dtype not in (jnp.bfloat16, jnp.float16)
    ]


def not_as_cache(name: str, x: Any, cache: Any) -> list[str]:
    """Lists reasons unless `x` and the cache are of one 16-bit float type."""
    reasons = not_half((f"{name} is", x.dtype), ("the cache is", cache.dtype))
    if not reasons and x.dtype != cache.dtype:
        reasons.append(f"{name} is {x.dtype}, the cache {cache.dtype}")
    return reasons


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
