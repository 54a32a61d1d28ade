"""One matrix in a streaming kernel, and the layout of 16 rows in shared memory."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pallas_kernels import layout
from pallas_kernels.mosaic_decode.arithmetic import Arithmetic, Value
from pallas_kernels.mosaic_decode.fragments import CodeFormat
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices

ROWS = 16  # of a row tile
COLUMNS = 8  # of a column tile
MAX_ROW_BYTES = 256  # of a stage, so that a warp copies two rows at once or more
X_SUMS = 64  # bytes of the sums of x of a group and column tile: four float32 of each t
HALF_LINE = 64  # bytes that four lanes read of a row


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix [N, K] in a kernel: static facts, and addresses of the operands."""

    form: CodeFormat
    num_rows: int
    num_inputs: int
    num_words: int  # of a row (plain: pairs)
    group: int  # k that share a scale within a block
    group_size: int
    num_groups: int
    scale_bytes: int
    zero_kind: str
    second_plane: int  # bytes from a row's start to INT3's second plane
    refined_words: int = 0  # of a row of a second plane that lies apart
    constants: layout.PrefixConstants | None = None  # of scales and zeros; None: they are as stored
    words: Any = None
    scales: Any = None
    zeros: Any = None
    refined: Any = None  # the second plane's words
    refined_slots: Any = None

    @property
    def num_blocks(self) -> int:
        """Blocks of K; the last may be a short one (`CodeFormat.short_block`)."""
        return -(-self.num_inputs // self.form.block)

    @property
    def last_size(self) -> int:
        """Codes of a short block at the end of K; 0 where all are full."""
        return self.num_inputs % self.form.block

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's words, scales and zeros."""
        of_zero = {"float": self.scale_bytes, "integer": 1}.get(self.zero_kind, 0)
        words = self.num_words + self.refined_words
        return 4 * words + self.num_groups * (self.scale_bytes + of_zero)

    @property
    def groups_per_block(self) -> int:
        """Scales per block of a row."""
        return self.form.block // self.group

    def scaled(self, e: Arithmetic, total: Value) -> Value:
        """Multiplies a sum over K by the factor of all scales, if they are derived."""
        return total if self.constants is None else e.fmul(total, self.constants.scale_factor)


def matrix_of(weights: PackedMatrices, kind: str) -> Matrix:
    """Static facts of a matrix; addresses are set when the kernel is lowered."""
    form = CodeFormat(weights.bits, kind, bool(weights.refinements), weights.is_mxfp4)
    width = weights.words.shape[2]
    return Matrix(
        form=form,
        num_rows=weights.num_outputs,
        num_inputs=weights.num_inputs,
        num_words=width // 2 if weights.bits == PLAIN_BITS else width,
        group=min(weights.group_size, form.block),
        group_size=weights.group_size,
        num_groups=weights.num_groups,
        scale_bytes=0 if weights.scales is None else weights.scales.dtype.itemsize,
        zero_kind=weights.zero_kind,
        second_plane=weights.num_inputs * 2 // 8,
        refined_words=sum(part.words.shape[2] for part in weights.refinements),
        constants=weights.constants,
    )


def num_arrays(matrix: Matrix) -> int:
    """Number of operands of its form, `PackedMatrices.arrays`."""
    constants = (matrix.num_groups > 0) + (matrix.zero_kind in ("float", "integer"))
    return 1 + constants + (2 if matrix.form.apart else 0)


def addressed(matrix: Matrix, addresses: Sequence[Any]) -> Matrix:
    """Sets the addresses of a matrix's operands, as many as its form has."""
    names = ("words", "scales", "zeros", "refined", "refined_slots")
    return dataclasses.replace(matrix, **dict(zip(names, addresses, strict=False)))


@dataclasses.dataclass(frozen=True)
class StagePart:
    """One kind of bytes of a stage of 16 rows: its position, and how a warp copies it."""

    of: str  # "words", "second" (another plane), "scales" or "zeros"
    matrix_row_bytes: int  # from row to row of the matrix
    imm: int  # bytes from a row's start
    row_bytes: int  # of a stage
    stored: int  # bytes of a whole row of this kind
    pitch: int  # from row to row in shared memory
    at: int  # in the tile
    copied: bool  # or read where it lies
    swapped: bool  # odd rows have the 64-byte halves of their 128 bytes exchanged
    skewed: bool = False  # odd rows begin in the middle of a word, and are copied from its start

    @property
    def piece(self) -> int:
        """Bytes that a lane copies at once: as many as the rows are aligned to."""
        return 4 if self.skewed else math.gcd(16, self.row_bytes, self.matrix_row_bytes)

    @property
    def lanes_per_row(self) -> int:
        """Lanes per row, at most 32."""
        return (self.pitch if self.skewed else self.row_bytes) // self.piece

    @property
    def rows_per_pass(self) -> int:
        """Rows per copy of a warp."""
        return min(ROWS, 32 // self.lanes_per_row)

    @property
    def passes(self) -> int:
        """Copies per lane."""
        return ROWS // self.rows_per_pass


def stage_parts(matrix: Matrix) -> list[StagePart]:
    """Parts of a stage, a block of K, in order in shared memory.

    Constants of fewer than 4 bytes per row, or that do not change with every block, are not copied.
    """
    m, form = matrix, matrix.form
    words = m.num_words * 4
    kinds = [("words", words, 0, form.block * form.widths[0] // 8, 0, True)]
    if form.planes == 2:
        row, imm = (4 * m.refined_words, 0) if form.apart else (words, m.second_plane)
        kinds.append(("second", row, imm, form.block * form.widths[1] // 8, 32, True))
    sizes = {"float": m.scale_bytes, "integer": 1}
    for of, size in (("scales", m.scale_bytes), ("zeros", sizes.get(m.zero_kind, 0))):
        if size:
            each = m.groups_per_block * size
            copied = each % 4 == 0 and m.group_size <= form.block
            kinds.append((of, m.num_groups * size, 0, each, 16, copied))
    found, at = [], 0
    for of, row, imm, row_bytes, spread, copied in kinds:
        # Two rows' reads of one phase must not meet on a bank, as at distance 0 modulo 128 bytes.
        if copied and (row_bytes > MAX_ROW_BYTES or row_bytes & (row_bytes - 1)):
            raise ValueError(f"{of} of {row_bytes} bytes a row and stage are not copied whole")
        whole = row_bytes % (2 * HALF_LINE) == 0
        swapped = whole and of in ("words", "second")
        skewed = copied and row % 4 != 0
        pitch = row_bytes + (spread if whole and not swapped else 0)
        if skewed:  # a word more, and a power of two of lanes
            pitch = 1 << (row_bytes + 3).bit_length()
        stored = row  # of the constants
        if of in ("words", "second"):
            stored = m.num_inputs * form.widths[of == "second"] // 8
        found.append(StagePart(of, row, imm, row_bytes, stored, pitch, at, copied, swapped, skewed))
        at += -(-pitch * ROWS // 16) * 16 if copied else 0
    return found


def tile_bytes(matrix: Matrix) -> int:
    """Shared memory of a stage of 16 rows."""
    last = [part for part in stage_parts(matrix) if part.copied][-1]
    return last.at + -(-last.pitch * ROWS // 16) * 16


def x_sums_bytes(matrix: Matrix, column_tiles: int = 1) -> int:
    """Shared memory of the sums of a block of x, if they are not in registers."""
    return X_SUMS * column_tiles * (0 if matrix.zero_kind == "none" else matrix.groups_per_block)
