"""What every policy is: three pure functions over a state of fixed shapes.

    init(spec) -> state
    decide(state, observation) -> (decision, state)      once a sparse layer, inside the step
    transfers(state, residency) -> (requests, state)     between steps

The same functions run in the engine, in the replay of a trace, and in a `vmap`ped sweep over their
settings. A setting that sweeps is a leaf of the state: `decide` and `transfers` read it there,
never from the policy. So the states of several settings stack, and any of their policies serves
them all. What fixes shapes, or chooses the formula that is compiled, is static and stays in the
policy.

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers, T tiers.
"""

import dataclasses
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from moejax.errors import MoejaxError
from pallas_kernels.tiered_plan import Rule

State = TypeVar("State")
SKIPPED = -1  # a tier: the pair is not computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Static facts that a policy may use.

    Attributes:
      num_layers: M.
      num_experts: E.
      width: A.
      tiers: names, of falling fidelity, such as ("int4", "int2").
      expert_bytes: of one expert in each tier.
      slots: of a layer in each tier's pool.
    """

    num_layers: int
    num_experts: int
    width: int
    tiers: tuple[str, ...]
    expert_bytes: tuple[int, ...]
    slots: tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """What is known of one layer of a step when its router has spoken.

    Attributes:
      layer: int32[], which sparse layer, 0..M - 1.
      probabilities: float32[N, E], of all experts: the softmax, or sigmoids, of no such sum.
      ids: int32[N, A], the router's choice, by falling probability.
      weights: float32[N, A], its weights.
      active: bool[N], False for padding, which has no influence on anything.
      resident: bool[T, E], what a slot of each tier's pool holds now.
      importance: float32[N], attention that each token received (DyMoE eq. 1); None in decode, and
        for policies that do not need it.
      predicted: float32[N, E], probabilities that the next layer's router gives this layer's
        hidden state (DyMoE eq. 6); None after the last layer, and where nobody looks ahead. Inside
        a loop over layers it is not None after the last one, and of no meaning there.
      tables: int32[M, K], K >= E, of a single tier the slot of each expert in all layers, -1: none.
        It says what `resident` says, and a kernel that reads it saves the launch that makes that.
        None: there is none.
      is_prefill: static.
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


class Decision(NamedTuple):
    """What one layer computes and keeps.

    Attributes:
      ids: int32[N, A], the experts that run, a token's different from each other.
      tier: int32[N, A], index of the tier that each pair asks for; `SKIPPED` for none, and for
        all pairs of a token that is not active.
      weights: float32[N, A], of the sum.
      at_least: bool[N, A], a tier of higher fidelity may serve the pair where one is resident
        (DyMoE's conservative reuse).
      ahead: int32[E], the tier in which the next layer's experts are to be brought ahead, -1 for
        not; None for none.
    """

    ids: jax.Array
    tier: jax.Array
    weights: jax.Array
    at_least: jax.Array
    ahead: jax.Array | None = None


class Requests(NamedTuple):
    """Bulk transfers to begin before the next step, the most urgent first.

    Carried out in this order no pool ever holds more than its budget: what makes room stands before
    what takes it. An entry whose three numbers are -1 asks for nothing; such ones stand anywhere.

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
    """What of an `Observation` costs work that is done only where a policy looks at it.

    Attributes:
      importance: of the tokens of a prefill step.
      aggregation: what it is of the attention that they receive; see
        `attention_importance.attention_received`.
      predicted: the next layer's probabilities.
    """

    importance: bool = False
    aggregation: str = "mean"
    predicted: bool = False


class Policy(Protocol, Generic[State]):
    """A frozen dataclass of hyper-parameters.

    None of the methods may read a clock, log, or place an array on a device.

    A property `layer_axes`, which not every policy has, says that the layers of a step do not
    depend on one another (`moejax.policies.by_layer`): a tree of the state's form with the axis of
    layers of each leaf that `decide` reads or writes by `Observation.layer`, at that index alone,
    and None for a leaf that all layers share and change alike; None for all where they do depend.
    It also says that `Decision.ahead` does not depend on what is resident.
    """

    @property
    def name(self) -> str:
        """Such as "dynaexq"."""
        ...

    @property
    def needs(self) -> Needs:
        """What the engine must compute for it."""
        ...

    def init(self, spec: PolicySpec) -> State:
        """The state before any token; a pytree of arrays.

        Raises:
          MoejaxError: the settings do not suit the spec.
        """
        ...

    def decide(self, state: State, observation: Observation) -> tuple[Decision, State]:
        """One layer of one step."""
        ...

    def transfers(self, state: State, resident: jax.Array) -> tuple[Requests, State]:
        """Between steps; as often as suits the engine.

        `resident` is bool[M, T, E] as it will be when what is on its way has arrived: a transfer
        that was begun is not asked for again.
        """
        ...


AnyPolicy = Policy[Any]


def asks_again(policy: AnyPolicy) -> bool:
    """Whether requests come in pairs, a demotion and its promotion, again and again until done.

    Then they may be left undone for want of room. It says so by an attribute of this name; others
    count what they asked for as done.
    """
    return bool(getattr(policy, "asks_again", False))


def idle(policy: AnyPolicy, state: Any, resident: jax.Array) -> jax.Array:
    """int32[], before how many more tokens asking again leads to nothing; 0: it may at any time.

    A policy says so by a method of this name, of the state that `transfers` has returned: until so
    many active tokens have passed it asks for nothing and changes nothing of what it asks for
    later, as long as `resident`, what is in slots or on its way, stays as it is.
    """
    found = getattr(policy, "idle", None)
    return jnp.zeros((), jnp.int32) if found is None else found(state, resident)


def moves_between_steps(policy: AnyPolicy, state: Any, dims: tuple[int, int, int]) -> bool:
    """Whether it may ask for transfers, by shapes alone: of its state, and of (M, tiers, E)."""
    resident = jax.ShapeDtypeStruct(dims, bool)
    return len(jax.eval_shape(policy.transfers, state, resident)[0].layer) > 0


def tiers_between_steps(policy: AnyPolicy, spec: PolicySpec) -> tuple[int, ...]:
    """Tiers for which it asks where an expert is in a slot of theirs, and never else.

    It says so by a method of this name that takes the spec; others may ask for any expert.
    """
    found = getattr(policy, "tiers_between_steps", None)
    return tuple(found(spec)) if found is not None else ()


def rule_of(policy: AnyPolicy, state: Any) -> Rule | None:
    """What says the tiers that its decisions ask for in a step of decode, or None.

    A policy says so by a method `rule` of its state, of constant leaves alone: `decide` gives these
    tiers and `at_least`, and, where it leaves the router's ids, the router's weights.
    Whoever follows the rule need not ask for them. Where its layers do not depend on one another
    (`Policy.layer_axes`) and it replaces no expert (`replaces`) it may be told of them after the
    step: `decide` must then bring nothing ahead but by `Observation.predicted`.
    """
    found = getattr(policy, "rule", None)
    return found(state) if found is not None else None


def most_ahead(policy: AnyPolicy, state: Any) -> int:
    """Experts of the next layer that a decode step may bring ahead: 0 where it does not say so.

    It says so by a method of this name, of the state that `init` has returned.
    """
    found = getattr(policy, "most_ahead", None)
    return int(found(state)) if found is not None else 0


def replaces(policy: AnyPolicy) -> bool:
    """Whether its decisions may name other experts than the router did.

    It says so by an attribute of this name.
    """
    return bool(getattr(policy, "replaces", False))


def high_serves_low(policy: AnyPolicy) -> bool:
    """Whether a copy of high fidelity may serve whom it gives a lower tier, as DyMoE's rules say.

    It says so by an attribute of this name.
    """
    return bool(getattr(policy, "high_serves_low", False))


def foreseen(policy: AnyPolicy, state: Any, resident: jax.Array) -> Requests:
    """Experts whose bytes ought to be in host memory soon, the most urgent first; R of its own.

    A policy says so by a method of this name, which is asked after `transfers` and changes nothing.
    Where an entry's bytes are on the disk alone, they are read ahead; it is not moved further.
    """
    found = getattr(policy, "foreseen", None)
    return found(state, resident) if found is not None else no_requests()


def pairs_with_room(moves: jax.Array, room: jax.Array) -> jax.Array:
    """bool[R], requests of the pairs before which fewer than `room` experts set out.

    Args:
      moves: bool[R], requests that move bytes; R even.
      room: int32[], experts that may set out; a pair of two may exceed it by one.
    """
    of_pair = jnp.sum(moves.reshape(-1, 2), axis=1, dtype=jnp.int32)
    return jnp.repeat(jnp.cumsum(of_pair) - of_pair < room, 2)


def state_of(kind: Any, **axes: int) -> Any:
    """`layer_axes` of a state that is a NamedTuple: None of each field that is not named."""
    return kind(**(dict.fromkeys(kind._fields) | axes))


def no_requests() -> Requests:
    """R = 0: of a policy that moves nothing between steps."""
    none = jnp.zeros(0, jnp.int32)
    return Requests(none, none, none)


def tier_id(spec: PolicySpec, name: str, default: int) -> int:
    """The index of a tier of the spec; `default` is that of the name "".

    Raises:
      MoejaxError: there is no such tier.
    """
    if not name:
        return range(len(spec.tiers))[default]
    if name not in spec.tiers:
        raise MoejaxError(f"tier {name!r} is not stored; there are {', '.join(spec.tiers)}")
    return spec.tiers.index(name)
