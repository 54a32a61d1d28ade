"""The Pallas-Mosaic implementation for Hopper: one warpgroup copies, two multiply.

The scheme is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, section 3.1): keys and values
come by TMA, a warpgroup has 64 tokens of one query head, and the two take turns, so that one's
softmax is hidden behind the other's products. Both have heads of the same kv head, and tokens of
the same tile where the group is even, so that they need the same slots.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launch
from pallas_kernels.chunk_attention.triton import UNSEEN
from pallas_kernels.target import Target

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
TOKENS = 64  # of a warpgroup: the rows of wgmma
WARPGROUPS = 2  # that multiply; the third copies
COPIER_REGISTERS, PRODUCT_REGISTERS = 40, 232
TILE_ROWS = 8  # copies do not reach beyond an array's end within a tile of shared memory
ROOM_BYTES = 192 * 1024  # of shared memory for queries, keys and values
WIDTHS = (64, 128, 256)
_WGMMA = plgpu.Layout.WGMMA
_TILED = (plgpu.TilingTransform((TILE_ROWS, 64)), plgpu.SwizzleTransform(128))


def refusal(q: Operand, keys: Operand, value_dim: int, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    del value_dim
    reasons = []
    if target.platform != "gpu" or target.capability != (9, 0):
        reasons.append(f"wgmma needs a gpu sm_90, this is {target.describe()}")
    if q.shape[3] not in WIDTHS:
        reasons.append(f"C={q.shape[3]} is none of {', '.join(map(str, WIDTHS))}")
    for name, length in (("T", q.shape[1]), ("S", keys.shape[3])):
        if length % TILE_ROWS:
            reasons.append(f"{name}={length} is no multiple of {TILE_ROWS}")
    return "; ".join(reasons) or None


def _sizes(head_dim: int) -> tuple[int, int]:
    """Slots of a block, and blocks in shared memory."""
    block = 128 if head_dim <= 128 else 64
    room = ROOM_BYTES - 2 * WARPGROUPS * TOKENS * head_dim
    return block, min(4, room // (2 * 2 * block * head_dim))


def _clipped(x: Any, low: Any, high: Any) -> Any:
    return lax.min(lax.max(x, low), high)


def _body(
    layer_ref: Ref, starts_ref: Ref, lengths_ref: Ref, q_ref: Ref, keys_ref: Ref, values_ref: Ref,
    *refs: Ref, window: int | None, scale: float, block: int, stages: int,
    q_room: Ref, k_room: Ref, v_room: Ref, q_full: Ref, k_full: Ref, v_full: Ref, k_free: Ref,
    v_free: Ref, turn: Ref,
) -> None:  # fmt: skip
    """Program (b K + k) N + i: the i-th pair from the end of N pairs of tokens and heads.

    `refs`: sinks, if there are any; the output.
    """
    *sinks, out_ref = refs
    num_kv, head_dim = keys_ref.shape[2], keys_ref.shape[4]
    length, group = q_ref.shape[1], q_ref.shape[2] // num_kv
    num_items = group * -(-length // TOKENS)
    num_pairs = -(-num_items // WARPGROUPS)
    program, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    pair = num_pairs - 1 - lax.rem(program, jnp.int32(num_pairs))
    row = lax.div(program, jnp.int32(num_pairs))
    b, kv_head = lax.div(row, jnp.int32(num_kv)), lax.rem(row, jnp.int32(num_kv))
    layer, start, live = layer_ref[0], starts_ref[b], lengths_ref[b]

    def item_of(number: Any) -> tuple[Any, Any]:
        """The first token and the query head of an item; the last one may be taken twice."""
        number = lax.min(number, jnp.int32(num_items - 1))
        tile, head = lax.div(number, jnp.int32(group)), lax.rem(number, jnp.int32(group))
        return tile * TOKENS, kv_head * group + head

    first_token, _ = item_of(pair * WARPGROUPS)
    last_tile, _ = item_of(pair * WARPGROUPS + (WARPGROUPS - 1))
    size, last_live = jnp.int32(block), live - 1
    end = start + lax.min(last_tile + (TOKENS - 1), last_live) + 1
    begin = jnp.int32(0)
    if window is not None:
        begin = lax.max(start + first_token - (window - 1), jnp.int32(0))
    lowest = lax.div(begin, size)
    highest = lax.div(end + (block - 1), size)
    highest = lax.select(first_token < live, lax.max(highest, lowest), lowest)

    @pl.when(warpgroup == WARPGROUPS)
    def copy_all() -> None:
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

        def copied(i: jax.Array, carry: None) -> None:
            slot = lax.rem(i, jnp.int32(stages))
            slots = pl.ds((lowest + i) * block, block)
            for ref, room, full, free in (
                (keys_ref, k_room, k_full, k_free), (values_ref, v_room, v_full, v_free),
            ):  # fmt: skip

                @pl.when(i >= stages)
                def wait(free: Ref = free) -> None:
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(
                    ref.at[layer, b, kv_head, slots], room.at[slot], full.at[slot]
                )
            return carry

        def freed(i: jax.Array, carry: None) -> None:
            plgpu.barrier_wait(k_free.at[lax.rem(i, jnp.int32(stages))])
            plgpu.barrier_wait(v_free.at[lax.rem(i, jnp.int32(stages))])
            return carry

        count = highest - lowest
        lax.fori_loop(0, count, copied, None)
        # No barrier ends with a phase that nobody saw.
        lax.fori_loop(lax.max(count, jnp.int32(stages)), count + stages, freed, None)

    @pl.when(warpgroup < WARPGROUPS)
    def multiply_all() -> None:
        plgpu.set_max_registers(PRODUCT_REGISTERS, action="increase")
        token, head = item_of(pair * WARPGROUPS + warpgroup)
        own_q = q_room.at[warpgroup]
        plgpu.copy_gmem_to_smem(
            q_ref.at[b, pl.ds(token, TOKENS), head], own_q, q_full.at[warpgroup]
        )
        plgpu.barrier_wait(q_full.at[warpgroup])
        first, last = start + token, start + lax.min(token + (TOKENS - 1), last_live)
        whole_end = _clipped(lax.div(lax.min(first + 1, end), size), lowest, highest)
        whole = lowest
        if window is not None:
            whole = lax.div(lax.max(last - (window - 1), jnp.int32(0)) + (block - 1), size)
            whole = _clipped(whole, lowest, whole_end)
        step = functools.partial(
            _step, own_q=own_q, k_room=k_room, v_room=v_room, k_full=k_full, v_full=v_full,
            k_free=k_free, v_free=v_free, turn=turn, lowest=lowest, first=first, window=window,
            to_log2=scale * math.log2(math.e), block=block, stages=stages,
        )  # fmt: skip
        # A sink is a score that was seen before, of a slot whose value is zero.
        top = sinks[0][layer, head] * math.log2(math.e) if sinks else jnp.float32(-jnp.inf)
        state = (
            plgpu.layout_cast(jnp.zeros((TOKENS, head_dim), jnp.float32), _WGMMA),
            plgpu.layout_cast(jnp.full((TOKENS,), top, jnp.float32), _WGMMA.reduce(1)),
            plgpu.layout_cast(
                jnp.full((TOKENS,), float(len(sinks)), jnp.float32), _WGMMA.reduce(1)
            ),
        )
        pl.when(warpgroup == 1)(lambda: _take_turns(turn))
        if window is not None:
            state = lax.fori_loop(lowest, whole, functools.partial(step, is_masked=True), state)
        state = lax.fori_loop(whole, whole_end, functools.partial(step, is_masked=False), state)
        state = lax.fori_loop(whole_end, highest, functools.partial(step, is_masked=True), state)
        pl.when(warpgroup == 0)(lambda: _take_turns(turn))
        acc, _, total = state
        rows = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=_WGMMA)
        found = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        found = jnp.where(rows + token < live, found, 0.0)
        own_q[...] = found.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_q, out_ref.at[b, pl.ds(token, TOKENS), head])
        plgpu.wait_smem_to_gmem(0)


def _take_turns(turn: Ref) -> None:
    """Waits for the other warpgroup to come to its own next turn."""
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _step(
    i: jax.Array, state: tuple[jax.Array, ...], *, is_masked: bool, own_q: Ref, k_room: Ref,
    v_room: Ref, k_full: Ref, v_full: Ref, k_free: Ref, v_free: Ref, turn: Ref, lowest: jax.Array,
    first: jax.Array, window: int | None, to_log2: float, block: int, stages: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Adds a block of slots to a warpgroup's sums, its largest scores and its sums of weights.

    Args:
      first: position of the first row.
    """
    acc, top, total = state
    slot = lax.rem(i - lowest, jnp.int32(stages))
    plgpu.barrier_wait(k_full.at[slot])

    def multiplied(sums_ref: Ref) -> jax.Array:
        plgpu.wgmma(sums_ref, own_q, k_room.at[slot].transpose((1, 0)))
        _take_turns(turn)  # the other may multiply while this one's scores are weighed
        return sums_ref[...]

    products = pl.run_scoped(multiplied, plgpu.WGMMAAccumulatorRef((TOKENS, block), jnp.float32))
    plgpu.barrier_arrive(k_free.at[slot])
    if is_masked:
        rows, columns = (
            plgpu.broadcasted_iota(jnp.int32, products.shape, axis, layout=_WGMMA)
            for axis in (0, 1)
        )
        ahead = rows + (first - i * block) - columns  # the query's position less the slot
        seen = ahead >= 0
        if window is not None:
            seen &= ahead < window
        scores = jnp.where(seen, products * to_log2, UNSEEN)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    else:  # the factor becomes part of one fused operation
        new_top = jnp.maximum(top, jnp.max(products, axis=1) * to_log2)
        scores = products * to_log2
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    shrink = jnp.exp2(top - new_top)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    total = total * shrink + jnp.sum(weights, axis=1)
    rounded = weights.astype(own_q.dtype)
    acc, new_top, total, rounded = lax.optimization_barrier((acc, new_top, total, rounded))
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(v_full.at[slot])
    plgpu.barrier_wait(turn)

    def added(sums_ref: Ref) -> None:
        plgpu.wgmma(sums_ref, rounded, v_room.at[slot])

    acc = pl.run_state(added)(plgpu.WGMMAAccumulatorRef.init(acc))
    plgpu.barrier_arrive(v_free.at[slot])
    return acc, new_top, total


def chunk_attention_mosaic(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None = None,
    *,
    kv_length: int,
    window: int | None,
    scale: float,
    target: Target,
) -> jax.Array:
    """Computes `api.chunk_attention` by Mosaic, in one launch."""
    del kv_length  # positions say how far to look
    _, length, num_heads, head_dim = q.shape
    batch, num_kv = keys.shape[1:3]
    group = num_heads // num_kv
    block, stages = _sizes(head_dim)
    num_pairs = -(-group * -(-length // TOKENS) // WARPGROUPS)
    room = (stages, block, head_dim)
    more = () if sinks is None else (sinks.astype(jnp.float32),)
    scratch = {
        "q_room": plgpu.SMEM((WARPGROUPS, TOKENS, head_dim), q.dtype, transforms=_TILED),
        "k_room": plgpu.SMEM(room, q.dtype, transforms=_TILED),
        "v_room": plgpu.SMEM(room, q.dtype, transforms=_TILED),
        "q_full": plgpu.Barrier(num_barriers=WARPGROUPS),
        "k_full": plgpu.Barrier(num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    return launch.mosaic_pipeline_call(
        functools.partial(_body, window=window, scale=scale, block=block, stages=stages),
        name=f"chunk_attention_{q.dtype.name}_{group}x{head_dim}_s{block}p{stages}",
        num_blocks=batch * num_kv * num_pairs,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=scratch,
        num_warpgroups=WARPGROUPS + 1,
        approx_math=True,
        interpret=target.simulated,
    )(layer.reshape(1), starts, lengths, q, keys, values, *more)
