"""The public call: which implementation runs, and why one is refused."""

import jax
import jax.numpy as jnp

from pallas_kernels.router_topk import triton
from pallas_kernels.router_topk.reference import top_k_reference
from pallas_kernels.target import SIMULATED, Choice, Target, current_target

Operand = jax.Array | jax.ShapeDtypeStruct
Found = tuple[jax.Array, jax.Array, jax.Array]
IMPLEMENTATIONS = ("triton", "reference")  # in order of preference; the reference refuses nothing


def refusal(
    implementation: str, logits: Operand, k: int, target: Target | None = None
) -> str | None:
    """Why an implementation cannot serve operands of these shapes on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      logits: [N, E].
      k: how many are chosen.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    return triton.refusal(logits, k, target or current_target())


def choose(logits: Operand, k: int, target: Target | None = None) -> Choice:
    """The kernel, or the reference and why the kernel refuses."""
    reason = refusal("triton", logits, k, target)
    return Choice("triton", {}) if reason is None else Choice("reference", {"triton": reason})


def top_k(
    logits: jax.Array,
    k: int,
    normalise: bool,
    *,
    first: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Found:
    """p = softmax(logits), and the k largest of each row (Shazeer et al. 2017, eq. 3-5).

    The chosen are those of `jax.lax.top_k` of the returned p: of equal ones the lowest id comes
    first. Shazeer et al. take the softmax of the k largest logits: that is p of the chosen, divided
    by its sum. A row with a NaN, with +inf or of -inf alone is NaN, and its ids are the lowest.

    Args:
      logits: float32[N, E].
      k: in 1..E; static.
      normalise: the weights are divided by their sum; static.
      first: int32[], the id of the first expert, such as its place among all layers' experts; None
        for 0.
      implementation: "triton" or "reference"; None for `choose`'s.
      interpret: runs the kernel on the CPU, for tests.

    Returns:
      p, float32[N, E]; the weights of the chosen, float32[N, k], by falling p; their ids,
      int32[N, k], of different experts, in first..first + E - 1.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    _check(logits, k)
    chosen = implementation or choose(logits, k).implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if chosen == "reference":
        return top_k_reference(logits, k, normalise, first)
    target = SIMULATED if interpret else current_target()
    if reason := refusal(chosen, logits, k, target):
        raise ValueError(f"router_topk by {chosen} refuses: {reason}")
    return triton.top_k_triton(logits, first, k=k, normalise=normalise, interpret=interpret)


def _check(logits: jax.Array, k: int) -> None:
    if logits.ndim != 2 or logits.dtype != jnp.float32 or not logits.size:
        raise ValueError(f"logits are {logits.dtype}{logits.shape}, not float32[N, E] of some rows")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k {k} is not in 1..{logits.shape[1]}")
