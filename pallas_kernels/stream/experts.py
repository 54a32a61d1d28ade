"""Experts of a few tokens: the two kernels of a MoE layer.

A thread block belongs to a pair (token, a) and a tile of outputs. It looks through all pairs for
those with the same tier and slot: if one of them comes earlier, that one's blocks do the work and
this block ends; else it multiplies the matrix by all their rows: an expert's words are read once.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.stream.dense import KINDS
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.launching import launch_blocks
from pallas_kernels.stream.low_rank import BlockTerms
from pallas_kernels.stream.matrix import (
    COLUMNS,
    ROWS,
    Matrix,
    addressed,
    matrix_of,
    num_arrays,
    tile_bytes,
)
from pallas_kernels.stream.product import Lane, Ring, Stream, walk
from pallas_kernels.stream.terms import Share, Term, operands_of, suffix, terms_of, with_addresses
from pallas_kernels.stream.tiles import StreamTiles, expert_share

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of a launch."""

    tiers: tuple[Matrix, ...]
    terms: tuple[tuple[Term, ...], ...]  # of each tier
    tiles: StreamTiles
    kind: str  # of x and of the hidden values
    num_pairs: int
    width: int  # pairs that share a row of x
    num_outputs: int  # of a pair
    gated: bool  # rows n and num_outputs + n of a matrix are gate and up of output n
    columns: int

    @property
    def halves(self) -> int:
        """Matrix rows of an output."""
        return 2 if self.gated else 1

    @property
    def main_bytes(self) -> int:
        """Shared memory of the rings, and later of the sums."""
        tiles = self.tiles
        sums = tiles.warps_k * self.columns * (self.halves * tiles.rows + 1)
        stage = max(tile_bytes(matrix, tiles.span_of(matrix.form)) for matrix in self.tiers)
        return -(-max(4 * sums, tiles.num_warps * tiles.depth * stage) // 16) * 16

    @property
    def share(self) -> Share:
        """Of a thread block, for the terms."""
        return expert_share(self.tiles, self.gated, self.num_outputs)

    @property
    def blocks_per_pair(self) -> int:
        """Tiles of outputs."""
        return -(-self.num_outputs // self.tiles.rows)

    @property
    def list_bytes(self) -> int:
        """Shared memory that the numbers of the pairs take."""
        return -(-4 * self.num_pairs // 16) * 16


@functools.partial(jax.jit, static_argnames=("gated", "tiles", "interpret"))
def expert_products(
    x: jax.Array,
    tier: jax.Array,
    slot: jax.Array,
    tiers: Sequence[PackedMatrices],
    *,
    gated: bool,
    tiles: StreamTiles,
    interpret: bool = False,
    low_rank: Sequence[Sequence[LowRank]] = (),
) -> jax.Array:
    """Rows of x, each by the matrix of its pairs.

    Args:
      x: [R, K]; pair p multiplies row p // (P / R).
      tier: int32[P]; out of range: skipped.
      slot: int32[P].
      tiers: matrices [2 F, K] where gated, else [N, K].
      gated: yields silu(gate) up (Shazeer 2020, eq. 6).
      tiles: rows are those of the outputs.
      interpret: on the CPU, for tests.
      low_rank: terms of each tier; empty for none.

    Returns:
      [P, F] in `x.dtype`, zero where skipped; or float32[P, N], undefined where skipped.
    """
    kind = KINDS[x.dtype.name]
    low_rank = low_rank or [()] * len(tiers)
    num_pairs = tier.shape[0]
    plan = _Plan(
        tiers=tuple(matrix_of(weights, kind) for weights in tiers),
        terms=tuple(terms_of(of_tier, kind) for of_tier in low_rank),
        tiles=tiles,
        kind=kind,
        num_pairs=num_pairs,
        width=num_pairs // x.shape[0],
        num_outputs=tiers[0].num_outputs // (2 if gated else 1),
        gated=gated,
        columns=COLUMNS * tiles.column_tiles,
    )
    tiles.check(plan.num_outputs, plan.tiers)
    arrays = []
    for w, of_tier in zip(tiers, low_rank, strict=True):
        arrays += [a for a in (w.words, w.scales, w.zeros) if a is not None]
        arrays += operands_of(of_tier)
    names = zip(tiers, plan.terms, strict=True)
    form = "_".join(w.describe().replace(" ", "_") + suffix(terms) for w, terms in names)
    room = max(plan.share.room(terms) for terms in plan.terms)
    out = jax.ShapeDtypeStruct((num_pairs, plan.num_outputs), x.dtype if gated else jnp.float32)
    (y,) = launch_blocks(
        functools.partial(_body, plan=plan),
        [tier, slot, x, *arrays],
        name=f"expert_{'gate_up' if gated else 'down'}_{form}_p{num_pairs}_{tiles.describe()}",
        num_blocks=num_pairs * plan.blocks_per_pair,
        num_warps=tiles.num_warps,
        out_shapes=[out],
        shared_floats=(plan.list_bytes + plan.main_bytes + room) // 4,
        interpret=interpret,
    )  # fmt: skip
    return y


def _body(e: Mlir, *refs: Value, plan: _Plan) -> None:
    tier_at, slot_at, x_at, *operands, out_at = (e.address(ref) for ref in refs[:-1])
    shared = e.shared_address(refs[-1])
    thread, block = e.special("tid.x"), e.special("ctaid.x")
    lane = Lane.here(e, e.band(thread, 31))
    pair = e.div(block, plan.blocks_per_pair)
    first = e.mul(e.rem(block, plan.blocks_per_pair), plan.tiles.rows)
    first = e.smaller(first, plan.num_outputs - plan.tiles.rows)
    (tier,) = e.load(e.offset(tier_at, pair, 4), 0, 1)
    (slot,) = e.load(e.offset(slot_at, pair, 4), 0, 1)
    count, earlier = _members(e, plan, lane, tier_at, slot_at, shared, pair, tier, slot)
    free = e.add(shared, plan.list_bytes)

    if plan.gated:
        inside = e.both(e.compare(tier, "ge", 0), e.compare(tier, "lt", len(plan.tiers)))
        skipped = e.select(inside, 0, 1)

        def zero(index: Value, _: list[Value]) -> list[Value]:
            place = e.add(e.mul(pair, plan.num_outputs), e.add(first, index))
            e.store(e.offset(out_at, place, 2), 0, 0, "b16")
            return []

        e.when(
            e.compare(skipped, "eq", 1),
            lambda: _ignore(e.loop(thread, plan.tiles.rows, 32 * plan.tiles.num_warps, [], zero)),
        )
    for number, matrix in enumerate(plan.tiers):
        arrays = num_arrays(matrix)
        mine, operands = operands[:arrays], operands[arrays:]
        arrays = sum(term.num_arrays for term in plan.terms[number])
        terms = with_addresses(plan.terms[number], operands[:arrays])
        operands = operands[arrays:]
        chosen = e.both(e.compare(tier, "eq", number), e.compare(earlier, "eq", 0))
        e.when(
            chosen,
            functools.partial(
                _product, e, plan, addressed(matrix, mine), terms, slot, x_at, out_at, shared, free,
                lane, thread, first, count,
            ),
        )  # fmt: skip


def _ignore(_: object) -> None:
    return None


def _members(
    e: Mlir, plan: _Plan, lane: Lane, tier_at: Value, slot_at: Value, shared: Value, pair: Value,
    tier: Value, slot: Value,
) -> tuple[Value, Value]:  # fmt: skip
    """Writes the pairs of this tier and slot, in order; returns how many, and 1 if one is earlier.

    Every warp writes them all, so none has to wait for another.
    """
    count, earlier = e.const(0), e.const(0)
    below = e.sub(e.shl(1, lane.index), 1)
    for chunk in range(0, plan.num_pairs, 32):
        index = e.add(lane.index, chunk)
        safe = e.smaller(index, plan.num_pairs - 1)
        (its_tier,) = e.load(e.offset(tier_at, safe, 4), 0, 1)
        (its_slot,) = e.load(e.offset(slot_at, safe, 4), 0, 1)
        same = e.both(e.compare(its_tier, "eq", tier), e.compare(its_slot, "eq", slot))
        same = e.both(same, e.compare(index, "lt", plan.num_pairs))
        mask = e.ballot(same)
        before = e.ballot(e.both(same, e.compare(index, "lt", pair)))
        earlier = e.bor(earlier, before)
        rank = e.add(count, e.count_ones(e.band(mask, below)))
        place = e.add(shared, e.mul(rank, 4))
        e.when(same, functools.partial(e.store_shared, place, 0, index, "b32"))
        count = e.add(count, e.count_ones(mask))
    e.warp_barrier()
    return count, e.select(e.compare(earlier, "ne", 0), 1, 0)


def _product(
    e: Mlir, plan: _Plan, matrix: Matrix, terms: Sequence[Term], slot: Value, x_at: Value,
    out_at: Value, shared: Value, free: Value, lane: Lane, thread: Value, first: Value,
    count: Value,
) -> None:  # fmt: skip
    """The outputs `first`.. of all members, `plan.columns` of them at a time."""
    tiles = plan.tiles
    warp = e.shr(thread, 5)
    warp_n, warp_k = e.rem(warp, tiles.warps_n), e.div(warp, tiles.warps_n)
    local = e.mul(warp_n, ROWS * tiles.row_tiles)
    starts = [
        e.add(e.add(first, local), half * plan.num_outputs + ROWS * tile)
        for half in range(plan.halves)
        for tile in range(tiles.row_tiles)
    ]
    stream = Stream(e, matrix, slot, starts, lane, tiles.span_of(matrix.form))
    ring = Ring(e.add(free, e.mul(warp, tiles.depth * stream.tile_bytes)), tiles.depth)
    pitch = plan.halves * tiles.rows + 1
    firsts = [e.add(first, half * plan.num_outputs) for half in range(plan.halves)]
    extra_at = e.add(free, plan.main_bytes)
    extra = BlockTerms(e, terms, plan.share, slot, firsts, extra_at, thread)

    def some(base: Value, _: list[Value]) -> list[Value]:
        x = []
        for column in range(0, plan.columns, COLUMNS):
            number = e.smaller(e.add(base, e.add(lane.g, column)), e.sub(count, 1))
            member = e.load_shared(e.add(shared, e.mul(number, 4)), 0, "b32")
            row = e.div(member, plan.width)
            x.append(e.offset(e.offset(x_at, row, 2 * matrix.num_inputs), lane.t, 16))
        totals: list[Value] = [0.0] * (4 * len(starts) * len(x))
        begin = functools.partial(extra.begin, x, lane)
        totals = walk(stream, warp_k, tiles.warps_k, x, totals, ring, begin)
        e.copies_wait(0)
        e.block_barrier()  # the sums take the place of the rings
        for number in range(len(starts)):
            half, tile = divmod(number, tiles.row_tiles)
            at = e.add(local, e.add(lane.g, half * tiles.rows + ROWS * tile))
            at = e.add(at, e.mul(warp_k, plan.columns * pitch))
            at = e.add(free, e.mul(e.add(at, e.mul(lane.t, 2 * pitch)), 4))
            for j in range(len(x)):
                for c in range(4):
                    place = 8 * (c // 2) + (COLUMNS * j + c % 2) * pitch
                    value = totals[4 * (number * len(x) + j) + c]
                    e.store_shared(at, 4 * place, e.const_f32(value))
        extra.reduce()
        e.block_barrier()
        left = e.smaller(e.sub(count, base), plan.columns)
        store = functools.partial(_store, e, plan, extra, out_at, shared, free, first, base, pitch)
        e.loop(thread, e.mul(left, tiles.rows), 32 * tiles.num_warps, [], store)
        e.block_barrier()  # the next columns' rings take the place of the sums
        return []

    e.loop(0, count, plan.columns, [], some)


def _store(
    e: Mlir, plan: _Plan, extra: BlockTerms, out_at: Value, shared: Value, free: Value,
    first: Value, base: Value, pitch: int, index: Value, _: list[Value],
) -> list[Value]:  # fmt: skip
    """One output: the warps' parts in their order, SwiGLU where gated."""
    tiles = plan.tiles
    column, row = e.div(index, tiles.rows), e.rem(index, tiles.rows)
    at = e.add(free, e.mul(e.add(e.mul(column, pitch), row), 4))
    values = []
    for half in range(plan.halves):
        total = e.load_shared(at, 4 * half * tiles.rows)
        for part in range(1, tiles.warps_k):
            imm = 4 * (half * tiles.rows + part * plan.columns * pitch)
            total = e.fadd(total, e.load_shared(at, imm))
        values.append(extra.add(total, half, column, row))
    member = e.load_shared(e.add(shared, e.mul(e.add(base, column), 4)), 0, "b32")
    place = e.add(e.mul(member, plan.num_outputs), e.add(first, row))
    if plan.gated:
        gate, up = values
        decay = e.exp2(e.fmul(gate, -LOG2_E))
        hidden = e.fmul(e.fmul(gate, e.reciprocal(e.fadd(decay, 1.0))), up)
        e.store(e.offset(out_at, place, 2), 0, e.f32_to_16(plan.kind, hidden), "b16")
    else:
        e.store(e.offset(out_at, place, 4), 0, values[0], "f32")
    return []
