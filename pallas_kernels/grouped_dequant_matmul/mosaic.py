"""The Mosaic GPU implementation: streaming kernels for few tokens, wgmma for many (Hopper).

Many tokens' low-rank terms are added by Triton's launches, which then have the gating, too.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_decode, mosaic_prefill
from pallas_kernels.assignments import Assignments, Turn
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import triton
from pallas_kernels.grouped_dequant_matmul.tiles import Tiles, measured
from pallas_kernels.mosaic_decode.tiles import StreamTiles
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import Target
from pallas_kernels.triton import low_rank as triton_low_rank

Operand = jax.Array | jax.ShapeDtypeStruct
Tiers = Sequence[PackedMatrices]
LowRanks = Sequence[tuple[LowRank, ...]]
Products = tuple[Tiers, LowRanks]  # matrices and low-rank terms of a product, of each tier
MOST_STREAMED = 64  # tokens that the streaming kernels serve, where an expert has few of them
FEW_TOKENS = 32  # that they always serve
MOST_PAIRS = 512  # that a block of threads lists


def _streams(num_tokens: int, width: int, tiles: Tiles | None) -> bool:
    """Whether streaming kernels run, by the tokens or by the given tiles."""
    if tiles is None:
        # One of 2 A^2 experts has T / 2 A tokens, and the streaming kernels take 8 at a time.
        few = num_tokens <= max(FEW_TOKENS, min(MOST_STREAMED, 10 * width))
        return few and num_tokens * width <= MOST_PAIRS
    if not isinstance(tiles, StreamTiles | WgmmaTiles):
        raise ValueError(f"{type(tiles).__name__} are tiles of another implementation than mosaic")
    return isinstance(tiles, StreamTiles)


def refusal(
    x: Operand,
    width: int,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    low_rank: LowRanks,
    is_plain: bool,
    target: Target,
) -> str | None:
    """Reason why this implementation refuses, or None."""
    if _streams(x.shape[0], width, None):
        found = mosaic_decode.refusals(x, gate_up_tiers, target, low_rank)
        found += [r for r in mosaic_decode.refusals(x, down_tiers, target) if r not in found]
        if any(weights.num_outputs % 32 for weights in gate_up_tiers):
            found.append(f"F {gate_up_tiers[0].num_outputs // 2} is no multiple of 16")
    else:
        found = mosaic_prefill.refusals(x, [*gate_up_tiers, *down_tiers], target)
        if target.simulated:
            found.append("its kernel for many rows has no interpret mode")
        found += dict.fromkeys(filter(None, map(triton_low_rank.refusal, low_rank)))
        if not is_plain:
            found.append("its kernel for many rows has silu(gate) * up alone, without a bias")
    return "; ".join(found) or None


def has_many_rows(
    assignments: Assignments, of_each: Sequence[Products], tiles: Tiles | None, target: Target
) -> bool:
    """Whether the kernel for many rows runs both products."""
    tokens, width = assignments.slot.shape
    return not any(
        _streams(tokens, width, _tiles(what, (tokens, width), *of, tiles, target))
        for what, of in zip(("gate_up", "down"), of_each, strict=True)
    )


def _tiles(
    what: str, shape: tuple[int, int], tiers: Tiers, low_rank: LowRanks, tiles: Tiles | None,
    target: Target,
) -> Tiles | None:  # fmt: skip
    """The tiles that are given, or measured ones."""
    if tiles is not None or any(low_rank):
        return tiles
    return measured(what, shape[0], shape[1], tiers, target, (StreamTiles, WgmmaTiles))


def layer_mosaic(
    x: jax.Array,
    assignments: Assignments,
    of_each: Sequence[Products],
    tiles: Tiles | None,
    target: Target,
    bias: jax.Array | None,
    gating: Gating,
    turn: Turn | None,
) -> jax.Array:
    """Computes `api.moe_products` by the kernel for many rows.

    With terms one product follows the other; those of earlier turns stay where they are.
    """
    _fits_many_rows(bias, gating)
    tokens, width = assignments.slot.shape
    chosen = [
        _tiles(what, (tokens, width), *of, tiles, target)
        for what, of in zip(("gate_up", "down"), of_each, strict=True)
    ]
    if not any(any(low_rank) for _, low_rank in of_each):
        both, (ups, downs) = map(_many_row_tiles, chosen), (tiers for tiers, _ in of_each)
        return mosaic_prefill.layer(x, assignments, ups, downs, [*both], target, turn)[None]
    rows = x
    for of, own, gated in zip(of_each, chosen, (gating, None), strict=True):
        rows = _of_many_rows(rows, assignments, *of, own, target, gated, turn)
        rows = rows.reshape(tokens, width, -1)
    return rows[None]


def _of_many_rows(
    rows: jax.Array, assignments: Assignments, tiers: Tiers, low_rank: LowRanks,
    tiles: Tiles | None, target: Target, gating: Gating | None, turn: Turn | None = None,
) -> jax.Array:  # fmt: skip
    """Computes one product by the kernel for many rows."""
    chosen = _many_row_tiles(tiles)
    given = rows, assignments, tiers, chosen, target
    if gating and not any(low_rank):
        return mosaic_prefill.gate_up(*given, turn)
    before = turn.before if turn and not gating else None
    found = mosaic_prefill.products(*given, before=before, turn=turn)
    if not any(low_rank):
        return found
    pairs = turn.pairs(assignments) if turn else assignments
    return triton.product_triton(
        rows, pairs, tiers, low_rank, None, target, gating=gating, products=found
    )


def _fits_many_rows(bias: jax.Array | None, gating: Gating) -> None:
    if bias is not None or gating != SWIGLU:
        raise ValueError("mosaic's kernel for many rows has silu(gate) * up, without a bias")


def _as_read(bias: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return bias if bias.dtype == dtype else bias.astype(jnp.float32)


def product_mosaic(
    rows: jax.Array,
    assignments: Assignments,
    tiers: Tiers,
    low_rank: LowRanks,
    tiles: Tiles | None,
    target: Target,
    bias: jax.Array | None = None,
    gating: Gating | None = None,
) -> jax.Array:
    """Computes a product of `api.PRODUCT` by Mosaic GPU."""
    tokens, width = assignments.slot.shape
    what, shape = ("gate_up", (tokens, width, -1)) if gating else ("down", (1, tokens, width, -1))
    tiles = _tiles(what, (tokens, width), tiers, low_rank, tiles, target)
    if not _streams(tokens, width, tiles):
        _fits_many_rows(bias, gating or SWIGLU)
        found = _of_many_rows(rows, assignments, tiers, low_rank, tiles, target, gating)
        return found.reshape(shape)
    pairs = tokens * width
    rows = rows.reshape(-1, rows.shape[-1])
    chosen = tiles or mosaic_decode.tiles_of_experts(
        rows[:tokens], list(tiers), pairs, gating is not None, target, low_rank
    )
    found = mosaic_decode.expert_products(
        rows,
        assignments.tier.reshape(pairs),
        assignments.slot.reshape(pairs),
        tuple(tiers),
        gating=gating,
        tiles=chosen,
        interpret=target.simulated,
        low_rank=tuple(low_rank),
        bias=None if bias is None else _as_read(bias.reshape(pairs, -1), rows.dtype),
    )
    return found.reshape(shape)


def _many_row_tiles(tiles: Tiles | None) -> WgmmaTiles | None:
    return tiles if isinstance(tiles, WgmmaTiles) else None
