"""Public call of the buddy search, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.buddy_search import triton
from pallas_kernels.buddy_search.reference import Found, Gate, search_reference
from pallas_kernels.op import Implementation, Operation, check_operands

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
      resident: bool[E], of that layer; or int32[M, K], K >= E, of all layers, not negative if an
        expert is resident, such as `cache_plan.Tables.table`.
      allowed: bool[N] or bool[N, A], tokens or pairs whose missing experts may be replaced.
      depth: int32[], how far lists are searched.
      budget: int32[], rho, the most replacements per token.
      replaced: int32[M, E], counts to which the replaced pairs of each expert are added; donate it.
        None: no counts.
    """
    operands = {
        "ids": (ids, "int32[N, A]"), "lists": (lists, "int32[M, E, H]"),
        "allowed": (allowed, "bool[N]" if allowed.ndim == 1 else "bool[N, A]"),
        "resident": (resident, "bool[E]" if resident.ndim == 1 else "int32[M, .]"),
        "replaced": (replaced, "int32[M, E]"),
    }  # fmt: skip
    if gate is not None:
        forms = ("float32[N, E]", "float32[M]", "float32[]", "float32[]")
        parts = zip(gate._fields, gate, forms, strict=True)
        operands |= {name: (array, form) for name, array, form in parts}
    axes = check_operands("buddy_search", operands)
    if resident.shape[-1] < axes["E"]:
        raise ValueError(f"buddy_search: resident {resident.shape} is of fewer than E={axes['E']}")
    index = jnp.asarray(layer, jnp.int32)
    given = (ids, lists, index, resident, allowed, depth, budget, gate, replaced)
    return OPERATION(
        *given, last_first=last_first, implementation=implementation, interpret=interpret
    )
