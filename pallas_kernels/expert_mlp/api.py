"""Public call of the expert MLP, and its refusals."""

import jax
import jax.numpy as jnp

from pallas_kernels.expert_mlp.tiles import Tiles, default_tiles, power_of_two_divisor
from pallas_kernels.expert_mlp.triton import expert_mlp_triton

MIN_TILE = 8


Operand = jax.Array | jax.ShapeDtypeStruct


def refusal(x: Operand, gate_up: Operand, down: Operand) -> str | None:
    """Reasons why the kernel refuses these shapes and dtypes, in one line, or None.

    Args:
      x: [N, D].
      gate_up: [M, E, 2F, D].
      down: [M, E, D, F].
    """
    reasons = []
    for name, size in (("D", x.shape[1]), ("F", down.shape[3])):
        if power_of_two_divisor(size, MIN_TILE) < MIN_TILE:
            reasons.append(f"{name}={size} is no multiple of {MIN_TILE}")
    for name, dtype in (("x", x.dtype), ("gate_up", gate_up.dtype), ("down", down.dtype)):
        if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            reasons.append(f"{name} is {dtype}, not bfloat16, float16 or float32")
    return "; ".join(reasons) or None


def expert_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    layer: int,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes sum_a weights[n, a] down_e(silu(gate_e x_n) * up_e x_n), e = ids[n, a].

    For a few tokens: every assignment reads its expert by itself. The stacked weights are indexed
    inside the kernels, nothing of them is copied. Products and sums are float32.

    Args:
      x: [N, D] in bf16, fp16 or fp32.
      ids: int32[N, A].
      weights: float32[N, A].
      gate_up: [M, E, 2F, D], gate rows first.
      down: [M, E, D, F].

    Returns:
      [N, D] in `x.dtype`.

    Raises:
      ValueError: naming every reason why the kernel refuses.
    """
    reason = refusal(x, gate_up, down)
    if reason:
        raise ValueError(f"expert_mlp refuses: {reason}")
    return expert_mlp_triton(
        x,
        ids,
        weights,
        gate_up,
        down,
        layer=layer,
        tiles=tiles or default_tiles(x.shape[1], down.shape[3]),
        interpret=interpret,
    )
