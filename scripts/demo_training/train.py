"""Trains the demo model; resumes from its newest checkpoint.

    python -m scripts.demo_training.train --config=configs/train_demo.py --data=demo_data \
        --run_dir=demo_run

`--data` is what `prepare_data` wrote. The run directory receives orbax checkpoints, log.jsonl
(one JSON object a line), loss.png and, when it stops, weights.safetensors: the flat weights in
bfloat16. `--time_budget_s` stops early, after a checkpoint; the same command goes on.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import safetensors.flax
from absl import app, flags, logging
from ml_collections import config_flags

from moejax.errors import MoejaxError
from moejax.models.attention import AttentionImpl
from moejax.models.config import ModelConfig
from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training import plotting
from scripts.demo_training.batches import crop_source
from scripts.demo_training.loop import Clock, JsonLog, Run
from scripts.demo_training.objective import Metrics, Objective, Weights
from scripts.demo_training.optimizer import OptimizerConfig, from_views, num_parameters
from scripts.demo_training.scoring import Scorer, Windows, cut_windows, make_scorer, score_windows
from scripts.demo_training.trainer import (
    CheckpointStore,
    StepConfig,
    TrainState,
    initial_state,
    make_step,
)

_CONFIG = config_flags.DEFINE_config_file("config", None, "the experiment", lock_config=True)
_DATA = flags.DEFINE_string("data", None, "packed corpus", required=True)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "checkpoints, log and weights", required=True)
_TIME_BUDGET_S = flags.DEFINE_float("time_budget_s", 0.0, "stop after so long; 0: never")

VALIDATION_BATCH = 16


def model_config(config: ml_collections.ConfigDict) -> ModelConfig:
    """The model that the experiment asks for."""
    return ModelConfig.from_fields(config.model.to_dict())


def step_config(config: ml_collections.ConfigDict, streams: list[str]) -> StepConfig:
    """The static part of the step; MoejaxError where the mixtures do not sum to 1."""
    on_gpu = jax.default_backend() == "gpu"
    auto: AttentionImpl = "cudnn" if on_gpu and config.dtype == "bfloat16" else "xla"
    mixtures = {}
    for name in ("mixture", "final_mixture"):
        mixtures[name] = tuple(float(config[name][stream]) for stream in streams)
        if abs(sum(mixtures[name]) - 1.0) > 1e-6:
            raise MoejaxError(f"{name} sums to {sum(mixtures[name])}, not to 1")
    return StepConfig(
        model=model_config(config),
        objective=Objective(
            dtype=jnp.dtype(config.dtype),
            attention=auto if config.attention == "auto" else config.attention,
            dropout=config.dropout,
            balance_coefficient=config.balance_coefficient,
            z_coefficient=config.z_coefficient,
        ),
        optimizer=OptimizerConfig(total_steps=config.total_steps, **config.optimizer.to_dict()),
        batch_size=config.batch_size,
        context=config.context,
        seed=config.seed,
        **mixtures,
    )


class Validator:
    """Held-out bits per byte by stream, and of a piece of the training text for comparison."""

    def __init__(
        self, corpus: corpus_lib.Corpus, config: ml_collections.ConfigDict, scorer: Scorer
    ):
        held_out = [name for name in corpus.streams if name.startswith("valid/")]
        self._windows: dict[str, Windows] = {}
        self._bytes_per_token: dict[str, float] = {}
        for name in [*held_out, "wikitext", "books"]:
            ids = corpus.stream(name)[: config.validation_tokens]
            self._windows[name] = cut_windows(ids, config.context, config.context)
            stream = corpus.streams[name]
            self._bytes_per_token[name] = stream.num_bytes / stream.length
        self._scorer = scorer

    def __call__(self, weights: Weights) -> dict[str, float]:
        """Bits per byte by stream, by its mean token length; training text under `train/`."""
        results = {}
        for name, windows in self._windows.items():
            score = score_windows(self._scorer, weights, windows, batch_size=VALIDATION_BATCH)
            key = name if "/" in name else f"train/{name}"
            results[key] = score.bits / score.num_targets / self._bytes_per_token[name]
        return {key: round(value, 4) for key, value in results.items()}


def train(config: ml_collections.ConfigDict, data: Path, run_dir: Path, budget_s: float) -> bool:
    """Runs until the last step or the end of the budget; returns whether the run is complete."""
    clock = Clock(budget_s)
    run_dir.mkdir(parents=True, exist_ok=True)
    corpus = corpus_lib.read_corpus(data)
    streams = [name for name in corpus.train_names() if name in config.mixture]
    steps = step_config(config, streams)
    source = crop_source(corpus, streams, steps.context + 1)
    validate = Validator(
        corpus, config, make_scorer(steps.model, steps.objective.dtype, steps.objective.attention)
    )
    log, store = JsonLog(run_dir / "log.jsonl"), CheckpointStore(run_dir / "checkpoints")
    run = Run(config, clock, log, store)
    state: TrainState = initial_state(steps)
    state = store.restore_latest(state) or state
    take_step = make_step(steps)
    run.start(state, num_parameters(steps.model))

    def take(state: TrainState) -> tuple[TrainState, Metrics, dict[str, Any]]:
        state, metrics, factor = take_step(state, source)
        return state, metrics, {"rate_factor": factor}

    def weights_of(state: TrainState) -> Weights:
        return from_views(state.views, steps.model)

    state = run.take_steps(
        state, take, lambda state: {"bits_per_byte": validate(weights_of(state))}
    )
    half = {name: leaf.astype(jnp.bfloat16) for name, leaf in weights_of(state).items()}
    safetensors.flax.save_file(half, run_dir / "weights.safetensors")
    complete = run.stop(state)
    if not plotting.draw_loss_curve(run_dir / "log.jsonl", run_dir / "loss.png"):
        logging.warning("no loss.png: matplotlib is not installed")
    return complete


def main(argv: list[str]) -> None:
    """Trains by the flags."""
    del argv
    logging.set_verbosity(logging.WARNING)  # orbax tells every file that it writes
    train(_CONFIG.value, Path(_DATA.value), Path(_RUN_DIR.value), _TIME_BUDGET_S.value)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
