"""Public call of the router's top-k, and its operation."""

import jax

from pallas_kernels.op import Implementation, Operation, check_operands
from pallas_kernels.router_topk import triton
from pallas_kernels.router_topk.reference import top_k_reference

Found = tuple[jax.Array, jax.Array, jax.Array]

# A choice is for logits [N, E] and k.
OPERATION = Operation(
    "router_topk",
    kernels=(Implementation("triton", triton.refusal, triton.top_k_triton),),
    reference=lambda logits, first, k, normalise: top_k_reference(logits, k, normalise, first),
    abstract=lambda logits, first, k, normalise: (logits, k),
)


def top_k(
    logits: jax.Array,
    k: int,
    normalise: bool,
    *,
    first: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Found:
    """Computes p = softmax(logits), and the k largest of each row (Shazeer et al. 2017).

    The choice is that of `jax.lax.top_k` on the returned p: among equal ones the lowest id comes
    first. Shazeer et al. take the softmax of the k largest logits: that is p of the chosen, divided
    by its sum. A row with a NaN, with +inf or of -inf alone is NaN, and its ids are the lowest.

    Args:
      logits: float32[N, E].
      k: in 1..E; static.
      first: int32[], id of the first expert, such as its index among all layers' experts; None for
        0.

    Returns:
      p, float32[N, E]; the weights of the chosen, float32[N, k], by falling p; their ids,
      int32[N, k], of different experts, in first..first + E - 1.
    """
    axes = check_operands("router_topk", {"logits": (logits, "float32[N, E]")})
    if not 1 <= k <= axes["E"]:
        raise ValueError(f"router_topk: k {k} is not in 1..{axes['E']}")
    return OPERATION(
        logits, first, k=k, normalise=normalise, implementation=implementation,
        interpret=interpret,
    )  # fmt: skip
