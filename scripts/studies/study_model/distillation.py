"""The step that trains the experts: the parent's distribution, next tokens, balance."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from moejax.models.attention import AttentionImpl
from moejax.models.config import ModelConfig
from moejax.models.stacked import rms_norm
from moejax.models.transformer import merge_weights, model_definition
from scripts.demo_training.batches import CropSource, sample_crops
from scripts.demo_training.losses import balance_loss, expert_share
from scripts.demo_training.objective import Weights, training_forward
from scripts.demo_training.trainer import TrainState
from scripts.studies.study_model.upcycle import TRAINED

Leaf = TypeVar("Leaf")

LOGITS_TOKENS = 4096  # whose logits exist at once: 0.8 GB of float32 at a vocabulary of 49,152


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Static description of a step."""

    student: ModelConfig
    parent: ModelConfig  # as experts that all run
    dtype: jnp.dtype  # of activations and of the weights as used; trained masters are float32
    attention: AttentionImpl
    batch_size: int  # B
    context: int  # T
    mixture: tuple[float, ...]  # share of each stream in a batch; sums to 1
    parent_share: float  # weight of the parent's distribution; the rest is that of next tokens
    balance_coefficient: float
    router_rate: float  # learning rate of routers, over that of experts
    adam_b2: float
    max_grad_norm: float
    seed: int


class Metrics(NamedTuple):
    """Float32 scalars of one step, for the log."""

    divergence: jax.Array  # KL from the parent's distribution to the student's, nats a token
    cross_entropy: jax.Array  # nats a token
    balance: jax.Array
    min_share: jax.Array  # smallest and largest share of any expert in any layer
    max_share: jax.Array


class Parts(NamedTuple):
    """Weights that do not change, in the dtype of the activations."""

    shared: Weights  # leaves that student and parent have in common
    parent: Weights  # the parent's experts


def split_weights(leaves: Mapping[str, Leaf]) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """The trained leaves, and the others."""
    trained = {name: leaf for name, leaf in leaves.items() if name in TRAINED}
    return trained, {name: leaf for name, leaf in leaves.items() if name not in TRAINED}


class TokenLosses(NamedTuple):
    """Two models' predictions compared, [N]."""

    divergence: jax.Array  # float32, KL from the parent's distribution to the student's, nats
    cross_entropy: jax.Array  # float32, the student's, nats
    parent_cross_entropy: jax.Array
    agrees: jax.Array  # bool, whether both find the same token likeliest


def token_losses(
    hidden: jax.Array, parent: jax.Array, head: jax.Array, targets: jax.Array
) -> TokenLosses:
    """Compares two models' predictions through one vocabulary matrix.

    Args:
      hidden: [N, D], the student's, normed.
      parent: [N, D], likewise.
      head: [V, D].
      targets: int32[N].
    """
    logits = jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=jnp.float32)
    wanted = jnp.einsum("nd,vd->nv", parent, head, preferred_element_type=jnp.float32)
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(wanted)
    divergence = jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
    losses = [-jnp.take_along_axis(of, targets[:, None], axis=-1)[:, 0] for of in (log_p, log_q)]
    agrees = jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1)
    return TokenLosses(divergence, losses[0], losses[1], agrees)


def mean_losses(
    hidden: jax.Array, parent: jax.Array, head: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Means of `token_losses`, whose logits the backward pass computes again, part by part."""
    count = len(targets)
    part = math.gcd(LOGITS_TOKENS, count)

    @jax.checkpoint
    def sums(x: jax.Array, y: jax.Array, target: jax.Array) -> jax.Array:
        found = token_losses(x, y, head, target)
        return jnp.stack([jnp.sum(found.divergence), jnp.sum(found.cross_entropy)])

    def add(total: jax.Array, of: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + sums(*of), None

    cut = tuple(x.reshape(count // part, part, *x.shape[1:]) for x in (hidden, parent, targets))
    total, _ = jax.lax.scan(add, jnp.zeros(2, jnp.float32), cut)
    return total[0] / count, total[1] / count


def make_optimizer(step: Distillation) -> optax.GradientTransformation:
    """Adam with clipped gradients; the caller multiplies by the rate, which it may change."""
    return optax.chain(
        optax.clip_by_global_norm(step.max_grad_norm), optax.scale_by_adam(b1=0.9, b2=step.adam_b2)
    )


def initial_state(step: Distillation, trained: Weights) -> TrainState:
    """The upcycled experts and routers, float32, before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), trained, make_optimizer(step).init(trained))


def make_step(
    config: Distillation,
) -> Callable[[TrainState, Parts, CropSource, jax.Array], tuple[TrainState, Metrics]]:
    """Compiles one step of a learning rate, float32 scalar. The old state is donated.

    The randomness of step n depends on the seed and n alone. All experts run on every token, masked
    (`moe._experts_dense`): README.md compares the cost with grouped products.
    """
    optimizer = make_optimizer(config)
    definitions = model_definition(config.student), model_definition(config.parent)

    def loss(trained: Weights, parts: Parts, crops: jax.Array) -> tuple[jax.Array, Metrics]:
        cast = {name: leaf.astype(config.dtype) for name, leaf in trained.items()}
        inputs, targets = crops[:, :-1], crops[:, 1:].reshape(-1)
        embedded = parts.shared["embed"][inputs]
        hidden, routings = [], []
        for definition, experts in zip(definitions, (cast, parts.parent), strict=True):
            model = merge_weights(definition, parts.shared | experts)
            x, routing = training_forward(
                model, embedded, attention=config.attention, dropout=0.0, dropout_key=None
            )
            normed = rms_norm(x, parts.shared["final_norm"], config.student.norm_eps)
            hidden.append(normed.reshape(-1, config.student.model_dim))
            routings.append(routing)
        student, parent = hidden[0], jax.lax.stop_gradient(hidden[1])
        divergence, cross_entropy = mean_losses(student, parent, parts.shared["embed"], targets)
        routing = routings[0]
        balance = balance_loss(routing.probabilities, routing.ids)
        share = expert_share(jax.lax.stop_gradient(routing.ids), config.student.num_experts)
        total = (
            config.parent_share * divergence
            + (1.0 - config.parent_share) * cross_entropy
            + config.balance_coefficient * balance
        )
        return total, Metrics(divergence, cross_entropy, balance, jnp.min(share), jnp.max(share))

    def step(
        state: TrainState, parts: Parts, source: CropSource, rate: jax.Array
    ) -> tuple[TrainState, Metrics]:
        crops = sample_crops(
            jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), state.step),
            source,
            jnp.asarray(config.mixture, jnp.float32),
            num_crops=config.batch_size,
            crop_length=config.context + 1,
        )
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.views, parts, crops)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes weak and strong types
            updates, optimizer_state = optimizer.update(grads, state.optimizer)
        rates = {
            name: rate * (config.router_rate if name == "moe.router" else 1.0) for name in grads
        }
        trained = {name: leaf - rates[name] * updates[name] for name, leaf in state.views.items()}
        return TrainState(state.step + 1, trained, optimizer_state), metrics

    return jax.jit(step, donate_argnums=0)
