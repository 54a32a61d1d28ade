"""Public call of the buddy search, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.buddy_search import triton
from pallas_kernels.buddy_search.reference import Found, Gate, search_reference
from pallas_kernels.op import Implementation, Operation

# A choice is for A, experts a token, and H, places of a list.
OPERATION = Operation(
    "buddy_search",
    kernels=(Implementation("triton", triton.refusal, triton.search_triton),),
    reference=search_reference,
    abstract=lambda ids, lists, *_, **__: (ids.shape[1], lists.shape[2]),
)


def search(
    ids: jax.Array,
    lists: jax.Array,
    layer: int | jax.Array,
    resident: jax.Array,
    allowed: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    gate: Gate | None = None,
    replaced: jax.Array | None = None,
    *,
    last_first: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Found:
    """Runs BuddyMoE's Algorithm 1 with the budget rho (section 5.1), in list order.

    The ranks of an allowed token that passes the gate are visited in order. For each expert that is
    not resident, while the token's budget lasts, the buddy is the first listed expert that is
    resident, that the router did not choose for the token, and that replaces none of its other
    experts yet.

    Args:
      ids: int32[N, A], the router's choice, by falling weight.
      lists: int32[M, E, H], of every expert of M layers, the best first; -1 pads.
      layer: int or int32[] in 0..M - 1.
      resident: bool[E], of that layer; or int32[M, K], K >= E, of all layers, not negative if an
        expert is resident, such as `cache_plan.Tables.table`.
      allowed: bool[N] or bool[N, A], tokens or pairs whose missing experts may be replaced.
      depth: int32[], how far lists are searched.
      budget: int32[], rho, the most replacements per token.
      replaced: int32[M, E], counts to which the replaced pairs of each expert are added; donate it.
        None: no counts.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    reasons = []
    fits = allowed.shape in (ids.shape[:1], ids.shape)
    if ids.ndim != 2 or ids.dtype != jnp.int32 or not fits:
        reasons.append(f"ids are {ids.dtype}{ids.shape}, allowed {allowed.shape}")
    if lists.ndim != 3 or lists.dtype != jnp.int32 or not _is_of(resident, lists):
        reasons.append(f"lists are {lists.dtype}{lists.shape}, resident {resident.shape}")
    if allowed.dtype != jnp.bool_:
        reasons.append(f"allowed is {allowed.dtype}, not bool")
    if resident.dtype != (jnp.int32 if resident.ndim == 2 else jnp.bool_):
        reasons.append(f"resident is {resident.dtype}{resident.shape}, not bool[E] or int32[M, K]")
    counted = None if replaced is None else (replaced.shape, replaced.dtype)
    if counted not in (None, (lists.shape[:2], jnp.int32)):
        reasons.append(f"replaced is {counted}, not int32{lists.shape[:2]}")
    if gate is not None:
        shapes = ((len(ids), *lists.shape[1:2]), lists.shape[:1], (), ())
        found = tuple(array.shape for array in gate)
        if found != shapes or any(array.dtype != jnp.float32 for array in gate):
            reasons.append(f"the gate is {found}, not float32{shapes}")
    if reasons:
        raise ValueError(f"buddy_search: {'; '.join(reasons)}")
    index = jnp.asarray(layer, jnp.int32)
    given = (ids, lists, index, resident, allowed, depth, budget, gate, replaced)
    return OPERATION(
        *given, last_first=last_first, implementation=implementation, interpret=interpret
    )


def _is_of(resident: jax.Array, lists: jax.Array) -> bool:
    """Whether `resident` has the shape of one layer's experts, or of all layers' tables."""
    num_layers, num_experts = lists.shape[:2]
    if resident.ndim == 2:
        return len(resident) == num_layers and resident.shape[1] >= num_experts
    return resident.shape == (num_experts,)
