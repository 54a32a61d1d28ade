"""Mixture-of-Experts language models whose experts do not fit the accelerator, in JAX."""

from moejax.engine import Engine as Engine
from moejax.errors import MoejaxError as MoejaxError
from moejax.generation import Chunk as Chunk
from moejax.generation import Generation as Generation
