"""Static facts, operands and shared memory of low-rank terms in streaming kernels."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_decode.matrix import (
    ROWS,
    Matrix,
    addressed,
    matrix_of,
    num_arrays,
    tile_bytes,
)
from pallas_kernels.mosaic_decode.u_factor import row_words
from pallas_kernels.packed import LowRank, PackedMatrices

MAX_RANK = 64
MAX_TERMS = 4  # of a matrix
DEEP_TILE_BYTES = 2560  # tiles of V up to which a warp has two in shared memory


@dataclasses.dataclass(frozen=True)
class Term:
    """Static facts of a `LowRank`, and the addresses of its operands."""

    u: Matrix
    v: Matrix
    first_row: int
    max_rank: int
    start: Any = None
    rank: Any = None

    @property
    def num_tiles(self) -> int:
        """Number of tiles of 16 rows of V."""
        return -(-self.max_rank // ROWS)

    @property
    def padded(self) -> int:
        """Rank in whole tiles."""
        return ROWS * self.num_tiles

    @property
    def pitch(self) -> int:
        """Floats per column of a warp's part; four more spread columns over the banks."""
        return self.padded + 4

    @property
    def depth(self) -> int:
        """Tiles of V per warp in shared memory."""
        return 2 if tile_bytes(self.v) <= DEEP_TILE_BYTES else 1

    @property
    def num_arrays(self) -> int:
        """Number of the kernel's operands."""
        return 2 + num_arrays(self.u) + num_arrays(self.v)

    @property
    def odd(self) -> int:
        """1 if even rows of the matrix are odd ones of the term, else 0."""
        return self.first_row % 2

    @property
    def stride(self) -> int:
        """Terms of the sum over the rank that are unrolled; divides `padded`."""
        return 2 * ROWS if self.padded % (2 * ROWS) == 0 else ROWS

    def width(self, rows: int) -> int:
        """Values of U per rank that a block of so many outputs unpacks, an even number."""
        return rows + 2 * self.odd

    def u_words(self, rows: int) -> int:
        """Words of shared memory per rank of U: unpacked, and as stored."""
        width = self.width(rows)
        return width + row_words(self.u, width)

    def _meets(self, first: int, count: int) -> bool:
        """Whether the term has any of the matrix's rows first .. first + count."""
        return first < self.first_row + self.u.num_inputs and self.first_row < first + count

    def covers(self, first: int, count: int) -> bool:
        """Whether the term has all of the matrix's rows first .. first + count."""
        end = self.first_row + self.u.num_inputs
        return self.first_row <= first and first + count <= end


def _term_of(terms: LowRank, kind: str) -> Term:
    """Static facts of a term; addresses are set when the kernel is lowered."""
    of_u = "f16" if terms.u.words.dtype == jnp.float16 else "bf16"
    v = dataclasses.replace(matrix_of(terms.v, kind), num_rows=max(ROWS, terms.v.num_outputs))
    return Term(matrix_of(terms.u, of_u), v, terms.first_row, terms.max_rank)


def terms_of(low_rank: Sequence[LowRank], kind: str) -> tuple[Term, ...]:
    """Terms of one matrix."""
    return tuple(_term_of(terms, kind) for terms in low_rank if terms.max_rank)


def operands_of(low_rank: Sequence[LowRank]) -> list[jax.Array]:
    """Operands of the kernel, `Term.num_arrays` per term of `terms_of`."""
    found = []
    for terms in low_rank:
        if terms.max_rank:
            found += [terms.start, terms.rank, *_arrays(terms.u), *_arrays(_tall(terms.v))]
    return found


def _arrays(weights: PackedMatrices) -> list[jax.Array]:
    return [a for a in (weights.words, weights.scales, weights.zeros) if a is not None]


def _tall(pool: PackedMatrices) -> PackedMatrices:
    """Pads a pool to a whole tile of rows, since whole tiles are copied."""
    missing = ROWS - pool.num_outputs
    if missing <= 0:
        return pool
    return jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, missing), (0, 0))), pool)


def with_addresses(terms: Sequence[Term], addresses: Sequence[Any]) -> list[Term]:
    """Sets the addresses of `operands_of` in the terms."""
    found, rest = [], list(addresses)
    for term in terms:
        (start, rank, *mine), rest = rest[: term.num_arrays], rest[term.num_arrays :]
        of_u = num_arrays(term.u)
        u, v = addressed(term.u, mine[:of_u]), addressed(term.v, mine[of_u:])
        found.append(dataclasses.replace(term, start=start, rank=rank, u=u, v=v))
    return found


def suffix(terms: Sequence[Term]) -> str:
    """Suffix of a kernel's name, such as "_rank32_8"; "" without terms."""
    return "_rank" + "_".join(str(term.max_rank) for term in terms) if terms else ""


@dataclasses.dataclass(frozen=True)
class Share:
    """Share of a thread block: `rows` outputs of each of `halves` row ranges."""

    num_warps: int
    columns: int  # of x at a time
    rows: int
    halves: int
    num_outputs: int  # matrix rows of a half
    num_x: int  # columns that are there
    thin: int = 0  # row tiles of V that every warp has among its own; 0: V apart

    def met(self, term: Term) -> list[int]:
        """Halves in which a term has rows."""
        span = range(self.halves)
        return [h for h in span if term._meets(h * self.num_outputs, self.num_outputs)]

    def room(self, terms: Sequence[Term]) -> int:
        """Bytes of shared memory, a multiple of 16."""
        return sum(self._room(term) for term in terms)

    def _room(self, term: Term) -> int:
        values = term.padded * (self.columns + len(self.met(term)) * term.u_words(self.rows))
        return self.num_warps * self.part_bytes(term) + 4 * values

    def part_pitch(self, term: Term) -> int:
        """Floats per column of a warp's part of V x."""
        return ROWS * self.thin + 4 if self.thin else term.pitch

    def part_bytes(self, term: Term) -> int:
        """Shared memory of a warp's part of V x, and of its separate ring of V if any."""
        part = 4 * self.columns * self.part_pitch(term)
        return part if self.thin else max(term.depth * tile_bytes(term.v), part)
