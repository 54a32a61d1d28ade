"""The base class of every policy: pure functions over a state of fixed shapes.

    init(spec) -> state
    decide(state, observation) -> (decision, state)      once a sparse layer, inside the step
    transfers(state, resident) -> (requests, state)      between steps

The same functions run in the engine, in the replay of a trace, and in a `vmap`ped sweep over their
settings. A setting that sweeps is a leaf of the state: `decide` and `transfers` read it there,
never from the policy. So the states of several settings stack, and any of their policies serves
them all. What fixes shapes, or chooses the formula that is compiled, is static and stays in the
policy.

Orders are made by comparing all pairs, without sorting (`ranks`), which XLA fuses on a GPU.

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers, T tiers.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from moejax.errors import MoejaxError
from pallas_kernels.cache_plan import Rule

State = TypeVar("State")
SKIPPED = -1  # a tier: the pair is not computed
_UNROLLED = 16  # of an axis up to which places are counted without a reduction


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Static facts that a policy may use.

    Attributes:
      num_layers: M.
      num_experts: E.
      width: A.
      tiers: names, of falling fidelity, such as ("int4", "int2").
      expert_bytes: bytes of one expert in each tier.
      slots: slots per layer in each tier's pool.
      prefetch: most experts of the next layer that a layer prefetches in each tier; (): as many as
        there are slots. Of a longer `Decision.ahead` the smaller ids come, so a policy that orders
        experts asks for no more (`most_ahead`).
    """

    num_layers: int
    num_experts: int
    width: int
    tiers: tuple[str, ...]
    expert_bytes: tuple[int, ...]
    slots: tuple[int, ...]
    prefetch: tuple[int, ...] = ()

    def most_ahead(self, tier: int) -> int:
        """Counts the experts of the next layer that a layer may prefetch in a tier."""
        return min((self.slots[tier], *self.prefetch[tier : tier + 1]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """Everything that a policy may know of a layer after its router has run.

    Attributes:
      layer: int32[], which sparse layer, 0..M - 1.
      probabilities: float32[N, E], of all experts: the softmax, or sigmoids, of no such sum.
      ids: int32[N, A], the router's choice, by falling probability.
      weights: float32[N, A], its weights.
      active: bool[N], False for padding, which has no influence on anything.
      resident: bool[T, E], experts that have a slot in each tier's pool now.
      importance: float32[N], attention that each token received (DyMoE eq. 1); None in decode, and
        for policies that do not need it.
      predicted: float32[N, E], probabilities that the next layer's router gives this layer's hidden
        state (DyMoE eq. 6); None after the last layer, and without prefetch. Inside a loop over
        layers it is not None after the last one, but meaningless there.
      tables: int32[M, K], K >= E, with a single tier: the slot of each expert in all layers, -1 for
        none. A kernel that reads it instead of `resident` saves a launch. None: not available.
      is_prefill: static.
      is_complete: static; every expert has its slot in every tier, for ever.
      partition: int32[E], on a mesh that hands experts out the device that has each one, the first
        of several; then `resident` has those that are resident on all devices that have them.
        None: nothing is handed out.
    """

    layer: jax.Array
    probabilities: jax.Array
    ids: jax.Array
    weights: jax.Array
    active: jax.Array
    resident: jax.Array
    importance: jax.Array | None = None
    predicted: jax.Array | None = None
    tables: jax.Array | None = None
    is_prefill: bool = dataclasses.field(default=False, metadata={"static": True})
    is_complete: bool = dataclasses.field(default=False, metadata={"static": True})
    partition: jax.Array | None = None


class Decision(NamedTuple):
    """Experts, tiers and weights that one layer runs, and its prefetch.

    Attributes:
      ids: int32[N, A], the experts that run, a token's different from each other.
      tier: int32[N, A], index of the tier that each pair asks for; `SKIPPED` for none, and for all
        pairs of a token that is not active.
      weights: float32[N, A], of the sum.
      at_least: bool[N, A], a tier of higher fidelity may serve the pair where one is resident
        (DyMoE's conservative reuse).
      ahead: int32[E], the tier in which to prefetch each of the next layer's experts, -1 for none;
        None without prefetch.
    """

    ids: jax.Array
    tier: jax.Array
    weights: jax.Array
    at_least: jax.Array
    ahead: jax.Array | None = None


class Requests(NamedTuple):
    """Bulk transfers to begin before the next step, the most urgent first.

    In this order no pool ever exceeds its budget: a demotion precedes the promotion that needs its
    slot. An entry of three -1 requests nothing; such entries may stand anywhere.

    Attributes:
      layer: int32[R].
      expert: int32[R].
      tier: int32[R], in which the expert is to serve; its copy in the other tier serves until then.
        Where the lower tier always holds every expert, such a request moves no bytes: it frees
        the slot of the higher tier.
    """

    layer: jax.Array
    expert: jax.Array
    tier: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Costly parts of an `Observation`, computed only for policies that read them.

    Attributes:
      importance: attention received by each token of a prefill step.
      aggregation: how that attention is aggregated; see `dymoe.attention_received`.
      predicted: the next layer's probabilities.
    """

    importance: bool = False
    aggregation: str = "mean"
    predicted: bool = False


class Policy(abc.ABC, Generic[State]):
    """Chooses, for every layer, which expert runs each pair and in which tier.

    A subclass is a frozen dataclass of its settings. It defines `name`, `init` and `decide`; every
    other attribute has a default that suits a policy that asks for nothing more. No method reads a
    clock, logs, or puts an array on a device.
    """

    name: ClassVar[str]

    @property
    def repeats_requests(self) -> bool:
        """Whether requests are pairs, a demotion and its promotion, made again until done.

        Such pairs may wait for room. Any other request counts as done once it is made.
        """
        return False

    @property
    def substitutes(self) -> bool:
        """Whether decisions may name experts that the router did not choose."""
        return False

    def first_alone(self, spec: PolicySpec) -> bool:
        """Whether the first tier is to have all slots of a limited memory.

        Its copies serve all pairs (DyMoE 4.4.2), and at least half of them ask for it.
        """
        del spec
        return False

    @property
    def partition_refusal(self) -> str | None:
        """Reason not to serve a mesh that hands experts out, or None.

        There every device makes each decision alike, and nothing moves between steps.
        """
        return f"{self.name} does not decide by partition"

    @property
    def needs(self) -> Needs:
        """Costly parts of an `Observation` that this policy reads; none by default."""
        return Needs()

    @property
    def layer_axes(self) -> Any:
        """Layer axes of the state's leaves if a step's layers are independent; else None.

        A tree of the state's form. A leaf that `decide` reads and writes only at
        `Observation.layer` has the axis of its layers; a leaf that all layers share and change
        alike has None. With such a tree `Decision.ahead` must not depend on what is resident.
        """
        return None

    @abc.abstractmethod
    def init(self, spec: PolicySpec) -> State:
        """Returns the state before any token; a pytree of arrays.

        Raises:
          MoejaxError: the settings do not suit the spec.
        """

    @abc.abstractmethod
    def decide(self, state: State, observation: Observation) -> tuple[Decision, State]:
        """Decides one layer of one step."""

    def transfers(self, state: State, resident: jax.Array) -> tuple[Requests, State]:
        """Requests transfers between steps; none by default.

        Args:
          state: after the last step.
          resident: bool[M, T, E] once everything in flight has arrived: a transfer that has begun
            is not asked for again.
        """
        del resident
        return no_requests(), state

    def tokens_until_change(self, state: State, resident: jax.Array) -> jax.Array:
        """Active tokens, int32[], before `transfers` can request anything new; 0 if unknown.

        Holds for the state that `transfers` has just returned, while `resident` stays the same.
        """
        del state, resident
        return jnp.zeros((), jnp.int32)

    def transfer_tiers(self, spec: PolicySpec) -> tuple[int, ...]:
        """Tiers in which decisions name an expert only if it has a slot there."""
        del spec
        return ()

    def decode_rule(self, state: State) -> Rule | None:
        """Tiers of every decode decision as a rule over constant leaves of the state, or None.

        With a rule, `decide` gives these tiers and `at_least`, and keeps the router's weights where
        it keeps the router's ids; the plan kernel then evaluates the rule itself. Where layers are
        independent (`layer_axes`) and nothing is substituted, `decide` may run after the step, so
        it must prefetch by `Observation.predicted` alone.
        """
        del state
        return None

    def max_prefetch(self, state: State) -> int:
        """Experts of the next layer that a decode step may prefetch; `state` is from `init`."""
        del state
        return 0

    def disk_prefetch(self, state: State, resident: jax.Array) -> Requests:
        """Experts to read from the disk into host memory, most urgent first; none by default.

        Called after `transfers`; changes nothing and moves nothing beyond host memory.
        """
        del state, resident
        return no_requests()


AnyPolicy = Policy[Any]


def moves_between_steps(policy: AnyPolicy, state: Any, dims: tuple[int, int, int]) -> bool:
    """Whether a policy may request transfers, judged by shapes: state and (M, tiers, E)."""
    resident = jax.ShapeDtypeStruct(dims, bool)
    return len(jax.eval_shape(policy.transfers, state, resident)[0].layer) > 0


def pairs_with_room(moves: jax.Array, room: jax.Array) -> jax.Array:
    """Mask bool[R] of the requests in pairs before which fewer than `room` experts move.

    Args:
      moves: bool[R], requests that move bytes; R even.
      room: int32[], experts that may move; a pair of two may exceed it by one.
    """
    of_pair = jnp.sum(moves.reshape(-1, 2), axis=1, dtype=jnp.int32)
    return jnp.repeat(jnp.cumsum(of_pair) - of_pair < room, 2)


def layer_axes_of(kind: Any, **axes: int) -> Any:
    """Returns `layer_axes` of a NamedTuple state; a field that is not named has None."""
    return kind(**(dict.fromkeys(kind._fields) | axes))


def default_prefetch(policy: AnyPolicy, width: int) -> int:
    """Experts of the next layer that a tier prefetches at most, if nobody says otherwise.

    As many as the policy's setting `prefetch`; `width`, A, if it has none or a negative one.
    """
    if not policy.needs.predicted:
        return 0
    stated = int(getattr(policy, "prefetch", -1))
    return stated if stated >= 0 else width


def no_requests() -> Requests:
    """Empty requests (R = 0), for a policy that moves nothing between steps."""
    none = jnp.zeros(0, jnp.int32)
    return Requests(none, none, none)


def tier_id(spec: PolicySpec, name: str, default: int) -> int:
    """Index of a tier of the spec; the name "" means `default`.

    Raises:
      MoejaxError: the spec has no such tier.
    """
    if not name:
        return range(len(spec.tiers))[default]
    if name not in spec.tiers:
        raise MoejaxError(f"tier {name!r} is not stored; there are {', '.join(spec.tiers)}")
    return spec.tiers.index(name)


def vmap_decide(policy: AnyPolicy, state: Any, observations: Observation) -> tuple[Decision, Any]:
    """Decides all layers of a step at once, [M, ...], equal to deciding them in turn.

    Each layer has a view of the state with its own rows alone, like the only layer of a model; a
    leaf that `Policy.layer_axes` says to be shared, and that a layer changes in its own way, is an
    error of `vmap`. `observations` are stacked, [M, ...]; `active` is the same of all layers.
    """
    o, axes = observations, policy.layer_axes
    shared: dict[str, Any] = {"layer": jnp.zeros((), jnp.int32), "active": o.active[0]}
    own = {
        name: getattr(o, name)
        for name in ("probabilities", "ids", "weights", "resident", "importance", "predicted")
    }

    def decide(rows: Any, of_layer: dict[str, Any]) -> tuple[Decision, Any]:
        seen = Observation(**shared, **of_layer, is_prefill=o.is_prefill)
        view = _mapped(jnp.expand_dims, axes, rows)
        decision, view = policy.decide(view, seen)
        return decision, _mapped(jnp.squeeze, axes, view)

    return jax.vmap(decide, in_axes=(axes, 0), out_axes=(0, axes))(state, own)


def _mapped(function: Any, axes: Any, state: Any) -> Any:
    """Applies `function(leaf, axis)` to the leaves that have a layer axis."""

    def of(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(lambda leaf: function(leaf, axis), part)

    return jax.tree.map(of, axes, state, is_leaf=lambda leaf: leaf is None)


def ranks(*keys: jax.Array) -> jax.Array:
    """Rank of each element by falling first key, then the next, then rising index.

    A permutation int32[..., n] of 0..n - 1 along the last axis, of keys of that shape each, numbers
    or bool, no NaN.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, keys[0].shape, keys[0].ndim - 1)
    if keys[0].shape[-1] <= _UNROLLED:
        return _ranks_one_by_one(keys, index)
    before = index[..., None, :] < index[..., :, None]
    for key in reversed(keys):
        other, own = key[..., None, :], key[..., :, None]
        before = (other > own) | ((other == own) & before)
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def _ranks_one_by_one(keys: tuple[jax.Array, ...], index: jax.Array) -> jax.Array:
    """Ranks like `ranks`, without a reduction."""
    place = jnp.zeros_like(index)
    for i in range(index.shape[-1]):
        before = index > i
        for key in reversed(keys):
            other = key[..., i : i + 1]
            before = (other > key) | ((other == key) & before)
        place += before.astype(jnp.int32)
    return place


def of_few(operation: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """Reduces a short last axis in order to [..., 1], without a reduction op."""
    parts = [values[..., i : i + 1] for i in range(values.shape[-1])]
    return functools.reduce(operation, parts)


def chosen_by(ids: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """Counts the masked pairs of each expert, int32[E], of ids and mask [N, A]."""
    expert = jax.lax.iota(jnp.int32, num_experts)
    pairs = (ids[None] == expert[:, None, None]) & mask[None]
    return jnp.sum(pairs, axis=(1, 2), dtype=jnp.int32)


def prefetch_limits(spec: PolicySpec, tier: int, count: int) -> jax.Array:
    """Limits t of `experts_ahead`, int32[M]: `count` or `PolicySpec.most_ahead`; 0 in the last."""
    limit = min(count, spec.most_ahead(tier))
    return jnp.full(spec.num_layers, limit, jnp.int32).at[-1].set(0)


def experts_ahead(observation: Observation, limit: jax.Array) -> jax.Array | None:
    """Chooses the next layer's experts, bool[E], that its predicted routing wants most.

    Prefill: the top t by c_e, the number of tokens among whose predicted top A an expert is (eq.
    7). Decode: the top t by predicted probability (eq. 8), summed over the sequences of a batch, of
    which the paper has one. Ties go to the smaller id; an expert that no token is predicted to
    choose is not prefetched. None without a prediction (`Observation.predicted`, eq. 6); `limit` is
    int32[], t.
    """
    predicted = observation.predicted
    if predicted is None:
        return None
    active = observation.active
    width, num_experts = observation.ids.shape[1], predicted.shape[1]
    if observation.is_prefill:
        _, ids = jax.lax.top_k(predicted, width)
        demand = chosen_by(ids, jnp.broadcast_to(active[:, None], ids.shape), num_experts)
        return (ranks(demand) < limit) & (demand > 0)
    mass = jnp.sum(jnp.where(active[:, None], predicted, 0.0), axis=0)
    return (ranks(mass) < limit) & (mass > 0)
