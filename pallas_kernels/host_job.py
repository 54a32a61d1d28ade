"""Kernels that post a job to the host's cores and wait for its reply.

They reach the mailbox by its address. Inline assembly orders the accesses over the link, which
Pallas cannot say. Results of one piece are operands of the next, so that the compiler neither
reorders nor drops them. The state of jobs is int32[2]: the number of the last one, and whether a
reply was late; then no further job is posted, and what was to be added is missing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import host_mailbox as mailbox
from pallas_kernels import launch
from pallas_kernels.host_mailbox import MOST, Mailbox

Ref = Any
LANES = 32  # of the one warp of each kernel
TIMEOUT_NS = 2_000_000_000

# $1 and $2 are the halves of the mailbox's address, $3 an offset in bytes.
_ADDRESS = ".reg .b64 a, o; mov.b64 a, {$1, $2}; cvt.s64.s32 o, $3; add.s64 a, a, o; "
_STORE = "{ " + _ADDRESS + "st.relaxed.sys.global.b32 [a], $4; mov.b32 $0, 0; }"
_LOAD = "{ " + _ADDRESS + "ld.relaxed.sys.global.b32 $0, [a]; }"
_PUBLISH = (
    "{ " + _ADDRESS + "fence.acq_rel.sys; bar.warp.sync 0xffffffff; "
    "st.release.sys.global.b32 [a], $4; mov.b32 $0, 0; }"
)
# 0 once the number is $4, -64 after the timeout: then what is read is wrong, but in bounds.
_AWAIT = (
    "{ " + _ADDRESS + ".reg .pred late, found; .reg .b64 t, n; .reg .b32 v; "
    "mov.u64 t, %globaltimer; "
    "again: ld.acquire.sys.global.b32 v, [a]; setp.eq.s32 found, v, $4; @found bra done; "
    "mov.u64 n, %globaltimer; sub.u64 n, n, t; "
    f"setp.lt.u64 late, n, {TIMEOUT_NS}; @late bra again; "
    "done: selp.s32 $0, 0, -64, found; }"
)


def _run(assembly: str, address: Any, offsets: jax.Array, *values: jax.Array) -> jax.Array:
    """Runs assembly at each of some offsets; int32 of their shape."""
    shape = offsets.shape
    args = [*(jnp.broadcast_to(half, shape) for half in address), offsets, *values]
    [found] = pltriton.elementwise_inline_asm(
        assembly, args=args, constraints=",".join(["=r"] + ["r"] * len(args)), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )  # fmt: skip
    return found


def _chunks(width: int) -> list[jax.Array]:
    """Indices of a row, an element a lane: each access of the link is of whole lines."""
    return [start + jax.lax.iota(jnp.int32, LANES) for start in range(0, width, LANES)]


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _load_rows(rows_ref: Ref, most: jax.Array) -> jax.Array:
    return pltriton.load(rows_ref.at[0, most], mask=most < rows_ref.shape[1], other=-1)


@jax.jit
def post(
    x: jax.Array, rows: jax.Array, weights: jax.Array, state: jax.Array, address: jax.Array
) -> jax.Array:
    """Writes a job to the mailbox if a row is not negative.

    Args:
      x: [1, D], D a multiple of 32.
      rows: int32[1, A], A at most `MOST`; -1: none.
      weights: float32[1, A].
      state: int32[2].
      address: int32[2], low and high half of the mailbox's.

    Returns:
      The state, to be taken by whatever is to run after it.
    """

    def body(
        x_ref: Ref, rows_ref: Ref, weights_ref: Ref, state_ref: Ref, address_ref: Ref, out_ref: Ref
    ) -> None:
        where = (address_ref[0], address_ref[1])
        before, late = state_ref[0], state_ref[1]
        most = jax.lax.iota(jnp.int32, MOST)
        wanted = _load_rows(rows_ref, most)

        def write() -> jax.Array:
            number = before + 1
            # All loads before any store: none then waits for another.
            chunks = _chunks(x.shape[1])
            parts = [pltriton.load(x_ref.at[0, lanes]).astype(jnp.float32) for lanes in chunks]
            inside = most < weights_ref.shape[1]
            gates = pltriton.load(weights_ref.at[0, most], mask=inside, other=0.0)
            sent = [
                _run(_STORE, where, mailbox.X + 4 * lanes, _bits(part))
                for lanes, part in zip(chunks, parts, strict=True)
            ]
            first = _run(_STORE, where, mailbox.ROWS + 4 * most, wanted)
            second = _run(_STORE, where, mailbox.WEIGHTS + 4 * most, _bits(gates))
            same = jnp.zeros(LANES, jnp.int32)
            last = jnp.max(sum(sent, same)) + jnp.max(first) + jnp.max(second)
            return number + jnp.max(_run(_PUBLISH, where, same + last, same + number))

        posts = (jnp.max(wanted) >= 0) & (late == 0)
        out_ref[0] = jax.lax.cond(posts, write, lambda: before)
        out_ref[1] = late

    call = launch.triton_call(
        body, name="post_host_job", grid=(1,), out_shape=jax.ShapeDtypeStruct((2,), jnp.int32),
        num_warps=1, num_stages=1, interpret=False,
    )  # fmt: skip
    return call(x, rows, weights, state, address)


@functools.partial(jax.jit, static_argnames="dtype")
def add_reply(
    y: jax.Array, rows: jax.Array, state: jax.Array, address: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Adds a job's reply to float32[1, D] once it has come.

    Args:
      rows: as `post` got them.
      state: as `post` gave it.
      dtype: of the sum, which is rounded once.

    Returns:
      dtype[1, D], and the state: late, in the mailbox too, if no reply came in two seconds.
    """
    reply = Mailbox(y.shape[1]).reply

    def body(
        y_ref: Ref, rows_ref: Ref, state_ref: Ref, address_ref: Ref, out_ref: Ref, after_ref: Ref
    ) -> None:
        where = (address_ref[0], address_ref[1])
        number, before, chunks = state_ref[0], state_ref[1], _chunks(y.shape[1])
        own = [pltriton.load(y_ref.at[0, lanes]) for lanes in chunks]
        wanted = _load_rows(rows_ref, jax.lax.iota(jnp.int32, MOST))

        def wait() -> tuple[list[jax.Array], jax.Array]:
            same = jnp.zeros(LANES, jnp.int32)
            found = jnp.min(_run(_AWAIT, where, same + reply, same + number))
            # All loads before any use: they cross the link together.
            at = reply + mailbox.Y + found
            parts = [_run(_LOAD, where, at + 4 * lanes) for lanes in chunks]
            sums = [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in parts]
            is_late = (found < 0).astype(jnp.int32)
            said = _run(_STORE, where, same + (reply + mailbox.LATE), same + is_late)
            return [a + b for a, b in zip(own, sums, strict=True)], is_late + jnp.max(said)

        waits = (jnp.max(wanted) >= 0) & (before == 0)
        out, late = jax.lax.cond(waits, wait, lambda: (own, before))
        for lanes, values in zip(chunks, out, strict=True):
            pltriton.store(out_ref.at[0, lanes], values.astype(dtype))
        after_ref[0] = number
        after_ref[1] = late

    call = launch.triton_call(
        body, name="add_host_reply", grid=(1,),
        out_shape=(
            jax.ShapeDtypeStruct(y.shape, dtype), jax.ShapeDtypeStruct((2,), jnp.int32)
        ),
        num_warps=1, num_stages=1, interpret=False,
    )  # fmt: skip
    return call(y, rows, state, address)
