"""DynaExq: precision follows hotness (arXiv text "Dynamic Expert Quantization for Scalable MoE").

Inside the step each expert has an exponential mean of the router's scores (eq. 2), and a pair runs
in high precision if its expert's hot copy is resident: the last stable version serves. Between
steps Algorithm 1 chooses, every T tokens, the hot set H, and requests the transfers that lead from
the pools' contents to H. Experts that may soon be hot can be read from the disk to host memory
ahead of that (section 3.3).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.policies.base import (
    Decision,
    Observation,
    Policy,
    PolicySpec,
    Requests,
    layer_axes_of,
    no_requests,
    ranks,
    tier_id,
)
from moejax.policies.baselines import as_routed
from moejax.policies.settings import (
    ByContent,
    check_array,
    check_choice,
    check_number,
    check_numbers,
    check_text,
)
from pallas_kernels.cache_plan import Rule

CHOICES = ("hot", "random", "first")
FORESEE_BY = ("scores", "links")


class _DynaExqSettings(NamedTuple):
    """Settings that a sweep may vary; see `DynaExq` for the meanings."""

    alpha: jax.Array  # float32[]
    period: jax.Array  # int32[], T
    warmup: jax.Array  # int32[]
    fixed: jax.Array  # bool[], whether tau is
    hysteresis: jax.Array  # float32[]
    n_hot: jax.Array  # int32[M]
    cold_slots: jax.Array  # int32[], of a layer
    hot: jax.Array  # int32[], the tier of high precision
    cold: jax.Array  # int32[], the tier of low precision


class _DynaExqState(NamedTuple):
    """State of DynaExq."""

    scores: jax.Array  # float32[M, E], S of eq. 2.
    high: jax.Array  # bool[M, E], H of Algorithm 1; nothing before the warm-up has ended
    # float32[M], fixed when the warm-up ends, or the n_hot-th score at the last update
    tau: jax.Array
    # int32[], since the last multiple of T at which H was updated; in the warm-up, all
    tokens: jax.Array
    warm: jax.Array  # bool[], whether the warm-up has ended
    is_fresh: jax.Array  # bool[], whether H was chosen by the last `transfers`
    links: jax.Array | None  # float32[M, E, E], constant; None if not used
    settings: _DynaExqSettings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DynaExq(ByContent, Policy[_DynaExqState]):
    """Two precisions, hot and cold, assigned to experts by the workload.

    The low tier always holds every expert where the spec gives it E slots a layer; then a demotion
    moves no bytes. Otherwise an expert is in one of the two, as in the paper.
    """

    name: ClassVar[str] = "dynaexq"
    repeats_requests: ClassVar[bool] = True

    hot: str = ""  # the tier of high precision; "": the first
    cold: str = ""  # the tier of low precision; "": the last
    period: int = 256  # T, tokens between updates of H
    alpha: float | None = None  # see eq. 2; None: 1 - 1/T.
    # "fixed" at the n_hot-th score when the warm-up ends (section 3.5), or "moving": the n_hot-th
    # score at each update, which leaves no slot empty after a shift
    tau: str = "moving"
    # experts of each layer in high precision: a number, one of each layer, or None for the slots of
    # the hot tier; never more than those
    n_hot: int | tuple[int, ...] | None = None
    warmup: int = 0  # tokens before H is chosen for the first time; 0: T
    # share by which a cold expert must exceed a hot one to take its place; the paper has none
    hysteresis: float = 0.0
    max_requests: int = 64  # R of `Requests`, even; what is left over is asked for the next time
    # experts per layer whose hot form is read from the disk to host memory whenever H is chosen,
    # since they may be hot next time; 0: none
    foresight: int = 0
    # how such experts are predicted: by "scores", their own hotness, or by "links", the hotness of
    # the layer before through a profile's cross-layer activations (the paper's way)
    foresee_by: str = "scores"
    links: np.ndarray | None = None  # float32[M, E, E] for the latter, by `links_of`
    # "hot"; or, for comparison, fixed choices that ignore frequencies: "random", or "first", the
    # smallest ids. (A static choice by the frequencies of the warm-up is "hot" with a period that
    # never ends, and an alpha of its own.)
    choice: str = "hot"
    seed: int = 0  # seed of "random"

    def __post_init__(self) -> None:
        check_text("hot", self.hot)
        check_text("cold", self.cold)
        check_number("period", self.period, 1, 2**30, integer=True)
        if self.alpha is not None:
            check_number("alpha", self.alpha, 0, 1, below=True)
        check_choice("tau", self.tau, ("moving", "fixed"))
        if isinstance(self.n_hot, tuple):
            check_numbers("n_hot", self.n_hot, 0, integer=True)
        elif self.n_hot is not None:
            check_number("n_hot", self.n_hot, 0, integer=True)
        check_number("warmup", self.warmup, 0, 2**30, integer=True)
        check_number("hysteresis", self.hysteresis, 0)
        check_number("max_requests", self.max_requests, 2, 2**20, integer=True)
        if self.max_requests % 2:
            raise MoejaxError(f"max_requests={self.max_requests} must be even: they come in pairs")
        check_number("foresight", self.foresight, 0, 2**16, integer=True)
        check_choice("foresee_by", self.foresee_by, FORESEE_BY)
        if self.foresee_by == "links" and not self.foresight:
            raise MoejaxError("foresee_by=links is for foresight above 0")
        if self.foresight and self.choice != "hot":
            raise MoejaxError(f"foresight={self.foresight} is for choice=hot: {self.choice} stays")
        if self.links is not None:
            check_array("links", self.links, of_profile=True)
        check_choice("choice", self.choice, CHOICES)
        check_number("seed", self.seed, 0, 2**32 - 1, integer=True)

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes, as `Policy.layer_axes`."""
        return layer_axes_of(_DynaExqState, scores=0)

    def transfer_tiers(self, spec: PolicySpec) -> tuple[int, ...]:
        """Names the tiers of transfers, as `Policy.transfer_tiers`: all tiers but the cold one."""
        cold = tier_id(spec, self.cold, -1)
        return tuple(tier for tier in range(len(spec.tiers)) if tier != cold)

    def init(self, spec: PolicySpec) -> _DynaExqState:
        """Makes the first state, as `Policy.init`."""
        hot, cold = tier_id(spec, self.hot, 0), tier_id(spec, self.cold, -1)
        if not hot < cold:
            raise MoejaxError(
                f"hot={spec.tiers[hot]} must be of higher fidelity than cold={spec.tiers[cold]}; "
                f"stored are {', '.join(spec.tiers)}"
            )
        self._check_foresight(spec)
        alpha = 1 - 1 / self.period if self.alpha is None else self.alpha
        if self.choice != "hot":
            alpha = 1.0  # scores stay what they are
        scores = self._first_scores(spec)
        settings = _DynaExqSettings(
            alpha=jnp.asarray(alpha, jnp.float32),
            period=jnp.asarray(self.period, jnp.int32),
            warmup=jnp.asarray(self.warmup or self.period, jnp.int32),
            fixed=jnp.asarray(self.tau == "fixed"),
            hysteresis=jnp.asarray(self.hysteresis, jnp.float32),
            n_hot=jnp.asarray(self._n_hot(spec, spec.slots[hot]), jnp.int32),
            cold_slots=jnp.asarray(spec.slots[cold], jnp.int32),
            hot=jnp.asarray(hot, jnp.int32),
            cold=jnp.asarray(cold, jnp.int32),
        )
        return _DynaExqState(
            scores=jnp.asarray(scores, jnp.float32),
            high=jnp.zeros(scores.shape, bool),
            tau=jnp.zeros(spec.num_layers, jnp.float32),
            tokens=jnp.zeros((), jnp.int32),
            warm=jnp.zeros((), bool),
            is_fresh=jnp.zeros((), bool),
            links=jnp.asarray(self.links, jnp.float32) if self._uses_links else None,
            settings=settings,
        )

    def decide(
        self, state: _DynaExqState, observation: Observation
    ) -> tuple[Decision, _DynaExqState]:
        """Runs UPDATEHOTNESS of Algorithm 1 for the layer; the pools decide the precision."""
        settings, layer = state.settings, observation.layer
        count = _num_active(observation)
        row = jax.lax.dynamic_index_in_dim(state.scores, layer, keepdims=False)
        row = _smoothed(row, _gate_means(observation), count, settings.alpha)
        scores = jax.lax.dynamic_update_index_in_dim(state.scores, row, layer, 0)
        tokens = state.tokens + jnp.where(layer == 0, count, 0)
        is_hot = observation.resident[settings.hot][observation.ids]
        decision = as_routed(observation, jnp.where(is_hot, settings.hot, settings.cold))
        return decision, state._replace(scores=scores, tokens=tokens)

    def decode_rule(self, state: _DynaExqState) -> Rule:
        """Gives the rule of decode steps, as `Policy.decode_rule`."""
        return Rule(None, state.settings.hot, state.settings.cold, jnp.ones((), bool))

    def transfers(
        self, state: _DynaExqState, resident: jax.Array
    ) -> tuple[Requests, _DynaExqState]:
        """Runs PRECISIONSCHEDULE of Algorithm 1 for all layers, once T tokens have passed."""
        settings = state.settings
        first = ~state.warm & (state.tokens >= settings.warmup)
        due = first | (state.warm & (state.tokens >= settings.period))
        is_fixed = settings.fixed & ~first
        tau = jnp.where(is_fixed, state.tau, -jnp.inf)
        found = _hot_set(state.scores, state.high, settings.n_hot, tau, settings.hysteresis)
        state = state._replace(
            high=jnp.where(due, found.high, state.high),
            tau=jnp.where(due & ~is_fixed, found.last, state.tau),
            tokens=jnp.where(due, state.tokens % settings.period, state.tokens),
            warm=state.warm | first,
            is_fresh=due,
        )
        asked = _swaps(
            state.scores,
            state.high,
            resident[:, settings.hot],
            resident[:, settings.cold],
            settings.n_hot,
            settings.cold_slots,
            (settings.hot, settings.cold),
            self.max_requests,
        )
        return Requests(*(jnp.where(state.warm, field, -1) for field in asked)), state

    def tokens_until_change(self, state: _DynaExqState, resident: jax.Array) -> jax.Array:
        """Counts the tokens until H is chosen, in the warm-up or while the pools hold H; else 0."""
        settings = state.settings
        rests = ~state.warm | jnp.all(state.high == resident[:, settings.hot])
        until = jnp.where(state.warm, settings.period, settings.warmup)
        return jnp.where(rests, jnp.maximum(until - state.tokens, 0), 0)

    def disk_prefetch(self, state: _DynaExqState, resident: jax.Array) -> Requests:
        """Requests nearly hot experts from the disk when `transfers` has just chosen H.

        An expert that has a slot still, and is to leave it, is likely to return.
        """
        del resident
        if not self.foresight:
            return no_requests()
        hot = state.settings.hot
        worth = state.scores if state.links is None else _expected(state.scores, state.links)
        return _nearly_hot(worth, state.high, hot, self.foresight, state.is_fresh)

    @property
    def _uses_links(self) -> bool:
        return self.foresight > 0 and self.foresee_by == "links"

    def _check_foresight(self, spec: PolicySpec) -> None:
        """Raises MoejaxError for too many experts, or links of another model."""
        if self.foresight > spec.num_experts:
            raise MoejaxError(f"foresight={self.foresight}, but a layer has {spec.num_experts}")
        if not self._uses_links:
            return
        if self.links is None:
            raise MoejaxError(
                "foresee_by=links needs a profile (moejax.profile_experts) that says which experts "
                "follow which"
            )
        shape = (spec.num_layers, spec.num_experts, spec.num_experts)
        if self.links.shape != shape:
            raise MoejaxError(f"links are {list(self.links.shape)}, the model needs {list(shape)}")

    def _first_scores(self, spec: PolicySpec) -> np.ndarray:
        """Scores float64[M, E] before any token."""
        shape = spec.num_layers, spec.num_experts
        if self.choice == "random":
            return np.random.default_rng(self.seed).random(shape)
        if self.choice == "first":
            return np.tile(1 - np.arange(spec.num_experts) / spec.num_experts, (shape[0], 1))
        return np.zeros(shape)

    def _n_hot(self, spec: PolicySpec, slots: int) -> np.ndarray:
        """Number of hot experts per layer, int64[M], checked against the slots."""
        wanted = slots if self.n_hot is None else self.n_hot
        if isinstance(wanted, tuple) and len(wanted) != spec.num_layers:
            raise MoejaxError(
                f"n_hot has {len(wanted)} numbers, but the model has {spec.num_layers} sparse "
                "layers: give one of each, or a single number"
            )
        numbers = np.broadcast_to(np.asarray(wanted), spec.num_layers)
        if numbers.max() > slots:
            if slots == spec.num_experts:
                raise MoejaxError(f"n_hot={int(numbers.max())}, but a layer has {slots} experts")
            raise MoejaxError(f"n_hot={int(numbers.max())}, but the hot tier has {slots} slots")
        return numbers


def _gate_means(observation: Observation) -> jax.Array:
    """Means float32[E] of g over the active tokens; 0 without any.

    g is the router's full softmax, and 0 for experts that a token did not choose: Algorithm 1
    lets inactive experts decay, which eq. 2 alone would not.
    """
    num_experts = observation.probabilities.shape[1]
    expert = jax.lax.iota(jnp.int32, num_experts)
    chosen = jnp.any(observation.ids[:, :, None] == expert[None, None], axis=1)
    chosen &= observation.active[:, None]
    total = jnp.sum(jnp.where(chosen, observation.probabilities, 0.0), axis=0)
    return total / jnp.maximum(_num_active(observation), 1).astype(jnp.float32)


def _num_active(observation: Observation) -> jax.Array:
    """Number of tokens that are not padding, int32[]."""
    return jnp.sum(observation.active, dtype=jnp.int32)


def _smoothed(
    scores: jax.Array,  # float32[E], S
    means: jax.Array,  # float32[E], of `_gate_means`
    num_tokens: jax.Array,  # int32[], n
    alpha: jax.Array,  # float32[], 0 to 1, less than 1
) -> jax.Array:
    """Applies eq. 2 to n tokens at once: S <- alpha^n S + (1 - alpha^n) mean(g), float32[E].

    For one token it is eq. 2. It does not depend on the order of the tokens, and a prompt counts as
    much as the same number of decoded ones.
    """
    kept = jnp.power(alpha, num_tokens.astype(jnp.float32))
    return kept * scores + (1 - kept) * means


class _HotSet(NamedTuple):
    """Hot set and its threshold: lines 14 and 15 of Algorithm 1."""

    high: jax.Array  # bool[M, E], the set H
    last: jax.Array  # float32[M], the n_hot-th score, tau_h = top(n_hot, S) of section 3.5


def _hot_set(
    scores: jax.Array, high: jax.Array, n_hot: jax.Array, tau: jax.Array, hysteresis: jax.Array
) -> _HotSet:
    """Chooses the top n_hot experts with S >= tau; ties go to hot ones, then to small ids.

    Args:
      scores: float32[M, E], S.
      high: bool[M, E], the set so far.
      n_hot: int32[M], K.
      tau: float32[M]; -inf lets all pass.
      hysteresis: float32[], the share by which a score must exceed a hot expert's to replace it,
        and by which a hot expert may fall below tau; 0 in the paper.
    """
    worth = jnp.where(high, scores * (1 + hysteresis), scores)
    place = ranks(worth, high)
    is_last = place == n_hot[:, None] - 1
    last = jnp.max(jnp.where(is_last, scores, 0.0), axis=1)
    return _HotSet((place < n_hot[:, None]) & (worth >= tau[:, None]), last)


def _swaps(
    scores: jax.Array,  # float32[M, E]
    high: jax.Array,  # bool[M, E], H, at most n_hot in a layer
    hot: jax.Array,  # bool[M, E], experts of the hot tier once all transfers in flight have arrived
    cold: jax.Array,  # bool[M, E], the cold tier
    n_hot: jax.Array,  # int32[M], slots of the hot tier
    cold_slots: jax.Array,  # int32[], slots of a layer in the cold tier
    tiers: tuple[jax.Array, jax.Array],  # int32[] of the hot tier and of the cold one
    max_requests: int,  # R, static and even
) -> Requests:
    """Demotions and promotions that lead to the hot set: lines 16 to 22 of Algorithm 1.

    In a layer the hottest promotion takes the slot of the coldest demotion, and so on; where slots
    are free, promotions take these first. Over the layers, the pair that gains the most hotness
    comes first. A demotion without a promotion needs room in the cold tier, if its expert is not
    there already.

    Returns:
      R requests, a demotion and then its promotion, either of which may be none.
    """
    num_layers, num_experts = scores.shape
    up, down = high & ~hot, ~high & hot
    free = jnp.maximum(n_hot - _num(hot), 0)
    # Places among the promotions, hottest first, and the demotions, coldest first.
    up_place = jnp.where(up, ranks(up, scores), num_experts)
    down_place = jnp.where(down, ranks(down, -scores) + free[:, None], num_experts)
    may_up = up_place < (free + _num(down))[:, None]
    alone = down & (down_place >= _num(up)[:, None])
    needs_room = alone & ~cold
    room = cold_slots - _num(cold)
    refused = needs_room & (ranks(needs_room, -scores) >= room[:, None])
    promoted, gain = _at_places(jnp.where(may_up, up_place, num_experts), scores)
    demoted, loss = _at_places(jnp.where(refused, num_experts, down_place), scores)
    some = (promoted >= 0) | (demoted >= 0)
    urgency = jnp.where(some, gain - loss, -jnp.inf).reshape(-1)
    num_pairs = min(max_requests // 2, urgency.size)
    urgency, pair = jax.lax.top_k(urgency, num_pairs)
    layer = jnp.broadcast_to(jax.lax.iota(jnp.int32, num_layers)[:, None], scores.shape)
    experts = jnp.stack([demoted, promoted], axis=-1).reshape(-1, 2)[pair]
    real = (urgency[:, None] > -jnp.inf) & (experts >= 0)
    wanted = jnp.stack([tiers[1], tiers[0]])
    fields = (layer.reshape(-1)[pair][:, None], experts, wanted[None])
    padding = (0, max_requests - 2 * num_pairs)
    return Requests(
        *(jnp.pad(jnp.where(real, x, -1).reshape(-1), padding, constant_values=-1) for x in fields)
    )


def _num(mask: jax.Array) -> jax.Array:
    """Number of set entries in each layer, int32[M]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


def _at_places(place: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expert at each place 0..E - 1, int32[M, E] or -1, and its score, or 0."""
    index = jax.lax.broadcasted_iota(jnp.int32, place.shape, 1)
    layer = jax.lax.iota(jnp.int32, len(place))[:, None]
    expert = jnp.full(place.shape, -1, jnp.int32).at[layer, place].set(index, mode="drop")
    score = jnp.take_along_axis(scores, jnp.maximum(expert, 0), axis=1)
    return expert, jnp.where(expert >= 0, score, 0.0)


def _expected(scores: jax.Array, links: jax.Array) -> jax.Array:
    """Hotness float32[M, E] predicted from the layer before; the first layer keeps its own.

    `scores`, float32[M, E], are S of eq. 2, `links`, float32[M, E, E], those of `links_of`.
    """
    before = jnp.einsum("le,lef->lf", scores[:-1], links[1:], precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([scores[:1], before])


def _nearly_hot(
    worth: jax.Array, settled: jax.Array, tier: jax.Array, count: int, is_due: jax.Array
) -> Requests:
    """Requests the `count` most valuable experts of each layer that are not settled.

    The first of every layer comes before the second of any.

    Args:
      worth: float32[M, E]; experts with 0 are never requested.
      settled: bool[M, E], experts that are hot or will be.
      tier: int32[], the hot tier.
      is_due: bool[], whether to request anything.
    """
    num_layers, num_experts = worth.shape
    wanted = ~settled & (worth > 0) & is_due
    place = jnp.where(wanted, ranks(~settled, worth), num_experts)
    expert = _at_places(place, worth)[0][:, :count].T.reshape(-1)
    layer = jnp.tile(jax.lax.iota(jnp.int32, num_layers), count)
    asked = expert >= 0
    return Requests(jnp.where(asked, layer, -1), expert, jnp.where(asked, tier, -1))
