"""Loads a configuration's engine, and its trace recorder; imports JAX when needed."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax import cli
from moejax.config.commands import EvaluateConfig, GenerateConfig, MemoryConfig
from moejax.errors import MoejaxError, print_stderr
from moejax.experts.machine import raise_pinned_limit
from moejax.inference import report

if TYPE_CHECKING:
    from moejax.engine import Engine
    from moejax.experts.tiering import Tiering


def load_engine(config: GenerateConfig, num_prompts: int = 1, *, running: bool = False) -> "Engine":
    """Loads the engine that generates; prints on stderr where compiled programs are kept."""
    import jax

    engine = _load(
        config, config.checkpoint, config.policy.tiering(), batch=num_prompts,
        running=running, context=config.context, generation_config=config.generation_config,
    )  # fmt: skip
    print_stderr(
        f"compilation cache: {jax.config.values['jax_compilation_cache_dir'] or 'off'}",
        f"loaded {config.checkpoint} on {engine.devices_text} in {engine.load_seconds:.2f} s",
        f"weights: {engine.weights_summary}",
        *report.placement(engine.budget),
        *filter(None, [engine.host_text]),
    )
    return engine


def load_scoring_engine(
    config: EvaluateConfig, directory: Path, policy: "Tiering | None"
) -> "Engine":
    """Loads the engine that scores texts; without a policy, the exact one."""
    from moejax.engine import PLANNED_CONTEXT

    context = config.window if config.window > PLANNED_CONTEXT else 0
    return _load(
        config, str(directory), policy, batch=config.num_rows(), context=context,
        generation_config=False,
    )  # fmt: skip


def _load(
    config: GenerateConfig | EvaluateConfig,
    checkpoint: str,
    policy: "Tiering | None",
    **arguments: Any,
) -> "Engine":
    from moejax.engine import Engine
    from moejax.experts.tiering import verify_all

    limits = config.memory.limits() if config.memory != MemoryConfig() else None
    if (policy or limits) and (said := raise_pinned_limit(config.platform)):
        print_stderr(said)
    if config.verify:
        print_stderr(*verify_all(checkpoint, config.memory.disk_path, policy))
    engine = Engine.from_pretrained(
        checkpoint, dtype=config.dtype, platform=config.platform, policy=policy, limits=limits,
        compilation_cache=config.compilation_cache, read_bits=config.read_bits,
        mesh=config.mesh, **arguments,
    )  # fmt: skip
    if engine.tokenizer is None:
        raise MoejaxError(f"{config.checkpoint} has no tokenizer.json: add the original model's")
    return engine


def check_recorded(config: GenerateConfig | EvaluateConfig) -> None:
    """Raises MoejaxError if the configured trace cannot be written, before the run."""
    if config.record_trace:
        from moejax.routing.trace import check_place

        check_place(cli.user_path(config.record_trace))


def recorded(
    engine: "Engine", config: GenerateConfig | EvaluateConfig, text: str = ""
) -> contextlib.AbstractContextManager[Any]:
    """Records the routing of the calls inside, if the configuration names a file for a trace."""
    if not config.record_trace:
        return contextlib.nullcontext()
    from moejax.inference.recorder import facts

    return engine.recording(
        cli.user_path(config.record_trace),
        about=facts(config.checkpoint, text),
        foreseen=config.record_foreseen,
        probabilities=config.record_probabilities,
        importance=config.record_importance,
    )
