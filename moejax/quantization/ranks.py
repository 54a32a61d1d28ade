"""Rank policies: which rank the low-rank compensator of each matrix gets (MiLo 3.2.4).

A policy is a sum of terms, "Dense-512 + Kurtosis-16", that may end in a budget, "within 200 MB":

| term | rank |
| --- | --- |
| Uniform-r | r for every dense and sparse matrix |
| Dense-r | r for attention, shared experts and dense MLPs |
| Sparse-r | r for routed experts |
| Kurtosis-r | r on average over routed experts, more where the kurtosis is higher |
| Frequency-r | r on average over routed experts, more where the router sends more tokens |

r is a rank or a percentage of min(N, K), "Dense-25%". Terms add up; no rank passes min(N, K).
Routers, embeddings and heads get none.

The paper lets Kurtosis and Frequency "control the average rank to be r" and says no more. Here:
  * they concern the routed experts, alone and in sums alike, as Table 4 and the right half of
    Table 7 use them;
  * the average is by bytes: a term takes what Sparse-r would take and never more;
  * Frequency-r is in proportion to the frequency, Kurtosis-r to the excess kurtosis (which may be
    negative) shifted so that the least one gets half of the average;
  * ranks are multiples of `multiple`, what is left goes by largest remainder.
"""

import dataclasses
import math
import re
from collections.abc import Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.weights.qtensor import FACTOR_GROUP_SIZE, CodesKind

DENSE_KINDS = ("attention", "shared_experts", "mlp")
SPARSE_KINDS = ("experts",)

# Table 4 of the paper.
NAMED_POLICIES = {
    "mixtral-s1": "Dense-512 + Kurtosis-16",
    "mixtral-s2": "Dense-1024 + Kurtosis-32",
    "deepseek-s1": "Dense-800",
    "deepseek-s2": "Dense-1024 + Frequency-32",
}

_TERMS = ("uniform", "dense", "sparse", "kurtosis", "frequency")
_TERM = re.compile(r"([a-z]+)-(\d+(?:\.\d+)?)(%?)")
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b|b)")
_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmg", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmg", 1)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedMatrix:
    """Facts of one matrix [N, K] for a rank policy."""

    name: str
    kind: str  # "attention" | "shared_experts" | "mlp" | "experts" | "router" | "embed" | "head"
    num_rows: int  # N
    num_inputs: int  # K
    kurtosis: float | None = None  # excess kurtosis of its weights
    frequency: float | None = None  # share of its layer's assignments that its expert gets
    # Ranks of all widths of bit planes together, over the one that is assigned, the narrowest's.
    all_widths: float = 1.0

    @property
    def max_rank(self) -> int:
        """Largest rank, min(N, K)."""
        return min(self.num_rows, self.num_inputs)


class _RankTerm(NamedTuple):
    """One term: "kurtosis", 16 or 6.25, and whether that is a percentage."""

    policy: str
    amount: float
    is_percentage: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the matrices that it concerns."""
        kinds = {"uniform": DENSE_KINDS + SPARSE_KINDS, "dense": DENSE_KINDS}
        return kinds.get(self.policy, SPARSE_KINDS)

    def __str__(self) -> str:
        return f"{self.policy.capitalize()}-{self.amount:g}{'%' * self.is_percentage}"


class RankPolicy(NamedTuple):
    """Sum of terms, and the byte budget of all compensators together."""

    terms: tuple[_RankTerm, ...]
    budget_bytes: int | None = None

    def needs(self, statistic: str) -> bool:
        """Whether ranks follow the "kurtosis" of weights or the "frequency" of experts."""
        return any(term.policy == statistic for term in self.terms)

    def __str__(self) -> str:
        within = "" if self.budget_bytes is None else f" within {self.budget_bytes} B"
        return " + ".join(map(str, self.terms)) + within


class _RankPlan(NamedTuple):
    """Ranks of a list of matrices, in its order."""

    ranks: tuple[int, ...]
    capped: tuple[str, ...]  # names of matrices for which the policy said more than min(N, K)
    num_bytes: int  # of all compensators: words and scales of the factors


class _Problem(NamedTuple):
    """List of matrices as arrays."""

    matrices: Sequence[RankedMatrix]
    costs: np.ndarray  # int64[n], bytes of one rank
    caps: np.ndarray  # int64[n]


def parse_policy(text: str) -> RankPolicy:
    """Reads "Dense-512 + Kurtosis-16", "mixtral-s1" or "Uniform-5% within 200 MB".

    Case and spaces do not matter. Units: B, KB, MB, GB (powers of 1000), KiB, MiB, GiB. MoejaxError
    names a term that is not known, and what is.
    """
    body, within, budget = text.lower().partition(" within ")
    body = NAMED_POLICIES.get(body.strip(), body).lower()
    terms = tuple(_parse_term(part.strip(), text) for part in body.split("+"))
    if not within:
        return RankPolicy(terms)
    match = _BUDGET.fullmatch(budget.strip())
    if match is None:
        raise MoejaxError(
            f"rank policy {text!r}: {budget.strip()!r} is no number of bytes such as 200 MB"
        )
    return RankPolicy(terms, int(float(match[1]) * _UNITS[match[2]]))


def _parse_term(part: str, text: str) -> _RankTerm:
    match = _TERM.fullmatch(part)
    if match is None or match[1] not in _TERMS:
        known = ", ".join(f"{name.capitalize()}-r" for name in _TERMS)
        raise MoejaxError(
            f"rank policy {text!r}: term {part!r} is none of {known} (r a rank or, with %, a "
            f"share of the width), and {part!r} is none of the sets {', '.join(NAMED_POLICIES)}"
        )
    term = _RankTerm(match[1], float(match[2]), bool(match[3]))
    if not term.is_percentage and not term.amount.is_integer():
        raise MoejaxError(f"rank policy {text!r}: the rank of {part!r} is no integer")
    return term


def check_terms(policy: RankPolicy, kinds: Set[str]) -> None:
    """Raises MoejaxError, with the mend, for a term that concerns none of the kinds."""
    kept = tuple(term for term in policy.terms if not kinds.isdisjoint(term.kinds))
    if kept == policy.terms:
        return
    term = next(term for term in policy.terms if term not in kept)
    mend = f"to terms of {', '.join(sorted(kinds))}"
    if kept:
        mend = f"without it: --config.rank={str(policy._replace(terms=kept))!r}"
    raise MoejaxError(
        f"rank policy: {term} concerns {', '.join(term.kinds)}, and no matrix with a compensator "
        f"is of such a kind; set --config.rank {mend}"
    )


def excess_kurtosis(weights: jax.Array) -> jax.Array:
    """Excess kurtosis E[(x - mean)^4] / var^2 - 3 of matrices [..., N, K]: 0 for a Gaussian.

    MiLo 3.1.1 prints the formula without the 3, but its Table 2 is negative for flat weights. A
    constant matrix has 0.
    """
    x = weights.astype(jnp.float32)
    x = x - jnp.mean(x, axis=(-2, -1), keepdims=True)
    # By the largest element, so that fourth powers neither overflow nor vanish.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)
    second = jnp.mean(x**2, axis=(-2, -1))
    fourth = jnp.mean(x**4, axis=(-2, -1))
    return jnp.where(second > 0, fourth / jnp.where(second > 0, second, 1.0) ** 2 - 3.0, 0.0)


def rank_bytes(num_rows: int, num_inputs: int, factor_bits: int) -> int:
    """Bytes of one rank: a column of U and a row of V, packed, with their fp16 scales.

    `factor_bits` is 2, 3, 4, 8, or 16 for bfloat16 without scales.
    """
    if factor_bits == 16:
        return 2 * (num_rows + num_inputs)
    lengths = (num_rows, num_inputs)
    sizes = [min(FACTOR_GROUP_SIZE, length) for length in lengths]
    kinds = [CodesKind(bits=factor_bits, group_size=size) for size in sizes]
    return sum(kind.num_bytes((1, n)) for kind, n in zip(kinds, lengths, strict=True))


def assign_ranks(
    policy: RankPolicy, matrices: Sequence[RankedMatrix], *, factor_bits: int = 8, multiple: int = 8
) -> _RankPlan:
    """Assigns a rank to every matrix.

    Without a budget Uniform, Dense and Sparse give what they say; Kurtosis and Frequency multiples
    of `multiple`. With one the same policy, before rounding, is scaled until all compensators take
    the budget, and all ranks are multiples (or min(N, K)).

    Args:
      matrices: all of the model's, since averages run over all sparse ones.
      factor_bits: of the factors; a rank costs `rank_bytes`.

    Raises:
      MoejaxError: a term concerns no matrix, or lacks the kurtosis or frequency of one.
    """
    check_terms(policy, {m.kind for m in matrices})
    costs = [
        math.ceil(m.all_widths * rank_bytes(m.num_rows, m.num_inputs, factor_bits))
        for m in matrices
    ]
    caps = [m.max_rank for m in matrices]
    problem = _Problem(matrices, np.array(costs, np.int64), np.array(caps, np.int64))
    wanted = np.zeros(len(matrices))
    for term in policy.terms:
        real = _real_ranks(term, problem)
        is_spread = term.policy in ("kurtosis", "frequency") and policy.budget_bytes is None
        if is_spread:
            budget = int(np.floor(problem.costs @ real + 1e-6))
            real = _round_within(real, problem, budget, multiple).astype(np.float64)
        wanted += real
    if policy.budget_bytes is None:
        ranks = np.minimum(np.rint(wanted).astype(np.int64), problem.caps)
        is_capped = wanted > problem.caps
    else:
        ranks = _round_within(wanted, problem, policy.budget_bytes, multiple)
        is_capped = (ranks == problem.caps) & (problem.caps > 0)
    capped = tuple(m.name for m, flag in zip(matrices, is_capped, strict=True) if flag)
    return _RankPlan(tuple(int(rank) for rank in ranks), capped, int(problem.costs @ ranks))


def _real_ranks(term: _RankTerm, problem: _Problem) -> np.ndarray:
    """Ranks float64[n] of a term before rounding; fixed terms round percentages."""
    concerned = np.array([m.kind in term.kinds for m in problem.matrices], bool)
    rank = term.amount * problem.caps / 100 if term.is_percentage else term.amount
    even = np.where(concerned, rank, 0.0)
    if term.policy not in ("kurtosis", "frequency"):
        return np.rint(even)
    spread = np.zeros(len(even))
    spread[concerned] = _shares(term, [m for m in problem.matrices if m.kind in SPARSE_KINDS])
    # A percentage stays one of each matrix's own width.
    spread *= even
    total = problem.costs @ spread
    return spread * (problem.costs @ even / total) if total else even


def _shares(term: _RankTerm, matrices: Sequence[RankedMatrix]) -> np.ndarray:
    """Weights float64[n] to which the ranks are proportional, before bytes are counted."""
    found: list[float | None] = [getattr(matrix, term.policy) for matrix in matrices]
    for matrix, value in zip(matrices, found, strict=True):
        if value is None or not np.isfinite(value) or (term.policy == "frequency" and value < 0):
            raise MoejaxError(
                f"rank policy: {term} needs the {term.policy} of {matrix.name}, which is {value}"
            )
    values = np.array(found, np.float64)
    if term.policy == "frequency":
        return values if values.any() else np.ones(len(values))
    spread = values.mean() - values.min()
    return values - values.min() + spread if spread > 0 else np.ones(len(values))


def _round_within(
    real: np.ndarray, problem: _Problem, budget_bytes: int, multiple: int
) -> np.ndarray:
    """Rounds ranks in proportion to `real`, int64[n], multiples or capped, within the budget.

    Bytes that a cap frees go to the other matrices. Matrices of one shape keep the order of `real`.
    """
    costs, caps = problem.costs, problem.caps
    exact = np.zeros(len(real))
    is_open = (real > 0) & (caps > 0)
    left = float(budget_bytes)
    while is_open.any() and left > 0:
        scaled = real * (left / (costs[is_open] @ real[is_open]))
        full = is_open & (scaled >= caps)
        if not full.any():
            exact[is_open] = scaled[is_open]
            break
        exact[full] = caps[full]
        is_open &= ~full
        left -= float(costs[full] @ caps[full])
    ranks = np.where(exact >= caps, caps, (exact + 1e-9) // multiple * multiple).astype(np.int64)
    left_bytes = budget_bytes - int(costs @ ranks)
    for i in np.argsort(-(exact - ranks), kind="stable"):
        step = int(min(multiple, caps[i] - ranks[i])) if real[i] > 0 else 0
        if step > 0 and step * costs[i] <= left_bytes:
            ranks[i] += step
            left_bytes -= step * int(costs[i])
    return ranks
