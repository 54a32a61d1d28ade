"""The engine of a configuration, and the exact one beside it; JAX is imported when needed."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moejax import report
from moejax.config.commands import GenerateConfig, MemoryConfig
from moejax.errors import MoejaxError
from moejax.experts.machine import let_jax_pin

if TYPE_CHECKING:
    from moejax.engine import Engine


def say(*lines: str) -> None:
    """Lines to stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def load_engine(config: GenerateConfig, num_prompts: int = 1) -> "Engine":
    """The engine of a configuration; says on stderr where compiled programs are kept."""
    import jax

    from moejax.engine import Engine
    from moejax.experts.tiering import verify_all

    tiering = config.policy.tiering()
    moves = tiering is not None or config.memory != MemoryConfig()
    if moves and (said := let_jax_pin(config.platform)):
        say(said)
    if config.verify:
        say(*verify_all(config.checkpoint, config.memory.disk_path, tiering))
    engine = Engine.from_pretrained(
        config.checkpoint, dtype=config.dtype, platform=config.platform, context=config.context,
        compilation_cache=config.compilation_cache, policy=tiering, batch=num_prompts,
        generation_config=config.generation_config,
        limits=config.memory.limits() if config.memory != MemoryConfig() else None,
    )  # fmt: skip
    say(
        f"compilation cache: {jax.config.values['jax_compilation_cache_dir'] or 'off'}",
        f"loaded {config.checkpoint} on {engine.device} in {engine.load_seconds:.2f} s",
        f"weights: {engine.weights_summary}",
        *report.placement(engine.budget),
    )
    return engine


def compared(
    config: GenerateConfig,
    engine: "Engine",
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> str:
    """The KL of the exact model to this one on some tokens of its answers, read as prompts."""
    import numpy as np

    from moejax.engine import Engine
    from moejax.evaluation import fidelity

    samples = [
        fidelity.sample_answer([*prompt, *answer], len(prompt), config.fidelity_share, seed)
        for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if len(prompt) + len(answer) > 1
    ]
    if not samples:
        return "the KL of the exact model was not measured: there is no token before the answer's"
    try:  # the exact model stands beside this one: there may be no room
        own = [fidelity.predictions(engine.logits, sample) for sample in samples]
        with Engine.from_pretrained(
            config.checkpoint, dtype=config.dtype, platform=config.platform,
            compilation_cache=config.compilation_cache, progress=False, generation_config=False,
            limits=config.memory.limits() if config.memory != MemoryConfig() else None,
        ) as exact:  # fmt: skip
            theirs = [fidelity.predictions(exact.logits, sample) for sample in samples]
    except MoejaxError as error:
        return f"the KL of the exact model was not measured: {error}"
    return fidelity.compare(np.concatenate(theirs), np.concatenate(own)).describe()
