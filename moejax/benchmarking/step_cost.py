"""Bytes that a decode step must read, and the experts that it chooses."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from moejax.devices import REPLICATED, specs_of
from moejax.inference import steps
from moejax.inference.runner import Runner, Session
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import ResidentExperts, Routing
from moejax.models.transformer import ChunkSpec, merge_weights
from moejax.weights.handed_out import OwnExperts


def floor_bytes(
    config: ModelConfig,
    weights_nbytes: Mapping[str, int],  # of its leaves on a device, those of experts or not
    *,
    experts_nbytes: float,  # of the distinct experts that the step's tokens chose, over all layers
    positions: float,  # of the cache that are read, summed over the sequences
    itemsize: int,  # bytes of a number of the cache
    batch: int,  # sequences, each of which has states
) -> float:
    """Least bytes that a device reads in a decode step: dense leaves, chosen experts, the cache.

    Codes, scales and zeros count; of embeddings that are not the head, nothing does. States of
    layers without attention are read and written.
    """
    dense = sum(
        nbytes
        for name, nbytes in weights_nbytes.items()
        if name not in EXPERT_LEAVES and (name != "embed" or config.tied_embeddings)
    )
    a_position = config.cached_values * itemsize
    wide, plain = config.state_values
    states = 2 * batch * (4 * wide + plain * itemsize)
    return dense + experts_nbytes + a_position * positions + states


def distinct_experts(runner: Runner, session: Session, spec: ChunkSpec) -> float:
    """Experts of a layer that one decode step of a session reads, the mean over layers.

    The routing of the next step is counted on the device. The session, after a prefill or some
    steps, is used up: its cache is donated.
    """
    definition = runner._program.definition

    def count(
        state: steps.DecodeState, weights: steps.Weights, own: jax.Array | None
    ) -> tuple[steps.DecodeState, jax.Array]:
        model = merge_weights(definition, weights)
        num_experts = runner.config.num_experts

        def num_chosen(x: jax.Array, routing: Routing) -> jax.Array:
            return jnp.sum(jnp.zeros(num_experts, jnp.int32).at[routing.ids.reshape(-1)].max(1))

        cache, _, _, counts = model(
            state.tokens[:, None], state.positions[:, None], ~state.done[:, None], state.cache,
            spec,
            ResidentExperts(
                model.moe, spec.experts, num_chosen, None if own is None else OwnExperts(own)
            ),
        )  # fmt: skip
        mean = jnp.mean(counts.astype(jnp.float32))
        return dataclasses.replace(state, cache=cache), mean

    operands = session.state, runner.weights, runner._own_experts
    program = count
    if runner.mesh is not None:
        program = runner.mesh.map(count, operands, (specs_of(session.state), REPLICATED))
    _, mean = jax.jit(program, donate_argnums=0)(*operands)
    return float(mean)
