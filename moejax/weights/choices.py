"""Record of the kernels that a program runs, made where they are chosen: while it is traced.

A program that is traced already adds nothing, so whoever keeps programs keeps their records.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pallas_kernels.target import Choice


class KernelChoice(NamedTuple):
    """The implementation chosen for one product."""

    implementation: str  # of `pallas_kernels`, `linear.DEQUANTIZED`, `PLAIN`, a form of experts
    form: str  # of the stored matrices: "int4g64 float", "bfloat16", "FP8 ..."
    packed: bool
    refusals: Mapping[str, str]  # of the implementations that come before it

    def describe(self) -> str:
        """Describes the choice: "mosaic, int4g64 float", "dequantized, ... (mosaic: ...)"."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return f"{self.implementation}, {self.form}" + (f" ({reasons})" if reasons else "")


Record = dict[str, KernelChoice]  # by leaf, or by part: "experts", "routing", ...

_record: contextvars.ContextVar[Record | None] = contextvars.ContextVar("record", default=None)


@contextlib.contextmanager
def recorded_choices() -> Iterator[Record]:
    """Collects the choices of all that this thread traces inside the context."""
    found: Record = {}
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


def is_new(name: str, choice: Choice) -> bool:
    """Whether recording would change something: layers of a stack choose alike."""
    if (found := _record.get()) is None:
        return False
    if (known := found.get(name)) is None:
        return True
    return (known.implementation, known.refusals) != (choice.implementation, choice.refusals)


def record(name: str, choice: Choice, form: str, *, packed: bool = False) -> None:
    """Records the choice for a leaf or a part; the last of a name counts."""
    if (found := _record.get()) is not None:
        found[name] = KernelChoice(choice.implementation, form, packed, choice.refusals)
