"""Experts: what runs the experts of a model's sparse layers, as functions of a carry."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from moejax.models.attention import Attended
from moejax.models.layer_index import LayerIndex
from moejax.models.moe import ExpertImpl, SparseMoe
from moejax.models.routing import Routing
from moejax.weights.linear import Index


class Experts(Protocol):
    """Runs the experts of the sparse layers, one layer after another.

    The model takes `init()` into its first sparse layer and the carry of each into the next. In a
    loop its tree, shapes and dtypes never change; layers of an iteration are a multiple of
    `layers_per_iteration`, since consecutive ones may use different arrays.

    Attributes:
      observes_attention: whether layers pass on the queries and keys of their attention.
    """

    layers_per_iteration: int = 1
    observes_attention: bool = False

    def init(self) -> Any:
        """Returns the carry before the first layer; None where there is none."""
        return None

    def route(
        self, carry: Any, moe: SparseMoe, layer: Index, x: jax.Array, *, is_ahead: bool = False
    ) -> Routing:
        """Routes tokens, x [N, D], by a layer's router."""
        return moe.route(x, layer)

    def __call__(
        self,
        carry: Any,
        layer: LayerIndex,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        next_routing: Callable[[], Routing] | None,
        attended: Attended | None,
    ) -> tuple[jax.Array, Any, Any]:
        """Runs the chosen experts on N tokens.

        Args:
          next_routing: routes x by the next sparse layer's router (DyMoE eq. 6), a prediction; None
            after the last. In a loop never None: the last layer's is of itself, to be ignored.
          attended: of the layer; None of one without attention, and if it is not observed.

        Returns:
          [N, D] in `x.dtype`, the carry, and a record: None, or a tree of arrays that is the same
          for all layers.
        """
        ...


class ResidentExperts(Experts):
    """Runs experts that the model holds."""

    def __init__(
        self,
        moe: SparseMoe | None,
        impl: ExpertImpl,
        record: Callable[[jax.Array, Routing], Any] = lambda x, routing: None,
    ):
        """Needs no carry.

        Args:
          moe: None of a model without sparse layers.
          record: of a layer's input and its routing gives the layer's record.
        """
        self._moe, self._impl, self._record = moe, impl, record

    def route(
        self, carry: Any, moe: SparseMoe, layer: Index, x: jax.Array, *, is_ahead: bool = False
    ) -> Routing:
        """Routes tokens, as `Experts.route`."""
        first_slot = None
        if self._impl == "grouped_kernel" and isinstance(layer, int) and layer and not is_ahead:
            first_slot = jnp.int32(layer * moe.gate_up.shape[1])
        return moe.route(x, layer, first_slot)

    def __call__(
        self,
        carry: Any,
        layer: LayerIndex,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        next_routing: Callable[[], Routing] | None,
        attended: Attended | None,
    ) -> tuple[jax.Array, Any, Any]:
        """Runs a layer's experts, as `Experts`."""
        assert self._moe is not None
        out = self._moe(x, routing, layer.mlp, token_mask, self._impl)
        return out, carry, self._record(x, routing)


def routing_record(x: jax.Array, routing: Routing) -> Routing:
    """The routing alone, for `ResidentExperts`."""
    return routing
