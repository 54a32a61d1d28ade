"""Fidelity of a policy's model: KL divergence from the exact one on sampled tokens."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moejax.config.commands import GenerateConfig, MemoryConfig
from moejax.errors import MoejaxError
from moejax.text.windows import Windowing

if TYPE_CHECKING:
    from moejax.engine import Engine

_POSITIONS = 64  # of a window, at most
_MAX_PROMPTS = 4  # whose predictions are kept: a float32 a token and word of the vocabulary

Logits = Callable[[np.ndarray], np.ndarray]  # int32[1, T] to float32[1, T, V]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Windows int32[n, T] of a text, and the compared positions of each."""

    tokens: np.ndarray
    positions: np.ndarray  # int32[n, P]

    @property
    def num_tokens(self) -> int:
        """Number of compared predictions."""
        return self.positions.size


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Divergence of a policy's predictions from the exact model's, over a sample's tokens."""

    mean_kl: float  # nats, of exact p and policy's q: sum p log(p / q)
    largest_kl: float  # the largest of one token
    same_choice: float  # share of tokens whose likeliest next token is the same
    num_tokens: int  # tokens compared

    def describe(self) -> str:
        """Describes the result in a line."""
        return (
            f"KL of the exact model to this one {self.mean_kl:.4f} nats a token (largest "
            f"{self.largest_kl:.3f}), the same likeliest token in {100 * self.same_choice:.1f} % "
            f"of {self.num_tokens} tokens"
        )


def sample(ids: Sequence[int], windowing: Windowing, share: float, seed: int = 0) -> Sample:
    """Samples a share of the windows of a stream, one at least, and random positions of each."""
    stream = np.asarray(ids, np.int32)
    length = min(windowing.window, len(stream))
    num_windows = windowing.num_windows(len(stream))
    count = max(1, math.ceil(share * num_windows))
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    rng = np.random.default_rng(seed)
    positions = [
        np.sort(rng.choice(length, min(_POSITIONS, length), replace=False)) for _ in starts
    ]
    tokens = np.stack([stream[start : start + length] for start in starts])
    return Sample(tokens, np.stack(positions).astype(np.int32))


def _sample_answer(ids: Sequence[int], num_prompt: int, share: float, seed: int = 0) -> Sample:
    """Samples random positions of a share of an answer, in one window with its prompt."""
    tokens = np.asarray(ids, np.int32)
    predicting = np.arange(max(0, num_prompt - 1), len(tokens) - 1)  # each the token after it
    count = math.ceil(share * len(predicting))
    places = np.sort(np.random.default_rng(seed).choice(predicting, count, replace=False))
    return Sample(tokens[None, :-1], places[None].astype(np.int32))


def sample_prompts(prompts: Sequence[list[int]], share: float) -> list[Sample]:
    """Some prompts, spread over all of them, and random tokens of each.

    Args:
      share: of a prompt's tokens, above 0; at most `_POSITIONS`, at least one.
    """
    long = [prompt for prompt in prompts if len(prompt) > 1]
    if not long:
        raise MoejaxError("fidelity_share needs a prompt of two tokens or more")
    places = np.linspace(0, len(long) - 1, min(_MAX_PROMPTS, len(long))).astype(int)
    found = []
    for seed, prompt in enumerate(long[place] for place in dict.fromkeys(places.tolist())):
        at_most = min(share, _POSITIONS / (len(prompt) - 1))
        found.append(_sample_answer(prompt, 1, at_most, seed))
    return found


def predictions(logits: Logits, of: Sample) -> np.ndarray:
    """Log-probabilities float64[n P, V] at the sample's positions."""
    rows = []
    for tokens, places in zip(of.tokens, of.positions, strict=True):
        found = logits(tokens[None])[0, places].astype(np.float64)
        found -= found.max(axis=-1, keepdims=True)
        rows.append(found - np.log(np.exp(found).sum(axis=-1, keepdims=True)))
    return np.concatenate(rows)


def predictions_of(logits: Logits, samples: Sequence[Sample]) -> np.ndarray:
    """Log-probabilities float32[P, V] of all samples, read as prompts."""
    return np.concatenate([predictions(logits, one) for one in samples]).astype(np.float32)


def compare(exact: np.ndarray, policy: np.ndarray) -> Fidelity:
    """Compares the `predictions` of both models on one sample."""
    kl = np.sum(np.exp(exact) * (exact - policy), axis=-1)
    same = exact.argmax(axis=-1) == policy.argmax(axis=-1)
    return Fidelity(float(kl.mean()), float(kl.max()), float(same.mean()), len(kl))


def kl_from_exact(
    config: GenerateConfig,
    engine: "Engine",
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> str:
    """KL of the exact model from this one on some tokens of its answers, read as prompts."""
    from moejax.engine import Engine

    samples = [
        _sample_answer([*prompt, *answer], len(prompt), config.fidelity_share, seed)
        for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if len(prompt) + len(answer) > 1
    ]
    if not samples:
        return "the KL of the exact model was not measured: there is no token before the answer's"
    try:  # the exact model stands beside this one: there may be no room
        own = [predictions(engine.logits, sample) for sample in samples]
        with Engine.from_pretrained(
            config.checkpoint, dtype=config.dtype, platform=config.platform,
            compilation_cache=config.compilation_cache, progress=False, generation_config=False,
            read_bits=config.read_bits, mesh=config.mesh,
            limits=config.memory.limits() if config.memory != MemoryConfig() else None,
        ) as exact:  # fmt: skip
            theirs = [predictions(exact.logits, sample) for sample in samples]
    except MoejaxError as error:
        return f"the KL of the exact model was not measured: {error}"
    return compare(np.concatenate(theirs), np.concatenate(own)).describe()
