"""Loop of a training run: steps, its log, checkpoints, a budget of time."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from scripts.demo_training.trainer import CheckpointStore, TrainState


class JsonLog:
    """Appends JSON objects to a file, one a line, and shows them."""

    def __init__(self, path: Path):
        self._file = path.open("a")

    def write(self, **fields: Any) -> None:
        """Writes one line."""
        line = json.dumps(fields)
        self._file.write(line + "\n")
        self._file.flush()
        print(line, flush=True)


class Clock:
    """Seconds of this process, and the limit on them; 0: none."""

    def __init__(self, budget_s: float):
        self._began, self._budget_s = time.monotonic(), budget_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began in this process."""
        return time.monotonic() - self._began

    def is_out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return bool(self._budget_s) and self.elapsed_s > self._budget_s


class Run(NamedTuple):
    """Config, clock, log and checkpoints of a run."""

    # total_steps, batch_size, context, and how often what is done
    config: ml_collections.ConfigDict
    clock: Clock
    log: JsonLog
    store: CheckpointStore

    def start(self, state: TrainState, num_parameters: int) -> None:
        """Logs the start."""
        self.log.write(
            event="start", step=int(state.step), device=jax.devices()[0].device_kind,
            jax=jax.__version__, parameters=num_parameters,
            loaded_s=round(self.clock.elapsed_s, 1),
            config=json.loads(self.config.to_json_best_effort()),
        )  # fmt: skip

    def take_steps(
        self,
        state: TrainState,
        take: Callable[[TrainState], tuple[TrainState, NamedTuple, dict[str, Any]]],
        validate: Callable[[TrainState], dict[str, Any]],
    ) -> TrainState:
        """Takes steps until the last one or the end of the budget, then saves.

        Args:
          take: one step: the state after it, its metrics, and more numbers for the log.
          validate: numbers for the log.
        """
        config, log, clock = self.config, self.log, self.clock
        first = step = int(state.step)
        tokens_per_step = config.batch_size * config.context
        rows: list[NamedTuple] = []
        marked = saved = time.monotonic()
        while step < config.total_steps and not clock.is_out_of_time():
            state, metrics, more = take(state)
            step += 1
            rows.append(metrics)
            if step == first + 1:
                jax.block_until_ready(state)
                log.write(event="compiled", step=step, elapsed_s=round(clock.elapsed_s, 1))
                marked = time.monotonic()
            is_last = step == config.total_steps
            if step % config.log_every == 0 or is_last:
                means = _means(rows)
                now = time.monotonic()
                log.write(
                    event="train", step=step, total_steps=config.total_steps,
                    tokens=step * tokens_per_step, **means,
                    **{name: round(float(value), 7) for name, value in more.items()},
                    tokens_per_s=round(len(rows) * tokens_per_step / (now - marked)),
                    elapsed_s=round(clock.elapsed_s, 1),
                )  # fmt: skip
                rows, marked = [], now
                if now - saved > config.checkpoint_every_s and not is_last:
                    self.store.save(state)
                    saved = marked = time.monotonic()
            if step % config.validate_every == 0 or is_last:
                log.write(event="valid", step=step, **validate(state))
                marked = time.monotonic()
        self.store.save(state)
        self.store.close()
        return state

    def stop(self, state: TrainState) -> bool:
        """Logs the end, and returns whether the run is complete."""
        complete = int(state.step) >= self.config.total_steps
        self.log.write(
            event="stop", step=int(state.step), complete=complete,
            elapsed_s=round(self.clock.elapsed_s, 1),
        )  # fmt: skip
        return complete


def _means(rows: Sequence[NamedTuple]) -> dict[str, float]:
    """Means over steps, on the host."""
    stacked = jax.device_get(jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves)), *rows))
    return {name: round(float(value), 5) for name, value in stacked._asdict().items()}
