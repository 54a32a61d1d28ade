"""Trains the study model's experts; resumes from its newest checkpoint.

    python -m scripts.studies.study_model.train --config=configs/train_study_model.py \
        --parent=PARENT --corpus=CORPUS --run_dir=RUN  # gpu

`--corpus` is what `prepare_data` wrote. The run directory receives orbax checkpoints, log.jsonl,
schedule.json (the number of steps, chosen once), `model` and `parent_as_experts`: Hugging Face
directories, the second one the dense parent in the same family. `--time_budget_s` stops early,
after a checkpoint; the same command goes on. Exit status 3: stopped, not complete.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from moejax.files.whole import write_json
from moejax.models.hf.config import read_json
from scripts.demo_training.corpus import read_corpus
from scripts.demo_training.json_log import JsonLog, mean_metrics
from scripts.demo_training.objective import Weights
from scripts.demo_training.optimizer import OptimizerConfig, num_parameters, rate_factor
from scripts.demo_training.trainer import CheckpointStore, TrainState
from scripts.studies.study_model.distillation import Metrics, Parts, initial_state, make_step
from scripts.studies.study_model.experiment import Experiment, open_experiment
from scripts.studies.study_model.measure import Meter, make_meter, measure_stream

_CONFIG = config_flags.DEFINE_config_file("config", None, "the experiment", lock_config=True)
_PARENT = flags.DEFINE_string("parent", None, "Hugging Face directory of the parent", required=True)
_CORPUS = flags.DEFINE_string("corpus", None, "packed text", required=True)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "checkpoints, log and models", required=True)
_TIME_BUDGET_S = flags.DEFINE_float("time_budget_s", 0.0, "stop after so long; 0: never")

UNFINISHED = 3  # exit status of a run that stopped for its budget


def schedule(config: ml_collections.ConfigDict, total_steps: int) -> OptimizerConfig:
    """Warm-up, stable, linear decay to zero over so many steps, for `rate_factor`."""
    return OptimizerConfig(
        name="adamw",
        learning_rate=config.learning_rate,
        adam_learning_rate=config.learning_rate,
        weight_decay=0.0,
        adam_b2=config.adam_b2,
        max_grad_norm=config.max_grad_norm,
        warmup_steps=config.warmup_steps,
        decay_fraction=config.decay_fraction,
        total_steps=total_steps,
    )


def validate(
    experiment: Experiment, meter: Meter, trained: Weights, parts: Parts
) -> dict[str, Any]:
    """Divergence and cross entropy by held-out stream, use and likeness of experts."""
    found: dict[str, Any] = {"divergence": {}, "cross_entropy": {}, "top_quarter_later": {}}
    cosines = []
    for name in (name for name in experiment.corpus.streams if "/" in name):
        measures = measure_stream(
            meter,
            trained,
            parts,
            experiment.corpus.stream(name)[: experiment.config.validation_tokens],
            context=experiment.step.context,
        )
        top = measures.top_quarter()
        found["divergence"][name] = round(measures.divergence, 4)
        found["cross_entropy"][name] = round(measures.cross_entropy, 4)
        found["top_quarter_later"][name] = round(float(top[len(top) // 2 :].mean()), 4)
        cosines.append(measures.cosines.mean(axis=0))
    replica, other = sum(cosines) / len(cosines)
    return found | {"replica_cosine": round(replica, 4), "other_cosine": round(other, 4)}


class Run:
    """The loop's state on the host: what is known of time and of the number of steps."""

    def __init__(self, config: ml_collections.ConfigDict, run_dir: Path, budget_s: float):
        self.began = time.monotonic()
        self.budget_s = budget_s
        self.config = config
        self.path = run_dir / "schedule.json"
        self.total_steps: int = self.config.total_steps
        if not self.total_steps and self.path.is_file():
            self.total_steps = int(read_json(self.path)["total_steps"])

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process began the run."""
        return time.monotonic() - self.began

    def is_out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return bool(self.budget_s) and self.elapsed_s > self.budget_s

    def choose_steps(self, step_s: float) -> None:
        """Fits the number of steps to the minutes, and keeps it for whoever resumes."""
        self.total_steps = max(self.config.warmup_steps + 1, int(self.config.minutes * 60 / step_s))
        write_json(self.path, {"total_steps": self.total_steps, "measured_step_s": step_s})

    def rate(self, step: int) -> jax.Array:
        """Learning rate of a step; the warm-up does not depend on the number of steps."""
        config = schedule(self.config, self.total_steps or 10**9)
        return jnp.float32(config.learning_rate) * rate_factor(config, jnp.int32(step))


def _loop(
    experiment: Experiment,
    run: Run,
    log: JsonLog,
    store: CheckpointStore,
    state: TrainState,
    parts: Parts,
    meter: Meter,
) -> TrainState:
    """Takes steps until the last one or the end of the budget."""
    config, step, taken = experiment.config, int(state.step), 0
    take_step, source = make_step(experiment.step), experiment.source()
    tokens_per_step = experiment.step.batch_size * experiment.step.context
    rows: list[Metrics] = []
    marked = saved = time.monotonic()
    while (not run.total_steps or step < run.total_steps) and not run.is_out_of_time():
        rate = run.rate(step)
        state, metrics = take_step(state, parts, source, rate)
        step, taken = step + 1, taken + 1
        rows.append(metrics)
        if taken == 1:
            jax.block_until_ready(state)
            log.write(event="compiled", step=step, elapsed_s=round(run.elapsed_s, 1))
            marked = time.monotonic()
        if not run.total_steps and taken == 1 + config.timed_steps:
            jax.block_until_ready(state)
            run.choose_steps((time.monotonic() - marked) / config.timed_steps)
        is_last = step == run.total_steps
        if step % config.log_every == 0 or is_last:
            means = mean_metrics(rows)
            now = time.monotonic()
            log.write(
                event="train",
                step=step,
                total_steps=run.total_steps,
                tokens=step * tokens_per_step,
                **means,
                rate=round(float(rate), 7),
                tokens_per_s=round(len(rows) * tokens_per_step / (now - marked)),
                elapsed_s=round(run.elapsed_s, 1),
            )
            rows, marked = [], now
            if now - saved > config.checkpoint_every_s and not is_last:
                store.save(state)
                saved = marked = time.monotonic()
        if step % config.validate_every == 0 or is_last:
            log.write(event="valid", step=step, **validate(experiment, meter, state.views, parts))
            marked = time.monotonic()
    return state


def train(
    config: ml_collections.ConfigDict, parent: Path, corpus: Path, run_dir: Path, budget_s: float
) -> bool:
    """Runs until the last step or the end of the budget; returns whether the run is complete."""
    run_dir.mkdir(parents=True, exist_ok=True)
    run = Run(config, run_dir, budget_s)
    experiment = open_experiment(config, parent, read_corpus(corpus))
    log = JsonLog(run_dir / "log.jsonl")
    parts, steps = experiment.parts(), experiment.step
    store = CheckpointStore(run_dir / "checkpoints")
    start: TrainState = initial_state(steps, experiment.trained(parts))
    state = store.restore_latest(start) or start
    del start  # else its memory would stay in use
    meter = make_meter(steps.student, steps.parent, steps.dtype, steps.attention)
    log.write(
        event="start",
        step=int(state.step),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        parameters=num_parameters(steps.student),
        loaded_s=round(run.elapsed_s, 1),
        config=json.loads(config.to_json_best_effort()),
    )
    if not int(state.step):
        log.write(event="valid", step=0, **validate(experiment, meter, state.views, parts))
    state = _loop(experiment, run, log, store, state, parts, meter)
    store.save(state)
    store.close()
    complete = int(state.step) >= run.total_steps > 0
    if complete:
        experiment.save(run_dir / "model", state.views)
        experiment.save(run_dir / "parent_as_experts", {}, is_parent=True)
    log.write(
        event="stop", step=int(state.step), complete=complete, elapsed_s=round(run.elapsed_s, 1)
    )
    return complete


def main(argv: list[str]) -> None:
    """Trains by the flags."""
    del argv
    logging.set_verbosity(logging.WARNING)  # orbax tells every file that it writes
    parent, corpus, run_dir = (Path(of.value) for of in (_PARENT, _CORPUS, _RUN_DIR))
    if not train(_CONFIG.value, parent, corpus, run_dir, _TIME_BUDGET_S.value):
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
