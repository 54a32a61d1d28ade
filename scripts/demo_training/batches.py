"""Random crops of the packed corpus, drawn on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from scripts.demo_training.corpus import Corpus


class CropSource(NamedTuple):
    """The corpus as the sampler sees it: the tokens and, for every training stream, its place."""

    tokens: jax.Array  # uint16[N]
    starts: jax.Array  # int32[S]
    lengths: jax.Array  # int32[S]


def crop_source(corpus: Corpus, names: list[str], crop_length: int) -> CropSource:
    """Puts the training streams `names` on the default device, in that order.

    Raises:
      MoejaxError: a stream is unknown or shorter than one crop.
    """
    parts = [corpus.stream(name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if len(part) <= crop_length:
            raise MoejaxError(f"stream {name!r} has {len(part)} tokens, a crop takes {crop_length}")
    lengths = np.array([len(part) for part in parts], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    return CropSource(jnp.asarray(np.concatenate(parts)), jnp.asarray(starts), jnp.asarray(lengths))


def sample_crops(
    key: jax.Array, source: CropSource, mixture: jax.Array, *, num_crops: int, crop_length: int
) -> jax.Array:
    """Draws crops at uniform places; every batch holds each stream in its share (stratified).

    Args:
      key: a typed PRNG key.
      source: the streams.
      mixture: float32[S], the share of each stream; sums to 1.
      num_crops: B.
      crop_length: T.

    Returns:
      int32[B, T].
    """
    pick_key, place_key = jax.random.split(key)
    shift = jax.random.uniform(pick_key, (), jnp.float32)
    points = (jnp.arange(num_crops, dtype=jnp.float32) + shift) / num_crops
    stream_ids = jnp.sum(points[:, None] >= jnp.cumsum(mixture)[None, :-1], axis=1)
    room = source.lengths[stream_ids] - crop_length
    places = source.starts[stream_ids] + jax.random.randint(place_key, (num_crops,), 0, room)
    positions = places[:, None] + jnp.arange(crop_length, dtype=jnp.int32)[None]
    return source.tokens[positions].astype(jnp.int32)
