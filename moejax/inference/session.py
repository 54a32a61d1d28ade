"""A batch in flight, and its settings as arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from moejax.inference import steps
from moejax.inference.generation import GenerationSettings
from moejax.inference.sampling import Sampling
from moejax.inference.step_output import StepOutput
from moejax.models.config import ModelConfig

Put = Callable[[Any], jax.Array]  # an array of the host to the device


@dataclasses.dataclass
class Session:
    """A batch in flight: device state, and what the host knows without a read."""

    state: steps.DecodeState
    sampling: Sampling
    eos_ids: jax.Array  # int32[B, n]
    all_greedy: bool
    next_position: int  # largest position that the next step writes
    emitted: StepOutput  # of the last call, at first int32[B, 1]; not waited for
    top_logprobs: int = 0  # see `steps.Program`
    since: int = 0  # see `ExpertMemory.begin_session`

    @property
    def first_tokens(self) -> jax.Array:
        """First tokens int32[B, 1], before any decode."""
        return self.emitted.tokens


def settings_by_row(
    settings: GenerationSettings | Sequence[GenerationSettings], batch: int
) -> list[GenerationSettings]:
    """Settings per row, each with its own seed."""
    if not isinstance(settings, GenerationSettings):
        return list(settings)
    return [dataclasses.replace(settings, seed=seed) for seed in settings.seeds(batch)]


def seeds_of(rows: Sequence[GenerationSettings]) -> list[int]:
    """Seed of each row."""
    return [row.seeds(1)[0] for row in rows]


def seen_tokens(prompts: list[list[int]], config: ModelConfig, put: Put) -> jax.Array:
    """bool[B, V], the tokens of each prompt, for the repetition penalty."""
    seen = np.zeros((len(prompts), config.vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return put(seen)


def sampling_of(rows: Sequence[GenerationSettings], put: Put) -> Sampling:
    """Converts the settings of every sequence to arrays."""

    def column(name: str, dtype: type[np.generic]) -> jax.Array:
        return put(np.asarray([getattr(row, name) for row in rows], dtype))

    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
    )
