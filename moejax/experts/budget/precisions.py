"""Number of experts of each layer in high precision (DynaExq, section 3.5)."""

from moejax.experts.budget.limits import BudgetError, gib_above


def n_hot(
    *, num_layers: int, num_experts: int, hot_nbytes: int, cold_nbytes: int, budget_nbytes: int
) -> tuple[int, ...]:
    """n_hot of each layer, where n_hot S_hot + n_cold S_cold <= M and n_hot + n_cold = N.

    N is of a layer and M of all of them, so a layer has floor((M / L - N S_cold) / (S_hot -
    S_cold)); what the division leaves makes one more expert hot in the earliest layers.

    Args:
      num_layers: L, sparse ones.
      num_experts: N, of a layer.
      hot_nbytes: S_hot, one expert in high precision.
      cold_nbytes: S_cold, one in low precision; less than `hot_nbytes`.
      budget_nbytes: M, what is left beside the transient buffer, the cache and all else.

    Raises:
      BudgetError: not even all experts in low precision fit.
      ValueError: the precisions are not in this order.
    """
    if not 0 < cold_nbytes < hot_nbytes:
        raise ValueError(f"a hot expert of {hot_nbytes} bytes and a cold one of {cold_nbytes}")
    room = budget_nbytes - num_layers * num_experts * cold_nbytes
    if room < 0:
        raise BudgetError(
            f"{gib_above(budget_nbytes)} for the experts are too little: in low precision alone "
            f"they take {gib_above(budget_nbytes - room)}"
        )
    total = min(room // (hot_nbytes - cold_nbytes), num_layers * num_experts)
    each, left = divmod(total, num_layers)
    return tuple(each + (layer < left) for layer in range(num_layers))
