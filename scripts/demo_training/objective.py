"""The model's training forward pass and the loss of a batch."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.errors import MoejaxError
from moejax.models.attention import Attention, AttentionImpl, Heads, causal_attention
from moejax.models.config import ModelConfig
from moejax.models.layer_index import LayerIndex, layer_indices
from moejax.models.moe import ResidentExperts, Routing, routing_record
from moejax.models.rope import model_angles
from moejax.models.stacked import rms_norm
from moejax.models.transformer import Transformer, merge_weights
from scripts.demo_training.corpus import UNKNOWN_ID
from scripts.demo_training.losses import HEAD_CHUNK_TOKENS, balance_loss, expert_share, head_loss

Weights = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Static choices of the loss."""

    dtype: jnp.dtype  # of activations and of the weights as used; masters are float32
    attention: AttentionImpl
    dropout: float  # rate on the embedding's and every block's output
    balance_coefficient: float
    z_coefficient: float


class Metrics(NamedTuple):
    """Float32 scalars of one step, for the log."""

    cross_entropy: jax.Array  # nats a counted token
    balance: jax.Array
    z_loss: jax.Array
    min_share: jax.Array  # smallest and largest share of any expert in any layer
    max_share: jax.Array


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate`, to 1/256, and scales the others up."""
    if key is None or rate == 0.0:
        return x
    threshold = round(rate * 256)
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= jnp.uint8(threshold)
    return jnp.where(
        keep, x * jnp.asarray(256 / (256 - threshold), x.dtype), jnp.zeros((), x.dtype)
    )


def require_trainable(config: ModelConfig) -> None:
    """Raises MoejaxError unless the model is of the kind that is trained here."""
    c = config
    if c.latent or c.delta_net or c.attention_gate or c.zero_centred_norm or c.router.has_bias:
        raise MoejaxError(f"models of the family {c.family} are not trained here")


def training_forward(
    model: Transformer,
    embedded: jax.Array,
    *,
    attention: AttentionImpl,
    dropout: float,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, Routing]:
    """`transformer.forward` with dropout; the backward pass recomputes element-wise work.

    Args:
      model: a Transformer whose layers all attend, without a latent.
      embedded: [B, T, D], the tokens' embeddings.
      attention: which implementation runs causal attention.
      dropout: rate.
      dropout_key: None turns dropout off.

    Returns:
      As `transformer.forward`.
    """
    c, mixer = model.config, model.attention
    require_trainable(c)
    assert isinstance(mixer, Attention)
    batch_shape = embedded.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(batch_shape[1], dtype=jnp.int32), batch_shape)
    cos, sin = model_angles(c, positions)
    mask = jnp.ones(batch_shape, bool)
    keys: list[jax.Array | None] = [None] * (2 * c.num_layers + 1)
    if dropout_key is not None and dropout > 0.0:
        keys = list(jax.random.split(dropout_key, 2 * c.num_layers + 1))
    # Products are kept, what lies between them is cheap: SwiGLU's intermediates are the largest
    # arrays of the step, and the step is bound by memory traffic.
    keep_products = jax.checkpoint_policies.dots_saveable

    experts = ResidentExperts(model.moe, "dense", routing_record)

    def mlp(index: LayerIndex, x: jax.Array) -> tuple[jax.Array, Routing | None]:
        out, _, routing = model.mlp_block(x, index, mask, experts, None)
        return out, routing

    def project(index: LayerIndex, x: jax.Array) -> Heads:
        return mixer.project(model.mix_norm(x, index), index.mixer, cos, sin)

    mlp = jax.checkpoint(mlp, policy=keep_products, static_argnums=0)
    project = jax.checkpoint(project, policy=keep_products, static_argnums=0)
    x = _dropout(embedded, dropout, keys[-1])
    routings = []
    for layer, index in enumerate(layer_indices(c)):
        q, k, v, gate = project(index, x)
        attended = causal_attention(q, k, v, c.sliding_window, attention, c.score_scale)
        mixed = mixer.output(attended, layer, gate)
        x = x + _dropout(mixed, dropout, keys[2 * layer])
        out, routing = mlp(index, x)
        x = x + _dropout(out, dropout, keys[2 * layer + 1])
        if routing is not None:
            routings.append(routing)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)


def batch_loss(
    weights: Weights,
    definition: nnx.GraphDef[Transformer],
    config: ModelConfig,
    objective: Objective,
    crops: jax.Array,
    dropout_key: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy of next tokens, plus z-loss and load balance.

    Args:
      weights: float32 leaves named as `weight_shapes`.
      definition: of `model_definition(config)`.
      config: the model.
      objective: static choices.
      crops: int32[B, T + 1].
      dropout_key: a typed PRNG key.
    """
    cast = {name: leaf.astype(objective.dtype) for name, leaf in weights.items()}
    model = merge_weights(definition, cast)
    inputs, targets = crops[:, :-1], crops[:, 1:].reshape(-1)
    hidden, routing = training_forward(
        model,
        weights["embed"][inputs].astype(objective.dtype),  # scattered gradients add up in float32
        attention=objective.attention,
        dropout=objective.dropout,
        dropout_key=dropout_key,
    )
    hidden = rms_norm(hidden, model.final_norm[...], config.norm_eps)
    counted = (targets != UNKNOWN_ID).astype(jnp.float32)
    scale = counted / jnp.sum(counted)
    head = cast["embed"] if config.tied_embeddings else cast["head"]
    flat = hidden.reshape(-1, config.model_dim)
    chunk = math.gcd(HEAD_CHUNK_TOKENS, flat.shape[0])
    cross_entropy, z_loss = head_loss(flat, head, targets, scale, objective.z_coefficient, chunk)
    balance = balance_loss(routing.probabilities, routing.ids)
    share = expert_share(jax.lax.stop_gradient(routing.ids), config.num_experts)
    total = cross_entropy + z_loss + objective.balance_coefficient * balance
    return total, Metrics(cross_entropy, balance, z_loss, jnp.min(share), jnp.max(share))
