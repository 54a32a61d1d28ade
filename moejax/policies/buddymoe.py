"""BuddyMoE: a similar resident expert replaces a missing one, which is not fetched.

With `prefetch`, a layer fetches the experts that the next one is predicted to need (sections 1 and
2.3, Figure 3). They are in their slots before the next layer decides: an expert is missing, in
eq. 2 and in Algorithm 1, where the prefetch failed.

Per token and layer, in this order: the TAE gate (eq. 1), the distribution gate (eq. 2, off by
default), the search of the missing experts' buddy lists (eq. 3, Algorithm 1) under the budget rho
(section 5.1). A pair that a gate or the budget excludes is fetched; a pair without a buddy is
fetched or dropped. A buddy takes the weight of the expert that it replaces, not renormalized;
`gains`, which are not in the paper, scale it. A replaced expert is not fetched in the step: the
most missed ones are fetched in the background, a number of bytes per step, or the set of residents
would freeze.

Tokens are independent; the ranks of a token are visited in order, so that the result is that of the
printed loops, not of the CUDA kernel's race (section 4). U_t holds all experts that the router
chose, the missing ones too, as printed, and the buddies so far. After it, in prompts alone and not
in the paper: a pair whose expert the chunk fetches for another pair runs it (`keep_fetched`).

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers, K places of a buddy list,
of which H are searched.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.policies import buddy_gates
from moejax.policies.base import (
    SKIPPED,
    Decision,
    Needs,
    Observation,
    Policy,
    PolicySpec,
    Requests,
    experts_ahead,
    layer_axes_of,
    prefetch_limits,
)
from moejax.policies.baselines import always
from moejax.policies.buddy_lists import BuddyLists
from moejax.policies.settings import (
    ByContent,
    check_array,
    check_choice,
    check_flag,
    check_number,
    check_numbers,
)
from pallas_kernels import buddy_search
from pallas_kernels.buddy_search import Gate
from pallas_kernels.cache_plan import Rule

# "ranks" visits a token's ranks one after the other, on any device.
# "kernel" is one launch (`pallas_kernels.buddy_search`) where lists are in their order.
Form = Literal["ranks", "kernel"]
FallBack = Literal["fetch", "drop"]
NO_LISTS = BuddyLists(np.full((0, 0, 1), -1, np.int32), np.zeros((0, 0, 1), np.float32))


class Substitution(NamedTuple):
    """Result of the search, for every pair."""

    ids: jax.Array  # int32[N, A], the buddy's where `replaced`, else the router's
    replaced: jax.Array  # bool[N, A]
    # bool[N, A], wanted, and the token's budget was not spent yet; where it is not `replaced`,
    # there is no buddy
    searched: jax.Array


def _normalized_logits(probabilities: jax.Array) -> jax.Array:
    """Normalised logits z^ of eq. 3: the router's, up to a constant, scaled to 0..1.

    float32[N, E], 0 where all are equal. The paper names no norm; this one leaves 1 + eta z^
    positive.
    """
    logits = jnp.log(jnp.maximum(probabilities, float(np.finfo(np.float32).tiny)))
    least = jnp.min(logits, axis=-1, keepdims=True)
    span = jnp.max(logits, axis=-1, keepdims=True) - least
    return (logits - least) / jnp.where(span > 0, span, 1.0)


def _buddy_score(
    candidates: jax.Array,  # int32[N, A, H], possible buddies of each pair; -1 for none
    q: jax.Array,  # float32[N, A, H], of each candidate
    logits: jax.Array,  # float32[N, E], of `_normalized_logits`
    # float32[E], partitions between the tokens' device and each expert's, or of each candidate,
    # [N, A, H]
    hops: jax.Array,
    eta: jax.Array,  # float32[]
    kappa: jax.Array,  # float32[]
) -> jax.Array:
    """Score of eq. 3: Psi(j | i, x) = q_(j|i) (1 + eta z^_j(x)) (1 - kappa hop(j)).

    float32[N, A, H]; 0 where there is no candidate.
    """
    safe = jnp.maximum(candidates, 0)
    flat = safe.reshape(len(safe), -1)
    local = jnp.take_along_axis(logits, flat, axis=1, mode="clip").reshape(safe.shape)
    of_each = hops if hops.ndim == safe.ndim else hops.at[safe].get(mode="clip")
    psi = q * (1 + eta * local) * (1 - kappa * of_each)
    return jnp.where(candidates >= 0, psi, 0.0)


def _in_order(ids: jax.Array, value: jax.Array) -> jax.Array:
    """Sorts candidates [N, A, H] by falling score, then by place; -1 replaces scores <= 0."""
    order = jnp.argsort(-value, axis=-1, stable=True)
    return jnp.take_along_axis(jnp.where(value > 0, ids, -1), order, axis=-1)


class _Settings(NamedTuple):
    """Settings that a sweep may vary: leaves of the state."""

    tau: jax.Array  # float32[M], of the TAE gate
    ahead: jax.Array  # int32[M], experts of the next layer to prefetch; 0 for the last
    margin: jax.Array  # float32[], gamma
    temperature: jax.Array  # float32[], of p~
    beta: jax.Array  # float32[], of the distribution gate
    bypass_bytes: jax.Array  # float32[], from which beta follows where it is used
    eta: jax.Array  # float32[], weight of the token's own logits in eq. 3.
    kappa: jax.Array  # float32[], penalty of a hop in eq. 3.
    budget: jax.Array  # int32[], rho
    depth: jax.Array  # int32[], H
    background_bytes: jax.Array  # float32[], of background transfers, a step
    expert_bytes: jax.Array  # float32[], of one expert
    retention: jax.Array  # float32[], of the counts of misses, a step
    least_misses: jax.Array  # float32[], from which on an expert is brought


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BuddyState:
    """State of BuddyMoE; shapes and dtypes never change."""

    settings: _Settings
    lists: jax.Array  # int32[M, E, K]
    q: jax.Array  # float32[M, E, K]
    gains: jax.Array | None  # float32[M, E, E], or None
    hops: jax.Array  # float32[E], partitions between an expert and the tokens' device
    replaced: jax.Array  # int32[M, E], pairs of each expert that a buddy served, so far
    dropped: jax.Array  # int32[M, E], pairs of each expert that nobody served, so far
    counted: jax.Array  # int32[M, E], how many of both `missed` knows of
    # float32[M, E], pairs replaced or dropped since the expert was last asked for, fading
    missed: jax.Array
    requested: jax.Array  # int32[], experts that background transfers were asked for
    credit: jax.Array  # float32[], bytes of background transfers that are saved up
    # float32[DELTA_BINS + 1], experts that decode steps asked for in vain, by the delta of their
    # layer of delta, fading; 0 where beta does not follow from it
    missing: jax.Array
    steps: jax.Array  # float32[], the steps of that, fading alike


def _with_missing(state: BuddyState, o: Observation, asked: jax.Array) -> BuddyState:
    """Counts a decode layer's misses among the pairs `asked`, as if no buddy replaced them."""
    requested = buddy_gates.requested_experts(o.ids, asked, o.resident.shape[1])
    count = jnp.sum(requested & ~o.resident[0], dtype=jnp.int32).astype(jnp.float32)
    delta = buddy_gates.missing_share(requested, o.resident[0])
    place = jnp.floor(delta * buddy_gates.DELTA_BINS).astype(jnp.int32)  # of 1 its own
    bins = jnp.arange(buddy_gates.DELTA_BINS + 1, dtype=jnp.int32)
    begins = (o.layer == 0) & jnp.any(o.active)
    return dataclasses.replace(
        state,
        missing=state.missing + jnp.where(bins == place, count, 0.0),
        steps=state.steps + begins.astype(jnp.float32),
    )


def _most_missed(
    state: BuddyState, resident: jax.Array, max_requests: int
) -> tuple[Requests, BuddyState]:
    """Requests the most missed experts, as many as the saved bytes allow; resident bool[M, 1, E].

    A requested expert is counted from 0 again; credit beyond the cost of `max_requests` is lost.
    """
    settings, num_experts = state.settings, state.missed.shape[1]
    size, limit = settings.expert_bytes, min(max_requests, state.missed.size)
    credit = jnp.minimum(state.credit + settings.background_bytes, size * limit)
    counted = state.replaced + state.dropped
    new = (counted - state.counted).astype(jnp.float32)
    missed = state.missed * settings.retention + new
    eligible = (missed >= settings.least_misses) & (missed > 0) & ~jnp.any(resident, axis=1)
    most, at = jax.lax.top_k(jnp.where(eligible, missed, 0.0).reshape(-1), limit)
    affordable = jnp.floor(credit / size).astype(jnp.int32)
    asked = (most > 0) & (jnp.arange(limit, dtype=jnp.int32) < affordable)
    num_asked = jnp.sum(asked, dtype=jnp.int32)
    cleared = missed.reshape(-1).at[jnp.where(asked, at, missed.size)].set(0.0, mode="drop")
    at = jnp.where(asked, at.astype(jnp.int32), -1)
    requests = Requests(
        layer=jnp.where(asked, at // num_experts, -1),
        expert=jnp.where(asked, at % num_experts, -1),
        tier=jnp.where(asked, 0, -1),
    )
    return requests, dataclasses.replace(
        state,
        counted=counted,
        missed=cleared.reshape(missed.shape),
        requested=state.requested + num_asked,
        credit=credit - size * num_asked.astype(jnp.float32),
        missing=state.missing * settings.retention,
        steps=state.steps * settings.retention,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BuddyMoe(ByContent, Policy[BuddyState]):
    """BuddyMoE as a policy over one tier.

    All numbers but `max_requests`, which is a shape, are leaves of the state, and may be swept
    there; eta, kappa and beta only if they are not 0 (beta: not None) here, which compiles them
    into the program.
    """

    name: ClassVar[str] = "buddymoe"
    substitutes: ClassVar[bool] = True
    has_kernel: ClassVar[bool] = True  # a subclass with a `search` of its own has none

    lists: BuddyLists = NO_LISTS  # of a profile (`python -m moejax.profile_experts`)
    # float[M, E, E], what the weight of expert i is multiplied by where j serves, such as
    # `buddy_lists.output_gains`; None is the paper's rule, 1. With buddies that are hardly alike
    # the full weight does more harm than dropping the pair.
    gains: np.ndarray | None = None
    # see eq. 1, one of all layers or [M], such as `percentile_tau` gives; below 0: off.
    tae_tau: float | np.ndarray = -1.0
    tae_margin: float = 2.0  # gamma; 2 is off
    tae_temperature: float = 1.0  # temperature of p~
    beta: float | None = None  # see eq. 2; None is off, as in the paper's Tables 2 to 4.
    # in place of beta, B of section 3.1: what layers that the gate bypasses may fetch in a decode
    # step, on the mean; beta follows from what was missing so far
    bypass_bytes: float | None = None
    eta: float = 0.0  # see eq. 3; not 0 costs two launches a layer more.
    kappa: float = 0.0  # see eq. 3; the same.
    hops: tuple[float, ...] = ()  # [E], of eq. 3; () is 0 for all, one partition.
    rho: int | None = None  # replacements of a token and layer at most; None is no limit
    # which pairs the budget goes to first, "first" ranks (Algorithm 1's order) or "last" ones, of
    # the least gate weight
    spend_on: Literal["first", "last"] = "first"
    depth: int | None = None  # H, places of a list that are searched; None is all
    fall_back: FallBack = "fetch"  # what happens to a pair without a buddy
    in_prefill: bool = True  # whether prompts are served by buddies as well
    # whether pairs of a prompt keep the expert that their chunk fetches for another pair, which
    # costs the layer nothing, on one device; False is Algorithm 1 as printed
    keep_fetched: bool = True
    # experts of the next layer to prefetch, those that its router ranks first for this layer's
    # input; -1: as many as a token has. 0 is Algorithm 1, which takes residency as it is given, in
    # a system without prefetch (section 3.4). Never more than the layer has slots.
    prefetch: int = 0
    # of transfers in the background, each time the engine asks for them, which is once a call of
    # decode steps; None is a quarter of an expert
    background_bytes: float | None = None
    half_life: float = 256.0  # such times after which a miss counts half
    least_misses: float = 2.0  # an expert is brought from so many on
    max_requests: int = 4  # most requests per step
    form: Form = "ranks"  # how Algorithm 1 is computed; the engine takes "kernel" on a GPU

    def __post_init__(self) -> None:
        """Raises MoejaxError naming the first setting that is out of its range."""
        spend_on = Literal["first", "last"]
        options = {"spend_on": spend_on, "fall_back": FallBack, "form": Form}
        if not isinstance(self.lists, BuddyLists):
            raise MoejaxError(f"lists={self.lists!r} must be those of a profile")
        for name, allowed in options.items():
            check_choice(name, getattr(self, name), get_args(allowed))
        check_array("tae_tau", self.tae_tau)
        if self.gains is not None:
            check_array("gains", self.gains, of_profile=True)
        check_number("tae_margin", self.tae_margin, 0)
        for name in ("tae_temperature", "half_life"):
            check_number(name, getattr(self, name), 0, above=True)
        if self.beta not in (None, math.inf):  # infinity: nothing bypasses
            check_number("beta", self.beta, 0)
        if self.bypass_bytes is not None:
            check_number("bypass_bytes", self.bypass_bytes, 0)
            if self.beta is not None:
                raise MoejaxError(f"beta={self.beta} and bypass_bytes are of one gate: give one")
        for name in ("eta", "kappa", "least_misses"):
            check_number(name, getattr(self, name), 0)
        check_numbers("hops", self.hops, 0)
        if self.rho is not None:
            check_number("rho", self.rho, 0, 2**30, integer=True)
        if self.depth is not None:
            check_number("depth", self.depth, 1, self.lists.ids.shape[-1], integer=True)
        for name in ("in_prefill", "keep_fetched"):
            check_flag(name, getattr(self, name))
        check_number("prefetch", self.prefetch, -1, 2**30, integer=True)
        if self.background_bytes is not None:
            check_number("background_bytes", self.background_bytes, 0)
        check_number("max_requests", self.max_requests, 0, 2**20, integer=True)

    @property
    def partition_refusal(self) -> str | None:
        """Names the first setting that is of one device."""
        if self.max_requests:
            return f"nothing moves between steps, but max_requests={self.max_requests}: set 0"
        if self.bypass_bytes is not None:
            return "bypass_bytes are those of one link: give beta"
        return "hops are those of the mesh: leave hops out" if self.hops else None

    @property
    def needs(self) -> Needs:
        """Names what the engine must compute, as `Policy.needs`."""
        return Needs(predicted=self.prefetch != 0)

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes; None where all layers share a budget of bytes."""
        if self.bypass_bytes is not None:
            return None
        rows = ("lists", "q", "replaced", "dropped", *("gains",) * (self.gains is not None))
        axes: dict[str, Any] = {of.name: None for of in dataclasses.fields(BuddyState)}
        settings = layer_axes_of(_Settings, tau=0, ahead=0)
        return BuddyState(**axes | dict.fromkeys(rows, 0) | {"settings": settings})

    def init(self, spec: PolicySpec) -> BuddyState:
        """Returns the state before any token."""
        shape = (spec.num_layers, spec.num_experts)
        if not self.lists.ids.size:
            raise MoejaxError("buddymoe needs the lists of a profile (moejax.profile_experts)")
        if self.lists.ids.shape[:2] != shape:
            raise MoejaxError(
                f"the buddy lists are of {self.lists.ids.shape[0]} layers of "
                f"{self.lists.ids.shape[1]} experts, the model has {shape[0]} of {shape[1]}"
            )
        if len(spec.tiers) != 1:
            raise MoejaxError(f"buddymoe serves one tier, not {', '.join(spec.tiers)}")
        if self.hops and len(self.hops) != spec.num_experts:
            raise MoejaxError(f"hops has {len(self.hops)} of {spec.num_experts} experts")
        if np.shape(self.tae_tau) not in ((), shape[:1]):
            raise MoejaxError(f"tae_tau has {np.size(self.tae_tau)} of {shape[0]} layers")
        if self.gains is not None and self.gains.shape != (*shape, spec.num_experts):
            raise MoejaxError(f"gains is {list(self.gains.shape)}, not [layers, experts, experts]")
        if max(self.lists.ids.max(initial=-1), -1) >= spec.num_experts:
            raise MoejaxError(f"the buddy lists name experts beyond {spec.num_experts - 1}")
        zero = jnp.zeros((), jnp.int32)
        return BuddyState(
            settings=self._settings(spec),
            lists=jnp.asarray(self.lists.ids),
            q=jnp.asarray(self.lists.q),
            gains=None if self.gains is None else jnp.asarray(self.gains, jnp.float32),
            hops=jnp.asarray(self.hops or [0.0] * spec.num_experts, jnp.float32),
            replaced=jnp.zeros(shape, jnp.int32),
            dropped=jnp.zeros(shape, jnp.int32),
            counted=jnp.zeros(shape, jnp.int32),
            missed=jnp.zeros(shape, jnp.float32),
            requested=zero,
            credit=jnp.zeros((), jnp.float32),
            missing=jnp.zeros(buddy_gates.DELTA_BINS + 1, jnp.float32),
            steps=jnp.zeros((), jnp.float32),
        )

    def _settings(self, spec: PolicySpec) -> _Settings:
        background = self.background_bytes
        if background is None:
            background = spec.expert_bytes[0] / 4
        real = {
            "margin": self.tae_margin,
            "temperature": self.tae_temperature,
            "beta": np.inf if self.beta is None else self.beta,
            "bypass_bytes": self.bypass_bytes or 0,
            "eta": self.eta,
            "kappa": self.kappa,
            "background_bytes": background,
            "expert_bytes": spec.expert_bytes[0],
            "retention": 0.5 ** (1 / self.half_life),
            "least_misses": self.least_misses,
        }
        whole = {
            "budget": spec.width if self.rho is None else self.rho,
            "depth": self.depth or self.lists.ids.shape[-1],
        }
        tau = np.broadcast_to(np.asarray(self.tae_tau, np.float32), spec.num_layers)
        return _Settings(
            tau=jnp.asarray(tau),
            ahead=prefetch_limits(spec, 0, spec.width if self.prefetch < 0 else self.prefetch),
            **{name: jnp.asarray(value, jnp.float32) for name, value in real.items()},
            **{name: jnp.asarray(value, jnp.int32) for name, value in whole.items()},
        )

    def decide(
        self, state: BuddyState, observation: Observation, runs: jax.Array | None = None
    ) -> tuple[Decision, BuddyState]:
        """Decides which expert computes each pair of a layer, and what to prefetch.

        Only pairs that `runs`, bool[N, A], has (None: all) are replaced, use budget and are
        counted.
        """
        o = observation
        asked = jnp.broadcast_to(o.active[:, None], o.ids.shape)
        asked = asked if runs is None else asked & runs
        tier = jnp.where(asked, 0, SKIPPED)
        served = Decision(
            o.ids, tier, o.weights, jnp.zeros(o.ids.shape, bool), self.ahead(state, o)
        )
        if o.is_complete or (o.is_prefill and not self.in_prefill):
            return served, state  # nothing is missing, or replaced: a launch less
        resident = o.resident[0]
        keeps = self.keep_fetched and o.is_prefill and o.partition is None
        missing = asked & ~resident.at[o.ids].get(mode="clip")
        counts = None  # of replaced pairs, by the kernel
        if self._is_one_launch:
            given = o.active if runs is None else asked
            found, counts = self._searched(state, o, resident, given, counts=not keeps)
        else:
            wanted = missing & self._passes(state, o, resident, asked)
            found = self.search(state, o, resident, wanted)
        if keeps:
            found = self._without_fetched(found, o, missing)
        ids, weights = found.ids, o.weights
        if state.gains is not None:
            gain = state.gains.at[o.layer, o.ids, ids].get(mode="clip")
            weights = jnp.where(found.replaced, weights * gain, weights)
        dropped = jnp.zeros_like(found.replaced)
        if self.fall_back == "drop":
            dropped = found.searched & ~found.replaced
            tier = jnp.where(dropped, SKIPPED, tier)
        decision = served._replace(ids=ids, tier=tier, weights=weights)
        if self.bypass_bytes is not None and not o.is_prefill:
            state = _with_missing(state, o, asked)
        return decision, self._counted(state, o, counts, found.replaced, dropped)

    def _without_fetched(
        self, found: Substitution, o: Observation, missing: jax.Array
    ) -> Substitution:
        """Leaves out the pairs whose expert is fetched for another pair anyway."""
        fetched = missing & ~(found.searched if self.fall_back == "drop" else found.replaced)
        coming = buddy_gates.requested_experts(o.ids, fetched, o.resident.shape[1])
        kept = missing & coming.at[o.ids].get(mode="clip")
        return Substitution(
            jnp.where(kept, o.ids, found.ids), found.replaced & ~kept, found.searched & ~kept
        )

    def ahead(self, state: BuddyState, o: Observation) -> jax.Array | None:
        """Chooses what to prefetch of the next layer, as `Decision.ahead`; None without."""
        ahead = experts_ahead(o, state.settings.ahead[o.layer])
        return None if ahead is None else jnp.where(ahead, jnp.int32(0), -1)

    def max_prefetch(self, state: BuddyState) -> int:
        """Bounds the look-ahead, as `Policy.max_prefetch`."""
        return int(state.settings.ahead.max())

    def decode_rule(self, state: BuddyState) -> Rule | None:
        """Gives the rule by which all pairs run, unless some are dropped."""
        del state
        if self.fall_back == "drop":
            return None
        return always(jnp.zeros((), jnp.int32))

    def _passes(
        self, state: BuddyState, o: Observation, resident: jax.Array, asked: jax.Array
    ) -> jax.Array:
        """Mask of what both gates let be replaced: tokens bool[N, 1], or pairs bool[N, A]."""
        settings = state.settings
        chosen = buddy_gates.chosen_probabilities(o.probabilities, o.ids, settings.temperature)
        passes = buddy_gates.tolerates(chosen, settings.tau[o.layer], settings.margin)
        if not self._is_bypassed:
            return passes[:, None]
        cheap = self._is_cheap(state, o, resident, asked)
        return passes[:, None] & cheap if cheap.ndim else (passes & cheap)[:, None]

    def _is_cheap(
        self, state: BuddyState, o: Observation, resident: jax.Array, asked: jax.Array
    ) -> jax.Array:
        """Distribution gate, bool[]: few enough experts are missing for buddies.

        With partitions bool[N, A], by the share of the partition of each pair's expert.
        """
        requested = buddy_gates.requested_experts(o.ids, asked, len(resident))
        s = state.settings
        if self.bypass_bytes is None:
            beta = s.beta
        else:
            mean = state.missing / jnp.maximum(state.steps, 1.0)
            beta = buddy_gates.beta_within(mean, s.bypass_bytes / s.expert_bytes)
        if o.partition is None:
            return buddy_gates.missing_share(requested, resident) < beta
        same = o.partition[:, None] == o.partition[None]
        share = jax.vmap(buddy_gates.missing_share, (0, None))(same & requested[None], resident)
        return (share < beta)[o.ids]

    @property
    def _is_bypassed(self) -> bool:
        """Whether the policy has a distribution gate."""
        return self.beta is not None or self.bypass_bytes is not None

    @property
    def _is_scored(self) -> bool:
        """Whether candidates are ordered by a score and not by their lists."""
        return bool(self.eta or self.kappa)

    @property
    def _is_one_launch(self) -> bool:
        """Whether one kernel gates, searches and counts."""
        return self.form == "kernel" and self.has_kernel and not self._is_scored

    def _searched(
        self, state: BuddyState, o: Observation, resident: jax.Array, allowed: jax.Array,
        *, counts: bool,
    ) -> tuple[Substitution, jax.Array | None]:  # fmt: skip
        """Substitutes by that kernel; with `counts` returns those of replaced pairs, too."""
        s = state.settings
        if self._is_bypassed:
            asked = jnp.broadcast_to(allowed.reshape(len(o.ids), -1), o.ids.shape)
            allowed = asked if o.partition is not None else allowed
            allowed &= self._is_cheap(state, o, resident, asked)
        held = resident if o.tables is None else o.tables
        found = buddy_search.search(
            o.ids, state.lists, o.layer, held, allowed, s.depth, s.budget,
            Gate(o.probabilities, s.tau, s.margin, s.temperature),
            state.replaced if counts else None, last_first=self.spend_on == "last",
        )  # fmt: skip
        return Substitution(found.ids, found.ids != o.ids, found.searched), found.replaced

    def search(
        self, state: BuddyState, o: Observation, resident: jax.Array, wanted: jax.Array
    ) -> Substitution:
        """Runs Algorithm 1 over the pairs of a layer that are `wanted`, bool[N, A]."""
        settings = state.settings
        listed = state.lists[o.layer].at[o.ids].get(mode="clip")
        if self._is_scored:
            is_near = jnp.arange(listed.shape[2], dtype=jnp.int32) < settings.depth
            listed = jnp.where(is_near[None, None], listed, -1)
            listed = _in_order(listed, self._scores(state, o, listed))
        ids, searched = buddy_search.search_pairs(
            o.ids, listed, resident, wanted, settings.depth, settings.budget,
            last_first=self.spend_on == "last",
        )  # fmt: skip
        # Without the barrier every reader computes it again: 24 s of compiling 16 layers against 9.
        ids = jax.lax.optimization_barrier(ids)
        return Substitution(ids, ids != o.ids, searched)

    def _scores(self, state: BuddyState, o: Observation, listed: jax.Array) -> jax.Array:
        """Scores of listed buddies by eq. 3, float32[N, A, H]."""
        settings, hops = state.settings, state.hops
        if o.partition is not None:  # any two devices of a host are one hop apart
            buddys = o.partition.at[listed].get(mode="clip")
            hops = (buddys != o.partition[o.ids][..., None]).astype(jnp.float32)
        logits, q = _normalized_logits(o.probabilities), state.q[o.layer][o.ids]
        return _buddy_score(listed, q, logits, hops, settings.eta, settings.kappa)

    def _counted(
        self, state: BuddyState, o: Observation, counts: jax.Array | None, replaced: jax.Array,
        dropped: jax.Array,
    ) -> BuddyState:  # fmt: skip
        """Counts a layer's pairs by the missed expert; `counts`: replaced ones, if known."""
        expert = jnp.arange(state.missed.shape[1], dtype=jnp.int32)

        def by_expert(pairs: jax.Array) -> jax.Array:
            ids = jnp.where(pairs, o.ids, -1).reshape(-1)
            return jnp.sum(ids[:, None] == expert[None], axis=0, dtype=jnp.int32)

        def added(counts: jax.Array, pairs: jax.Array) -> jax.Array:  # no scatter: a launch less
            row = jax.lax.dynamic_index_in_dim(counts, o.layer, keepdims=False) + by_expert(pairs)
            return jax.lax.dynamic_update_index_in_dim(counts, row, o.layer, 0)

        now: dict[str, Any] = {"replaced": counts}
        if counts is None:
            now["replaced"] = added(state.replaced, replaced)
        if self.fall_back == "drop":
            now["dropped"] = added(state.dropped, dropped)
        return dataclasses.replace(state, **now)

    def transfers(self, state: BuddyState, resident: jax.Array) -> tuple[Requests, BuddyState]:
        """Requests the most missed experts, as many as the saved bytes allow."""
        return _most_missed(state, resident, self.max_requests)
