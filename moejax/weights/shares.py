"""Experts split along their width F, a share for each device of a mesh.

A share has rows of gate and of up, and columns of down: silu(gate x) * up x of its own part of F,
and what that part adds to down's product, so that the sum over the shares is the expert's own.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.weights.qtensor import QTensor, Weight
from pallas_kernels import layout, mxfp4

# Columns of a plain matrix that stay together, and fewest of them.
PLAIN_UNIT, LEAST_PLAIN_UNIT = 64, 8


@functools.partial(jax.jit, static_argnums=(1, 2))
def _take_codes(words: jax.Array, is_mxfp4: bool, where: tuple[Any, ...]) -> jax.Array:
    """`layout.take_codes`, of `where`."""
    if is_mxfp4:
        return mxfp4.arrange(layout.take_codes(mxfp4.packed(words), *where))
    return layout.take_codes(words, *where)


class Window(NamedTuple):
    """Rows and columns of a leaf's matrices, each a first one and the one after the last."""

    rows: tuple[tuple[int, int], ...] = ()  # (): all
    columns: tuple[int, int] | None = None  # None: all

    def rows_of(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields which of the leaf's rows `start`..`start + count` are inside, from `start` on."""
        for first, stop in self.rows or ((start, start + count),):
            found = max(first - start, 0), min(stop - start, count)
            if found[0] < found[1]:
                yield found


EVERYTHING = Window()


@dataclasses.dataclass(frozen=True)
class Shares:
    """Cut of an expert's width F into `count` shares of whole units.

    Shares differ by one unit at most, and are padded with zeros to one width: gates and ups of
    zero weights, so that what down has there is multiplied by zero.
    """

    count: int  # n, of the shares
    width: int  # F
    unit: int  # columns that stay together, a quantization group of down

    def __post_init__(self) -> None:
        if self._num_units < self.count:
            raise MoejaxError(
                f"an expert of width {self.width} has {self._num_units} groups of {self.unit}, too "
                f"few for a mesh of {self.count}: take a smaller mesh, or smaller groups"
            )

    @property
    def _num_units(self) -> int:
        """Units of F; the last may be shorter."""
        return -(-self.width // self.unit)

    @property
    def share_width(self) -> int:
        """Width of every share, with padding."""
        return min(self.width, -(-self._num_units // self.count) * self.unit)

    def span(self, index: int) -> tuple[int, int]:
        """First column of a share, and the one after its last."""
        ends = [self._num_units * i // self.count * self.unit for i in (index, index + 1)]
        return ends[0], min(ends[1], self.width)

    def windows(self, own: Collection[int]) -> tuple[Window, Window]:
        """Returns what the shares `own` have of gates and ups, and of downs."""
        if len(own) == self.count:
            return EVERYTHING, EVERYTHING
        start, stop = self.span(min(own))[0], self.span(max(own))[1]
        rows = tuple((first + start, first + stop) for first in (0, self.width))
        return Window(rows=rows), Window(columns=(start, stop))

    def gate_up(self, weight: Weight, index: int) -> Weight:
        """Takes a share of [..., 2F, D], of numpy leaves: [..., 2 share_width, D]."""
        start, stop = self.span(index)

        def rows(array: np.ndarray) -> np.ndarray:
            parts = array.reshape(*array.shape[:-2], 2, self.width, array.shape[-1])
            cut = _padded(parts[..., start:stop, :], -2, self.share_width)
            return cut.reshape(*array.shape[:-2], 2 * self.share_width, array.shape[-1])

        _check_form(weight)
        found: Weight = jax.tree.map(rows, weight)
        return found

    def down(self, weight: Weight, index: int) -> Weight:
        """Takes a share of [..., D, F], of numpy leaves: [..., D, share_width]."""
        start, stop = self.span(index)

        def columns(array: Any, per: int = 1) -> Any:
            cut = array[..., start // per : -(-stop // per)]
            return _padded(cut, -1, -(-self.share_width // per))

        def words(array: Any, widths: tuple[int, ...]) -> Any:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                where = (widths, self.width, start, stop, self.share_width)
                return np.asarray(_take_codes(array, is_mxfp4, where))

        _check_form(weight)
        if not isinstance(weight, QTensor):
            plain: Weight = columns(weight)
            return plain
        if self.unit % weight.group_size:
            raise MoejaxError(
                f"shares of whole groups of {self.unit} cut groups of {weight.group_size}: "
                "quantize all experts in groups of one size"
            )
        is_mxfp4 = weight.is_mxfp4
        by_planes = layout.PREFIX_PLANES[weight.bits] if weight.refinements else ()
        zeros = weight.zeros
        return dataclasses.replace(
            weight,
            words=words(weight.words, by_planes[:1] or layout.PLANES[weight.bits]),
            scales=columns(weight.scales, weight.group_size),
            zeros=None if zeros is None else columns(zeros, weight.group_size),
            refinements=tuple(
                words(plane, (width,))
                for plane, width in zip(weight.refinements, by_planes[1:], strict=True)
            ),
            num_inputs=self.share_width,
        )

    def gate_up_bias(self, bias: np.ndarray, index: int) -> np.ndarray:
        """Takes a share of [..., 2F]: [..., 2 share_width]."""
        start, stop = self.span(index)
        parts = bias.reshape(*bias.shape[:-1], 2, self.width)[..., start:stop]
        return _padded(parts, -1, self.share_width).reshape(*bias.shape[:-1], -1)

    def down_bias(self, bias: np.ndarray, index: int) -> np.ndarray:
        """Takes [..., D] in the first share, zeros in the others: the shares are summed."""
        return bias if index == 0 else np.zeros_like(bias)

    def narrow(self, down: Weight) -> Weight:
        """Gives arrays of shares of down, in the tree of the whole, the width of a share."""
        if not isinstance(down, QTensor):
            return down
        return dataclasses.replace(down, num_inputs=self.share_width)


def shares_of(width: int, count: int, group_size: int | None) -> Shares:
    """Shares of experts of a width.

    Args:
      group_size: of down's quantization groups; None of a plain matrix.

    Raises:
      MoejaxError: there are more shares than groups.
    """
    unit = group_size or math.gcd(width, PLAIN_UNIT)
    while not group_size and unit > LEAST_PLAIN_UNIT and width // unit % count:
        unit //= 2  # rather than to pad
    return Shares(count, width, unit)


def _check_form(weight: Weight) -> None:
    """Raises MoejaxError for a form that is not cut."""
    if isinstance(weight, QTensor):
        said = "permuted (act-order)" if weight.permutation is not None else ""
        said = "with low-rank compensators" if weight.compensators else said
    else:
        said = "" if hasattr(weight, "ndim") and not dataclasses.is_dataclass(weight) else "FP8"
    if said:
        raise MoejaxError(
            f"a mesh does not serve experts that are {said} yet; quantize them by another method "
            "(python -m moejax.quantize), or leave the mesh out"
        )


def _padded(array: np.ndarray, axis: int, length: int) -> np.ndarray:
    missing = length - array.shape[axis]
    if not missing:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, missing)
    return np.pad(array, padding)
