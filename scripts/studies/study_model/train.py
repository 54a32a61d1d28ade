"""Trains the study model's experts; resumes from its newest checkpoint.

    python -m scripts.studies.study_model.train --config=configs/train_study_model.py \
        --parent=PARENT --corpus=CORPUS --run_dir=RUN  # gpu

`--corpus` is what `prepare_data` wrote. The run directory receives orbax checkpoints, log.jsonl,
`model` and `parent_as_experts`: Hugging Face directories, the second one the dense parent in the
same family. `--time_budget_s` stops early,
after a checkpoint; the same command goes on. Exit status 3: stopped, not complete.
"""

import sys
from pathlib import Path
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from scripts.demo_training.corpus import read_corpus
from scripts.demo_training.loop import Clock, JsonLog, Run
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
    for name, ids in experiment.held_out(experiment.config.validation_tokens):
        measures = measure_stream(meter, trained, parts, ids, context=experiment.step.context)
        top = measures.top_quarter()
        found["divergence"][name] = round(measures.divergence, 4)
        found["cross_entropy"][name] = round(measures.cross_entropy, 4)
        found["top_quarter_later"][name] = round(float(top[len(top) // 2 :].mean()), 4)
        cosines.append(measures.cosines.mean(axis=0))
    replica, other = sum(cosines) / len(cosines)
    return found | {"replica_cosine": round(replica, 4), "other_cosine": round(other, 4)}


def train(
    config: ml_collections.ConfigDict, parent: Path, corpus: Path, run_dir: Path, budget_s: float
) -> bool:
    """Runs until the last step or the end of the budget; returns whether the run is complete."""
    run_dir.mkdir(parents=True, exist_ok=True)
    clock = Clock(budget_s)
    experiment = open_experiment(config, parent, read_corpus(corpus))
    parts, steps = experiment.parts(), experiment.step
    log, store = JsonLog(run_dir / "log.jsonl"), CheckpointStore(run_dir / "checkpoints")
    run = Run(config, clock, log, store)
    start: TrainState = initial_state(steps, experiment.trained(parts))
    state = store.restore_latest(start) or start
    del start  # else its memory would stay in use
    meter = make_meter(steps.student, steps.parent, steps.dtype, steps.attention)
    run.start(state, num_parameters(steps.student))
    if not int(state.step):
        log.write(event="valid", step=0, **validate(experiment, meter, state.views, parts))
    take_step, source, rates = make_step(steps), experiment.source(), schedule(config)

    def take(state: TrainState) -> tuple[TrainState, Metrics, dict[str, Any]]:
        rate = config.learning_rate * rate_factor(rates, state.step)
        state, metrics = take_step(state, parts, source, rate)
        return state, metrics, {"rate": rate}

    state = run.take_steps(
        state, take, lambda state: validate(experiment, meter, state.views, parts)
    )
    if int(state.step) >= config.total_steps:
        experiment.save(run_dir / "model", state.views)
        experiment.save(run_dir / "parent_as_experts", {}, is_parent=True)
    return run.stop(state)


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
