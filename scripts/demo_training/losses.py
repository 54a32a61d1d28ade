"""The terms of the training objective."""

import functools

import jax
import jax.numpy as jnp

HEAD_CHUNK_TOKENS = 32768


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    return x.reshape(x.shape[0] // chunk, chunk, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def head_loss(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    scale: jax.Array,
    z_coefficient: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy through the vocabulary matrix without keeping logits.

    Sum over tokens of scale * (log Z - logit[target]), and of scale * z * (log Z)^2 (Chowdhery et
    al. 2022, section 5). The forward pass computes the gradients chunk by chunk, since they need
    the same logits.

    Args:
      hidden: [N, D], N a multiple of `chunk`.
      head: [V, D].
      targets: int32[N].
      scale: float32[N], 0 where a target does not count; not differentiated.
      z_coefficient: z.
      chunk: tokens whose logits exist at once.

    Returns:
      Two float32 scalars: cross entropy in nats, z-loss.
    """
    return _head_loss_forward(hidden, head, targets, scale, z_coefficient, chunk)[0]


def _head_loss_forward(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    scale: jax.Array,
    z_coefficient: float,
    chunk: int,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array],
        inputs: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        total, total_z, head_grad = carry
        x, target, weight = inputs
        logits = jnp.einsum("nd,vd->nv", x, head, preferred_element_type=jnp.float32)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        hit = target[:, None] == jnp.arange(head.shape[0], dtype=jnp.int32)[None]
        picked = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
        loss = jnp.sum((log_z - picked) * weight)
        z_loss = z_coefficient * jnp.sum(jnp.square(log_z) * weight)
        slope = (1.0 + 2.0 * z_coefficient * log_z)[:, None]
        grad = jnp.exp(logits - log_z[:, None]) * slope - hit.astype(jnp.float32)
        grad = (grad * weight[:, None]).astype(x.dtype)
        x_grad = jnp.einsum("nv,vd->nd", grad, head)
        head_grad += jnp.einsum("nv,nd->vd", grad, x, preferred_element_type=jnp.float32)
        return (total + loss, total_z + z_loss, head_grad), x_grad

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(head.shape, jnp.float32))
    xs = (_chunks(hidden, chunk), _chunks(targets, chunk), _chunks(scale, chunk))
    (total, total_z, head_grad), hidden_grad = jax.lax.scan(step, start, xs)
    grads = (hidden_grad.reshape(hidden.shape), head_grad.astype(head.dtype))
    return (total, total_z), grads


def _head_loss_backward(
    z_coefficient: float,
    chunk: int,
    grads: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    # Both outputs enter the objective with the same factor, so one factor serves.
    del z_coefficient, chunk
    hidden_grad, head_grad = grads
    factor = cotangents[0]
    return (
        hidden_grad * factor.astype(hidden_grad.dtype),
        head_grad * factor.astype(head_grad.dtype),
        None,
        None,
    )


head_loss.defvjp(_head_loss_forward, _head_loss_backward)


def balance_loss(probabilities: jax.Array, expert_ids: jax.Array) -> jax.Array:
    """E * sum_e f_e P_e over the whole batch, mean over layers (Fedus et al. 2021, eq. 4).

    f_e is the share of assignments that expert e received, P_e its mean probability. The whole
    batch mixes every domain, so a domain may load few experts as long as the mixture loads all (Qiu
    et al. 2025, "Demons in the detail").

    Args:
      probabilities: float32[M, N, E].
      expert_ids: int32[M, N, A].

    Returns:
      float32 scalar, 1 when balanced.
    """
    num_experts = probabilities.shape[-1]
    share = expert_share(expert_ids, num_experts)
    mean_probability = jnp.mean(probabilities, axis=1)
    return num_experts * jnp.mean(jnp.sum(share * mean_probability, axis=-1))


def expert_counts(expert_ids: jax.Array, num_experts: int, token_mask: jax.Array) -> jax.Array:
    """Assignments of unmasked tokens an expert: int32[M, N, A], bool[N] to float32[M, E]."""
    experts = jnp.arange(num_experts, dtype=jnp.int32)[None, None, None]
    chosen = (expert_ids[..., None] == experts) & token_mask[None, :, None, None]
    return jnp.sum(chosen, axis=(1, 2), dtype=jnp.float32)


def expert_share(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """Share of all assignments that each expert received: int32[M, N, A] to float32[M, E]."""
    _, num_tokens, width = expert_ids.shape
    counts = expert_counts(expert_ids, num_experts, jnp.ones(num_tokens, bool))
    return counts / (num_tokens * width)
