"""Composed policies: hotness, importance and buddies in one.

DyMoE's importance chooses the pairs that deserve high precision; DynaExq's hotness keeps the most
used experts in the high tier, so that such pairs find them there, and a hot copy serves every pair
of its expert; BuddyMoE's lists replace experts that are in no tier. Any of the three may be left
out.

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers, T tiers.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from moejax.errors import MoejaxError
from moejax.policies.base import (
    SKIPPED,
    Decision,
    Needs,
    Observation,
    Policy,
    PolicySpec,
    Requests,
    no_requests,
)
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.policies.settings import ByContent
from pallas_kernels.cache_plan import Rule


class _ComposeState(NamedTuple):
    """State of each part; None for a part that is left out."""

    hotness: Any
    importance: Any
    buddies: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Compose(ByContent, Policy[_ComposeState]):
    """Two or three policies as one."""

    name: ClassVar[str] = "compose"

    # chooses, between steps, the experts of the high tier; with it, pairs run in high precision if
    # that copy is resident
    hotness: DynaExq | None = None
    # chooses, in a step, the pairs that request high precision; with `hotness`, the others run in
    # it too if that copy is resident
    importance: DyMoE | None = None
    # replace experts that are in no tier. A pair that `importance` leaves out is not replaced.
    buddies: BuddyMoe | None = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.hotness, self.importance, self.buddies)) < 2:
            raise MoejaxError("compose takes two parts or three: dynaexq, dymoe, buddymoe")

    @property
    def needs(self) -> Needs:
        """Names what the engine must compute, as `Policy.needs`."""
        return self._prefetcher.needs if self._prefetcher else Needs()

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes, as `Policy.layer_axes`."""
        parts = (self.hotness, self.importance, self.buddies)
        axes = [part.layer_axes if part is not None else None for part in parts]
        whole = all(a is not None for a, part in zip(axes, parts, strict=True) if part is not None)
        return _ComposeState(*axes) if whole else None

    @property
    def substitutes(self) -> bool:
        """Tells whether others serve, as `Policy.substitutes`."""
        return self.buddies is not None

    @property
    def prefetch(self) -> int:
        """Experts of the next layer to prefetch; -1: as many as that part decides."""
        return self._prefetcher.prefetch if self._prefetcher else 0

    @property
    def _prefetcher(self) -> DyMoE | BuddyMoe | None:
        """The part that prefetches: importance, and buddies only without it."""
        return self.importance or self.buddies

    def init(self, spec: PolicySpec) -> _ComposeState:
        """Makes the first state, as `Policy.init`."""
        # Buddies see one tier: an expert is somewhere, or it is missing and comes in the lowest.
        one = dataclasses.replace(
            spec,
            tiers=spec.tiers[-1:],
            expert_bytes=spec.expert_bytes[-1:],
            slots=spec.slots[-1:],
            prefetch=spec.prefetch[-1:],
        )
        return _ComposeState(
            hotness=self.hotness.init(spec) if self.hotness else None,
            importance=self.importance.init(spec) if self.importance else None,
            buddies=self.buddies.init(one) if self.buddies else None,
        )

    def max_prefetch(self, state: _ComposeState) -> int:
        """Bounds the look-ahead, as `Policy.max_prefetch`."""
        if self.importance is not None:
            return self.importance.max_prefetch(state.importance)
        return self.buddies.max_prefetch(state.buddies) if self.buddies else 0

    def decide(
        self, state: _ComposeState, observation: Observation
    ) -> tuple[Decision, _ComposeState]:
        """Chooses tiers and experts, as `Policy.decide`."""
        o, decision = observation, None
        if self.importance is not None:
            decision, critical = self.importance.decide(state.importance, o)
            state = state._replace(importance=critical)
        if self.hotness is not None:
            hot, of = self.hotness.decide(state.hotness, o)
            state = state._replace(hotness=of)
            if decision is None:
                decision = hot
            else:
                is_hot = (hot.tier == state.hotness.settings.hot) & (decision.tier != SKIPPED)
                decision = decision._replace(tier=jnp.where(is_hot, hot.tier, decision.tier))
        if self.buddies is not None:
            decision, of = self._replaced(state.buddies, o, decision)
            state = state._replace(buddies=of)
        assert decision is not None
        return decision, state

    def _replaced(
        self, state: Any, o: Observation, decision: Decision | None
    ) -> tuple[Decision, Any]:
        """Replaces experts that are in no tier by buddies."""
        assert self.buddies is not None
        assert decision is not None
        somewhere = jnp.any(o.resident, axis=0, keepdims=True)
        seen = dataclasses.replace(o, weights=decision.weights, resident=somewhere)
        found, state = self.buddies.decide(state, seen, decision.tier != SKIPPED)
        # A buddy runs in the best tier that has it.
        best = jnp.argmax(o.resident, axis=0).astype(jnp.int32)[found.ids]
        tier = jnp.where(found.ids != decision.ids, best, decision.tier)
        tier = jnp.where(found.tier == SKIPPED, SKIPPED, tier)
        ahead = decision.ahead
        if self.importance is None and found.ahead is not None:
            ahead = jnp.where(found.ahead >= 0, jnp.int32(len(o.resident) - 1), -1)
        decision = Decision(found.ids, tier, found.weights, decision.at_least, ahead)
        return decision, state

    @property
    def repeats_requests(self) -> bool:
        """Tells whether requests repeat; buddies count their own."""
        return self.hotness is not None and self.buddies is None

    def tokens_until_change(self, state: _ComposeState, resident: jax.Array) -> jax.Array:
        """Counts tokens, as `Policy.tokens_until_change`; buddies save up bytes between calls."""
        if self.hotness is None or self.buddies is not None:
            return jnp.zeros((), jnp.int32)
        return self.hotness.tokens_until_change(state.hotness, resident)

    def disk_prefetch(self, state: _ComposeState, resident: jax.Array) -> Requests:
        """Requests reads of the disk, as `Policy.disk_prefetch`."""
        if self.hotness is None:
            return no_requests()
        return self.hotness.disk_prefetch(state.hotness, resident)

    def decode_rule(self, state: _ComposeState) -> Rule | None:
        """Gives the rule by which hotness and importance share one high tier."""
        hotness, importance = self.hotness, self.importance
        if hotness is None or importance is None or self.buddies is not None:
            return None
        rule = importance.decode_rule(state.importance)
        if rule is None or hotness.hot != importance.high:
            return None
        # An expert left out stays out wherever a copy is, unless importance reuses it.
        return dataclasses.replace(
            rule, high_if_resident=rule.high_if_resident | (rule.low != SKIPPED)
        )

    def transfers(
        self, state: _ComposeState, resident: jax.Array
    ) -> tuple[Requests, _ComposeState]:
        """Requests promotions and demotions, then fetches of replaced experts."""
        asked = [no_requests()]
        if self.hotness is not None:
            requests, of = self.hotness.transfers(state.hotness, resident)
            state = state._replace(hotness=of)
            asked.append(requests)
        if self.buddies is not None:
            somewhere = jnp.any(resident, axis=1, keepdims=True)
            requests, missed = self.buddies.transfers(state.buddies, somewhere)
            state = state._replace(buddies=missed)
            lowest = jnp.where(requests.tier >= 0, resident.shape[1] - 1, -1)
            asked.append(requests._replace(tier=lowest.astype(jnp.int32)))
        return Requests(*(jnp.concatenate(part) for part in zip(*asked, strict=True))), state
