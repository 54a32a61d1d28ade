"""Training state, the compiled step, and its checkpoints."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.transformer import Transformer, flat_weights, model_definition
from scripts.demo_training.batches import CropSource, sample_crops
from scripts.demo_training.objective import Metrics, Objective, Weights, batch_loss
from scripts.demo_training.optimizer import (
    OptimizerConfig,
    decay_progress,
    from_views,
    make_optimizer,
    rate_factor,
    to_views,
)


class TrainState(NamedTuple):
    """Everything that a step changes; a checkpoint holds exactly this."""

    step: jax.Array  # int32 scalar, steps taken
    views: Weights  # float32 master weights in `matrix_views` shapes
    optimizer: Any  # of the optax transformation


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Static description of a training step."""

    model: ModelConfig
    objective: Objective
    optimizer: OptimizerConfig
    batch_size: int  # B
    context: int  # T
    mixture: tuple[float, ...]  # share of each stream until the decay begins; sums to 1
    final_mixture: tuple[float, ...]  # share at the last step; moves there with the decay
    seed: int


def initial_state(config: StepConfig) -> TrainState:
    """Random weights by seed, and a fresh optimiser."""
    model = Transformer(config.model, rngs=nnx.Rngs(config.seed))
    views = to_views(flat_weights(model), config.model)
    optimizer = make_optimizer(config.optimizer, config.model)
    return TrainState(jnp.zeros((), jnp.int32), views, optimizer.init(views))


def make_step(
    config: StepConfig,
) -> Callable[[TrainState, CropSource], tuple[TrainState, Metrics, jax.Array]]:
    """Compiles one step: crops, gradients, update. The old state is donated.

    The randomness of step n depends on the seed and n alone, so a resumed run repeats an
    uninterrupted one. Returns the new state, the metrics and the learning rate's factor.
    """
    optimizer = make_optimizer(config.optimizer, config.model)
    definition = model_definition(config.model)
    start = jnp.asarray(config.mixture, jnp.float32)
    end = jnp.asarray(config.final_mixture, jnp.float32)

    def loss(views: Weights, crops: jax.Array, key: jax.Array) -> tuple[jax.Array, Metrics]:
        weights = from_views(views, config.model)
        return batch_loss(weights, definition, config.model, config.objective, crops, key)

    def step(state: TrainState, source: CropSource) -> tuple[TrainState, Metrics, jax.Array]:
        # The hardware generator: Threefry would cost as much as the products that dropout follows.
        key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), state.step)
        crop_key, dropout_key = jax.random.split(key)
        mixture = start + (end - start) * decay_progress(config.optimizer, state.step)
        crops = sample_crops(
            crop_key, source, mixture, num_crops=config.batch_size, crop_length=config.context + 1
        )
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(
            state.views, crops, dropout_key
        )
        factor = rate_factor(config.optimizer, state.step)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes weak and strong types
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.views)
            views = optax.apply_updates(state.views, updates)
        return TrainState(state.step + 1, views, optimizer_state), metrics, factor

    return jax.jit(step, donate_argnums=0)


class CheckpointStore:
    """Orbax checkpoints of a `TrainState` by step; the newest two are kept."""

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def save(self, state: TrainState) -> None:
        """Writes the state under its step, and waits for the disk."""
        step = int(state.step)
        if step != self._manager.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state._asdict()))
            self._manager.wait_until_finished()

    def restore_latest(self, like: TrainState) -> TrainState | None:
        """The newest state, or None; MoejaxError if it does not fit the model or the optimiser."""
        step = self._manager.latest_step()
        if step is None:
            return None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        except (ValueError, KeyError) as error:
            raise MoejaxError(
                f"checkpoint {step} in {self._manager.directory} does not fit this config: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return TrainState(**found)

    def close(self) -> None:
        """Releases orbax's threads."""
        self._manager.close()
