"""Attention split by heads, a share for each device of a mesh.

A share has whole key/value heads and the queries that attend to them: rows of the projection to
queries, keys and values, columns of the one to the output, whose products are summed, and its part
of the KV cache.
"""

import dataclasses
from collections.abc import Collection, Iterator

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.weights.qtensor import Weight
from moejax.weights.shares import EVERYTHING, Shares, Window

QKV, OUTPUT = "attention.qkv_proj", "attention.o_proj"
HEAD_LEAVES = (QKV, "attention.qkv_bias", OUTPUT, "attention.sinks")
# KV cache of a layer from which a decode step gains: two devices save half of its reads, 20
# microseconds at 3 TB/s, which is what one more sum of a layer takes (docs/several_gpus.md).
LEAST_CACHE_BYTES = 2**27


@dataclasses.dataclass(frozen=True)
class HeadShares:
    """Cut of a model's attention into `count` shares; `refusal` must be None."""

    config: ModelConfig
    count: int

    def refusal(self, group_size: int = 1) -> str | None:
        """Returns why there are no such shares, or None.

        `group_size`: inputs of a quantization group of the output projection.
        """
        c = self.config
        if c.latent is not None:
            return "is latent, and its heads share what the cache holds"
        if c.joint_qk_norm:
            return "normalises all heads together"
        if not c.attention_layers or c.num_kv_heads % self.count:
            return f"has {c.num_kv_heads} key/value heads, no multiple of the {self.count} devices"
        if (width := self._outputs.unit) % group_size:
            return f"has shares of {width} outputs, no multiple of the groups of {group_size}"
        return None

    @property
    def own(self) -> ModelConfig:
        """Model with the heads of one share."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        return dataclasses.replace(
            self.config, num_heads=heads // self.count, num_kv_heads=kv_heads // self.count
        )

    @property
    def _outputs(self) -> Shares:
        width = self.config.num_heads * self.config.head_dim
        return Shares(self.count, width, width // self.count)

    def take(self, leaf: str, weight: Weight, index: int) -> Weight:
        """Takes a share of one of `HEAD_LEAVES`, of numpy leaves, stacked over layers or not."""
        if leaf == OUTPUT:
            return self._outputs.down(weight, index)
        rows = np.concatenate([np.arange(*of) for of in self._rows(leaf, [index])])
        axis = -2 if leaf == QKV else -1
        found: Weight = jax.tree.map(lambda array: np.take(array, rows, axis), weight)
        return found

    def window(self, leaf: str, own: Collection[int]) -> Window:
        """Returns what the shares `own` have of a leaf."""
        if len(own) == self.count:
            return EVERYTHING
        if leaf == OUTPUT:
            return self._outputs.windows(own)[1]
        return Window(rows=tuple(self._rows(leaf, own)))

    def _rows(self, leaf: str, own: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yields the first row, and the one after the last, of queries, of keys and of values."""
        c, start = self.config, 0
        keys = c.num_kv_heads * c.head_dim
        sizes = [c.num_heads] if leaf == "attention.sinks" else [c.qkv_dim - 2 * keys, keys, keys]
        for size in sizes:
            share = size // self.count
            yield start + share * min(own), start + share * (max(own) + 1)
            start += size


def splits_heads(
    shares: HeadShares, asked: bool | None, refusal: str | None, *, batch: int, context: int,
    itemsize: int,
) -> bool:  # fmt: skip
    """Whether a mesh splits attention by heads.

    Args:
      asked: what a user says; None: it splits where a layer's KV cache has `LEAST_CACHE_BYTES`.
      refusal: why the attention cannot be split, or None.
      batch: sequences at once.
      context: slots of the KV cache of each.
      itemsize: bytes of a number of the cache.

    Raises:
      MoejaxError: it is asked for, and cannot be.
    """
    if asked and refusal:
        raise MoejaxError(
            f"mesh={shares.count},heads: attention {refusal}; leave heads out, and each device has "
            "all of it"
        )
    c = shares.config
    layer = batch * context * c.cached_values * itemsize // max(1, len(c.attention_layers))
    return refusal is None and (layer >= LEAST_CACHE_BYTES if asked is None else asked)
