"""Inside the kernel: the slots of a layer and the experts asked for, as vectors of one program.

Vectors are padded to powers of two; what is beyond the end owns nothing, asks for nothing and is
never a victim. Comparisons of pairs are one tensor each, of what is asked for with itself and with
the slots. Slots are not compared with each other: victims are found one after the other, as many as
there are misses, which are few where caching pays. Where nothing is missing slots are not looked at
but for those that are used.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.cache_plan.operands import CLOSED, COLUMNS
from pallas_kernels.triton.elements import power_above

Ref = Any
Refs = Mapping[str, Ref]

OLDEST = np.int32(2**31 - 1)
SHARE = 1024  # a sum of 10 bits: several in one reduction; more than there are slots or pairs


class Loaded(NamedTuple):
    """Entries of the tables for the slots of a layer, [C]."""

    number: jax.Array  # 0, 1, ...
    owner: jax.Array
    owned: jax.Array
    last_use: jax.Array
    ahead: jax.Array
    inside: jax.Array  # not beyond the end


class Slots(NamedTuple):
    """The slots of a layer, [C]; `wanted`: the owner is one that is asked for."""

    loaded: Loaded
    wanted: jax.Array
    victim: jax.Array
    age: jax.Array  # since the last use, of signed numbers in the order of unsigned ones


def padded_iota(size: int) -> jax.Array:
    """int32, 0, 1, ... of the least power of two that is not below `size`."""
    return jax.lax.iota(jnp.int32, power_above(size))


def matches(left: jax.Array, right: jax.Array) -> jax.Array:
    """bool[l, r]."""
    return left[:, None] == right[None, :]


def count(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """int32, how many are set."""
    return jnp.sum(mask.astype(jnp.int32), axis=axis)


def some(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """bool, whether any is set."""
    return jnp.max(mask.astype(jnp.int32), axis=axis) > 0


def pick(mask: jax.Array, values: jax.Array, axis: int) -> jax.Array:
    """int32, the largest value, none negative, where the mask is set; -1 if it is nowhere."""
    return jnp.max(jnp.where(mask, values, -1), axis=axis)


def load_local(of: Refs, layer: jax.Array, ids: jax.Array) -> jax.Array:
    """int32[P], the local slots of experts, -1: none."""
    return pltriton.load(of["table"].at[layer, jnp.maximum(ids, 0)], mask=ids >= 0, other=-1)


def load_rows(of: Refs, layer: jax.Array, ids: jax.Array) -> jax.Array:
    """int32[P], their rows in the host store, -1: none."""
    return pltriton.load(of["row_of"].at[layer, jnp.maximum(ids, 0)], mask=ids >= 0, other=-1)


def leads(ids: jax.Array, num_tokens: int = 0) -> jax.Array:
    """bool[P], the first of those with its id; those of one token differ."""
    if num_tokens == 1:
        return ids >= 0
    index = jax.lax.iota(jnp.int32, len(ids))
    repeated = some(matches(ids, ids) & (index[None, :] < index[:, None]), axis=1)
    return (ids >= 0) & ~repeated


def order_of(new: jax.Array, ids: jax.Array) -> jax.Array:
    """int32[P], how many of the new experts have smaller ids."""
    return count(new[None, :] & (ids[None, :] < ids[:, None]), axis=1)


def _sizes(of: Refs, planes: int) -> tuple[int, int]:
    """Items, planes of an expert apart, and C."""
    num_items = planes * of["row_of"].shape[1]
    return num_items, (of["table"].shape[1] - num_items) // 3


def load_owners(of: Refs, layer: jax.Array) -> jax.Array:
    """int32[C], of slots of a layer, -1: none."""
    num_experts, slots = _sizes(of, 1)
    number = padded_iota(slots)
    place = of["table"].at[layer, num_experts + number]
    return pltriton.load(place, mask=number < slots, other=-1)


def load_slots(of: Refs, layer: jax.Array, planes: int = 1, has_closed: bool = False) -> Loaded:
    """The slots of a layer, C > 0; owners are items where planes have slots of their own.

    With `has_closed` one may be `CLOSED`, which is as if it were beyond the end.
    """
    num_items, slots = _sizes(of, planes)
    number = padded_iota(slots)
    inside = number < slots

    def column(i: int, other: int) -> jax.Array:
        place = num_items + i * slots + number
        return pltriton.load(of["table"].at[layer, place], mask=inside, other=other)

    owner = column(0, -1)
    if has_closed:
        inside &= owner != CLOSED
        owner = jnp.where(inside, owner, -1)
    return Loaded(number, owner, owner >= 0, column(1, 0), column(2, 0), inside)


def candidates(loaded: Loaded, clock: jax.Array, *asked: jax.Array) -> Slots:
    """Victims are those slots whose owner is not asked for, by any of the vectors."""
    wanted = loaded.owner < -1
    for ids in asked:
        wanted |= loaded.owned & some(matches(loaded.owner, ids), axis=1)
    victim = loaded.inside & ~wanted
    # Modulo 2^32 and with the first bit turned, so that signed numbers have the order of unsigned.
    age = (clock - loaded.last_use) ^ np.int32(-(2**31))
    return Slots(loaded, wanted, victim, jnp.where(loaded.owned, age, OLDEST))


def taken(
    slots: Slots, victim: jax.Array, number: jax.Array, *orders: jax.Array
) -> tuple[jax.Array, ...]:
    """Victims for those who come, one after the other.

    Free slots come first, then those of the oldest use, of the smallest expert.

    Args:
      victim: bool[C], of which at least `number` are set.
      number: int32[], how many come.
      orders: int32[P] each, 0, 1, ... of those who come; others are negative or not below `number`.

    Returns:
      int32[C], the order of who takes a slot, or -1; int32[P] for each of `orders`, the slot that
      each takes, or -1.
    """
    index = slots.loaded.number
    tie = jnp.where(slots.loaded.owned, len(index) + slots.loaded.owner, index)

    def take(n: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        taker, *locals_ = found
        left = victim & (taker < 0)
        left &= slots.age == jnp.max(jnp.where(left, slots.age, -OLDEST - 1))
        left &= tie == jnp.min(jnp.where(left, tie, OLDEST))
        slot = jnp.min(jnp.where(left, index, OLDEST))
        after = [
            jnp.where(order == n, slot, local) for order, local in zip(orders, locals_, strict=True)
        ]
        return jnp.where(index == slot, n, taker), *after

    none = tuple(jnp.full_like(vector, -1) for vector in (index, *orders))
    return jax.lax.fori_loop(0, number, take, none)


def store_owners(
    of: Refs, layer: jax.Array, slots: Slots, coming: jax.Array, planes: int = 1
) -> None:
    """Makes experts or items [C] (-1: none) the owners of their slots, in both directions."""
    table, num_items = of["table"], _sizes(of, planes)[0]
    came, beyond = coming >= 0, table.shape[1]
    leaves = came & slots.loaded.owned
    # Evicted experts are not requested, admitted ones are: no column is written twice. A masked
    # element's index is unique, since the interpreter writes it too, with the old value.
    pltriton.store(
        table.at[layer, jnp.where(leaves, slots.loaded.owner, beyond)],
        jnp.full_like(coming, -1),
        mask=leaves,
    )
    pltriton.store(table.at[layer, jnp.where(came, coming, beyond)], slots.loaded.number, mask=came)
    pltriton.store(table.at[layer, num_items + slots.loaded.number], coming, mask=came)


def store_use(
    of: Refs, layer: jax.Array, slots: Slots, used: jax.Array, clock: jax.Array, ahead: int,
    planes: int = 1,
) -> None:  # fmt: skip
    """The clock of last use, and whether it was brought ahead, of slots."""
    num_items, num_slots = _sizes(of, planes)
    place = num_items + num_slots + slots.loaded.number
    now = jnp.zeros_like(slots.loaded.number) + clock
    pltriton.store(of["table"].at[layer, place], now, mask=used)
    flag = jnp.full_like(slots.loaded.number, ahead)
    pltriton.store(of["table"].at[layer, place + num_slots], flag, mask=used)


def _use_of(of: Refs, layer: jax.Array, local: jax.Array, column: int, planes: int = 1) -> Any:
    """The clock of last use (0) of local slots [P], or whether they were brought ahead (1).

    Where there is none the place is beyond the end, which no other element has.
    """
    table, (num_items, num_slots) = of["table"], _sizes(of, planes)
    first = num_items + (1 + column) * num_slots
    return table.at[layer, jnp.where(local >= 0, first + local, table.shape[1])]


def load_ahead(of: Refs, layer: jax.Array, local: jax.Array, planes: int = 1) -> jax.Array:
    """bool[P], whether what is in local slots was brought ahead; -1: none."""
    return pltriton.load(_use_of(of, layer, local, 1, planes), mask=local >= 0, other=0) != 0


def store_use_at(of: Refs, layer: jax.Array, local: jax.Array, clock: jax.Array) -> None:
    """The clock of last use of local slots [P], -1: none; what was brought ahead is used."""
    now = jnp.zeros_like(local) + clock
    pltriton.store(_use_of(of, layer, local, 0), now, mask=local >= 0)
    pltriton.store(_use_of(of, layer, local, 1), jnp.zeros_like(local), mask=local >= 0)


def load_events(of: Refs, layer: jax.Array) -> jax.Array:
    """int32[K], the counts of a layer."""
    events = of["events"]
    lanes = padded_iota(events.shape[1])
    return pltriton.load(events.at[layer, lanes], mask=lanes < events.shape[1], other=0)


def store_events(of: Refs, layer: jax.Array, total: jax.Array, amounts: Mapping[str, Any]) -> None:
    """Writes the counts of a layer with these added."""
    events = of["events"]
    lanes = padded_iota(events.shape[1])
    for name, amount in amounts.items():
        total = jnp.where(lanes == COLUMNS[name], total + amount, total)
    pltriton.store(events.at[layer, lanes], total, mask=lanes < events.shape[1])


def _shares(total: jax.Array, number: int) -> list[jax.Array]:
    """The sums that were added up in one, the first in the lowest bits."""
    return [(total >> np.int32(10 * i)) & np.int32(SHARE - 1) for i in range(number)]


def together(*masks: jax.Array) -> list[jax.Array]:
    """How many are set of each of up to three masks of a shape: one reduction."""
    packed = sum(mask.astype(jnp.int32) << np.int32(10 * i) for i, mask in enumerate(masks))
    return _shares(jnp.sum(jnp.asarray(packed)), len(masks))


def store_jobs(of: Refs, size: int, order: jax.Array, row: jax.Array, place: jax.Array) -> None:
    """Writes the jobs: rows and places by order, where it is not negative."""
    jobs = padded_iota(size)
    match = matches(jobs, order)
    pltriton.store(of["rows"].at[jobs], pick(match, row[None, :], 1), mask=jobs < size)
    pltriton.store(of["slots"].at[jobs], pick(match, place[None, :], 1), mask=jobs < size)
