"""Kernels of the sum: each device writes its part into the others' memory, and adds what comes.

Up to `MOST` numbers, every 4 bytes of data go beside 4 bytes of the sum's count, so that a reader
knows by the data that they have come: neither a barrier nor a semaphore. Beyond, half the bytes
would be counts: programs send a tile each, then its count, and go on to their next tile.

Parts lie in two places by turns. A device writes the part after next only once it has the next
one, which a peer sends when it has read this one: nothing is overwritten before it is read. Every
device adds in the devices' order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.peer_sum.mailboxes import MOST, NUM_PROGRAMS, TILE, Mailbox
from pallas_kernels.target import Target, platform_refusal

Ref = Any
Address = tuple[jax.Array, jax.Array]  # halves of a mailbox's
LANES = 128  # of a program of a short sum, each with a number
THREADS = 256  # of one of a long sum
TIMEOUT_NS = 60_000_000_000  # then the program ends in an error

# $1 and $2 are the halves of a mailbox's address, $3 is an offset in bytes.
_AT = ".reg .b64 a, o; mov.b64 a, {$1, $2}; cvt.s64.s32 o, $3; add.s64 a, a, o; "
_LOAD = f"{{ {_AT}ld.relaxed.sys.global.b32 $0, [a]; }}"
_STORE = f"{{ {_AT}st.global.b32 [a], $4; mov.b32 $0, 0; }}"
_SEND_PAIR = f"{{ {_AT}st.volatile.global.v2.b32 [a], {{$4, $5}}; mov.b32 $0, 0; }}"
# One thread sends a count, after what all have sent.
_SEND_COUNT = (
    f"{{ {_AT}.reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 first, t, 0; "
    "@first fence.acq_rel.sys; @first st.relaxed.sys.global.b32 [a], $4; mov.b32 $0, 0; }"
)
_WAIT = (
    f"{{ {_AT}.reg .pred there, late; .reg .b64 t, n; .reg .b32 f; mov.u64 t, %globaltimer; "
    "again: READ; @there bra done; mov.u64 n, %globaltimer; sub.u64 n, n, t; "
    "setp.gt.u64 late, n, TIMEOUT; @late trap; bra again; done: }"
)
_PAIR = "ld.volatile.global.v2.b32 {$0, f}, [a]; setp.eq.s32 there, f, $4"  # a value, its count $4
_COUNT = (  # 0, once the count is $4 or more
    "ld.acquire.sys.global.b32 f, [a]; sub.s32 $0, f, $4; setp.ge.s32 there, $0, 0; mov.b32 $0, 0"
)


def refusal(x: Any, has_mailboxes: bool, target: Target) -> str | None:
    """Reason why the kernels cannot sum, or None."""
    reasons = [reason] if (reason := platform_refusal(target)) else []
    if not has_mailboxes:
        reasons.append("it needs GPUs of one process that reach each other's memory")
    if x.size >= 2**31:
        reasons.append(f"it sums less than 2^31 numbers, these are {x.size}")
    return "; ".join(reasons) or None


def _run(assembly: str, address: Address, offsets: jax.Array, *values: Any) -> jax.Array:
    shape = offsets.shape
    args = [*(jnp.broadcast_to(half, shape) for half in address), offsets]
    args += [jnp.broadcast_to(value, shape) for value in values]
    [found] = pltriton.elementwise_inline_asm(
        assembly, args=args, constraints=",".join(["=r"] + ["r"] * len(args)), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )  # fmt: skip
    return found


def _waiting(read: str) -> str:
    return _WAIT.replace("READ", read).replace("TIMEOUT", str(TIMEOUT_NS))


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


class _Peers:
    """The devices, inside a kernel."""

    def __init__(self, ref: Ref, count: int):
        self.places = [(ref[0, 1 + 2 * i], ref[0, 2 + 2 * i]) for i in range(count)]
        self.own, self.at = ref[0, 0], self.places[0]  # this device's number and mailbox
        for i, (low, high) in enumerate(self.places[1:], 1):
            is_own = self.own == i
            self.at = jnp.where(is_own, low, self.at[0]), jnp.where(is_own, high, self.at[1])

    def to_others(self, send: Callable[[Address], jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Zeros, once `send` has run for each other device."""
        none = jnp.zeros(shape, jnp.int32)
        found = none
        for i, place in enumerate(self.places):
            found += jax.lax.cond(self.own == i, lambda: none, lambda place=place: send(place))
        return found

    def total(self, part: jax.Array, receive: Callable[[int], jax.Array]) -> jax.Array:
        """Adds the parts, bits int32 of others', in the devices' order."""
        total = jnp.zeros_like(part)
        for i in range(len(self.places)):
            total += jax.lax.cond(
                self.own == i, lambda: part, lambda i=i: _bits(receive(i), jnp.float32)
            )
        return total


def peer_sum_triton(
    x: jax.Array, peers: jax.Array, *, target: Target, axis: str, dtype: jnp.dtype
) -> jax.Array:
    """Runs a kernel, see `api.peer_sum`."""
    del target, axis
    count = (peers.shape[1] - 1) // 2
    box = Mailbox(count)

    def few(x_ref: Ref, peers_ref: Ref, out_ref: Ref) -> None:
        lanes = pl.program_id(0) * LANES + jax.lax.iota(jnp.int32, LANES)
        is_there, devices = lanes < x.size, _Peers(peers_ref, count)
        number = _run(_LOAD, devices.at, 4 * lanes) + 1
        offsets = box.pairs + (number & 1) * (count * box.pairs_of_device) + 8 * lanes
        part = pltriton.load(x_ref.at[lanes], mask=is_there, other=0).astype(jnp.float32)
        mine = offsets + devices.own * box.pairs_of_device
        bits = _bits(part, jnp.int32)
        sent = devices.to_others(lambda at: _run(_SEND_PAIR, at, mine, bits, number), lanes.shape)

        def receive(i: int) -> jax.Array:
            theirs = offsets + i * box.pairs_of_device + sent
            return _run(_waiting(_PAIR), devices.at, theirs, number)

        total = devices.total(part, receive)
        done = _run(_STORE, devices.at, 4 * lanes, number)  # 0, so that it is not dropped
        total = (total + done.astype(jnp.float32)).astype(dtype)
        pltriton.store(out_ref.at[lanes], total, mask=is_there)

    def many(x_ref: Ref, peers_ref: Ref, out_ref: Ref) -> None:
        program, devices = pl.program_id(0), _Peers(peers_ref, count)
        threads, lanes = (jax.lax.iota(jnp.int32, n) for n in (THREADS, TILE))
        of_program = jnp.zeros_like(threads) + box.counts + 4 * program
        before = jnp.max(_run(_LOAD, devices.at, of_program))

        def one(turn: jax.Array, number: jax.Array) -> jax.Array:
            places = (turn * NUM_PROGRAMS + program) * TILE + lanes
            is_there = places < x.size
            part = pltriton.load(x_ref.at[places], mask=is_there, other=0).astype(jnp.float32)
            tile = box.tiles + 4 * ((number & 1) * NUM_PROGRAMS + program) * TILE + 4 * lanes
            mine, bits = tile + devices.own * box.tiles_of_device, _bits(part, jnp.int32)
            sent = devices.to_others(lambda at: _run(_STORE, at, mine, bits), lanes.shape)
            kept = _run(_STORE, devices.at, of_program, number)
            counted = number + jnp.sum(sent) + jnp.sum(kept)  # all threads have sent
            flag = box.sent + 4 * (devices.own * NUM_PROGRAMS + program) + jnp.zeros_like(threads)
            told = devices.to_others(lambda at: _run(_SEND_COUNT, at, flag, counted), threads.shape)

            def receive(i: int) -> jax.Array:
                flag = box.sent + 4 * (i * NUM_PROGRAMS + program) + told
                waited = jnp.sum(_run(_waiting(_COUNT), devices.at, flag, number))
                return _run(_LOAD, devices.at, tile + i * box.tiles_of_device + waited)

            total = devices.total(part, receive).astype(dtype)
            pltriton.store(out_ref.at[places], total, mask=is_there)
            return number + 1

        tiles = pl.cdiv(x.size, TILE)
        turns = jnp.maximum(0, (tiles - program + NUM_PROGRAMS - 1) // NUM_PROGRAMS)
        jax.lax.fori_loop(0, turns, one, before + 1)

    body, programs, threads = few, pl.cdiv(x.size, LANES), LANES
    if x.size > MOST:
        body, programs, threads = many, NUM_PROGRAMS, THREADS
    call = launch.triton_call(
        body, name=f"peer_sum_{jnp.dtype(dtype).name}_{count}x{x.size}", grid=(programs,),
        out_shape=jax.ShapeDtypeStruct((x.size,), dtype), num_warps=threads // 32, num_stages=1,
        interpret=False,
    )  # fmt: skip
    return call(x.reshape(-1), peers).reshape(x.shape)
