"""Protocols for what runs a model's experts when the model does not hold them."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from moejax.models.routing import Routing
from moejax.weights.linear import Index


class RunExperts(Protocol):
    """Runs a sparse layer's experts for a model that does not hold them."""

    def __call__(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """Runs the chosen experts on N tokens: [N, D] in `x.dtype`.

        Args:
          layer: index among the sparse layers; int32[] inside a loop (`LoopedExperts`).
          x: [N, D], normed.
          token_mask: bool[N], False for padding.
          ahead: routes this layer's input by the next sparse layer's router (DyMoE eq. 6), a
            prediction; None after the last. In a loop never None: the last layer's prediction is of
            itself, to be ignored.
        """
        ...


@runtime_checkable
class HearsRouters(Protocol):
    """Overrides the routers' logits, to replay a trace."""

    def heard(self, layer: Index, logits: jax.Array, *, is_ahead: bool) -> jax.Array:
        """Returns the logits to route by, float32[N, E].

        Args:
          layer: index among the sparse layers.
          logits: the router's own.
          is_ahead: computed from the input of the layer before, to prefetch.
        """
        ...


@runtime_checkable
class LoopedExperts(RunExperts, Protocol):
    """Runs experts inside a loop over layers, whose index is on the device.

    Call `resume` before the loop and first in its body. The body runs some layers, a multiple of
    `num_turns` from a multiple on, carries `state` to the next pass and stacks `kept`. After the
    loop, call `resume` and then `keep` with the results.
    """

    @property
    def num_turns(self) -> int:
        """Layers per pass must be a multiple of this: consecutive ones use different arrays."""
        ...

    @property
    def state(self) -> Any:
        """Carry of the loop, a pytree whose shapes never change."""
        ...

    def resume(self, state: Any) -> None:
        """Sets the carry that the layers before left."""

    def kept(self) -> Any:
        """Scan outputs: a pytree with one stacked array per layer since `resume`."""
        ...

    def keep(self, kept: Any) -> None:
        """Takes the scan outputs of all passes, with the layer axis first."""
