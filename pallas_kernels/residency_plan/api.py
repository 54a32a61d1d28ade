"""The public calls: which implementation runs, and why one is refused."""

import jax
import jax.numpy as jnp

from pallas_kernels.residency_plan import triton
from pallas_kernels.residency_plan.operands import (
    PLAN_EVENTS,
    PREDICT_EVENTS,
    Columns,
    Fetch,
    Placed,
    Tables,
    Waves,
    num_slots,
)
from pallas_kernels.residency_plan.reference import plan_reference, predict_reference
from pallas_kernels.target import SIMULATED, Target, current_target

IMPLEMENTATIONS = ("triton", "reference")  # in order of preference; the reference refuses nothing


def refusal(
    implementation: str, num_experts: int, num_asked: int, target: Target | None = None
) -> str | None:
    """Why an implementation cannot serve on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      num_experts: E.
      num_asked: pairs of a plan, N A, or experts of a prediction, L.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    return triton.refusal(num_experts, num_asked, target or current_target())


def plan(
    tables: Tables,
    row_of: jax.Array,
    layer: int | jax.Array,
    ids: jax.Array,
    active: jax.Array,
    weights: jax.Array,
    *,
    waves: Waves,
    banks: int = 1,
    columns: Columns,
    implementation: str | None = None,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[Tables, Placed]:
    """Where each expert that a layer needs is computed, and what is fetched for that.

    Misses, in order of id, take the victims: free slots, then those of experts that are not needed,
    of longest ago, then of least number. With waves, where there are fewer victims than misses,
    misses take the free slots alone and the rest is streamed (a scan evicts nothing). What was used
    gets the clock, which then advances.

    Args:
      tables: donate them.
      row_of: int32[M, E], rows of the host store; -1: none.
      layer: int or int32[] in 0..M - 1; an array lets all layers share a trace.
      ids: int32[N, A], in 0..E - 1; those of a token differ.
      active: bool[N], tokens that count.
      weights: float32[N, A], of the pairs; their sum is added to `gate`, of all and of the first
        tier.
      waves: how many, and their width.
      banks: arrays in which layers have their slots in turn; a slot's number counts within one.
      columns: of `events`, by the names of `PLAN_EVENTS`.
      implementation: "triton" or "reference"; None for the kernel where it does not refuse.
      num_warps: of the kernel; None for a number that goes with the sizes.
      interpret: runs the kernel on the CPU, for tests.

    Returns:
      The tables, in the same places in memory if they were donated, and the plan.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    reasons = _misfits(tables, row_of, active)
    if ids.ndim != 2 or ids.shape[0] != active.shape[0] or ids.dtype != jnp.int32:
        reasons.append(f"ids are {ids.dtype}{ids.shape}, active {active.shape}")
    if weights.shape != ids.shape or weights.dtype != jnp.float32:
        reasons.append(f"weights are {weights.dtype}{weights.shape}, ids {ids.shape}")
    if waves.num < 0 or waves.transient < 1:
        reasons.append(f"{waves.num} waves of {waves.transient}")
    if missing := sorted(set(PLAN_EVENTS) - set(columns)):
        reasons.append(f"no column for {', '.join(missing)}")
    chosen = _chosen("plan", reasons, implementation, row_of.shape[-1], ids.size, interpret)
    layer = jnp.asarray(layer, jnp.int32)
    given = (tables, row_of, layer, ids, active, weights)
    if chosen == "reference":
        return plan_reference(*given, waves=waves, banks=banks, columns=columns)
    return triton.plan_triton(
        *given, waves=waves, banks=banks, columns=columns, num_warps=num_warps, interpret=interpret
    )


def predict(
    tables: Tables,
    row_of: jax.Array,
    layer: int | jax.Array,
    ids: jax.Array,
    active: jax.Array,
    *,
    banks: int = 1,
    columns: Columns,
    implementation: str | None = None,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[Tables, Fetch]:
    """Admits experts that a layer to come will probably need, ahead of its `plan`.

    Those that are not resident, in order of id, take victims as in `plan`, never one that is itself
    listed. The clock stands, and nothing is added to `gate`.

    Args:
      tables: donate them; C > 0.
      row_of: as in `plan`.
      layer: the layer to come.
      ids: int32[L], experts; -1: none.
      active: bool[N]; nothing is admitted if no token is.
      banks: as in `plan`.
      columns: of `events`, by the names of `PREDICT_EVENTS`.
      implementation: as in `plan`.
      num_warps: as in `plan`.
      interpret: as in `plan`.

    Returns:
      The tables, and what to fetch before that layer's products.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    reasons = _misfits(tables, row_of, active)
    if ids.ndim != 1 or ids.dtype != jnp.int32:
        reasons.append(f"ids are {ids.dtype}{ids.shape}, not int32[L]")
    if not reasons and not num_slots(tables.table, row_of.shape[1]):
        reasons.append("there are no slots")
    if missing := sorted(set(PREDICT_EVENTS) - set(columns)):
        reasons.append(f"no column for {', '.join(missing)}")
    chosen = _chosen("predict", reasons, implementation, row_of.shape[-1], ids.size, interpret)
    given = (tables, row_of, jnp.asarray(layer, jnp.int32), ids, active)
    if chosen == "reference":
        return predict_reference(*given, banks=banks, columns=columns)
    return triton.predict_triton(
        *given, banks=banks, columns=columns, num_warps=num_warps, interpret=interpret
    )


def _misfits(tables: Tables, row_of: jax.Array, active: jax.Array) -> list[str]:
    """Reasons why the operands that both calls take do not fit."""
    if row_of.ndim != 2:
        return [f"row_of is {row_of.dtype}{row_of.shape}, not int32[M, E]"]
    (num_layers, num_experts), reasons = row_of.shape, []
    extra = tables.table.shape[-1] - num_experts
    if tables.table.ndim != 2 or len(tables.table) != num_layers or extra < 0 or extra % 3:
        reasons.append(f"table is {tables.table.shape}, row_of {row_of.shape}")
    for name, of, ndim in (("events", tables.events, 2), ("gate", tables.gate, 2)):
        if of.ndim != ndim or of.shape[0] != num_layers:
            reasons.append(f"{name} is {of.shape}, of {num_layers} layers")
    if tables.gate.shape[-1] < 2:
        reasons.append(f"gate is {tables.gate.shape}, without a tier")
    for name, of, dtype in (
        ("table", tables.table, jnp.int32), ("clock", tables.clock, jnp.int32),
        ("events", tables.events, jnp.int32), ("gate", tables.gate, jnp.float32),
        ("row_of", row_of, jnp.int32), ("active", active, jnp.bool_),
    ):  # fmt: skip
        if of.dtype != dtype:
            reasons.append(f"{name} is {of.dtype}, not {jnp.dtype(dtype).name}")
    if tables.clock.shape or active.ndim != 1:
        reasons.append(f"clock is {tables.clock.shape}, active {active.shape}: not [], [N]")
    return reasons


def _chosen(
    call: str, reasons: list[str], asked: str | None, num_experts: int, size: int, interpret: bool
) -> str:
    """The implementation; raises ValueError for what does not fit, or is refused."""
    if reasons:
        raise ValueError(f"residency_plan.{call}: {'; '.join(reasons)}")
    target = SIMULATED if interpret else current_target()
    refused = refusal("triton", num_experts, size, target)
    chosen = asked or ("reference" if refused else "triton")
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if chosen == "triton" and refused:
        raise ValueError(f"residency_plan.{call} by triton refuses: {refused}")
    return chosen
