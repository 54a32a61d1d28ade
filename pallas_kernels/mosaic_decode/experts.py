"""Kernels of a MoE layer for a few tokens: gate and up, then down.

Work comes from `jobs`: a matrix times up to 8 rows, in tiles of outputs, the items. A
thread block either belongs to a pair and an item of the job that it leads, or goes through its
share of all items; in the second case the words of an item are copied while the previous item is
computed.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.gating import Gating
from pallas_kernels.mosaic_decode.accumulate import (
    NextItem,
    Ring,
    SharedAccumulators,
    Totals,
    accumulate,
    accumulate_pipelined,
    preload_x,
    start_copies,
)
from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.jobs import ExpertJob, JobList, Pairs, Work, job_of_pair
from pallas_kernels.mosaic_decode.launch_blocks import launch_blocks
from pallas_kernels.mosaic_decode.low_rank import BlockTerms
from pallas_kernels.mosaic_decode.low_rank_spec import (
    Share,
    Term,
    operands_of,
    suffix,
    terms_of,
    with_addresses,
)
from pallas_kernels.mosaic_decode.matrix import (
    COLUMNS,
    ROWS,
    Matrix,
    addressed,
    matrix_of,
    num_arrays,
    tile_bytes,
)
from pallas_kernels.mosaic_decode.product import BlockOfX, Lane, Stream
from pallas_kernels.mosaic_decode.support import KINDS
from pallas_kernels.mosaic_decode.tiles import StreamTiles, expert_share
from pallas_kernels.packed import LowRank, PackedMatrices

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of a launch of the expert kernels."""

    tiers: tuple[Matrix, ...]
    terms: tuple[tuple[Term, ...], ...]  # of each tier
    tiles: StreamTiles
    kind: str  # of x and of the hidden values
    num_pairs: int
    width: int  # pairs that share a row of x
    num_outputs: int  # of a pair
    num_slots: int  # the most of a tier
    gating: Gating | None  # rows n and num_outputs + n are gate and up of output n; None: one row
    bias_bytes: int  # of each gate's and up's; 0: they have none

    @property
    def gated(self) -> bool:
        """Whether outputs are hidden values."""
        return self.gating is not None

    @property
    def halves(self) -> int:
        """Matrix rows per output."""
        return 2 if self.gated else 1

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all rings."""
        return self.tiles.num_warps * self.tiles.depth * max(map(tile_bytes, self.tiers))

    @property
    def main_bytes(self) -> int:
        """Shared memory of everything but the terms."""
        beside = self.tiles.expert_bytes(self.tiers, self.halves)
        return self.jobs_bytes + self.ring_bytes + beside

    @property
    def sums_bytes(self) -> int:
        """Shared memory of all warps' sums."""
        return self.tiles.warps_n * self.tiles.team_bytes(self.halves)

    @property
    def share(self) -> Share:
        """Share of a thread block, for the terms."""
        return expert_share(self.tiles, self.gated, self.num_outputs)

    @property
    def num_items(self) -> int:
        """Tiles of outputs."""
        return -(-self.num_outputs // self.tiles.rows)

    @property
    def jobs(self) -> JobList:
        """Job list of thread blocks that share all jobs."""
        return JobList(
            num_pairs=self.num_pairs,
            weights=self.weights,
            num_slots=self.num_slots,
            num_items=self.num_items,
            workers=self.tiles.workers,
            num_warps=self.tiles.num_warps,
        )

    @property
    def weights(self) -> tuple[int, ...]:
        """Weight of the tiers' items: about their bytes, and 1 for a single tier."""
        sizes = [matrix.row_bytes for matrix in self.tiers]
        return tuple(round(4 * size / min(sizes)) if len(sizes) > 1 else 1 for size in sizes)

    @property
    def jobs_bytes(self) -> int:
        """Shared memory of the jobs, a multiple of 16."""
        return self.jobs.num_bytes if self.tiles.workers else 4 * COLUMNS


def _gated(e: Mlir, gating: Gating, gate: Value, up: Value) -> Value:
    """`Gating` of a gate and an up, in float32."""
    if gating.limit is not None:
        gate = e.fmin(gate, gating.limit)
        up = e.fmax(e.fmin(up, gating.limit), -gating.limit)
    if gating.up_offset:
        up = e.fadd(up, gating.up_offset)
    decay = e.exp2(e.fmul(gate, -LOG2_E * gating.alpha))
    return e.fmul(e.fmul(gate, e.reciprocal(e.fadd(decay, 1.0))), up)


@functools.partial(jax.jit, static_argnames=("gating", "tiles", "interpret"))
def expert_products(
    x: jax.Array,
    tier: jax.Array,
    slot: jax.Array,
    tiers: Sequence[PackedMatrices],
    *,
    gating: Gating | None,
    tiles: StreamTiles,
    interpret: bool = False,
    low_rank: Sequence[Sequence[LowRank]] = (),
    bias: jax.Array | None = None,
) -> jax.Array:
    """Multiplies rows of x by the matrices of their pairs.

    Args:
      x: [R, K]; pair p multiplies row p // (P / R).
      tier: int32[P]; pairs out of range are skipped.
      slot: int32[P].
      tiers: matrices [2 F, K] with a gating, else [N, K].
      gating: what gates and ups become, as silu(gate) up (Shazeer 2020, eq. 6).
      bias: [P, 2 F] in `x.dtype` or float32, of gates and ups; None: there is none.

    Returns:
      [P, F] in `x.dtype`, zero for skipped pairs; or float32[P, N], undefined for them.
    """
    kind, gated = KINDS[x.dtype.name], gating is not None
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
        num_slots=max(weights.num_slots for weights in tiers),
        gating=gating,
        bias_bytes=0 if bias is None else bias.dtype.itemsize,
    )
    tiles.check(plan.num_outputs)
    if tiles.cluster > 1:
        raise ValueError(f"tiles {tiles.describe()} are of products with one matrix")
    arrays = [] if bias is None else [bias]
    for w, of_tier in zip(tiers, low_rank, strict=True):
        arrays += [*w.arrays, *operands_of(of_tier)]
    names = zip(tiers, plan.terms, strict=True)
    form = "_".join(w.describe().replace(" ", "_") + suffix(terms) for w, terms in names)
    room = max(plan.share.room(terms) for terms in plan.terms)
    out = jax.ShapeDtypeStruct((num_pairs, plan.num_outputs), x.dtype if gated else jnp.float32)
    name = f"expert_{'gate_up' if gated else 'down'}_{form}{'_b' if bias is not None else ''}"
    (y,) = launch_blocks(
        functools.partial(_body, plan=plan),
        [tier, slot, x, *arrays],
        name=f"{name}_p{num_pairs}_{tiles.describe()}",
        num_blocks=tiles.workers or num_pairs * plan.num_items,
        num_warps=tiles.num_warps,
        out_shapes=[out],
        shared_floats=(plan.main_bytes + room) // 4,
        interpret=interpret,
    )  # fmt: skip
    return y


def _body(e: Mlir, *refs: Value, plan: _Plan) -> None:
    tier_at, slot_at, x_at, *operands, out_at = (e.address(ref) for ref in refs[:-1])
    bias_at = operands.pop(0) if plan.bias_bytes else None
    shared = e.shared_address(refs[-1])
    block = e.special("ctaid.x")
    here = _Block(e, plan, e.special("tid.x"), x_at, bias_at, out_at, shared)
    products = []
    for matrix, of_tier in zip(plan.tiers, plan.terms, strict=True):
        arrays, terms = num_arrays(matrix), sum(term.num_arrays for term in of_tier)
        mine = addressed(matrix, operands[:arrays])
        with_them = with_addresses(of_tier, operands[arrays : arrays + terms])
        operands = operands[arrays + terms :]
        products.append(_Product(here, mine, with_them))
    pairs = Pairs(tier_at, slot_at, plan.num_pairs)
    if plan.tiles.workers:
        _all_jobs(here, products, pairs, block)
    else:
        _job_of_block(here, products, pairs, block)


def _job_of_block(
    here: "_Block", products: Sequence["_Product"], pairs: Pairs, block: Value
) -> None:
    """Runs a thread block's pair and item; blocks of pairs that lead no job end."""
    e, plan = here.e, here.plan
    pair, item = e.div(block, plan.num_items), e.rem(block, plan.num_items)
    tier, job, leads = job_of_pair(e, pairs, here.lane, pair, here.shared)
    if plan.gated:
        inside = e.both(e.compare(tier, "ge", 0), e.compare(tier, "lt", len(products)))
        skipped = e.compare(e.select(inside, 0, 1), "eq", 1)
        first, rows = here.first_output(item), plan.tiles.rows
        e.when(skipped, lambda: here.zero(pair, first, rows))
    for number, product in enumerate(products):
        chosen = e.both(e.compare(tier, "eq", number), leads)
        e.when(chosen, functools.partial(product.only_item, job, item))


def _all_jobs(here: "_Block", products: Sequence["_Product"], pairs: Pairs, block: Value) -> None:
    """Runs a thread block's share of all items."""
    e, plan, jobs = here.e, here.plan, here.plan.jobs
    works = jobs.make(e, pairs, here.lane, here.warp, block, here.shared)
    if plan.gated:

        def zero(pair: Value, _: list[Value]) -> list[Value]:
            skipped = jobs.skipped(e, here.shared, pair)
            e.when(skipped, lambda: here.zero(pair, e.const(0), plan.num_outputs))
            return []

        e.loop(block, plan.num_pairs, plan.tiles.workers, [], zero)
    for product, work in zip(products, works, strict=True):
        any_ = e.compare(work.first, "lt", work.end)
        e.when(any_, functools.partial(product.items, jobs, work))


class _Block:
    """A thread of a block: its position, and values that all its products share."""

    def __init__(
        self, e: Mlir, plan: _Plan, thread: Value, x_at: Value, bias_at: Value | None,
        out_at: Value, shared: Value,
    ):  # fmt: skip
        tiles = plan.tiles
        self.e, self.plan, self.thread = e, plan, thread
        self.x_at, self.bias_at, self.out_at, self.shared = x_at, bias_at, out_at, shared
        self.lane, self.warp = Lane.here(e, e.band(thread, 31)), e.shr(thread, 5)
        self.warp_n, self.warp_k = e.rem(self.warp, tiles.warps_n), e.div(self.warp, tiles.warps_n)
        self.sums = e.add(shared, plan.jobs_bytes)
        self.rings = e.add(self.sums, plan.sums_bytes)
        of_x = e.add(self.rings, plan.ring_bytes)
        self.of_x = e.add(
            of_x, e.add(e.mul(self.warp, tiles.expert_x_bytes(plan.tiers)), e.mul(self.lane.t, 16))
        )
        self.of_terms = e.add(shared, plan.main_bytes)

    def first_output(self, item: Value) -> Value:
        """First output of an item; the last item repeats outputs to stay in range."""
        e, rows = self.e, self.plan.tiles.rows
        return e.smaller(e.mul(item, rows), self.plan.num_outputs - rows)

    def zero(self, pair: Value, first: Value, count: int) -> None:
        """Writes zeros as the hidden values of a skipped pair."""
        e = self.e

        def one(index: Value, _: list[Value]) -> list[Value]:
            place = e.add(e.mul(pair, self.plan.num_outputs), e.add(first, index))
            e.store(e.offset(self.out_at, place, 2), 0, 0, "b16")
            return []

        e.loop(self.thread, count, 32 * self.plan.tiles.num_warps, [], one)


class _Product:
    """Products with the matrices of one tier."""

    def __init__(self, here: _Block, matrix: Matrix, terms: Sequence[Term]):
        self.here, self.matrix, self.terms = here, matrix, terms
        self.e, self.plan, self.tiles = here.e, here.plan, here.plan.tiles
        e, tiles = self.e, self.tiles
        # The address does not depend on the tier: a block's warps may be at different ones.
        mine = e.mul(here.warp, here.plan.ring_bytes // tiles.num_warps)
        self.ring = Ring(e.add(here.rings, mine), tiles.depth)
        # Warps that share rows, and work on their own but for the terms, which are the block's.
        self.team_rows = ROWS * tiles.row_tiles
        self.pitch = tiles.team_pitch(self.plan.halves)
        self.kept = SharedAccumulators(None, here.of_x) if tiles.kept else None
        team = tiles.team_bytes(self.plan.halves)
        self.sums = e.add(here.sums, e.mul(here.warp_n, team))

    def barrier(self) -> None:
        """Waits for the team, or for the block if terms are shared."""
        if self.terms:
            self.e.block_barrier()
        elif self.tiles.warps_k == 1:
            self.e.warp_barrier()
        else:
            self.e.team_barrier(self.e.add(self.here.warp_n, 1), 32 * self.tiles.warps_k)

    def stream(self, slot: Value, item: Value) -> Stream:
        """Stream of this warp's rows of an item."""
        e, plan = self.e, self.plan
        first = e.add(self.here.first_output(item), e.mul(self.here.warp_n, self.team_rows))
        halves = range(0, plan.halves * plan.num_outputs, plan.num_outputs)
        tiles_at = [half + tile for half in halves for tile in range(0, self.team_rows, ROWS)]
        return Stream(e, self.matrix, slot, [first], self.here.lane, tiles_at=tiles_at)

    def _columns_of_x(self, job: ExpertJob) -> list[Value]:
        """Address i64 of the only column tile: this lane's row of x, plus 16 t bytes."""
        e, here = self.e, self.here
        number = e.smaller(here.lane.g, e.sub(job.count, 1))
        member = e.load_shared(e.add(job.members, e.mul(number, 4)), 0, "b32")
        row = e.div(member, self.plan.width)
        return [e.offset(e.offset(here.x_at, row, 2 * self.matrix.num_inputs), here.lane.t, 16)]

    def items(self, jobs: JobList, work: Work) -> None:
        """Runs a block's share, job by job; the next item's copies start before one is done."""
        e, here, plan = self.e, self.here, self.plan

        def slot_of(item: Value) -> tuple[Value, Value]:
            """Slot of an item, and the item's number in its job."""
            job = e.sub(e.div(item, plan.num_items), work.first_job)
            record = jobs.job(e, here.shared, e.add(work.first_record, job))
            return record.slot, e.rem(item, plan.num_items)

        def one_job(number: Value, carried: list[Value]) -> list[Value]:
            record = e.add(work.first_record, e.sub(number, work.first_job))
            job = jobs.job(e, here.shared, record)
            x, base = self._columns_of_x(job), e.mul(number, plan.num_items)
            stream = self.stream(job.slot, e.const(0))
            preloaded = preload_x(stream, here.warp_k, self.tiles.warps_k, x, self.kept)
            first = e.select(e.compare(base, "lt", work.first), work.first, base)
            end = e.smaller(e.add(base, plan.num_items), work.end)

            def one_item(item: Value, carried: list[Value]) -> list[Value]:
                later = e.add(item, 1)
                follows = e.select(e.compare(later, "lt", work.end), 1, 0)
                after = self.stream(*slot_of(e.smaller(later, e.sub(work.end, 1))))
                next_item = NextItem(carried[0], after.rows[0], follows)
                is_new = e.compare(item, "eq", first)
                return [self.item(job, x, e.sub(item, base), is_new, preloaded, next_item)]

            return e.loop(first, end, 1, carried, one_item)

        e.copies_wait(0)  # of another tier's ring
        e.warp_barrier()
        start_copies(self.stream(*slot_of(work.first)), here.warp_k, self.tiles.warps_k, self.ring)
        e.loop(work.first_job, work.end_job, 1, [self.ring.at], one_job)

    def only_item(self, job: ExpertJob, item: Value) -> None:
        """Runs the only item of a block."""
        self.item(job, self._columns_of_x(job), item)

    def item(
        self, job: ExpertJob, x: Sequence[Value], item: Value, is_new: Value | None = None,
        preloaded: BlockOfX | None = None, next_item: NextItem | None = None,
    ) -> Value | None:  # fmt: skip
        """Runs one item of a job; returns the ring's position if it goes on.

        Args:
          is_new: whether it is the block's first of the job; None: it is the only one.
        """
        e, here, plan, tiles = self.e, self.here, self.plan, self.tiles
        stream, first, at = self.stream(job.slot, item), here.first_output(item), None
        firsts = [e.add(first, half * plan.num_outputs) for half in range(plan.halves)]
        extra = BlockTerms(
            e, self.terms, plan.share, job.slot, firsts, here.of_terms, here.thread, is_new=is_new
        )  # fmt: skip
        begin = functools.partial(extra.begin, x, here.lane)
        along = stream, here.warp_k, tiles.warps_k, x, self.ring
        if next_item is None:
            totals = accumulate(*along, begin, self.kept)
        else:
            totals, at = accumulate_pipelined(*along, next_item, begin, self.kept, preloaded)
            self.barrier()  # the sums of the item before have been read
        each, mine = 4 * len(x), e.mul(here.warp_k, COLUMNS * self.pitch)
        for number in range(stream.num_tiles):
            place = e.add(self.sums, e.mul(e.add(mine, number * ROWS), 4))
            sums = Totals.here(e, place, here.lane, self.pitch)
            sums.store(e, 0, totals[each * number : each * (number + 1)])
        if self.terms and next_item is None:
            e.block_barrier()  # all parts of the terms are there
        extra.reduce()
        self.barrier()
        store = functools.partial(self._store, extra, job, first)
        member = e.add(e.mul(here.warp_k, 32), here.lane.index)
        e.loop(member, e.mul(job.count, self.team_rows), 32 * tiles.warps_k, [], store)
        if self.terms and next_item is not None:
            e.block_barrier()  # the next item's terms take the place of these
        return at

    def _store(
        self, extra: BlockTerms, job: ExpertJob, first: Value, index: Value, _: list[Value]
    ) -> list[Value]:
        """Stores one output: the warps' parts in their order, gated where there are two."""
        e, plan, tiles, here = self.e, self.plan, self.tiles, self.here
        column, row = e.div(index, self.team_rows), e.rem(index, self.team_rows)
        at = e.add(self.sums, e.mul(e.add(e.mul(column, self.pitch), row), 4))
        row = e.add(row, e.mul(here.warp_n, self.team_rows))
        values = []
        for half in range(plan.halves):
            imm = 4 * half * self.team_rows
            total = e.load_shared(at, imm)
            for part in range(1, tiles.warps_k):
                found = e.load_shared(at, imm + 4 * part * COLUMNS * self.pitch)
                total = e.fadd(total, found)
            values.append(extra.add(self.matrix.scaled(e, total), half, column, row))
        member = e.load_shared(e.add(job.members, e.mul(column, 4)), 0, "b32")
        output = e.add(first, row)
        place = e.add(e.mul(member, plan.num_outputs), output)
        if here.bias_at is not None:
            size = plan.bias_bytes
            at = e.offset(here.bias_at, member, 2 * size * plan.num_outputs)
            at = e.offset(at, output, size)
            for half in range(2):
                bias = e.load_small(at, size * half * plan.num_outputs, size)
                bias = e.f32_of_bits(bias) if size == 4 else e.f32_of_16(plan.kind, bias)
                values[half] = e.fadd(values[half], bias)
        if plan.gating is not None:
            hidden = _gated(e, plan.gating, *values)
            e.store(e.offset(here.out_at, place, 2), 0, e.f32_to_16(plan.kind, hidden), "b16")
        else:
            e.store(e.offset(here.out_at, place, 4), 0, values[0], "f32")
        return []
