"""Kernel of the sum: each device writes its part into the others' memory, and adds what comes.

Every 4 bytes of data go beside 4 bytes of the sum's number, so that a reader knows by the data that
they have come: neither a barrier nor a semaphore. Parts lie in two places by turns. A device writes
the sum after next only once it has the next one's parts, which a peer sends when it has read this
one's: nothing is overwritten before it is read. Every device adds in the devices' order.

The compiler may move each piece of assembly to where its result is used. So all that comes after
the sending takes `sent`, zeros, as an operand, and the sum takes `done`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.sum_mailbox import MOST, NUMBERS_NBYTES, PART_NBYTES
from pallas_kernels.target import Target, platform_refusal

_Ref = Any
_LANES = 128  # of a program, each with a number
TIMEOUT_NS = 60_000_000_000  # then the program ends in an error

# $1 and $2 are the halves of a mailbox's address, $3 is an offset in bytes.
_AT = ".reg .b64 a, o; mov.b64 a, {$1, $2}; cvt.s64.s32 o, $3; add.s64 a, a, o; "
_LOAD = f"{{ {_AT}ld.relaxed.gpu.global.b32 $0, [a]; }}"
_STORE = f"{{ {_AT}st.relaxed.gpu.global.b32 [a], $4; mov.b32 $0, 0; }}"
_SEND = f"{{ {_AT}st.volatile.global.v2.b32 [a], {{$4, $5}}; mov.b32 $0, 0; }}"
_RECEIVE = (  # the value, once its number is $4
    f"{{ {_AT}.reg .pred found, late; .reg .b64 t, n; .reg .b32 f; mov.u64 t, %globaltimer; "
    "again: ld.volatile.global.v2.b32 {$0, f}, [a]; setp.eq.s32 found, f, $4; @found bra done; "
    "mov.u64 n, %globaltimer; sub.u64 n, n, t; "
    "setp.gt.u64 late, n, TIMEOUT; @late trap; bra again; done: }"
)


def refusal(x: Any, has_mailboxes: bool, target: Target) -> str | None:
    """Reason why the kernel cannot sum, or None."""
    reasons = [reason] if (reason := platform_refusal(target)) else []
    if not has_mailboxes:
        reasons.append("it needs GPUs of one process that reach each other's memory")
    if x.size > MOST:
        reasons.append(f"it sums up to {MOST} numbers, these are {x.size}")
    return "; ".join(reasons) or None


def _run(assembly: str, address: Any, offsets: jax.Array, *values: Any) -> jax.Array:
    shape = offsets.shape
    args = [*(jnp.broadcast_to(half, shape) for half in address), offsets]
    args += [jnp.broadcast_to(value, shape) for value in values]
    [found] = pltriton.elementwise_inline_asm(
        assembly, args=args, constraints=",".join(["=r"] + ["r"] * len(args)), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )  # fmt: skip
    return found


def peer_sum_triton(
    x: jax.Array, peers: jax.Array, *, target: Target, axis: str, dtype: jnp.dtype
) -> jax.Array:
    """Runs the kernel, see `api.peer_sum`."""
    del target, axis
    num_devices = (peers.shape[1] - 1) // 2
    wide = jnp.float32
    late = _RECEIVE.replace("TIMEOUT", str(TIMEOUT_NS))

    def body(x_ref: _Ref, peers_ref: _Ref, out_ref: _Ref) -> None:
        lanes = pl.program_id(0) * _LANES + jax.lax.iota(jnp.int32, _LANES)
        is_there = lanes < x.size
        places = [(peers_ref[0, 1 + 2 * i], peers_ref[0, 2 + 2 * i]) for i in range(num_devices)]
        own, at = peers_ref[0, 0], places[0]
        for i, place in enumerate(places[1:], 1):
            at = jnp.where(own == i, place[0], at[0]), jnp.where(own == i, place[1], at[1])
        number = _run(_LOAD, at, 4 * lanes) + 1
        offsets = NUMBERS_NBYTES + (number & 1) * (num_devices * PART_NBYTES) + 8 * lanes
        part = pltriton.load(x_ref.at[lanes], mask=is_there, other=0).astype(wide)
        bits = jax.lax.bitcast_convert_type(part, jnp.int32)
        sent = jnp.zeros(_LANES, jnp.int32)
        for i, place in enumerate(places):

            def send(place: Any = place) -> jax.Array:
                return _run(_SEND, place, offsets + own * PART_NBYTES, bits, number)

            sent += jax.lax.cond(own == i, lambda: jnp.zeros(_LANES, jnp.int32), send)
        total = jnp.zeros(_LANES, wide)
        for i in range(num_devices):

            def receive(i: int = i) -> jax.Array:
                found = _run(late, at, offsets + i * PART_NBYTES + sent, number)
                return jax.lax.bitcast_convert_type(found, wide)

            total += jax.lax.cond(own == i, lambda: part, receive)
        done = _run(_STORE, at, 4 * lanes, number)  # 0, so that it is not dropped
        total = (total + done.astype(wide)).astype(dtype)
        pltriton.store(out_ref.at[lanes], total, mask=is_there)

    call = launch.triton_call(
        body, name=f"peer_sum_{jnp.dtype(dtype).name}_{num_devices}x{x.size}",
        grid=(pl.cdiv(x.size, _LANES),),
        out_shape=jax.ShapeDtypeStruct((x.size,), dtype), num_warps=_LANES // 32, num_stages=1,
        interpret=False,
    )  # fmt: skip
    return call(x.reshape(-1), peers).reshape(x.shape)
