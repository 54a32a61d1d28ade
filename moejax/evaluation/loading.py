"""The engine of an evaluation."""

from pathlib import Path
from typing import TYPE_CHECKING

from absl import logging

from moejax.config.commands import EvaluateConfig, MemoryConfig
from moejax.config.loading import say
from moejax.experts.machine import let_jax_pin

if TYPE_CHECKING:  # importing the engine imports JAX, which --help and mistakes need not wait for
    from moejax.engine import Engine
    from moejax.experts.tiering import Tiering


def load_engine(config: EvaluateConfig, directory: Path, policy: "Tiering | None") -> "Engine":
    """The engine of a configuration; without a policy, the exact one."""
    from moejax.engine import PLANNED_CONTEXT, Engine
    from moejax.experts.tiering import verify_all

    moves = policy is not None or config.memory != MemoryConfig()
    if moves and (said := let_jax_pin(config.platform)):
        logging.warning("%s", said)
    if config.verify:
        say(*verify_all(str(directory), config.memory.disk_path, policy))
    return Engine.from_pretrained(
        directory,
        dtype=config.dtype,
        platform=config.platform,
        compilation_cache=config.compilation_cache,
        limits=config.memory.limits() if config.memory != MemoryConfig() else None,
        policy=policy,
        batch=config.num_rows(),
        generation_config=False,
        context=config.window if config.window > PLANNED_CONTEXT else 0,
    )
