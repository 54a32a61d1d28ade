"""Experts whose weights are read as they are packed, by `pallas_kernels.grouped_dequant_matmul`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig
from moejax.models.expert_products import ExpertStacks, Pairs, combine, products_grouped
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Weight
from pallas_kernels import grouped_dequant_matmul
from pallas_kernels.target import Choice


def experts_grouped(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: Index,
    token_mask: jax.Array,
    implementation: str,
) -> jax.Array:
    """Runs packed experts by the grouped kernel; M E slots of one tier.

    y_n = sum_a w[n, a] down_e(silu(gate_e x_n) * up_e x_n), e = ids[n, a].

    Args:
      x: [N, D].
      ids: int32[N, A], the experts of each token.
      weights: float32[N, A], theirs in the sum.
      gate_up: [M, E, 2F, D].
      down: [M, E, D, F].
      layer: index among the sparse layers.
      token_mask: bool[N], False for padding, which costs nothing and yields zero.
      implementation: a kernel's name; see `choose_grouped`.

    Returns:
      [N, D] in `x.dtype`.
    """
    if (reason := _kernel_refusal((gate_up, down))) is not None:
        raise ValueError(f"the grouped kernel refuses: {reason}")
    pairs = Pairs(ids, jnp.broadcast_to(token_mask[:, None], ids.shape))
    products = products_grouped(x, pairs, ExpertStacks(gate_up, down, layer), implementation)
    return combine(products, pairs, weights, x.dtype)


def _kernel_refusal(experts: Sequence[Weight]) -> str | None:
    return "; ".join(dict.fromkeys(filter(None, map(ops.kernel_refusal, experts)))) or None


def choose_grouped(
    num_tokens: int,
    config: ModelConfig,
    dtype: jnp.dtype,
    experts: Sequence[Weight],
    kernels: ops.Kernels,
) -> Choice:
    """Chooses the grouped kernel's implementation for packed or plain experts.

    Args:
      experts: `moe.gate_up` and `moe.down`.

    Returns:
      `ops.DEQUANTIZED` with the reasons where none serves.
    """
    return choose_for_tiers(num_tokens, config, dtype, [experts], kernels)


def choose_for_tiers(
    num_tokens: int,
    config: ModelConfig,
    dtype: jnp.dtype,
    tiers: Sequence[Sequence[Weight]],
    kernels: ops.Kernels,
) -> Choice:
    """Chooses the grouped kernel for a layer whose experts have several precisions.

    Args:
      tiers: `moe.gate_up` and `moe.down` of each tier.
    """
    if reason := _kernel_refusal([weight for experts in tiers for weight in experts]):
        return Choice(ops.DEQUANTIZED, {"every kernel": reason})
    if kernels.implementation:
        return Choice(kernels.implementation, {})
    if kernels.target is None:
        return Choice(ops.DEQUANTIZED, {"every kernel": "no target was named"})
    x = jax.ShapeDtypeStruct((num_tokens, config.model_dim), dtype)
    shapes = [[jax.eval_shape(ops.operands, weight) for weight in experts] for experts in tiers]
    chosen = grouped_dequant_matmul.OPERATION.choose(
        x,
        config.experts_per_token,
        [gate_up.weights for gate_up, _ in shapes],
        [down.weights for _, down in shapes],
        [operands.low_rank for experts in shapes for operands in experts],
        target=kernels.target,
    )
    return ops.kernel_or_dequantized(chosen)
