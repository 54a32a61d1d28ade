"""Calibration of a small model for `demo_quantization.py`: all Hessians at once."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import ModelConfig
from moejax.quantization.pipeline.forward import LayerRun
from moejax.quantization.pipeline.quantizers import Calibration
from scripts.studies.quantizers.methods import Stack


class CalibratedModel(NamedTuple):
    """Hessians of the unquantized model's matrices, by (leaf, index)."""

    hessians: dict[tuple[str, tuple[int, ...]], jax.Array]  # float32[K, K]
    num_tokens: dict[tuple[str, tuple[int, ...]], int]
    expert_tokens: np.ndarray  # int64[M, E]

    def of_stacks(self, stacks: Sequence[Stack]) -> list[Calibration]:
        """In the order of the stacks' matrices."""
        found = []
        for stack in stacks:
            keys = [(place.leaf, place.index) for place in stack.places]
            counts = np.array([self.num_tokens[key] for key in keys], np.int32)
            hessians = jnp.stack([self.hessians[key] for key in keys])
            found.append(Calibration(hessians, jnp.asarray(counts)))
        return found

    @property
    def expert_shares(self) -> np.ndarray:
        """float64[M, E]: share of a layer's assignments that each expert got."""
        return self.expert_tokens / self.expert_tokens.sum(axis=1, keepdims=True)


def calibrate(
    config: ModelConfig, weights: Mapping[str, jax.Array], tokens: np.ndarray, device: jax.Device
) -> CalibratedModel:
    """Hessians of all attention and expert matrices on the unquantized model's activations.

    Args:
      config: of the model.
      weights: float32 leaves of `weight_shapes(config)`.
      tokens: int32[S, T].
      device: where it runs.
    """
    run = LayerRun(config, tokens, weights["embed"], dtype=jnp.float32, device=device)
    found = CalibratedModel({}, {}, np.zeros((len(config.moe_layers), config.num_experts)))
    for layer in range(config.num_layers):
        named = _layer_weights(config, weights, layer)
        captured = run.capture(named)
        wanted: list[tuple[str, tuple[int, ...], int | None]]
        wanted = [(leaf, (layer,), None) for leaf in ("attention.qkv_proj", "attention.o_proj")]
        if layer in config.moe_layers:
            i = config.moe_layers.index(layer)
            found.expert_tokens[i] = captured.expert_tokens
            wanted += [
                (leaf, (i, expert), expert)
                for leaf in ("moe.gate_up", "moe.down")
                for expert in range(config.num_experts)
            ]
        else:
            at = (config.dense_layers.index(layer),)
            wanted += [("mlp.gate_up", at, None), ("mlp.down", at, None)]
        for leaf, index, expert in wanted:
            hessian = captured.hessian(leaf, expert)
            found.hessians[leaf, index] = hessian.mean
            found.num_tokens[leaf, index] = hessian.num_tokens
        run.advance(named)
    return found


def _layer_weights(
    config: ModelConfig, weights: Mapping[str, jax.Array], layer: int
) -> dict[str, jax.Array]:
    """The leaves of one layer, without the layers' axis."""
    places = {"attention": layer, "mlp_norm": layer}
    if layer in config.moe_layers:
        places["moe"] = config.moe_layers.index(layer)
    else:
        places["mlp"] = config.dense_layers.index(layer)
    return {
        name: leaf[places[name.split(".")[0]]]
        for name, leaf in weights.items()
        if name.split(".")[0] in places
    }
