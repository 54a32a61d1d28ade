"""Kernels that post a job to a mailbox in host memory and wait for its reply.

They reach the mailbox by its address, as `worker.cpp` lays it out: a request has its number at byte
0, the count at 4, rows at 8, weights at 40 and x at 128; a reply its number at `REPLY` and y 64
bytes further. Inline assembly orders the accesses over the link, which Pallas cannot say. Results
of one piece are operands of the next, so that the compiler neither reorders nor drops them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from scripts.studies.host_experts.worker import REPLY

Ref = Any
LANES = 32  # of the one warp of each kernel
TIMEOUT_NS = 50_000_000

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


def post(x: jax.Array, job: jax.Array, weights: jax.Array, address: jax.Array) -> jax.Array:
    """Writes a job to the mailbox, its number last.

    Args:
      x: [1, D].
      job: int32[16]: number, count, then up to eight rows; number 0: there is none.
      weights: float32[8] of the rows.
      address: int32[2], low and high half of the mailbox's.

    Returns:
      int32[1], to be taken by whatever is to run after it.
    """

    def body(x_ref: Ref, job_ref: Ref, weights_ref: Ref, address_ref: Ref, out_ref: Ref) -> None:
        where = (address_ref[0], address_ref[1])
        number = job_ref[0]

        def write() -> jax.Array:
            # All loads before any store: none then waits for another.
            chunks = _chunks(x.shape[1])
            parts = [pltriton.load(x_ref.at[0, lanes]).astype(jnp.float32) for lanes in chunks]
            sent = [
                _run(_STORE, where, 128 + 4 * lanes, _bits(part))
                for lanes, part in zip(chunks, parts, strict=True)
            ]
            eight = jax.lax.iota(jnp.int32, 8)
            rows = pltriton.load(job_ref.at[2 + eight])
            first = _run(_STORE, where, 8 + 4 * eight, rows)
            second = _run(_STORE, where, 40 + 4 * eight, _bits(weights_ref[:]))
            same = jnp.zeros(LANES, jnp.int32)
            counted = _run(_STORE, where, same + 4, same + job_ref[1])
            last = jnp.max(sum(sent, counted)) + jnp.max(first) + jnp.max(second)
            return jnp.max(_run(_PUBLISH, where, same + last, same + number))

        out_ref[0] = jax.lax.cond(number > 0, write, lambda: number)

    call = launch.triton_call(
        body, name="post_job", grid=(1,), out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
        num_warps=1, num_stages=1, interpret=False,
    )  # fmt: skip
    return call(x, job, weights, address)


def add_reply(y: jax.Array, job: jax.Array, address: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds a job's reply to [1, D] once it has come.

    Returns:
      float32[1, D], and int32[1]: 0, or -64 if no reply came in time.
    """

    def body(y_ref: Ref, job_ref: Ref, address_ref: Ref, out_ref: Ref, state_ref: Ref) -> None:
        where = (address_ref[0], address_ref[1])
        number, chunks = job_ref[0], _chunks(y.shape[1])
        own = [pltriton.load(y_ref.at[0, lanes]).astype(jnp.float32) for lanes in chunks]

        def wait() -> tuple[list[jax.Array], jax.Array]:
            same = jnp.zeros(LANES, jnp.int32)
            state = jnp.min(_run(_AWAIT, where, same + REPLY, same + number))
            # All loads before any use: they cross the link together.
            found = [_run(_LOAD, where, REPLY + 64 + 4 * lanes + state) for lanes in chunks]
            reply = [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in found]
            has_any = job_ref[1] > 0
            return [jnp.where(has_any, a + b, a) for a, b in zip(own, reply, strict=True)], state

        out, state = jax.lax.cond(number > 0, wait, lambda: (own, number))
        for lanes, values in zip(chunks, out, strict=True):
            pltriton.store(out_ref.at[0, lanes], values)
        state_ref[0] = state

    call = launch.triton_call(
        body, name="add_reply", grid=(1,),
        out_shape=(
            jax.ShapeDtypeStruct(y.shape, jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
        ),
        num_warps=1, num_stages=1, interpret=False,
    )  # fmt: skip
    return call(y, job, address)
