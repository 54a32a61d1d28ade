"""Addresses that a warpgroup's lanes read and write, in shared and in device memory.

Copies to and from shared memory exchange the 16-byte pieces of rows (the swizzle), so that eight
rows read at one place meet all banks: piece c of a row lies at c ^ (row / rows in 128 bytes).
"""

from collections.abc import Callable, Sequence

from pallas_kernels.mosaic_decode.emit import Value
from pallas_kernels.mosaic_prefill.emit import Emitter
from pallas_kernels.mosaic_prefill.fragments import (
    BLOCK,
    ROWS,
    MatrixFormat,
    from_half_block,
    lane_words,
    prepare,
)


def place(e: Emitter) -> tuple[Value, Value, Value, Value]:
    """Position of this lane: g, t, its warp's first row in the warpgroup, the warpgroup."""
    thread = e.special("tid.x")
    lane = e.band(thread, 31)
    warp = e.shr(thread, 5)
    return e.shr(lane, 2), e.band(lane, 3), e.mul(e.band(warp, 3), 16), e.shr(warp, 2)


def _rows_before(e: Emitter, paired: bool) -> tuple[Value, Value]:
    """Rows of a half (or whole) tile before this warpgroup's, and before its warp's."""
    _, _, first, warpgroup = place(e)
    if paired:
        return e.mul(warpgroup, ROWS // 2), e.shr(first, 1)
    return e.mul(warpgroup, ROWS), first


def read_words(
    e: Emitter, form: MatrixFormat, block: Value, refs: Sequence[Value], rows: int
) -> list[Value]:
    """Reads a block's words for `fragments.operand`, from `form.tiles` in shared memory.

    Args:
      block: i32, of K.
      rows: rows per tile; if paired, those of the first half, then those of the second.
    """
    g, t, _, _ = place(e)
    group, first = _rows_before(e, form.paired)
    row = e.add(e.add(group, first), g)
    second = rows // 2 if form.paired else 8
    starts = []
    for tile, ref in zip(form.tiles, refs, strict=True):
        pitch = 4 * tile.num_words
        turn = e.shr(g, {32: 0, 16: 1, 8: 2}[tile.num_words])
        within = e.add(e.shl(turn, 4), e.mul(t, 4))
        start = e.add(e.shared_address(ref), e.mul(row, pitch))
        starts.append((e.add(start, within), pitch))
    raw = []
    for later, tile_id, word in lane_words(form):
        start, pitch = starts[tile_id]
        at = e.bxor(start, 4 * word) if word else start
        raw.append(e.load_shared(at, second * pitch * later, "b32"))
    if form.ends_in_half:
        is_half = e.compare(block, "eq", form.num_blocks - 1)
        pairs = zip(from_half_block(e, form, raw), raw, strict=True)
        raw = [e.select(is_half, moved, word) for moved, word in pairs]
    return prepare(e, form, raw)


def read_plain(e: Emitter, ref: Value, rows: int) -> list[Value]:
    """Reads the register operand of 64 k of plain weights, paired; see `fragments.operand`.

    Args:
      ref: to rows of 64 values of 16 bits in shared memory.
      rows: rows of the tile: those of the first half, then those of the second.
    """
    g, t, _, _ = place(e)
    group, first = _rows_before(e, True)
    row = e.add(e.add(group, first), g)
    start = e.add(e.shared_address(ref), e.mul(row, 128))
    start = e.add(start, e.add(e.shl(g, 4), e.mul(t, 4)))
    found = []
    for piece in range(8):
        at = e.bxor(start, 16 * piece) if piece else start
        found += [e.load_shared(at, later * rows // 2 * 128, "b32") for later in range(2)]
    return found


def read_constants(
    e: Emitter,
    form: MatrixFormat,
    slot: Value,
    first_row: Value,
    block: Value,
    refs: Sequence[Value],
) -> list[Value]:
    """Reads a block's scales and zeros for `MatrixFormat._constant`, from device memory."""
    g, _, _, _ = place(e)
    group, first = _rows_before(e, form.paired)
    halves = 2 if form.paired else 1
    second = form.num_rows // 2 if form.paired else 8
    # A warpgroup beyond the matrix repeats the last rows; its result is never stored.
    start = e.smaller(e.add(first_row, group), (form.num_rows - ROWS) // halves)
    row = e.add(e.add(start, first), g)
    first_group = e.div(e.mul(block, BLOCK), form.group_size)
    found = []
    for ref, size in zip(refs, (form.scale_bytes, form.zero_bytes), strict=False):
        pitch = form.num_groups * size
        at = e.offset(e.address(ref), slot, form.num_rows * pitch)
        at = e.offset(e.offset(at, row, pitch), first_group, size)
        num_bytes = form.groups_per_block * size
        for later in range(2):
            imm = second * pitch * later
            if form.ends_in_half and num_bytes >= 4:
                is_half = e.compare(block, "eq", form.num_blocks - 1)
                found += _run_of_either_block(e, at, imm, num_bytes, is_half)
            else:
                found += _run(e, at, imm, num_bytes)
    return found


def _run(e: Emitter, at: Value, imm: int, num_bytes: int) -> list[Value]:
    if num_bytes < 4:
        return [e.load_small(at, imm, num_bytes)]
    found = []
    for first in range(0, num_bytes, 16):
        found += e.load(at, imm + first, min(16, num_bytes - first) // 4)
    return found


def _run_of_either_block(
    e: Emitter, at: Value, imm: int, num_bytes: int, is_half: Value
) -> list[Value]:
    """Reads constants of a full block, or of half a one twice; rows are aligned to words."""
    back, found = e.select(is_half, num_bytes // 2, 0), []
    for first in range(0, num_bytes, 4):
        start: Value = first if 2 * first < num_bytes else e.sub(first, back)
        found += e.load(e.offset(at, start), imm, 1)
    return found


def write_rounded(e: Emitter, kind: str, sums: Sequence[Sequence[Value]], ref: Value) -> None:
    """Writes a warpgroup's sums [64, n], transposed and rounded, to shared memory [n, 64].

    Args:
      sums: for each 8 columns: rows g at columns 2t, 2t + 1, then rows g + 8.
      ref: rows of 128 bytes.
    """
    thread = e.special("tid.x")
    _, _, first, _ = place(e)
    # A lane gives the address of one row of one of four 8 x 8 matrices.
    inner, matrix = e.band(thread, 7), e.band(e.shr(thread, 3), 3)
    token = e.add(e.mul(e.shr(matrix, 1), 8), inner)
    piece = e.bxor(e.add(e.shr(first, 3), e.band(matrix, 1)), inner)
    at = e.add(e.add(e.shared_address(ref), e.mul(token, 128)), e.mul(piece, 16))
    words = []
    for a, b, c, d in sums:
        words += [e.pack_pair(kind, a, b), e.pack_pair(kind, c, d)]
    for i in range(0, len(words), 4):
        e.store_matrices(e.add(at, i // 4 * 16 * 128), words[i : i + 4])


def write_sums(
    e: Emitter,
    sums: Sequence[Sequence[Value]],
    first_row: Value,
    first_token: Value,
    ref: Value,
    shape: tuple[int, int],
) -> None:
    """Writes a warpgroup's sums [64, n] to device memory, float32 [num_tokens, num_rows]."""
    num_tokens, num_rows = shape
    g, t, first, warpgroup = place(e)
    start = e.add(first_row, e.mul(warpgroup, ROWS))
    inside = e.compare(start, "lt", num_rows)
    row = e.add(e.add(start, first), g)
    token = e.add(first_token, e.mul(t, 2))
    at = e.offset(e.address(ref), row, 4)
    for i, (a, b, c, d) in enumerate(sums):
        for half, pair in enumerate(((a, c), (b, d))):
            column = e.add(token, 8 * i + half)
            present = e.both(inside, e.compare(column, "lt", num_tokens))
            e.when(present, storer(e, e.offset(at, column, 4 * num_rows), pair))


PART_BYTES = 16 * 128  # of four sums of each lane of a warpgroup
MOST_LOADS = 16  # of four sums, under way together: 64 registers hide the latency of all but one


def _part_address(e: Emitter, ref: Value, part: Value, num_columns: int) -> Value:
    """Address of this lane's sums in a part of two warpgroups, each as `write_part` leaves it."""
    thread = e.special("tid.x")
    warpgroup, index = e.shr(thread, 7), e.band(thread, 127)
    number = e.add(e.mul(part, 2), warpgroup)
    return e.offset(e.offset(e.address(ref), number, 4 * ROWS * num_columns), index, 16)


def write_part(e: Emitter, sums: Sequence[Sequence[Value]], part: Value, ref: Value) -> None:
    """Writes a warpgroup's sums [64, n] to a part of device memory, four of a lane together."""
    at = _part_address(e, ref, part, 8 * len(sums))
    for i, four in enumerate(sums):
        e.store_four(at, i * PART_BYTES, four)
    e.warpgroup_barrier()


def add_part(
    e: Emitter, sums: Sequence[Sequence[Value]], part: Value, ref: Value
) -> list[list[Value]]:
    """Adds a part to a warpgroup's sums [64, n]; loads go ahead of the sums."""
    at = _part_address(e, ref, part, 8 * len(sums))
    found: list[list[Value]] = []
    loaded = [e.load_four(at, i * PART_BYTES) for i in range(min(MOST_LOADS, len(sums)))]
    for i, four in enumerate(sums):
        found.append([e.fadd(a, b) for a, b in zip(four, loaded[i], strict=True)])
        if len(loaded) < len(sums):
            loaded.append(e.load_four(at, len(loaded) * PART_BYTES))
    return found


def storer(e: Emitter, at: Value, pair: tuple[Value, Value]) -> Callable[[], None]:
    """Returns stores of float32 for row g and row g + 8, under a condition."""

    def store() -> None:
        for later, value in enumerate(pair):
            e.store(at, 32 * later, value, "f32")

    return store
