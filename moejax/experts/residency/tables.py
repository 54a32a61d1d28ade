"""Tables of a cache: its sizes, and the residency of every slot."""

import dataclasses
from typing import Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_plan.reference import Row

Layer = int | jax.Array  # int or int32[], 0 <= layer < M


class Counter(Protocol):
    """Counter of a layer's events: `moejax.experts.ledger.Counts`."""

    def add(self, layer: Layer, **amounts: jax.Array | int) -> Self:
        """Adds to events of a layer, by name."""
        ...

    def add_everywhere(self, **amounts: jax.Array | int) -> Self:
        """Adds to events of every layer, int32[M] or of each the same."""
        ...


Counts = TypeVar("Counts", bound=Counter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Static sizes of a cache.

    `banks`: arrays that the layers' slots lie in, layer l in bank l mod `banks`. A slot's global
    number counts within its bank, which has the same number of slots as the others: with two, what
    is copied into the next layer's slots touches no array that this layer's products read.
    """

    num_layers: int  # M
    num_experts: int  # E
    slots: int  # C, 0 for no cache
    transient: int  # B
    banks: int = 1

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_slots(self) -> int:
        """Slots of a bank, S."""
        return self.first_transient + self.transient

    @property
    def first_transient(self) -> int:
        """First transient slot: ceil(M / banks) C."""
        return -(-self.num_layers // self.banks) * self.slots

    def has(self, layer: int, expert: int) -> bool:
        """Whether the layer and the expert exist."""
        return 0 <= layer < self.num_layers and 0 <= expert < self.num_experts

    def check(self) -> None:
        """Raises ValueError naming the size that is not possible."""
        if self.num_layers < 1 or self.num_experts < 1:
            raise ValueError(f"{self.num_layers} layers of {self.num_experts} experts")
        if not 0 <= self.slots <= self.num_experts:
            raise ValueError(f"{self.slots} slots for {self.num_experts} experts of a layer")
        if self.transient < 1:
            raise ValueError(f"{self.transient} transient slots; at least 1")
        if self.banks < 1:
            raise ValueError(f"{self.banks} banks; at least 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residency:
    """Residency of every layer's slots; donated through steps with the pools.

    `table` int32[M, E + 3 C] has, of each layer, the columns that the properties of these names
    return; `clock` int32[] counts the steps of layers from 1 on and may wrap; `num_experts` is E.

    Invariants (`check`): `slot_of` and `owner` are inverse to each other; a slot without an owner
    is not `prefetched`.
    """

    table: jax.Array
    clock: jax.Array
    num_experts: int = dataclasses.field(metadata={"static": True})

    @property
    def slot_of(self) -> jax.Array:
        """int32[M, E], local slot of an expert."""
        return self._rows.slot_of

    @property
    def owner(self) -> jax.Array:
        """int32[M, C], expert of a slot; -1 if it is free."""
        return self._rows.owner

    @property
    def last_use(self) -> jax.Array:
        """int32[M, C], clock of the last use; 0 never."""
        return self._rows.last_use

    @property
    def prefetched(self) -> jax.Array:
        """bool[M, C], brought by a prediction or a bulk transfer and not used yet."""
        return self._rows.prefetched

    @property
    def _rows(self) -> Row:
        return Row.of(self.table, self.num_experts)

    def check(self, spec: CacheSpec) -> None:
        """Raises ValueError naming the invariant that does not hold; for concrete arrays."""
        num_layers, num_experts, slots = spec.num_layers, spec.num_experts, spec.slots
        shapes = {
            "table": (np.int32, (num_layers, num_experts + 3 * slots)),
            "clock": (np.int32, ()),
        }
        for name, (dtype, shape) in shapes.items():
            leaf = getattr(self, name)
            if leaf.dtype != dtype or leaf.shape != shape:
                wanted = f"{np.dtype(dtype).name}{shape}"
                raise ValueError(f"{name} is {leaf.dtype}{leaf.shape}, expected {wanted}")
        owner, slots_of, prefetched = map(np.asarray, (self.owner, self.slot_of, self.prefetched))
        for layer in range(num_layers):
            experts = owner[layer][owner[layer] != -1]
            if len(set(experts.tolist())) != len(experts):
                raise ValueError(f"layer {layer}: an expert is twice in owner")
            if len(experts) and not 0 <= experts.min() <= experts.max() < num_experts:
                raise ValueError(f"layer {layer}: owner has no expert of the layer")
            slot_of = np.full(num_experts, -1)
            used = owner[layer] >= 0
            slot_of[owner[layer][used]] = np.flatnonzero(used)
            if not np.array_equal(slot_of, slots_of[layer]):
                raise ValueError(f"layer {layer}: slot_of is not the inverse of owner")
            if (~used & prefetched[layer]).any():
                raise ValueError(f"layer {layer}: a slot without an owner is prefetched")


def empty(spec: CacheSpec) -> Residency:
    """Returns tables with nothing resident."""
    return seeded(spec, np.zeros((spec.num_layers, 0), np.int32))


def seeded(spec: CacheSpec, experts: np.ndarray | jax.Array) -> Residency:
    """Returns tables of a warm start: local slot c of layer l owns experts[l, c].

    Args:
      experts: int32[M, n], n <= C, different ones in a row.

    Raises:
      ValueError: they do not fit.
    """
    given = np.asarray(experts)
    if given.ndim != 2 or given.shape[0] != spec.num_layers or given.shape[1] > spec.slots:
        raise ValueError(
            f"experts of shape {given.shape} for {spec.num_layers} layers of {spec.slots} slots"
        )
    if given.size and not 0 <= given.min() <= given.max() < spec.num_experts:
        raise ValueError(f"an expert that is none of {spec.num_experts}")
    if (np.diff(np.sort(given, axis=1), axis=1) == 0).any():
        raise ValueError("an expert stands twice in a layer")
    slot_of = np.full((spec.num_layers, spec.num_experts), -1, np.int32)
    owner = np.full((spec.num_layers, spec.slots), -1, np.int32)
    owner[:, : given.shape[1]] = given
    slots = np.broadcast_to(np.arange(given.shape[1], dtype=np.int32), given.shape)
    np.put_along_axis(slot_of, given.astype(np.int64), slots, axis=1)
    unset = np.zeros_like(owner)
    table = np.concatenate([slot_of, owner, unset, unset], axis=1)
    return Residency(jnp.asarray(table), jnp.asarray(1, jnp.int32), spec.num_experts)


def first_slot(spec: CacheSpec, layer: Layer) -> jax.Array:
    """int32[], the global slot of a layer's local slot 0."""
    return jnp.asarray(layer, jnp.int32) // spec.banks * spec.slots
