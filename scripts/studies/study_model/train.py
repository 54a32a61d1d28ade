"""Trains the study model's experts; resumes from its newest checkpoint.

    python -m scripts.studies.study_model.train --config=configs/train_study_model.py \
        --parent=PARENT --corpus=CORPUS --run_dir=RUN  # gpu

`--corpus` is what `prepare_data` wrote. The run directory receives orbax checkpoints, log.jsonl,
`model` and `parent_as_experts`: Hugging Face directories, the second one the dense parent in the
same family. `--time_budget_s` stops early,
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


def schedule(config: ml_collections.ConfigDict) -> OptimizerConfig:
    """Warm-up, stable, linear decay to zero, for `rate_factor`."""
    return OptimizerConfig(
        name="adamw",
        learning_rate=config.learning_rate,
        adam_learning_rate=config.learning_rate,
        weight_decay=0.0,
        adam_b2=config.adam_b2,
        max_grad_norm=config.max_grad_norm,
        warmup_steps=config.warmup_steps,
        decay_fraction=config.decay_fraction,
        total_steps=config.total_steps,
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


class Clock:
    """Seconds of this process, and the limit on them."""

    def __init__(self, budget_s: float):
        self._began = time.monotonic()
        self._budget_s = budget_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began in this process."""
        return time.monotonic() - self._began

    def is_out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return bool(self._budget_s) and self.elapsed_s > self._budget_s


def _loop(
    experiment: Experiment,
    clock: Clock,
    log: JsonLog,
    store: CheckpointStore,
    state: TrainState,
    parts: Parts,
    meter: Meter,
) -> TrainState:
    """Takes steps until the last one or the end of the budget."""
    config, step = experiment.config, int(state.step)
    first = step
    take_step, source = make_step(experiment.step), experiment.source()
    tokens_per_step = experiment.step.batch_size * experiment.step.context
    rows: list[Metrics] = []
    marked = saved = time.monotonic()
    rates = schedule(config)
    while step < config.total_steps and not clock.is_out_of_time():
        rate = config.learning_rate * rate_factor(rates, jnp.int32(step))
        state, metrics = take_step(state, parts, source, rate)
        step += 1
        rows.append(metrics)
        if step == first + 1:
            jax.block_until_ready(state)
            log.write(event="compiled", step=step, elapsed_s=round(clock.elapsed_s, 1))
            marked = time.monotonic()
        is_last = step == config.total_steps
        if step % config.log_every == 0 or is_last:
            means = mean_metrics(rows)
            now = time.monotonic()
            log.write(
                event="train",
                step=step,
                total_steps=config.total_steps,
                tokens=step * tokens_per_step,
                **means,
                rate=round(float(rate), 7),
                tokens_per_s=round(len(rows) * tokens_per_step / (now - marked)),
                elapsed_s=round(clock.elapsed_s, 1),
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
    clock = Clock(budget_s)
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
        loaded_s=round(clock.elapsed_s, 1),
        config=json.loads(config.to_json_best_effort()),
    )
    if not int(state.step):
        log.write(event="valid", step=0, **validate(experiment, meter, state.views, parts))
    state = _loop(experiment, clock, log, store, state, parts, meter)
    store.save(state)
    store.close()
    complete = int(state.step) >= config.total_steps
    if complete:
        experiment.save(run_dir / "model", state.views)
        experiment.save(run_dir / "parent_as_experts", {}, is_parent=True)
    log.write(
        event="stop", step=int(state.step), complete=complete, elapsed_s=round(clock.elapsed_s, 1)
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
