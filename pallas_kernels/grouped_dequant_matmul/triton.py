"""The Pallas-Triton implementation: gate and up with SwiGLU, then down, then the combine (XLA's).

Three launches at decode, one more for each product with low-rank terms. Tiers share a launch: the
program branches on its matrix's tier, so each tier is compiled as if it were alone.

Biases and gating are part of the first launch, whose sums over K are whole. Products by another
implementation may be given: what is left is to add low-rank terms, biases and the gating.

Decode: a program belongs to a pair. The first pair of a matrix (and each that comes `columns` pairs
later among those of the matrix) leads and does the work of `columns` of them, so that the matrix is
read once; the other programs end. Prefill: a program takes blocks of `_make_blocks`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.assignments import Assignments
from pallas_kernels.dequant_matmul.tiles import (
    LEAST_SHARED_BYTES,
    SHARED_BYTES,
    TritonTiles,
    stage_bytes,
)
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import tiles as rules
from pallas_kernels.grouped_dequant_matmul.tiles import Tiles
from pallas_kernels.layout import BLOCK
from pallas_kernels.packed import LowRank, PackedMatrices, with_scale_pairs
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton import low_rank as triton_low_rank
from pallas_kernels.triton import product as triton_product
from pallas_kernels.triton.elements import iota, quotient, remainder
from pallas_kernels.triton.product import Columns, Span, columns_of

Ref = Any
Tiers = Sequence[PackedMatrices]
LowRanks = Sequence[tuple[LowRank, ...]]
EXTRA_PROGRAMS = 128  # of prefill, beyond those that full blocks take; more blocks are looped over


def refusal(
    x: Any, width: int, gate_up_tiers: Tiers, down_tiers: Tiers, low_rank: LowRanks, is_plain: bool,
    target: Target,
) -> str | None:  # fmt: skip
    """Reason why this implementation refuses, or None."""
    del x, width, is_plain
    reasons = [platform_refusal(target)]
    reasons += [triton_product.refusal(weights) for weights in (*gate_up_tiers, *down_tiers)]
    reasons += [triton_low_rank.refusal(terms) for terms in low_rank]
    return "; ".join(dict.fromkeys(filter(None, reasons))) or None


class _Pairs(NamedTuple):
    """Tier and slot of the P = T A pairs, flat."""

    tier: jax.Array  # int32[P]
    slot: jax.Array  # int32[P]


class _Blocks(NamedTuple):
    """`num_blocks` blocks, of which the first `used` hold pairs; device data of static shapes."""

    tier: jax.Array  # int32[num_blocks]; -1 of blocks of skipped pairs
    slot: jax.Array  # int32[num_blocks]
    pairs: jax.Array  # int32[num_blocks, rows]: t A + a; T A where there is none
    used: jax.Array  # int32[1]


class _Job(NamedTuple):
    """Pairs of one matrix."""

    tier: jax.Array  # int32[]; outside 0 .. tiers - 1 for pairs that are skipped
    slot: jax.Array  # int32[]
    pairs: jax.Array  # int32[columns]; P or more where masked
    mask: jax.Array  # bool[columns]


class _Operands(NamedTuple):
    """Operands of a launch: arrays, or refs inside it."""

    rows: jax.Array  # [R, K]
    sums: tuple[jax.Array | None, ...]  # of each tier, `sums_of` its rows, where it takes them
    source: _Pairs | _Blocks
    tiers: tuple[PackedMatrices, ...]
    low_rank: tuple[tuple[LowRank, ...], ...]
    thin: jax.Array | None
    bias: jax.Array | None = None  # [P, 2F], of gate_up
    products: jax.Array | None = None  # float32[1, P, N], without terms; None: to be computed


class _Static(NamedTuple):
    """Static facts of a launch."""

    treedef: Any
    tiles: TritonTiles
    num_pairs: int
    row_width: int  # pairs that share a row: A of gate_up, 1 of down
    alone: bool
    interpret: bool
    gating: Gating = SWIGLU


def _jobs(operands: _Operands, static: _Static, run: Any) -> None:
    """Runs `run(job, columns of each tier)` for the jobs of axis 1's program."""

    def with_columns(job: _Job) -> None:
        rows = quotient(job.pairs, static.row_width)
        found = [columns_of(operands.rows, sums, rows, job.mask) for sums in operands.sums]
        run(job, found)

    _for_each_job(
        operands.source, 1, static.tiles.block_m, static.num_pairs, with_columns,
        alone=static.alone,
    )  # fmt: skip


def _products(
    columns: Columns,
    operands: _Operands,
    static: _Static,
    tier: int,
    job: _Job,
    tiles: list[jax.Array],
    span: Span,
    ranges: list[tuple[int, int]],
) -> list[jax.Array]:
    """Products float32[rows, columns] of row tiles, each in its range, with low-rank terms."""
    weights, terms = operands.tiers[tier], operands.low_rank[tier]
    if operands.products is None:
        accs = triton_product.product(
            columns, weights, job.slot, tiles, span, num_columns=static.tiles.block_m,
            step=_step(weights, static.tiles), interpret=static.interpret,
        )  # fmt: skip
    else:
        exists = jnp.broadcast_to(job.mask[:, None], (static.tiles.block_m, static.tiles.block_n))
        views: list[Ref] = [operands.products.at[0, job.pairs[:, None], n[None, :]] for n in tiles]
        accs = [pltriton.load(view, mask=exists, other=0.0).T for view in views]
    if not terms:
        return accs
    mask = job.mask & span.tail
    return [
        triton_low_rank.add_terms(
            acc, terms, job.slot, rows, operands.thin, job.pairs, mask, within=within,
            interpret=static.interpret,
        )
        for acc, rows, within in zip(accs, tiles, ranges, strict=True)
    ]  # fmt: skip


def _step(weights: PackedMatrices, tiles: TritonTiles) -> int:
    return max(tiles.step, triton_product.min_step(weights))


def _tile_rows(tiles: TritonTiles, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Outputs of the program of axis 0, and the rows to read for them."""
    outputs = pl.program_id(0) * tiles.block_n + iota(tiles.block_n)
    return outputs, jnp.minimum(outputs, num_rows - 1)


def _gate_up_body(*refs: Ref, static: _Static) -> None:
    """Program (f, job) computes hidden values of a job's pairs."""
    operands: _Operands = static.treedef.unflatten(refs[:-1])
    out_ref, tiles, gating = refs[-1], static.tiles, static.gating
    num_hidden = out_ref.shape[1]
    hidden, rows = _tile_rows(tiles, num_hidden)
    both, ranges = [rows, num_hidden + rows], [(0, num_hidden), (num_hidden, 2 * num_hidden)]

    def run(job: _Job, columns: list[Columns]) -> None:
        def store(values: jax.Array) -> None:
            mask = job.mask[:, None] & (hidden < num_hidden)[None, :]
            view = out_ref.at[job.pairs[:, None], hidden[None, :]]
            pltriton.store(view, values.T.astype(out_ref.dtype), mask=mask)

        def with_bias(acc: jax.Array, half: int) -> jax.Array:
            if operands.bias is None:
                return acc
            outputs = (half * num_hidden + rows)[None, :]
            view: Ref = operands.bias.at[job.pairs[:, None], outputs]
            mask = jnp.broadcast_to(job.mask[:, None], acc.T.shape)
            return acc + pltriton.load(view, mask=mask, other=0.0).astype(jnp.float32).T

        def of_tier(tier: int) -> None:
            weights = operands.tiers[tier]
            span = Span(0, triton_product.num_steps(weights, _step(weights, tiles)), True)
            accs = _products(columns[tier], operands, static, tier, job, both, span, ranges)
            gate, up = gating.limited(*(with_bias(acc, half) for half, acc in enumerate(accs)))
            slope = gate if gating.alpha == 1.0 else gate * gating.alpha
            store(gate / (1.0 + jnp.exp(-slope)) * up)

        def skip() -> None:
            store(jnp.zeros((tiles.block_n, tiles.block_m), jnp.float32))

        for tier in range(len(operands.tiers)):
            pl.when(job.tier == tier)(functools.partial(of_tier, tier))
        pl.when((job.tier < 0) | (job.tier >= len(operands.tiers)))(skip)

    _jobs(operands, static, run)


def _products_body(*refs: Ref, static: _Static) -> None:
    """Program (n, job, part) computes outputs of a job's pairs over a part of K."""
    operands: _Operands = static.treedef.unflatten(refs[:-1])
    out_ref, tiles = refs[-1], static.tiles
    num_outputs, part = out_ref.shape[2], pl.program_id(2)
    outputs, rows = _tile_rows(tiles, num_outputs)

    def run(job: _Job, columns: list[Columns]) -> None:
        def of_tier(tier: int) -> None:
            weights = operands.tiers[tier]
            steps = triton_product.num_steps(weights, _step(weights, tiles))
            first, last = triton_product.split(steps, tiles.split_k, part)
            span = Span(first, last, part == tiles.split_k - 1)
            (acc,) = _products(
                columns[tier], operands, static, tier, job, [rows], span, [(0, num_outputs)]
            )
            mask = job.mask[:, None] & (outputs < num_outputs)[None, :]
            view = out_ref.at[part, job.pairs[:, None], outputs[None, :]]
            pltriton.store(view, acc.T, mask=mask)

        for tier in range(len(operands.tiers)):
            pl.when(job.tier == tier)(functools.partial(of_tier, tier))

    _jobs(operands, static, run)


def _thin_body(*refs: Ref, static: _Static) -> None:
    """Program (tile of V, job, part of K) computes a thin product."""
    operands: _Operands = static.treedef.unflatten(refs[:-1])
    out_ref = refs[-1]
    tile, part = pl.program_id(0), pl.program_id(2)
    places = iota(triton_low_rank.TILE)

    def run(job: _Job, columns: list[Columns]) -> None:
        def store(acc: jax.Array) -> None:
            view = out_ref.at[
                part, job.pairs[:, None], (tile * triton_low_rank.TILE + places)[None, :]
            ]
            mask = jnp.broadcast_to(job.mask[:, None], acc.T.shape)
            pltriton.store(view, acc.T, mask=mask)

        def of_tier(tier: int) -> None:
            triton_low_rank.thin_products(
                columns[tier]._replace(sums=None), operands.low_rank[tier], job.slot, tile, part,
                out_ref.shape[0],
                num_columns=static.tiles.block_m, store=store, interpret=static.interpret,
            )  # fmt: skip

        for tier, terms in enumerate(operands.low_rank):
            if terms:
                pl.when(job.tier == tier)(functools.partial(of_tier, tier))

    _jobs(operands, static, run)


class _Call:
    """One product of a layer: its operands, and the shared parts of its launches."""

    def __init__(
        self,
        rows: jax.Array,
        assignments: Assignments,
        tiers: Tiers,
        low_rank: LowRanks,
        tiles: TritonTiles,
        row_width: int,
        interpret: bool,
        products: jax.Array | None,
    ) -> None:
        self.products = products
        num_tokens, width = assignments.slot.shape
        self.blocks = rules.by_blocks(num_tokens, width)
        self.num_pairs, self.tiles, self.interpret = num_tokens * width, tiles, interpret
        sums: list[jax.Array | None] = [None] * len(tiers)
        source: _Pairs | _Blocks
        if self.blocks:
            source = _make_blocks(assignments, tiers, tiles.block_m)
            by_size: dict[int, jax.Array] = {}
            for i, weights in enumerate(tiers):
                size = triton_product.sum_size(weights, _step(weights, tiles))
                if size and products is None:
                    if size not in by_size:
                        by_size[size] = triton_product.sums_of(rows, size)
                    sums[i] = by_size[size]
            programs = self.num_pairs // tiles.block_m + EXTRA_PROGRAMS
            self.programs = min(source.tier.shape[0], programs)
        else:
            source = _Pairs(assignments.tier.reshape(-1), assignments.slot.reshape(-1))
            self.programs = self.num_pairs
        paired = tuple(map(with_scale_pairs, tiers))
        self.operands = _Operands(
            rows, tuple(sums), source, paired, tuple(map(tuple, low_rank)), None
        )
        self.static = _Static(None, tiles, self.num_pairs, row_width, num_tokens == 1, interpret)

    def run(
        self, body: Any, name: str, axes: tuple[int, int], out_shape: jax.ShapeDtypeStruct,
        tiles: TritonTiles | None = None,  # None: the call's
    ) -> jax.Array:  # fmt: skip
        """Launches a body on a grid of tiles, jobs and parts."""
        tiles = tiles or self.tiles
        leaves, treedef = jax.tree.flatten(self.operands)
        given = self.operands.products  # the last leaf
        in_place = given is not None and given.shape == out_shape.shape
        forms = "_".join(weights.describe().replace(" ", "_") for weights in self.operands.tiers)
        kind = "blocks" if self.blocks else "pairs"
        return launch.triton_call(
            functools.partial(body, static=self.static._replace(treedef=treedef)),
            name=f"grouped_{name}_{kind}_{forms}_{tiles.describe()}",
            grid=(axes[0], self.programs, axes[1]),
            out_shape=out_shape,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            interpret=self.interpret,
            aliases={len(leaves) - 1: 0} if in_place else None,
        )(*leaves)

    def add_thin(self, name: str, target: Target) -> None:
        """Launches the thin products of the low-rank terms, if any; then takes given products."""
        if any(self.operands.low_rank):
            self.operands = self.operands._replace(thin=self._thin(name, target))
        if self.products is not None:
            products = self.products.reshape(1, self.num_pairs, -1)
            self.operands = self.operands._replace(products=products)

    def _thin(self, name: str, target: Target) -> jax.Array:
        given = [terms for terms in self.operands.low_rank if terms]
        # Not by the number of programs: it depends on the slots, and bits must not.
        jobs = self.num_pairs // (rules.MAX_BLOCK_ROWS if self.blocks else 1)
        parts = min(triton_low_rank.thin_parts(terms, jobs) for terms in given)
        num_rows = max(map(triton_low_rank.thin_rows, given))
        shape = jax.ShapeDtypeStruct((parts, self.num_pairs, num_rows), jnp.float32)
        thin = self.run(
            _thin_body, f"{name}_thin", (num_rows // triton_low_rank.TILE, parts), shape,
            _thin_tiles(self.tiles, sum(given, ()), target),
        )  # fmt: skip
        # Of many pairs many programs read them.
        return jnp.sum(thin, axis=0, keepdims=True) if self.blocks else thin


def _thin_tiles(tiles: TritonTiles, low_rank: Sequence[LowRank], target: Target) -> TritonTiles:
    """Limits stages of the thin products, whose steps are whole blocks of K, to shared memory.

    Triton holds one stage fewer than it is told, and nothing else: 68,608 bytes for two and 137,216
    for three of 128 rows of x and V in INT3 (as compiled for each of six GPUs, jax 0.12).
    """
    whole = dataclasses.replace(tiles, block_n=triton_low_rank.TILE, step=BLOCK)
    stage = max(stage_bytes(whole, terms.v, 1) for terms in low_rank)
    shared = SHARED_BYTES.get(target.capability or (9, 0), LEAST_SHARED_BYTES)
    return dataclasses.replace(tiles, num_stages=min(tiles.num_stages, 1 + shared // stage))


def _checked(tiles: Tiles, tiers: Tiers) -> TritonTiles:
    if not isinstance(tiles, TritonTiles):
        raise ValueError(f"tiles {tiles} are not Triton's")
    for weights in tiers:
        dataclasses.replace(tiles, step=_step(weights, tiles)).check(weights)
    return tiles


def product_triton(
    rows: jax.Array,
    assignments: Assignments,
    tiers: Tiers,
    low_rank: LowRanks,
    tiles: Tiles | None,
    target: Target,
    bias: jax.Array | None = None,
    gating: Gating | None = None,
    products: jax.Array | None = None,
) -> jax.Array:
    """Computes a product of `api.PRODUCT` by Triton.

    Args:
      products: float32[T, A, N], without terms and bias; None: to be computed. Without a gating
        they are donated.
    """
    num_tokens, width = assignments.slot.shape
    name, row_width = ("gate_up", width) if gating else ("down", 1)
    choose = rules.gate_up_tiles if gating else rules.down_tiles
    tiles = _checked(tiles or choose(num_tokens, width, tiers, target), tiers)
    if products is not None and not gating:
        tiles = dataclasses.replace(tiles, split_k=1)
    rows = rows.reshape(-1, rows.shape[-1])
    call = _Call(rows, assignments, tiers, low_rank, tiles, row_width, target.simulated, products)
    call.add_thin(name, target)
    if bias is not None:
        call.operands = call.operands._replace(bias=bias.reshape(call.num_pairs, -1))
    body, parts, outputs, dtype = _products_body, tiles.split_k, tiers[0].num_outputs, jnp.float32
    shape: tuple[int, ...] = (parts, call.num_pairs, outputs)
    if gating:  # whole sums, whatever the tiles split: gates and ups meet in them
        call.static = call.static._replace(gating=gating)
        body, parts, outputs, dtype = _gate_up_body, 1, outputs // 2, rows.dtype
        shape = (call.num_pairs, outputs)
    found = call.run(
        body, name, (-(-outputs // tiles.block_n), parts), jax.ShapeDtypeStruct(shape, dtype)
    )
    return found.reshape(*shape[:-2], num_tokens, width, outputs)


def _for_each_job(
    source: _Pairs | _Blocks,
    axis: int,
    columns: int,
    num_pairs: int,
    run: Callable[[_Job], None],  # called once, under a condition or in a loop
    *,
    alone: bool,  # no search for other pairs of the same matrix; for one token
) -> None:
    """Runs the jobs of program `pl.program_id(axis)`.

    The last program takes the first pair or block: idle programs then start first.
    """
    programs = pl.num_programs(axis)
    program = programs - 1 - pl.program_id(axis)
    if isinstance(source, _Pairs):
        if alone:
            mask = iota(columns) == 0
            pairs = jnp.where(mask, program, num_pairs)
            run(_Job(source.tier[program], source.slot[program], pairs, mask))
            return
        job, leads = _pair_job(source, program, columns, num_pairs)
        pl.when(leads)(lambda: run(job))
        return
    places = iota(columns)

    def body(i: Any, carry: Any) -> Any:
        block = program + i * programs
        pairs = source.pairs[block, places]
        run(_Job(source.tier[block], source.slot[block], pairs, pairs < num_pairs))
        return carry

    rounds = quotient(source.used[0] - program + programs - 1, programs)
    jax.lax.fori_loop(0, rounds, body, 0)


def _pair_job(
    source: _Pairs, program: jax.Array, columns: int, num_pairs: int
) -> tuple[_Job, jax.Array]:
    """Job of the pair `program`, and whether it leads."""
    tier, slot = source.tier[program], source.slot[program]
    index = jax.lax.broadcasted_iota(jnp.int32, (1 << (num_pairs - 1).bit_length(),), 0)
    exists = index < num_pairs
    refs: tuple[Ref, Ref] = (source.tier, source.slot)
    tiers, slots = (pltriton.load(ref.at[index], mask=exists, other=-1) for ref in refs)
    same = (exists & (tiers == tier) & (slots == slot)).astype(jnp.int32)
    before = jnp.sum(jnp.where(index < program, same, 0))
    column = jnp.cumsum(same) - 1 - before
    places = iota(columns)
    chosen = (column[None, :] == places[:, None]) & (same[None, :] > 0)
    pairs = jnp.sum(jnp.where(chosen, index[None, :], 0), axis=1)
    mask = places < jnp.sum(same) - before
    # Out of range where masked: in interpret mode a masked store writes back what it has read.
    job = _Job(tier, slot, jnp.where(mask, pairs, num_pairs), mask)
    return job, remainder(before, columns) == 0


def _make_blocks(assignments: Assignments, tiers: Sequence[PackedMatrices], rows: int) -> _Blocks:
    """Sorts pairs by tier and slot, those of one matrix in their order, skipped ones last.

    Args:
      tiers: arrays or their shapes; only the numbers of slots matter.
    """
    tier, slot = (part.reshape(-1) for part in (assignments.tier, assignments.slot))
    num_pairs = tier.shape[0]
    most = max(weights.num_slots for weights in tiers)
    num_matrices = sum(weights.num_slots for weights in tiers) + 1
    # Each matrix adds at most one partial block.
    num_blocks = min(num_pairs, num_pairs // rows + num_matrices)
    runs = (tier >= 0) & (tier < len(tiers))
    key = jnp.where(runs, tier * most + jnp.clip(slot, 0, most - 1), len(tiers) * most)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    key = key[order]
    index = jnp.arange(num_pairs, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones(1, jnp.bool_), key[1:] != key[:-1]])
    within = index - jax.lax.cummax(jnp.where(starts, index, 0))
    block = jnp.cumsum((within % rows == 0).astype(jnp.int32)) - 1
    pairs = jnp.full((num_blocks, rows), num_pairs, jnp.int32)
    empty = jnp.full(num_blocks, -1, jnp.int32)
    return _Blocks(
        tier=empty.at[block].set(jnp.where(runs, tier, -1)[order]),
        slot=empty.at[block].set(slot[order]),
        pairs=pairs.at[block, within % rows].set(order),
        used=block[-1:] + 1,
    )
