"""A sum over the GPUs of a host by one kernel: each writes its part into the others' memory.

Every 4 bytes of data go beside 4 bytes of the sum's number, so that a reader knows by the data that
they have come: neither a barrier nor a semaphore. Parts lie in two places by turns. A device writes
the sum after next only once it has the next one's parts, which a peer sends when it has read this
one's: nothing is overwritten before it is read. Every device adds in the devices' order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch

Ref = Any
LANES = 128  # of a program, each with a float32
MOST = 64 * 2048  # float32 of a sum
TIMEOUT_NS = 2_000_000_000
_NUMBERS = 4 * MOST  # bytes of each lane's number of its last sum
_PART = 8 * MOST  # bytes of a device's part, numbers included

# $k and $k+1 are the halves of a mailbox's address, then an offset in bytes.
_AT = ".reg .b64 a, o; mov.b64 a, {{{0}, {1}}}; cvt.s64.s32 o, {2}; add.s64 a, a, o; "
_LOAD = "{ " + _AT.format("$1", "$2", "$3") + "ld.relaxed.gpu.global.b32 $0, [a]; }"
_STORE = "{ " + _AT.format("$1", "$2", "$3") + "st.relaxed.gpu.global.b32 [a], $4; mov.b32 $0, 0; }"
_SEND = (
    "{ " + _AT.format("$1", "$2", "$3") + "st.volatile.global.v2.b32 [a], {$4, $5}; "
    "mov.b32 $0, 0; }"
)
# The value once its number is $4; NaN after the timeout.
_RECEIVE = (
    "{ " + _AT.format("$1", "$2", "$3") + ".reg .pred found, early; .reg .b64 t, n; .reg .b32 f; "
    "mov.u64 t, %globaltimer; "
    "again: ld.volatile.global.v2.b32 {$0, f}, [a]; setp.eq.s32 found, f, $4; @found bra done; "
    "mov.u64 n, %globaltimer; sub.u64 n, n, t; "
    f"setp.lt.u64 early, n, {TIMEOUT_NS}; @early bra again; "
    "mov.b32 $0, 0x7fc00000; done: }"
)


def mailbox_nbytes(num_devices: int) -> int:
    """Bytes of a device's mailbox, zeros at first: numbers, and each device's part twice."""
    return _NUMBERS + 2 * num_devices * _PART


def addresses(mailboxes: jax.Array) -> np.ndarray:
    """int32[P, 2], halves of the addresses of uint8[P, bytes], of which each device has a row."""
    shards = sorted(mailboxes.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    found = [shard.data.unsafe_buffer_pointer() for shard in shards]
    return np.asarray(found, np.uint64).view(np.int32).reshape(-1, 2)


def _run(assembly: str, address: Any, offsets: jax.Array, *values: Any) -> jax.Array:
    shape = offsets.shape
    args = [*(jnp.broadcast_to(half, shape) for half in address), offsets]
    args += [jnp.broadcast_to(value, shape) for value in values]
    [found] = pltriton.elementwise_inline_asm(
        assembly, args=args, constraints=",".join(["=r"] + ["r"] * len(args)), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )  # fmt: skip
    return found


@jax.jit
def peer_sum(x: jax.Array, where: jax.Array, mine: jax.Array) -> jax.Array:
    """Sums float32 over all devices; called in `shard_map` by each of them, in the same order.

    Args:
      x: float32[N], the device's part, N at most `MOST` and a multiple of `LANES`.
      where: int32[P, 2], `addresses` of all mailboxes.
      mine: int32[1], the device's own number.

    Returns:
      float32[N], equal to the bit on all devices; NaN where a part did not come in two seconds.
    """
    num_devices = where.shape[0]

    def body(x_ref: Ref, where_ref: Ref, mine_ref: Ref, out_ref: Ref) -> None:
        lanes = pl.program_id(0) * LANES + jax.lax.iota(jnp.int32, LANES)
        places = [(where_ref[i, 0], where_ref[i, 1]) for i in range(num_devices)]
        own, at = mine_ref[0], places[0]
        for i, place in enumerate(places[1:], 1):
            at = jnp.where(own == i, place[0], at[0]), jnp.where(own == i, place[1], at[1])
        number = _run(_LOAD, at, 4 * lanes) + 1
        offsets = _NUMBERS + (number & 1) * (num_devices * _PART) + 8 * lanes
        part = pltriton.load(x_ref.at[lanes])
        bits = jax.lax.bitcast_convert_type(part, jnp.int32)
        sent = jnp.zeros(LANES, jnp.int32)
        for i, place in enumerate(places):

            def send(place: Any = place) -> jax.Array:
                return _run(_SEND, place, offsets + own * _PART, bits, number)

            sent += jax.lax.cond(own == i, lambda: jnp.zeros(LANES, jnp.int32), send)
        total = jnp.zeros(LANES, jnp.float32)
        for i in range(num_devices):

            def receive(i: int = i) -> jax.Array:
                found = _run(_RECEIVE, at, offsets + i * _PART + sent, number)
                return jax.lax.bitcast_convert_type(found, jnp.float32)

            total += jax.lax.cond(own == i, lambda: part, receive)
        done = _run(_STORE, at, 4 * lanes, number)  # 0, so that it is not dropped
        pltriton.store(out_ref.at[lanes], total + done.astype(jnp.float32))

    call = launch.triton_call(
        body, name="peer_sum", grid=(x.size // LANES,),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32), num_warps=LANES // 32, num_stages=1,
        interpret=False,
    )  # fmt: skip
    return call(x, where, mine)
