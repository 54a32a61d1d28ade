"""What may run the experts of a model's layers in the model's place."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from moejax.models.routing import Routing
from moejax.weights.linear import Index


class RunExperts(Protocol):
    """Runs the experts of a sparse layer in place of a model that holds them."""

    def __call__(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """[N, D] in `x.dtype`.

        Args:
          layer: index among the sparse layers; int32[] inside a loop (`LoopedExperts`).
          x: [N, D], normed.
          routing: of the N tokens.
          token_mask: bool[N], False for padding.
          ahead: what the next sparse layer's router says of this one's input (DyMoE eq. 6), a
            prediction; None after the last. In a loop never None: the last layer predicts itself,
            which is to be ignored.
        """
        ...


@runtime_checkable
class HearsRouters(Protocol):
    """What runs experts, where it may take other products than the routers' own (to replay)."""

    def heard(self, layer: Index, logits: jax.Array, *, is_ahead: bool) -> jax.Array:
        """float32[N, E], to route by.

        Args:
          layer: whose router has spoken, among the sparse layers.
          logits: its products.
          is_ahead: asked by the layer before, of its input.
        """
        ...


@runtime_checkable
class LoopedExperts(RunExperts, Protocol):
    """Which may also be called inside a loop over layers, where a layer is a number on the device.

    Before the loop, and first thing in its body, `resume` says where it stands. The body calls it
    for some layers, a multiple of `num_turns` of them from a multiple on, and takes `state` to the
    next pass and `kept` out of the loop; after it, `resume` and then `keep` hand back what came of
    them.
    """

    @property
    def num_turns(self) -> int:
        """Of which a pass has a multiple: consecutive layers use that many different arrays."""
        ...

    @property
    def state(self) -> Any:
        """A pytree, after the layers so far; its shapes never change."""
        ...

    def resume(self, state: Any) -> None:
        """The layers before are done, and left this state."""

    def kept(self) -> Any:
        """A pytree with one array a layer since `resume`, stacked; not part of the state."""
        ...

    def keep(self, kept: Any) -> None:
        """Takes what all passes of a loop kept, with the layers' axis in front."""
