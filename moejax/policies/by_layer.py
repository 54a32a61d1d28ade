"""A step's layers side by side, for policies whose layers do not depend on one another.

`decide` runs for every layer at once (`vmap`), each with a view of the state that has only its own
rows, like the only layer of a model. The tree `layer_axes` (`moejax.policies.base.Policy`) says
which leaves have rows of layers; a leaf that it says to be shared and that a layer changes in its
own way is an error of `vmap`, not a wrong result.

Axes: M sparse layers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moejax.policies.base import AnyPolicy, Decision, Observation


def vmap_decide(
    policy: AnyPolicy, axes: Any, state: Any, observations: Observation
) -> tuple[Decision, Any]:
    """Decides all layers of a step at once, [M, ...], equal to deciding them in turn.

    `observations` are stacked, [M, ...]; `active` is the same of all layers.
    """
    o = observations
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
