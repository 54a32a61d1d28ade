"""Caches of a model: preallocated, donated to every step, updated in place."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig, Pages


class KVCache(NamedTuple):
    """Keys and values of the layers that attend; slot s of a sequence holds its position s.

    A sequence's slots lie in one piece, or with a `table` in pages: slot s is slot s % S of page
    `table[b, s // S]`. Page 0 belongs to nobody and stays zero.

    In latent attention (K = 1) a key is the rotated key that all heads share, and a value is the
    latent from which keys and values of the heads are computed.

    Delta rule layers have a state instead: it holds a sequence up to its last token, has no slots,
    and cannot forget a token.

    Invariants:
      * `keys` and `values` have one dtype and shapes [U, B, K, S, C] that differ in C at most; in
        pages B is their number and S their slots;
      * a slot beyond a sequence's length may hold any finite number: readers mask by position;
      * a position is written before it is first read;
      * `states` is float32[G, B, value heads, key dim, value dim], and `tails` [G, B, W - 1,
        channels] the last inputs of the convolution, of a fresh sequence zeros; None without G.
    """

    keys: jax.Array
    values: jax.Array
    states: jax.Array | None = None
    tails: jax.Array | None = None
    table: jax.Array | None = None  # int32[B, n], pages of each sequence; 0 where it has none

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.keys.shape[1] if self.table is None else self.table.shape[0]

    @property
    def length(self) -> int:
        """Slots of a sequence."""
        return self.keys.shape[3] * (1 if self.table is None else self.table.shape[1])

    def lane(self, index: jax.Array, pages: jax.Array, length: jax.Array, spare: int) -> "KVCache":
        """Copies a sequence's tokens out of pages to a cache of its own; zeros follow.

        Args:
          index: int32[], the sequence whose state goes with them.
          pages: int32[n], the first ones, where they are.
          length: int32[], tokens that are copied; of a state all of them, or none.
          spare: static, more slots: a chunk's padding may be written beyond the last one.
        """
        num_slots = len(pages) * self.keys.shape[3]
        kept = (jnp.arange(num_slots, dtype=jnp.int32) < length)[None, None, None, :, None]

        def slots(leaf: jax.Array) -> jax.Array:
            found = leaf.at[:, pages].get(mode="promise_in_bounds").swapaxes(1, 2)
            found = found.reshape(len(leaf), 1, leaf.shape[2], -1, leaf.shape[4])
            # A slot behind them may hold what is not finite, of a prompt that failed.
            own = jnp.where(kept, found, jnp.zeros((), leaf.dtype))
            return jnp.pad(own, [(0, 0)] * 3 + [(0, spare), (0, 0)])

        def state(leaf: jax.Array | None) -> jax.Array | None:
            if leaf is None:
                return None
            own = jax.lax.dynamic_slice_in_dim(leaf, index, 1, axis=1)
            return jnp.where(length > 0, own, jnp.zeros((), leaf.dtype))

        return KVCache(slots(self.keys), slots(self.values), state(self.states), state(self.tails))

    def with_lane(
        self, index: jax.Array, pages: jax.Array, start: jax.Array, size: int, own: "KVCache"
    ) -> "KVCache":
        """Replaces slots of a sequence by `size` of a `lane` from position `start` on.

        The page in which they begin is replaced from its own beginning.

        Args:
          index: int32[].
          pages: int32[n], those of the sequence from now on.
          size: static.
        """
        assert self.table is not None
        num_pages, _, width = self.keys.shape[1:4]
        num_own = min(len(pages), own.keys.shape[3] // width)
        count = min(num_own, -(-(size - 1) // width) + 1)
        first = jnp.minimum(start // width, num_own - count)
        numbers = first + jnp.arange(count, dtype=jnp.int32)
        into = jax.lax.dynamic_slice_in_dim(pages, first, count)
        is_written = (numbers >= start // width) & (into > 0)
        into = jnp.where(is_written, into, num_pages + numbers)

        def slots(leaf: jax.Array, new: jax.Array) -> jax.Array:
            new = jax.lax.dynamic_slice_in_dim(new, first * width, count * width, axis=3)
            new = new.reshape(len(leaf), leaf.shape[2], count, *leaf.shape[3:]).swapaxes(1, 2)
            return leaf.at[:, into].set(new, mode="drop", unique_indices=True)

        def state(leaf: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
            if leaf is None or new is None:
                return None
            return jax.lax.dynamic_update_slice_in_dim(leaf, new, index, axis=1)

        return KVCache(
            slots(self.keys, own.keys), slots(self.values, own.values),
            state(self.states, own.states), state(self.tails, own.tails),
            self.table.at[index].set(pages),
        )  # fmt: skip

    def without_pages(self, pages: jax.Array) -> "KVCache":
        """Fills pages int32[n] with zeros, which may hold what is not finite."""

        def slots(leaf: jax.Array) -> jax.Array:
            return leaf.at[:, pages].set(0, mode="promise_in_bounds")

        return self._replace(keys=slots(self.keys), values=slots(self.values))

    def write_chunk(
        self,
        layer: int | jax.Array,
        keys: jax.Array,  # [B, T, K, C]; `start + T <= S`, or XLA would move the write
        values: jax.Array,  # [B, T, K, C]
        start: jax.Array,  # int32[]
        *,
        is_for_cpu: bool = False,  # XLA writes in place there as it stands (jax 0.10.2)
    ) -> "KVCache":
        """Writes T consecutive positions from `start` on, the same for all sequences."""
        zero = jnp.zeros_like(start)

        def write(cache: jax.Array, new: jax.Array) -> jax.Array:
            block = new.swapaxes(1, 2)[None].astype(cache.dtype)
            if isinstance(layer, int) or is_for_cpu:
                return jax.lax.dynamic_update_slice(cache, block, (layer, zero, zero, start, zero))
            # Slots and their numbers as one axis: in a loop over layers XLA would else choose a
            # layout in which the block needs no transposing, and copy the cache into it and back.
            # (Where layers are unrolled, one axis makes it copy.)
            whole, part = (a.reshape(*a.shape[:3], -1) for a in (cache, block))
            index = (jnp.full_like(start, layer), zero, zero, start * cache.shape[-1])
            return jax.lax.dynamic_update_slice(whole, part, index).reshape(cache.shape)

        return self._replace(keys=write(self.keys, keys), values=write(self.values, values))

    def write_token(
        self, layer: int | jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
    ) -> "KVCache":
        """Writes one position of each sequence; a position outside the cache is dropped.

        Args:
          keys: [B, 1, K, C].
        """
        rows, slots = jnp.arange(self.batch_size, dtype=positions.dtype), positions
        if self.table is not None:
            size = self.keys.shape[3]
            slots = positions % size
            found = self.table.at[rows, positions // size]
            rows = found.get(mode="fill", fill_value=self.keys.shape[1])

        def write(cache: jax.Array, new: jax.Array) -> jax.Array:
            token = new[:, 0].astype(cache.dtype)
            return cache.at[layer, rows, :, slots].set(token, mode="drop")

        return self._replace(keys=write(self.keys, keys), values=write(self.values, values))

    def read(self, layer: int | jax.Array, kv_length: int) -> tuple[jax.Array, jax.Array]:
        """The first `kv_length` slots of a layer: two [B, K, kv_length, C]."""
        if self.table is None:
            return self.keys[layer, :, :, :kv_length], self.values[layer, :, :, :kv_length]
        pages = self.table[:, : -(-kv_length // self.keys.shape[3])]

        def slots(leaf: jax.Array) -> jax.Array:
            # Without bounds to check, a decode step of the demo takes as long as by slots in one
            # piece; with them 4 % longer (2 cores, jax 0.10.2, 2026-11-26).
            found = leaf.at[layer, pages].get(mode="promise_in_bounds").swapaxes(1, 2)
            return found.reshape(*found.shape[:2], -1, leaf.shape[4])[:, :, :kv_length]

        return slots(self.keys), slots(self.values)

    def state_of(self, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """State and tail of a delta rule layer: [B, heads, key dim, value dim], [B, W - 1, ...]."""
        assert self.states is not None and self.tails is not None
        return self.states[layer], self.tails[layer]

    def with_state(self, layer: int | jax.Array, state: jax.Array, tail: jax.Array) -> "KVCache":
        """Replaces a delta rule layer's state and tail.

        A scatter, though a layer is contiguous. When a slice is updated, XLA on a CPU notices that
        the next layer's state did not change, reads it from before the update, and therefore copies
        the states of all layers (jax 0.10.2 and 0.11.2; on a GPU either form is in place).
        """
        assert self.states is not None and self.tails is not None

        def write(cache: jax.Array, new: jax.Array) -> jax.Array:
            rows, parts = (jnp.arange(size, dtype=jnp.int32) for size in new.shape[:2])
            at = cache.at[layer, rows[:, None], parts[None]]
            return at.set(new.astype(cache.dtype), unique_indices=True)

        return self._replace(states=write(self.states, state), tails=write(self.tails, tail))


def cache_shape(config: ModelConfig, batch_size: int, length: int) -> tuple[int, ...]:
    """Shape of the cached keys, [U, B, K, S, C]."""
    layers, width = len(config.attention_layers), config.cached_dims[0]
    return (layers, batch_size, config.cached_heads, length, width)


def empty_cache(
    config: ModelConfig, batch_size: int, length: int, dtype: jnp.dtype, pages: Pages | None = None
) -> KVCache:
    """Allocates zeros for `batch_size` sequences of up to `length` positions, perhaps in pages."""
    table, shape = None, cache_shape(config, batch_size, length)
    if pages is not None:
        shape = cache_shape(config, 1 + pages.number, pages.size)
        table = jnp.zeros((batch_size, pages.of(length)), jnp.int32)
    keys, values = (jnp.zeros((*shape[:-1], width), dtype) for width in config.cached_dims)
    if config.delta_net is None:
        return KVCache(keys, values, table=table)
    of = config.delta_net
    lead = (len(of.layers), batch_size)
    states = jnp.zeros((*lead, of.num_value_heads, of.key_dim, of.value_dim), jnp.float32)
    tails = jnp.zeros((*lead, of.conv_width - 1, of.conv_dim), dtype)
    return KVCache(keys, values, states, tails, table)
