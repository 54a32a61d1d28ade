"""The runner of a kernel's contract: its value on the host and on a GPU, and broken kernels.

A test file says in a `Contract` what its operation is, and subclasses `on_host` and `on_device` of
it. The interpreter fills a kernel's outputs with NaN before it runs, so what is not written shows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from tests import slow
from tests.host_test_case import HostTestCase
from tests.poisoned_outputs import after_nan

UNIT_ROUNDOFF = 2.0**-24  # of float32
# Half the distance from 1 to the next number.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = tuple(ROUNDOFF)

Kernel = Callable[[Any, Any], Any]  # takes operands and a shape


class Contract(NamedTuple):
    """One operation, under THE check."""

    shapes: Mapping[str, Any]  # that a CPU can interpret
    gpu_shapes: Mapping[str, Any]
    draw: Callable[[Any, str, int], Any]  # operands of a shape, a dtype and a seed
    violation: Callable[[Any, Any, Any], str | None]  # why a result of operands and shape is wrong
    reference: Kernel
    interpreted: Sequence[Kernel]
    compiled: Kernel
    fresh: Kernel  # the kernel interpreted, traced anew at each call
    loosest: Any  # a shape at whose tolerance, the loosest, every broken kernel fails
    broken: Mapping[str, Kernel]  # wrong in one thing each
    # Operands and shape from which the kernel's right value is a wrong one of those given.
    spoiled: Callable[[Any, Any], tuple[Any, Any]]
    dtypes: Sequence[str] = DTYPES


class Ways(NamedTuple):
    """An operation run in each of the ways that a contract needs."""

    reference: Kernel
    interpreted: Kernel
    fresh: Kernel  # interpreted without the cache of traces, for a kernel that was tampered with
    compiled: Kernel


def ways_of(run: Callable[..., Any], jitted: Any, plain: Any) -> Ways:
    """Ways of `run(call, operands, shape, **how)`, whose call is jitted or the plain one."""
    partial = functools.partial
    return Ways(
        reference=partial(run, jitted, implementation="reference"),
        interpreted=partial(run, jitted, implementation="triton", interpret=True),
        fresh=partial(run, plain, implementation="triton", interpret=True),
        compiled=partial(run, jitted, implementation="triton"),
    )


def on_host(c: Contract) -> Any:
    """Tests of the reference and of the kernel interpreted, and the check's own."""

    class Host(HostTestCase):
        @slow.repeats(lambda way, name, dtype: name if way is c.reference else (way, dtype))
        @parameterized.product(
            way=(c.reference, *c.interpreted), name=sorted(c.shapes), dtype=c.dtypes
        )
        def test_value_is_that_of_float64(self, way, name, dtype):
            shape = c.shapes[name]
            of = c.draw(shape, dtype, len(name))
            self.assertIsNone(c.violation(way(of, shape), of, shape))

        def test_a_nan_and_a_wrong_form_fail(self):
            of = c.draw(c.loosest, c.dtypes[0], 5)
            first, *others = jax.tree.leaves(c.reference(of, c.loosest))
            other = jnp.float16 if first.dtype == jnp.float32 else jnp.float32
            for wrong in (first.astype(other), first[..., :-1], first * jnp.nan):
                found = (wrong, *others) if others else wrong
                self.assertIsNotNone(c.violation(found, of, c.loosest))

        @pytest.mark.slow
        def test_a_broken_kernel_fails(self):
            check_broken(self, c, c.loosest, c.broken)

    return Host


def check_broken(
    test: Any, c: Contract, shape: Any, broken: Mapping[str, Kernel], **drawn: Any
) -> None:
    """The check that accepts the kernel refuses every broken one."""
    of = c.draw(shape, c.dtypes[0], 5, **drawn)
    test.assertIsNone(c.violation(c.fresh(of, shape), of, shape))
    test.assertNotEmpty(broken)
    for name, wrong in broken.items():
        with test.subTest(name):
            test.assertIsNotNone(c.violation(wrong(of, shape), of, shape))


def on_device(c: Contract) -> Any:
    """Tests of the kernel compiled; mark the subclass `gpu`."""

    class Device(parameterized.TestCase):
        @parameterized.product(name=sorted(c.gpu_shapes), dtype=c.dtypes)
        def test_value_is_that_of_float64(self, name, dtype):
            shape = c.gpu_shapes[name]
            of = c.draw(shape, dtype, len(name))
            found = after_nan(lambda: c.compiled(of, shape))[0]
            self.assertIsNone(c.violation(found, of, shape))
            again = jax.tree.leaves(c.compiled(of, shape))
            for one, other in zip(jax.tree.leaves(found), again, strict=True):
                self.assertEqual(np.asarray(one).tobytes(), np.asarray(other).tobytes())

        def test_a_broken_kernel_fails(self):
            of = c.draw(c.loosest, c.dtypes[0], 5)
            self.assertIsNone(c.violation(c.compiled(of, c.loosest), of, c.loosest))
            found = c.compiled(*c.spoiled(of, c.loosest))
            self.assertIsNotNone(c.violation(found, of, c.loosest))

    return Device


def tampered(kernel: Kernel, owner: Any, name: str, change: Callable[..., Any]) -> Kernel:
    """The kernel with `change(original, ...)` in place of a function, or another value."""

    def run(of: Any, shape: Any) -> Any:
        original = getattr(owner, name)
        new = functools.partial(change, original) if callable(original) else change
        with mock.patch.object(owner, name, new):
            return kernel(of, shape)

    return run


def one_program_fewer(call: Any, body: Any, *, grid: tuple[int, ...], **how: Any) -> Any:
    """A launch whose grid ends one program early, along its last axis."""
    return call(body, grid=(*grid[:-1], grid[-1] - 1), **how)


def wrong_form(found: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> str | None:
    """Describes the first array of another shape or dtype than it should have."""
    for array, shape, dtype in zip(found, shapes, dtypes, strict=True):
        if array.shape != shape or array.dtype != dtype:
            return f"{array.dtype}{array.shape} in place of {dtype}{shape}"
    return None


def outside(what: str, found: Any, expected: np.ndarray, tolerance: Any) -> str | None:
    """Describes the worst of values that are further from the expected ones than allowed."""
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    tolerance = np.broadcast_to(tolerance, error.shape)
    wrong = ~(error <= tolerance)  # NaN is wrong
    if not wrong.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(wrong, np.nan_to_num(error / tolerance, nan=np.inf), 0)
    worst = tuple(int(i) for i in np.unravel_index(excess.argmax(), excess.shape))
    return (
        f"{wrong.sum()} of {wrong.size} {what} are out of tolerance, the worst at {worst}: "
        f"{error[worst]:.3g} from {expected[worst]:.3g}, allowed {tolerance[worst]:.3g}"
    )
