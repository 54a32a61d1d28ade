"""The runner of a contract's own test: its check refuses every kernel that is broken."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Kernel = Callable[[Any, Any], Any]  # takes operands and a shape


class BrokenKernels:
    """Mixin of a test case over one operation.

    Attributes:
      broken: kernels that are wrong in one thing each.
    """

    broken: Sequence[Kernel]

    def sound(self) -> tuple[Kernel, Any, Any]:
        """Returns the kernel, traced anew, operands and a shape, at the loosest tolerance."""
        raise NotImplementedError

    def violation(self, found: Any, operands: Any, shape: Any) -> str | None:
        """Returns what the contract's check says."""
        raise NotImplementedError

    @pytest.mark.slow
    def test_a_broken_kernel_fails(self) -> None:
        kernel, operands, shape = self.sound()
        assert self.broken
        reason = self.violation(kernel(operands, shape), operands, shape)
        assert reason is None, reason
        for broken in self.broken:
            with self.subTest(broken.__name__):  # type: ignore[attr-defined]
                assert self.violation(broken(operands, shape), operands, shape) is not None
