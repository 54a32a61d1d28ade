"""DyMoE: critical experts in high precision, the others in low precision or left out.

For each layer a number of critical experts (eq. 4 and 5) is chosen by importance: by heavy hitters
in prefill, by gate in decode (eq. 1 to 3). The next layer's are prefetched (eq. 6 to 8), and a
resident copy of higher precision than requested serves, whether or not the low tier has every
expert (`cache_plan.resolve_tiers`).

Eq. 4 is r(l) = (1 - lambda) f(l) + lambda with f(l) = (cos(pi l / (L - 1)) + 1) / 2. Every profile
f here has the mean 1/2, so that the mean of r(l) is r = (1 + lambda) / 2, the retention that the
paper states in its tables: lambda = 2 r - 1, and r is at least 0.5. l counts sparse layers.

Axes: N tokens, A experts a token, E experts of a layer, L sparse layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.policies.base import (
    SKIPPED,
    Decision,
    Needs,
    Observation,
    Policy,
    PolicySpec,
    chosen_by,
    experts_ahead,
    layer_axes_of,
    of_few,
    ranks,
    tier_id,
)
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
SCHEDULES = ("cosine", "linear", "sensitivity", "equal")
ROUNDINGS = ("diffused", "ceil")


class _DyMoEState(NamedTuple):
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
class DyMoE(Policy[_DyMoEState]):
    """Mixed precision by importance."""

    name: ClassVar[str] = "dymoe"

    high: str = ""  # the tier of critical experts; "": the first
    low: str = ""  # the tier of the others; "": the last; "skip": they are left out (4/0)
    # r, the mean share of critical experts; 0.5 to 1, with schedule "equal" 0 to 1
    retention: float = 0.75
    schedule: str = "cosine"  # over depth; see `_retention_ratios`
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
    # t of eq. 7 and 8; -1: t_(l+1), 0: none. Never more than the high tier prefetches or has slots.
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
        return layer_axes_of(_DyMoEState, decode=0, prefill=0, ahead=1)

    def first_alone(self, spec: PolicySpec) -> bool:
        """Whether half or more are critical, in the first tier, as `Policy.first_alone`."""
        return self.retention >= 0.5 and tier_id(spec, self.high, 0) == 0

    def counts(self, num_layers: int, num_requested: int) -> np.ndarray:
        """Critical experts t_l, int64[L], of `num_requested` per layer; their mean is printed."""
        ratios = _retention_ratios(self.schedule, self.retention, num_layers, self.sensitivity)
        return _critical_counts(ratios, num_requested, self.rounding)

    def init(self, spec: PolicySpec) -> _DyMoEState:
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
        ahead = np.minimum(np.pad(ahead[:, 1:], ((0, 0), (0, 1))), spec.most_ahead(high))
        return _DyMoEState(
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

    def decide(self, state: _DyMoEState, observation: Observation) -> tuple[Decision, _DyMoEState]:
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

    def decode_rule(self, state: _DyMoEState) -> Rule | None:
        """Gives the rule by which a token's first experts by weight are critical."""
        if self.selection == "random" or (self.renormalise and self.low == SKIP):
            return None
        return Rule(state.decode, state.high, state.low, state.reuse_skipped, at_least=True)

    def max_prefetch(self, state: _DyMoEState) -> int:
        """Bounds the look-ahead, as `Policy.max_prefetch`."""
        return int(state.ahead[0].max())

    def _critical(self, state: _DyMoEState, observation: Observation) -> jax.Array:
        """Mask bool[N, A] of pairs whose expert is critical."""
        num_experts, active = observation.probabilities.shape[1], observation.active
        drawn = None
        if self.selection == "random":
            key = jax.random.fold_in(jax.random.key(state.seed), state.calls)
            drawn = jax.random.uniform(key, (num_experts,))
        if not observation.is_prefill:
            by = observation.weights if drawn is None else drawn[observation.ids]
            return _critical_pairs(observation, by, state.decode[observation.layer])
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
            num = _num_heavy(active, state.heavy_share, state.heavy_count)
            tokens = _heavy_hitters(observation.importance, active, num)
        return _critical_by_tokens(observation, tokens, limit)[observation.ids]


def _num_heavy(
    active: jax.Array,  # bool[N]
    share: jax.Array,  # float32[], 0 to 1
    count: jax.Array,  # int32[]
) -> jax.Array:
    """Number k of eq. 2, int32[]: `count`, or if 0 a share of the active tokens, rounded up."""
    # A share such as 0.1 of 30 tokens is 3, whatever float32 makes of it.
    of_all = jnp.ceil(share * jnp.sum(active, dtype=jnp.float32) - 1e-4).astype(jnp.int32)
    return jnp.where(count > 0, count, of_all)


def _heavy_hitters(
    importance: jax.Array,  # float32[N]
    active: jax.Array,  # bool[N]
    num: jax.Array,  # int32[]
) -> jax.Array:
    """Mask bool[N] of T_imp: the top `num` active tokens (eq. 1); ties to the earlier one."""
    return (ranks(jnp.where(active, importance, -jnp.inf)) < num) & active


def _critical_by_tokens(
    observation: Observation, tokens: jax.Array, num_critical: jax.Array
) -> jax.Array:
    """Mask bool[E] of the top t_l experts by assignments from `tokens`, bool[N], T_imp (eq. 2).

    Ties, which the paper does not mention, go to the expert with more tokens in all, since section
    3.3 finds the two loads correlated; then to the smaller id.
    """
    ids, num_experts = observation.ids, observation.probabilities.shape[1]
    load = chosen_by(ids, _of_pairs(tokens, ids), num_experts)
    tie = chosen_by(ids, _of_pairs(observation.active, ids), num_experts)
    return ranks(load, tie) < num_critical


def _critical_pairs(
    observation: Observation,
    importance: jax.Array,  # float32[N, A]
    num_critical: jax.Array,  # int32[], t_l
) -> jax.Array:
    """Mask bool[N, A] of pairs whose expert is in some active token's top t_l (eq. 3).

    The paper decodes one sequence. Where several tokens ask for one expert in different precision,
    it is critical for all of them: an expert has one format (section 4.4.2). `importance` is of a
    token's experts to one another; their gate weights in eq. 3.
    """
    own = (ranks(importance) < num_critical) & observation.active[:, None]
    ids = observation.ids
    if len(ids) == 1:
        return own
    flat, chosen = ids.reshape(-1), own.reshape(-1)
    shared = (flat[None] == flat[:, None]) & chosen[None]
    return jnp.any(shared, axis=1).reshape(ids.shape)


def _of_pairs(tokens: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.broadcast_to(tokens[:, None], ids.shape)


def _retention_ratios(
    schedule: str, retention: float, num_layers: int, sensitivity: Sequence[float] = ()
) -> np.ndarray:
    """Ratios r(l) of eq. 4, float64[L], with mean `retention`.

    Args:
      schedule: "cosine" (the paper's), "linear" (falls from 1 to lambda), "sensitivity" (f
        proportional to what was measured, cut at 1), or "equal" (r in every layer).
      retention: r, 0.5 to 1; with "equal" 0 to 1.
      sensitivity: one per layer, such as the loss that its quantization alone causes (Figure 5);
        not negative.

    Raises:
      MoejaxError: a ratio below 0.5, or sensitivities from which no profile can be made.
    """
    if schedule == "equal" or num_layers == 1:
        return np.full(num_layers, float(retention))
    if retention < 0.5:
        raise MoejaxError(
            f"retention={retention} must be 0.5 or more, since lambda = 2 r - 1 of eq. 4 is not "
            "negative; schedule='equal' takes less"
        )
    depth = np.arange(num_layers) / (num_layers - 1)
    if schedule == "cosine":
        profile = (np.cos(np.pi * depth) + 1) / 2
    elif schedule == "linear":
        profile = 1 - depth
    else:
        profile = _proportional(np.asarray(sensitivity, np.float64), num_layers)
    floor = 2 * retention - 1
    return (1 - floor) * profile + floor


def _critical_counts(ratios: np.ndarray, num_requested: int, rounding: str) -> np.ndarray:
    """Number t_l of critical experts in each layer, int64[L], eq. 5.

    Args:
      ratios: float64[L], r(l).
      num_requested: M of eq. 5: experts that a layer is asked for, k at decode, E at prefill.
      rounding: "ceil" is the paper's letter: it demotes almost nothing where M is small. "diffused"
        carries what rounding leaves on to the next layer, so that the first l layers together
        have round(M sum r), and all of them round(M r L).
    """
    wanted = np.asarray(ratios, np.float64) * num_requested
    # Sums of ratios that are exact on paper must not fall to the other side of an integer.
    if rounding == "ceil":
        return np.ceil(wanted - 1e-9).astype(np.int64)
    total = np.floor(np.cumsum(wanted) + 0.5 + 1e-9).astype(np.int64)
    return np.diff(total, prepend=0)


def _proportional(sensitivity: np.ndarray, num_layers: int) -> np.ndarray:
    """Profile f(l) = min(1, c s_l), with the c for which the mean of f is 1/2."""
    if sensitivity.shape != (num_layers,):
        raise MoejaxError(
            f"sensitivity has {sensitivity.size} numbers, but the model has {num_layers} sparse "
            "layers: give one of each"
        )
    half = num_layers / 2
    if not (np.isfinite(sensitivity) & (sensitivity >= 0)).all():
        raise MoejaxError("sensitivity must have numbers of 0 or more")
    if np.count_nonzero(sensitivity) < half:
        raise MoejaxError(
            "sensitivity is 0 in more than half of the layers: no profile has mean 1/2"
        )
    falling = np.sort(sensitivity)[::-1]
    for num_full in range(num_layers):
        scale = (half - num_full) / falling[num_full:].sum()
        if scale * falling[num_full] <= 1:
            break
    profile: np.ndarray = np.minimum(1.0, scale * sensitivity)
    return profile


AGGREGATIONS = ("mean", "sum", "last_query")
# Bytes of scores at a time. A prefill chunk's own attention takes ten times as much; smaller
# blocks are more turns of a loop.
BLOCK_BYTES = 64 * 2**20


def attention_received(
    q: jax.Array,
    k: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    *,
    aggregation: str = "mean",
    sliding_window: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Computes s_i = 1/H sum_h a_i^(h) of eq. 1, for every key.

    a_i^(h), the paper's attention score of token i in head h, is the mean attention to token i of
    the queries that see it. A plain "sum" favours early tokens, which more queries see;
    "last_query" is the attention of a sequence's last active query alone.

    Args:
      q: [B, T, H, C], rotated.
      k: [B, S, K, C], rotated, of positions 0..S - 1; H is a multiple of K.
      positions: int32[B, T], of the queries; a query sees keys up to its own position.
      active: bool[B, T], queries that are no padding.
      aggregation: "mean", "sum" or "last_query".
      sinks: [H], logits that join each head's softmax and are no token; None: there are none.
      block: queries at a time; None: as many as keep their weights under `BLOCK_BYTES`.

    Returns:
      float32[B, S]; 0 for keys that no active query sees. Scores and softmax are float32.

    Raises:
      ValueError: an unknown aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}")
    batch, length, num_heads, _ = q.shape
    num_keys = k.shape[1]
    if aggregation == "last_query":
        place = jnp.where(active, positions, -1)
        last = jnp.argmax(place, axis=1)[:, None]
        q = jnp.take_along_axis(q, last[:, :, None, None], axis=1)
        positions = jnp.take_along_axis(positions, last, axis=1)
        active = jnp.take_along_axis(active, last, axis=1)
        length = 1
    if block is None:
        block = max(1, BLOCK_BYTES // _scores_nbytes(batch, num_heads, num_keys))
    block = min(block, length)
    num_blocks = -(-length // block)
    padding = num_blocks * block - length

    def blocks(x: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, widths)  # of `active` with False
        return jnp.moveaxis(padded.reshape(batch, num_blocks, block, *x.shape[2:]), 1, 0)

    def add(
        sums: tuple[jax.Array, jax.Array], queries: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        found = _of_block(*queries, k, sliding_window, scale, sinks)
        return (sums[0] + found[0], sums[1] + found[1]), None

    zeros = jnp.zeros((batch, num_keys), jnp.float32)
    queries = blocks(q), blocks(positions), blocks(active)
    (received, seen), _ = jax.lax.scan(add, (zeros, zeros), queries)
    if aggregation == "mean":
        received = received / jnp.maximum(seen, 1)
    return received


def importance_nbytes(
    *,
    batch: int,
    length: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,  # C
    itemsize: int,  # bytes of a number of queries and keys
    platform: str,  # "gpu" or "cpu"
) -> int:
    """Bound on the workspace of `attention_received`, for any S up to `num_keys`.

    It counts the scores of a block, the queries cut into blocks (the last one padded), transposed
    keys, the mask, and the sums; on a CPU scores and their powers apart. Compiled for an H100
    without one (jax 0.11.2, 2026-11-22), chunks of 64 to 1024 tokens over keys of 1024 to 32768 of
    Qwen3-30B and Mixtral shapes took 0.71 to 0.87 of this.
    """
    row = _scores_nbytes(batch, num_heads, num_keys)
    scores = min(length * row, max(BLOCK_BYTES, row))
    apart = 2 if platform == "cpu" else 1
    queries = 2 * batch * length * num_heads * head_dim * itemsize
    keys = batch * num_keys * num_kv_heads * head_dim * itemsize
    sums = 4 * 4 * batch * num_keys
    return apart * scores + scores // (4 * num_heads) + queries + keys + sums


def _scores_nbytes(batch: int, num_heads: int, num_keys: int) -> int:
    """Bytes of float32 scores of one query per sequence."""
    return 4 * batch * num_heads * num_keys


def _of_block(
    q: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    k: jax.Array,
    sliding_window: int | None,
    scale: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Sums a block of queries: head-mean attention to each key and count of viewers, [B, S]."""
    batch, block, num_heads, head_dim = q.shape
    num_keys, num_kv = k.shape[1:3]
    grouped = q.reshape(batch, block, num_kv, num_heads // num_kv, head_dim)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, k, preferred_element_type=jnp.float32)
    key = jax.lax.iota(positions.dtype, num_keys)[None, None]
    sees = (key <= positions[:, :, None]) & active[:, :, None]
    if sliding_window is not None:
        sees &= key > positions[:, :, None] - sliding_window
    visible = sees[:, None, None]
    scale = head_dim**-0.5 if scale is None else scale
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    # Written out: a query that sees nothing has a row of -inf, of which softmax makes NaN.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv, -1, 1, 1)
        largest = jnp.maximum(largest, sink)
    powers = jnp.exp(scores - jnp.where(largest > -jnp.inf, largest, 0.0))
    total = jnp.sum(powers, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - largest)
    shares = powers / jnp.where(total > 0, total, 1.0)
    return jnp.sum(shares, axis=(1, 2, 3)) / num_heads, jnp.sum(sees, axis=1, dtype=jnp.float32)
