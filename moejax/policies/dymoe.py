"""DyMoE: critical experts in high precision, the others in low precision or left out.

For each layer a number of critical experts (`dymoe_schedule`, eq. 4 and 5) is chosen by importance
(`expert_importance`, eq. 1 to 3), the next layer's are prefetched (`lookahead`, eq. 6 to 8), and a
resident copy of higher precision than requested serves (`cache_plan.resolve_tiers`).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.policies.attention_importance import AGGREGATIONS
from moejax.policies.base import (
    SKIPPED,
    Decision,
    Needs,
    Observation,
    Policy,
    PolicySpec,
    layer_axes_of,
    tier_id,
)
from moejax.policies.dymoe_schedule import (
    ROUNDINGS,
    SCHEDULES,
    critical_counts,
    retention_ratios,
)
from moejax.policies.expert_importance import (
    critical_by_tokens,
    critical_pairs,
    heavy_hitters,
    num_heavy,
)
from moejax.policies.lookahead import experts_ahead
from moejax.policies.ordering import of_few, ranks
from moejax.policies.settings import (
    check_choice,
    check_flag,
    check_number,
    check_numbers,
    check_text,
)
from pallas_kernels.cache_plan import Rule

SKIP = "skip"  # the name of 0 bits
SELECTIONS = ("critical", "load", "random")
# The curves of Figure 3, as settings of skipping. Its legend explains two choices, of experts and
# of layers; where it names one, the other is the plain one, so "token" and "equal" are one run.
FIGURE_3 = {
    "random": {"low": SKIP, "selection": "random", "schedule": "equal"},
    "token": {"low": SKIP, "selection": "critical", "schedule": "equal"},
    "equal": {"low": SKIP, "selection": "critical", "schedule": "equal"},
    "depth": {"low": SKIP, "selection": "critical", "schedule": "cosine"},
}


class DyMoEState(NamedTuple):
    """State that `decide` reads; only `calls` changes.

    All of it may be swept, except `renormalise` in an engine whose policy has a rule.
    """

    decode: jax.Array  # int32[M], t_l of eq. 5 with M = A.
    prefill: jax.Array  # int32[M], t_l with M = E
    # int32[2, M], experts of the next layer that each layer prefetches, in decode and in prefill; 0
    # for the last
    ahead: jax.Array
    high: jax.Array  # int32[], the tier of critical experts
    low: jax.Array  # int32[], the other ones' tier, or `SKIPPED`
    renormalise: jax.Array  # bool[]
    reuse_skipped: jax.Array  # bool[], False where nothing is left out
    heavy_share: jax.Array  # float32[]
    heavy_count: jax.Array  # int32[]
    seed: jax.Array  # uint32[]
    calls: jax.Array  # int32[], layers decided so far, for `random` alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class DyMoE(Policy[DyMoEState]):
    """Mixed precision by importance."""

    name: ClassVar[str] = "dymoe"
    high_serves_low: ClassVar[bool] = True

    high: str = ""  # the tier of critical experts; "": the first
    low: str = ""  # the tier of the others; "": the last; "skip": they are left out (4/0)
    # r, the mean share of critical experts; 0.5 to 1, with schedule "equal" 0 to 1
    retention: float = 0.75
    schedule: str = "cosine"  # over depth; see `dymoe_schedule.retention_ratios`
    sensitivity: tuple[float, ...] = ()  # one per layer, for the schedule of that name
    rounding: str = "diffused"  # "diffused", so that the mean is r, or "ceil", eq. 5's letter.
    # "critical", by eq. 2 in prefill and eq. 3 in decode; "load": in prefill by all tokens, without
    # attention's importance; "random" (Figure 3).
    selection: str = "critical"
    # of the attention that a token receives (eq. 1): "mean", of the queries that see it, "sum", or
    # "last_query" alone.
    aggregation: str = "mean"
    # of a prefill step's tokens that are heavy hitters, whatever prompts they are of; the paper, of
    # one prompt in one step, states no number
    heavy_share: float = 0.1
    heavy_count: int = 0  # their number, in place of the share; 0: the share
    # the weights of a token's remaining experts sum to what all summed to
    renormalise: bool = False
    # an expert to be left out runs if its high copy is resident, by the rule of conservative reuse;
    # the paper "entirely bypasses" it
    reuse_skipped: bool = False
    # t of eq. 7 and 8; -1: t_(l+1), 0: none. Never more than the high tier has slots.
    prefetch: int = -1
    seed: int = 0  # from `random`

    def __post_init__(self) -> None:
        check_text("high", self.high)
        check_text("low", self.low)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_number("retention", self.retention, 0 if self.schedule == "equal" else 0.5, 1)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("selection", self.selection, SELECTIONS)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_numbers("sensitivity", self.sensitivity, 0)
        if self.sensitivity and self.schedule != "sensitivity":
            raise MoejaxError(
                f"sensitivity is of schedule='sensitivity', not of schedule={self.schedule!r}"
            )
        check_number("heavy_share", self.heavy_share, 0, 1)
        check_number("heavy_count", self.heavy_count, 0, 2**30, integer=True)
        check_flag("renormalise", self.renormalise)
        check_flag("reuse_skipped", self.reuse_skipped)
        check_number("prefetch", self.prefetch, -1, 2**30, integer=True)
        check_number("seed", self.seed, 0, 2**32 - 1, integer=True)

    @property
    def needs(self) -> Needs:
        """Names what the engine must compute, as `Policy.needs`."""
        return Needs(
            importance=self.selection == "critical",
            aggregation=self.aggregation,
            predicted=self.prefetch != 0,
        )

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes; None where random draws are numbered by layer."""
        if self.selection == "random":
            return None
        return layer_axes_of(DyMoEState, decode=0, prefill=0, ahead=1)

    def counts(self, num_layers: int, num_requested: int) -> np.ndarray:
        """Critical experts t_l, int64[L], of `num_requested` per layer; their mean is printed."""
        ratios = retention_ratios(self.schedule, self.retention, num_layers, self.sensitivity)
        return critical_counts(ratios, num_requested, self.rounding)

    def init(self, spec: PolicySpec) -> DyMoEState:
        """Makes the first state, as `Policy.init`."""
        high = tier_id(spec, self.high, 0)
        low = SKIPPED if self.low == SKIP else tier_id(spec, self.low, -1)
        if low != SKIPPED and high >= low:
            raise MoejaxError(
                f"high={spec.tiers[high]} must be of higher fidelity than low={spec.tiers[low]}; "
                f"stored are {', '.join(spec.tiers)}; low='skip' leaves experts out"
            )
        counts = np.stack([self.counts(spec.num_layers, n) for n in (spec.width, spec.num_experts)])
        ahead = counts if self.prefetch < 0 else np.full_like(counts, self.prefetch)
        ahead = np.minimum(np.pad(ahead[:, 1:], ((0, 0), (0, 1))), spec.slots[high])
        return DyMoEState(
            decode=jnp.asarray(counts[0], jnp.int32),
            prefill=jnp.asarray(counts[1], jnp.int32),
            ahead=jnp.asarray(ahead, jnp.int32),
            high=jnp.asarray(high, jnp.int32),
            low=jnp.asarray(low, jnp.int32),
            renormalise=jnp.asarray(self.renormalise),
            reuse_skipped=jnp.asarray(self.reuse_skipped and low == SKIPPED),
            heavy_share=jnp.asarray(self.heavy_share, jnp.float32),
            heavy_count=jnp.asarray(self.heavy_count, jnp.int32),
            seed=jnp.asarray(self.seed, jnp.uint32),
            calls=jnp.zeros((), jnp.int32),
        )

    def decide(self, state: DyMoEState, observation: Observation) -> tuple[Decision, DyMoEState]:
        """Chooses tiers and experts, as `Policy.decide`."""
        ids, weights, layer = observation.ids, observation.weights, observation.layer
        is_critical = self._critical(state, observation)
        is_low = ~is_critical & observation.active[:, None]
        reused = state.reuse_skipped & observation.resident[state.high][ids]
        tier = jnp.where(is_critical | reused, state.high, state.low)
        tier = jnp.where(observation.active[:, None], tier, SKIPPED)
        kept = jnp.where(tier >= 0, weights, 0.0)
        left = of_few(jnp.add, kept)
        share = of_few(jnp.add, weights) / jnp.where(left > 0, left, 1.0)
        skips = state.renormalise & (state.low < 0) & (left > 0)
        decision = Decision(
            ids=ids,
            tier=tier,
            weights=jnp.where(skips, kept * share, weights),
            at_least=is_low & (tier >= 0),
        )
        ahead = experts_ahead(observation, state.ahead[int(observation.is_prefill), layer])
        if ahead is not None:
            decision = decision._replace(ahead=jnp.where(ahead, state.high, -1))
        if self.selection == "random":
            state = state._replace(calls=state.calls + 1)
        return decision, state

    def decode_rule(self, state: DyMoEState) -> Rule | None:
        """Gives the rule by which a token's first experts by weight are critical."""
        if self.selection == "random" or (self.renormalise and self.low == SKIP):
            return None
        return Rule(state.decode, state.high, state.low, state.reuse_skipped, at_least=True)

    def max_prefetch(self, state: DyMoEState) -> int:
        """Bounds the look-ahead, as `Policy.max_prefetch`."""
        return int(state.ahead[0].max())

    def _critical(self, state: DyMoEState, observation: Observation) -> jax.Array:
        """Mask bool[N, A] of pairs whose expert is critical."""
        num_experts, active = observation.probabilities.shape[1], observation.active
        drawn = None
        if self.selection == "random":
            key = jax.random.fold_in(jax.random.key(state.seed), state.calls)
            drawn = jax.random.uniform(key, (num_experts,))
        if not observation.is_prefill:
            by = observation.weights if drawn is None else drawn[observation.ids]
            return critical_pairs(observation, by, state.decode[observation.layer])
        limit = state.prefill[observation.layer]
        if drawn is not None:
            return (ranks(drawn) < limit)[observation.ids]
        tokens = active
        if self.selection == "critical":
            if observation.importance is None:
                raise ValueError(
                    "dymoe needs the importance of tokens in prefill (`Policy.needs`); "
                    "selection='load' does without"
                )
            num = num_heavy(active, state.heavy_share, state.heavy_count)
            tokens = heavy_hitters(observation.importance, active, num)
        return critical_by_tokens(observation, tokens, limit)[observation.ids]
