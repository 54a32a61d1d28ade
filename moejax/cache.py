"""The key/value cache: preallocated, donated through every step, written in place."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer; slot s of a sequence holds its position s.

    Invariants:
      * `keys` and `values` have one shape [L, B, K, S, C] and one dtype, and keep them;
      * a slot beyond a sequence's length may hold any finite number: readers mask by position;
      * a position is written before it is first read.
    """

    keys: jax.Array
    values: jax.Array

    @property
    def batch_size(self) -> int:
        """B."""
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        """S, slots of a sequence."""
        return self.keys.shape[3]

    def check(self) -> None:
        """Raises ValueError when an invariant does not hold."""
        if self.keys.shape != self.values.shape or self.keys.dtype != self.values.dtype:
            raise ValueError(
                f"keys {self.keys.dtype}{self.keys.shape} and values "
                f"{self.values.dtype}{self.values.shape} differ"
            )

    def write_chunk(
        self, layer: int | jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array
    ) -> "KVCache":
        """Writes T consecutive positions from `start` on, the same for all sequences.

        Args:
          layer: which layer.
          keys: [B, T, K, C]; `start + T <= S`, or XLA would move the write.
          values: [B, T, K, C].
          start: int32[].
        """
        zero, width = jnp.zeros_like(start), self.keys.shape[-1]
        index = (jnp.full_like(start, layer), zero, zero, start * width)

        def write(cache: jax.Array, new: jax.Array) -> jax.Array:
            block = new.swapaxes(1, 2)[None].astype(cache.dtype)
            if isinstance(layer, int):
                return jax.lax.dynamic_update_slice(cache, block, (layer, zero, zero, start, zero))
            # Slots and their numbers as one axis: in a loop over layers XLA would else choose a
            # layout in which the block needs no transposing, and copy the cache into it and back.
            # (Where layers are unrolled, one axis makes it copy.)
            whole, part = (a.reshape(*a.shape[:3], -1) for a in (cache, block))
            return jax.lax.dynamic_update_slice(whole, part, index).reshape(cache.shape)

        return KVCache(write(self.keys, keys), write(self.values, values))

    def write_token(
        self, layer: int | jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
    ) -> "KVCache":
        """Writes one position of each sequence; a position outside the cache is dropped.

        Args:
          layer: which layer.
          keys: [B, 1, K, C].
          values: [B, 1, K, C].
          positions: int32[B].
        """
        rows = jnp.arange(self.batch_size, dtype=positions.dtype)

        def write(cache: jax.Array, new: jax.Array) -> jax.Array:
            token = new[:, 0].astype(cache.dtype)
            return cache.at[layer, rows, :, positions].set(token, mode="drop")

        return KVCache(write(self.keys, keys), write(self.values, values))

    def read(self, layer: int | jax.Array, kv_length: int) -> tuple[jax.Array, jax.Array]:
        """The first `kv_length` slots of a layer: two [B, K, kv_length, C]."""
        return self.keys[layer, :, :, :kv_length], self.values[layer, :, :, :kv_length]


def cache_shape(config: ModelConfig, batch_size: int, length: int) -> tuple[int, ...]:
    """[L, B, K, S, C] of each of the two arrays."""
    return (config.num_layers, batch_size, config.num_kv_heads, length, config.head_dim)


def empty_cache(
    config: ModelConfig,
    batch_size: int,
    length: int,
    dtype: jnp.dtype,
) -> KVCache:
    """A cache of zeros for `batch_size` sequences of up to `length` positions."""
    shape = cache_shape(config, batch_size, length)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
