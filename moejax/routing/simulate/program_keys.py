"""Groups policies with one formula, whose settings can run side by side in one program.

Formulas are compared as JAX traces them. Tracing takes tens of milliseconds; so the fields of a
policy that its functions read while they are traced are noted, and a policy that is equal in these
has the same formula without another trace.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.base import AnyPolicy, Observation, PolicySpec

_PLAIN = (bool, int, float, str, type(None), type)  # compared by value; other things by identity
Path = tuple[str, ...]


class ProgramKeys:
    """Formulas traced so far."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[dict[Path, Any], tuple[str, ...]]]] = {}

    def key_of(self, policy: AnyPolicy, state: Any, spec: PolicySpec) -> tuple[str, ...]:
        """Key of a policy's computation, state aside: equal keys may share a program."""
        leaves = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state))
        key = (type(policy), jax.tree.structure(state), leaves, spec.tiers)
        for read, formula in self._known.setdefault(key, []):
            if all(_same(_field(policy, path), value) for path, value in read.items()):
                return formula
        read = {}
        formula = _traced(_watched(policy, read, ()), state, spec)
        formula = (type(policy).__name__, str(key[1]), *spec.tiers, *formula)
        self._known[key].append((read, formula))
        return formula


def _traced(policy: AnyPolicy, state: Any, spec: PolicySpec) -> tuple[str, ...]:
    zero = jnp.zeros
    observation = Observation(
        layer=zero((), jnp.int32),
        probabilities=zero((1, spec.num_experts)),
        ids=zero((1, spec.width), jnp.int32),
        weights=zero((1, spec.width)),
        active=zero(1, bool),
        resident=zero((len(spec.tiers), spec.num_experts), bool),
        importance=zero(1),
        predicted=zero((1, spec.num_experts)),
    )
    resident = zero((spec.num_layers, len(spec.tiers), spec.num_experts), bool)
    prefill = dataclasses.replace(observation, is_prefill=True)
    said = []
    for function, argument in (
        (policy.decide, observation),
        (policy.decide, prefill),
        (policy.transfers, resident),
    ):
        # Not the method itself, which would be hashed with all fields of its policy.
        traced = jax.make_jaxpr(lambda *given, of=function: of(*given))(state, argument)
        consts = [(np.asarray(c).shape, np.asarray(c).tobytes()) for c in traced.consts]
        said.append(f"{traced.jaxpr} {consts}")
    return tuple(said)


def _watched(policy: Any, read: dict[Path, Any], path: Path) -> Any:
    """Copies a policy so that reads of its fields, and of policies within it, are noted."""
    kind = type(policy)
    names = {field.name for field in dataclasses.fields(policy)}

    def get(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in names:
            return value
        read[(*path, name)] = _noted(value)
        return _watched(value, read, (*path, name)) if _is_policy(value) else value

    copy: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": get}))
    copy.__dict__.update(vars(policy))
    return copy


def _field(policy: Any, path: Path) -> Any:
    for name in path:
        policy = getattr(policy, name, None)
    return _noted(policy)


def _noted(value: Any) -> Any:
    """Returns a value to note; for a nested policy its class, since its reads are noted apart."""
    return type(value) if _is_policy(value) else value


def _is_policy(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "decide")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b))
