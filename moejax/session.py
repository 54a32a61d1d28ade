"""One batch on its way, and what of its settings the steps take."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moejax import steps
from moejax.generation import GenerationSettings
from moejax.models.config import ModelConfig
from moejax.sampling import Sampling

Put = Callable[[Any], jax.Array]  # an array of the host to the device


@dataclasses.dataclass
class Session:
    """One batch on its way: device state, and what the host knows of it without asking."""

    state: steps.DecodeState
    sampling: Sampling
    eos_ids: jax.Array
    all_greedy: bool
    next_position: int  # largest position that the next step writes
    first_tokens: jax.Array  # int32[B, 1], not waited for


def seen_tokens(
    prompts: list[list[int]], settings: GenerationSettings, config: ModelConfig, put: Put
) -> jax.Array | None:
    """bool[B, V], the tokens of each prompt; None where no penalty asks for them."""
    if settings.repetition_penalty == 1.0:
        return None
    seen = np.zeros((len(prompts), config.vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return put(seen)


def sampling_of(settings: GenerationSettings, batch: int, put: Put) -> Sampling:
    """The settings of every sequence as arrays."""

    def full(value: float, dtype: type[np.generic]) -> jax.Array:
        return put(np.full(batch, value, dtype))

    return Sampling(
        temperature=full(settings.temperature, np.float32),
        top_k=full(settings.top_k, np.int32),
        top_p=full(settings.top_p, np.float32),
        min_p=full(settings.min_p, np.float32),
        repetition_penalty=full(settings.repetition_penalty, np.float32),
    )
