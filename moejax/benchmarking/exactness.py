"""How far a policy's model is from the exact one on tokens of the prompts, beside its times."""

import sys
from collections.abc import Sequence

import numpy as np

from moejax.benchmarking.figures import Figure, Figures
from moejax.errors import MoejaxError
from moejax.evaluation import fidelity
from moejax.inference.runner import Runner

MAX_PROMPTS = 4  # whose predictions are kept: a float32 a token and word of the vocabulary


def samples_of(prompts: Sequence[list[int]], share: float) -> list[fidelity.Sample]:
    """Some prompts, spread over all of them, and random tokens of each.

    Args:
      prompts: token ids.
      share: of a prompt's tokens, above 0; at most `fidelity.POSITIONS`, at least one.

    Raises:
      MoejaxError: no prompt has two tokens.
    """
    long = [prompt for prompt in prompts if len(prompt) > 1]
    if not long:
        raise MoejaxError("fidelity_share needs a prompt of two tokens or more")
    places = np.linspace(0, len(long) - 1, min(MAX_PROMPTS, len(long))).astype(int)
    found = []
    for seed, prompt in enumerate(long[place] for place in dict.fromkeys(places.tolist())):
        at_most = min(share, fidelity.POSITIONS / (len(prompt) - 1))
        found.append(fidelity.sample_answer(prompt, 1, at_most, seed))
    return found


def predicted(runner: Runner, samples: Sequence[fidelity.Sample]) -> np.ndarray:
    """float32[P, V], log-probabilities of all samples, read as prompts."""
    rows = [fidelity.predictions(runner.logits, sample) for sample in samples]
    return np.concatenate(rows).astype(np.float32)


def figures_of(exact: np.ndarray, policy: np.ndarray) -> Figures:
    """Of what both models `predicted`."""
    found = fidelity.compare(exact.astype(np.float64), policy.astype(np.float64))
    return {
        "KL of the exact model": Figure(found.mean_kl, "nats a token"),
        "largest KL of the exact model": Figure(found.largest_kl, "nats"),
        "same likeliest token": Figure(100 * found.same_choice, f"% of {found.num_tokens} tokens"),
    }


def say_unmeasured(error: MoejaxError) -> None:
    """On stderr: times stand without it."""
    print(f"the KL of the exact model was not measured: {error}", file=sys.stderr, flush=True)
