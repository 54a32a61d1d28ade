"""The sparse MLP: a router, what runs the experts that it chose (`Experts`), and four ways to.

All four compute y_n = sum_a w[n, a] down_e(silu(gate_e x_n) * up_e x_n) with e = ids[n, a], or by
another gating (`ModelConfig.gating`) and with biases, on the whole layer-stacked
arrays and a layer index, so that no layer's slab is ever copied:

  * `_experts_dense`: every expert on every token, masked. For training.
  * `products_by_row`: one small product an assignment. For a few rows on a CPU.
  * `products_by_block`: assignments sorted by expert, cut in blocks. For prefill; "block_in_cache"
    takes steps whose weights stay in a CPU's cache.
  * `products_grouped`: `pallas_kernels.grouped_dequant_matmul`, which reads weights as they are
    packed or plain. For decode and prefill on a GPU.

With packed weights, the first three read matrices through `moejax.weights.linear`. Shapes: x
[N, D], gate_up [M, E, 2F, D], down [M, E, D, F]; the token mask, bool[N], is False for padding,
which costs nothing and yields zero.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import Attended
from moejax.models.config import ModelConfig, RouterRule
from moejax.models.expert_products import (
    ExpertPairs,
    ExpertStacks,
    PairBiases,
    choose_grouped,
    combine,
    products_by_block,
    products_by_row,
    products_grouped,
)
from moejax.models.layer_index import LayerIndex
from moejax.models.stacked import StackedModule
from moejax.weights import linear as ops
from moejax.weights.handed_out import OwnExperts
from moejax.weights.linear import Index, is_new_choice, record_choice
from moejax.weights.qtensor import Weight
from pallas_kernels import router_topk
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import Turn
from pallas_kernels.target import Choice, Target

# DeepSeek-V3's: keeps a sum of sigmoids away from zero.
SUM_FLOOR = 1e-20


class Routing(NamedTuple):
    """Probabilities, chosen experts and weights of N tokens."""

    probabilities: jax.Array  # float32[N, E], of all experts: the softmax, or sigmoids
    weights: jax.Array  # float32[N, A], of the chosen experts, normalised where the model does so
    ids: jax.Array  # int32[N, A], by falling weight


class _ExpertBiases(NamedTuple):
    """Biases of all experts of the sparse layers; they stay on the device wherever experts are."""

    gate_up: jax.Array  # [M, E, 2F]
    down: jax.Array  # [M, E, D]

    def of_pairs(self, layer: Index, ids: jax.Array) -> PairBiases:
        """Gathers those of the experts int32[N, A] of a layer; any for one that is none."""
        ids = jnp.clip(ids, 0, self.down.shape[1] - 1)
        return PairBiases(self.gate_up[layer, ids], self.down[layer, ids])


def routing_of(logits: jax.Array, config: ModelConfig, bias: jax.Array | None = None) -> Routing:
    """Routes by logits, float32[N, E].

    Args:
      config: gives A, the rule, and whether the chosen weights are divided by their sum.
      bias: float32[E], added to the scores for the choice alone, not to the weights.
    """
    rule, width = config.router, config.experts_per_token
    is_softmax = rule.scoring == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
    weights, ids = jax.lax.top_k(_of_best_groups(scores, rule, bias), width)
    if not rule.is_plain:
        weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
    if config.norm_topk_prob:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total if is_softmax else total + SUM_FLOOR)
    routing = _scaled(Routing(scores, weights, ids), config)
    if rule.is_plain:
        return routing
    # A bias decides who is chosen, not who comes first.
    weights, order = jax.lax.top_k(routing.weights, width)
    return Routing(scores, weights, jnp.take_along_axis(ids, order, axis=-1))


def prefetch_scores(routing: Routing, config: ModelConfig) -> jax.Array:
    """Prefetch scores float32[N, E]: higher where the next router is likelier to choose.

    They are the router's scores where those alone decide (DyMoE eq. 7); with groups or a bias, the
    experts that it would choose come before all others.
    """
    if config.router.is_plain:
        return routing.probabilities
    numbers = jnp.arange(routing.probabilities.shape[1], dtype=routing.ids.dtype)
    chosen = jnp.any(routing.ids[:, :, None] == numbers[None, None], axis=1)
    return routing.probabilities + chosen.astype(jnp.float32)


def _scaled(routing: Routing, config: ModelConfig) -> Routing:
    """Multiplies the weights by the model's routed scaling factor."""
    if config.router.scale == 1.0:
        return routing
    return routing._replace(weights=routing.weights * config.router.scale)


def _of_best_groups(scores: jax.Array, rule: RouterRule, bias: jax.Array | None) -> jax.Array:
    """Choice scores float32[N, E], -inf outside the best groups."""
    deciding = scores if bias is None else scores + bias[None]
    if rule.num_groups == rule.top_groups:
        return deciding
    grouped = deciding.reshape(len(deciding), rule.num_groups, -1)
    best = 1 if rule.group_score == "max" else min(2, grouped.shape[-1])
    of_group = jnp.sum(jax.lax.top_k(grouped, best)[0], axis=-1)
    _, groups = jax.lax.top_k(of_group, rule.top_groups)
    numbers = jnp.arange(rule.num_groups, dtype=groups.dtype)
    kept = jnp.any(groups[:, :, None] == numbers[None, None], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(deciding.shape)


ExpertImpl = Literal["dense", "row", "block", "block_in_cache", "grouped_kernel"]

# Above so many assignments a call on a CPU sorts them into blocks. Unrolled, a decode step of the
# demo model took 9.9 ms against 16.8 at 32 rows (batch 8, two busy cores, jax 0.10.2, 2026-11-21),
# and compiled in 17.5 s against 7.8: more rows are not worth the compiling.
MAX_UNROLLED_ROWS = 32
MAX_KERNEL_TOKENS = 32  # that Triton's grouped kernel serves on plain experts
# Weights gathered for a scan step of `products_by_block`: bounds its temporary memory on a GPU.
# On a CPU small steps are faster: the demo model's TTFT at 512 tokens was 133 ms with 512 MiB, 83
# with 0.8 MiB, 105 with one block (two cores, jax 0.10.2, 2026-11-21).
STEP_BYTES: dict[ExpertImpl, int] = {"block": 512 * 2**20, "block_in_cache": 2**20}


def _choose_routing(num_tokens: int, config: ModelConfig, kernels: ops.Kernels) -> Choice:
    """Chooses the implementation of routing `num_tokens`; see `linear.choose_part`."""

    def choose(target: Target) -> Choice:
        if not config.router.is_plain:
            return Choice("xla", {"triton": "its experts are no top-k of one softmax"})
        logits = jax.ShapeDtypeStruct((num_tokens, config.num_experts), jnp.float32)
        return router_topk.OPERATION.choose(logits, config.experts_per_token, target=target)

    return ops.choose_part("routing", "float32", kernels, choose)


@functools.partial(jax.jit, static_argnames=("num_chosen", "normalise"))
def _routing_by_kernel(
    logits: jax.Array, first: jax.Array | None = None, *, num_chosen: int, normalise: bool
) -> Routing:
    """Runs `routing_of` in one launch, without a gradient; jitted for all layers.

    Args:
      first: int32[], an offset that the caller adds to the ids later; the kernel adds it and it is
        subtracted here, so that XLA cancels both and needs no launch. None for 0.
    """
    found = Routing(
        *router_topk.top_k(logits, num_chosen, normalise, first=first, implementation="triton")
    )
    return found if first is None else found._replace(ids=found.ids - first)


def _experts_dense(
    x: jax.Array, routing: Routing, gate_up: Weight, down: Weight, layer: Index,
    gating: Gating = SWIGLU, biases: _ExpertBiases | None = None,
) -> jax.Array:  # fmt: skip
    """Runs every expert on every token, masked by choice: two large products.

    Returns:
      [N, D] in `x.dtype`.
    """
    num_experts, _, model_dim = gate_up.shape[1:]
    expert_dim = down.shape[-1]
    chosen = routing.ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    combine = jnp.sum(jnp.where(chosen, routing.weights[:, :, None], 0.0), axis=1)
    gate, up = jnp.split(ops.matrix(gate_up, (layer,), x.dtype), 2, axis=1)
    gate = jnp.einsum("nd,kd->nk", x, gate.reshape(-1, model_dim))
    up = jnp.einsum("nd,kd->nk", x, up.reshape(-1, model_dim))
    share = combine.astype(x.dtype)
    if biases is not None:
        of_gate, of_up = jnp.split(biases.gate_up[layer], 2, axis=1)
        gate, up = gate + of_gate.reshape(1, -1), up + of_up.reshape(1, -1)
    hidden = gating(gate, up).reshape(-1, num_experts, expert_dim)
    hidden = hidden * share[:, :, None]
    out = jnp.einsum("nef,edf->nd", hidden, ops.matrix(down, (layer,), x.dtype))
    return out if biases is None else out + jnp.einsum("ne,ed->nd", share, biases.down[layer])


def _experts_in_pairs(
    x: jax.Array,
    routing: Routing,
    experts: ExpertStacks,
    token_mask: jax.Array,
    impl: ExpertImpl,
    implementation: str = "",
    gating: Gating = SWIGLU,
    biases: _ExpertBiases | None = None,
    out_dtype: jnp.dtype | None = None,
    handed_out: OwnExperts | None = None,
) -> jax.Array:
    """Runs the chosen experts by a form of `products_in_pairs`; [N, D] in `x.dtype`.

    Rows cost the same whether they are active or not, so that `token_mask` is for other forms.
    """
    ids = routing.ids
    active = jnp.ones(ids.shape, bool)
    if impl != "row":
        active = jnp.broadcast_to(token_mask[:, None], ids.shape)
    if handed_out is not None:
        ids, mine = handed_out.of_pairs(experts.layer, ids)
        active &= mine
    own = None if biases is None else biases.of_pairs(experts.layer, ids)
    pairs, num_experts = ExpertPairs(ids, active, None, own), experts.gate_up.shape[1]
    products = products_in_pairs(x, pairs, experts, num_experts, impl, implementation, gating)
    return combine(products, pairs, routing.weights, out_dtype or x.dtype)


def products_in_pairs(
    x: jax.Array,
    pairs: ExpertPairs,
    experts: ExpertStacks,
    num_experts: int,  # E, different ones that the pairs may have
    impl: ExpertImpl,  # any form but "dense"
    implementation: str,  # of the grouped kernel
    gating: Gating = SWIGLU,
    # which of several calls this is; `pairs.tier` are the calls of all pairs
    turn: Turn | None = None,
) -> jax.Array:
    """Multiplies the active pairs of N tokens and A experts: [P, N, A, D]."""
    match impl:
        case "row":
            found = products_by_row(x, pairs, experts, gating)
        case "block" | "block_in_cache":
            step_bytes = STEP_BYTES[impl]
            found = products_by_block(x, pairs, experts, num_experts, step_bytes, gating)
        case "grouped_kernel":
            return products_grouped(x, pairs, [experts], implementation, gating, turn)
        case _:
            forms = ", ".join(map(repr, get_args(ExpertImpl)[1:]))
            raise ValueError(f"{impl!r} is none of {forms}")
    if turn is None:
        return found
    assert pairs.tier is not None
    return turn.joined(found, pairs.tier)


def _packings(experts: Sequence[Weight]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(ops.packing, experts))))


def default_expert_impl(
    num_tokens: int,
    config: ModelConfig,
    dtype: jnp.dtype,
    platform: str,
    experts: Sequence[Weight] = (),
    kernels: ops.Kernels = ops.NO_KERNELS,
    *,
    pooled: bool = False,  # the experts are slots of a pool
) -> ExpertImpl:
    """Chooses the form that runs experts for `num_tokens` tokens on `platform`."""
    packed = bool(_packings(experts))
    if experts:
        chosen = choose_grouped(num_tokens, config, dtype, [experts], kernels).implementation
        few = chosen == "triton" and num_tokens <= MAX_KERNEL_TOKENS
        if chosen != ops.DEQUANTIZED and (chosen == "mosaic" or few or packed or pooled):
            return "grouped_kernel"
    # Unrolled, packed experts take long to compile: a decode step of the demo at INT3 and 32 rows
    # 73 s against 10 (two crowded cores, jax 0.10.2, 2026-11-21).
    unrolled = num_tokens * config.experts_per_token <= MAX_UNROLLED_ROWS
    if platform == "cpu" and unrolled and not packed:
        return "row"
    return "block_in_cache" if platform == "cpu" else "block"


def record_experts(tier: int, impl: ExpertImpl, experts: Sequence[Weight], grouped: Choice) -> None:
    """Records the form that runs experts, or the grouped kernel's implementation.

    Args:
      grouped: the choice for the grouped kernel, with its refusals where another form runs.
    """
    name, packed = f"experts, tier {tier + 1}" if tier else "experts", bool(_packings(experts))
    if impl == "grouped_kernel":
        choice = grouped
    elif packed:
        choice = Choice(ops.DEQUANTIZED, grouped.refusals)
    else:
        choice = Choice(impl, grouped.refusals if impl == "block" else {})
    if not is_new_choice(name, choice):
        return
    forms = " and ".join(dict.fromkeys(map(ops.form, experts)))
    if packed and impl != "grouped_kernel":
        forms += f", {impl}"
    record_choice(name, choice, forms, packed=packed)


class SparseMoe(StackedModule):
    """Routers and experts of all M sparse layers."""

    part = "moe"
    router: nnx.Param[jax.Array]
    router_bias: nnx.Param[jax.Array]
    logit_bias: nnx.Param[jax.Array]
    gate_up_bias: nnx.Param[jax.Array]
    down_bias: nnx.Param[jax.Array]
    gate_up: nnx.Param[jax.Array]
    down: nnx.Param[jax.Array]

    @property
    def biases(self) -> _ExpertBiases | None:
        """Biases of the experts; None of most families."""
        if not self.config.expert_bias:
            return None
        return _ExpertBiases(self.gate_up_bias[...], self.down_bias[...])

    def route(
        self,
        x: jax.Array,
        layer: Index,
        # an offset that the products add to the ids; see `_routing_by_kernel`
        first_slot: jax.Array | None = None,
        # gives logits, float32[N, E], in place of the router's, to replay a trace
        override: Callable[[jax.Array], jax.Array] | None = None,
    ) -> Routing:
        """Routes N tokens to experts."""
        wide = jnp.dtype(jnp.float32)
        logits = self.linear(x, "router", layer, wide, always_kernel=True)
        if self.config.router.has_logit_bias:
            logits = logits + self.logit_bias[...][layer].astype(wide)[None]
        if override is not None:
            logits = override(logits)
        c = self.config
        if _choose_routing(len(x), c, self.kernels).implementation == "triton":
            routing = _routing_by_kernel(
                logits, first_slot, num_chosen=c.experts_per_token, normalise=c.norm_topk_prob
            )
            return _scaled(routing, c)
        bias = self.router_bias[...][layer] if c.router.has_bias else None
        return routing_of(logits, c, bias)

    def __call__(
        self,
        x: jax.Array,
        routing: Routing,
        layer: Index,
        token_mask: jax.Array,
        impl: ExpertImpl,
        out_dtype: jnp.dtype | None = None,
        handed_out: OwnExperts | None = None,
    ) -> jax.Array:
        """Runs the chosen experts on N tokens: [N, D] in `out_dtype`; None: in `x.dtype`.

        Those of a device alone where they are `handed_out`.
        """
        gate_up, down = self.gate_up[...], self.down[...]
        chosen = choose_grouped(len(x), self.config, x.dtype, [(gate_up, down)], self.kernels)
        record_experts(0, impl, (gate_up, down), chosen)
        if impl == "dense":
            assert handed_out is None
            gating, biases = self.config.gating, self.biases
            out = _experts_dense(x, routing, gate_up, down, layer, gating, biases)
            return out if out_dtype is None else out.astype(out_dtype)
        if impl == "grouped_kernel" and chosen.implementation == ops.DEQUANTIZED:
            raise ValueError(f"the grouped kernel refuses: {chosen.describe()}")
        experts = ExpertStacks(gate_up, down, layer)
        return _experts_in_pairs(
            x, routing, experts, token_mask, impl, chosen.implementation, self.config.gating,
            self.biases, out_dtype, handed_out,
        )  # fmt: skip


class MoeInputs(NamedTuple):
    """Inputs of a sparse layer's experts, of N tokens."""

    layer: LayerIndex
    x: jax.Array  # [N, D], normed
    routing: Routing
    token_mask: jax.Array  # bool[N], False for padding
    # routes x by the next sparse layer's router (DyMoE eq. 6), a prediction; None after the last.
    # In a loop never None: the last layer's is of itself, to be ignored.
    next_routing: Callable[[], Routing] | None
    attended: Attended | None  # None of a layer without attention, and if it is not observed
    biases: _ExpertBiases | None = None
    # of the result; float32 where devices add their parts of it, None: that of x
    out_dtype: jnp.dtype | None = None


class Experts(Protocol):
    """Runs the experts of the sparse layers, one layer after another.

    The model takes `init()` into its first sparse layer and the carry of each into the next. In a
    loop its tree, shapes and dtypes never change; layers of an iteration are a multiple of
    `layers_per_iteration`, since consecutive ones may use different arrays.
    """

    layers_per_iteration: int = 1
    # whether layers pass on the queries and keys of their attention
    observes_attention: bool = False

    def init(self) -> Any:
        """Returns the carry before the first layer; None where there is none."""
        return None

    def route(
        self, carry: Any, moe: SparseMoe, layer: Index, x: jax.Array, *, is_ahead: bool = False
    ) -> Routing:
        """Routes tokens, x [N, D], by a layer's router."""
        return moe.route(x, layer)

    def __call__(self, carry: Any, inputs: MoeInputs) -> tuple[jax.Array, Any, Any]:
        """Runs the chosen experts on N tokens.

        Returns:
          [N, D] in `inputs.out_dtype`, the carry, and a record: None, or a tree of arrays that is
          the same for all layers.
        """
        ...


class ResidentExperts(Experts):
    """Runs experts that the model holds."""

    def __init__(
        self,
        moe: SparseMoe | None,  # None of a model without sparse layers
        impl: ExpertImpl,
        # of a layer's input and its routing gives the layer's record
        record: Callable[[jax.Array, Routing], Any] = lambda x, routing: None,
        # where a device has some experts alone; not for the form "dense"
        handed_out: OwnExperts | None = None,
    ):
        """Needs no carry."""
        self._moe, self._impl, self._record = moe, impl, record
        self._handed_out = handed_out

    def route(
        self, carry: Any, moe: SparseMoe, layer: Index, x: jax.Array, *, is_ahead: bool = False
    ) -> Routing:
        """Routes tokens, as `Experts.route`."""
        first_slot = None
        is_offset = self._impl == "grouped_kernel" and self._handed_out is None
        if is_offset and isinstance(layer, int) and layer and not is_ahead:
            first_slot = jnp.int32(layer * moe.gate_up.shape[1])
        return moe.route(x, layer, first_slot)

    def __call__(self, carry: Any, inputs: MoeInputs) -> tuple[jax.Array, Any, Any]:
        """Runs a layer's experts, as `Experts`."""
        assert self._moe is not None
        layer, x, routing, token_mask, *_ = inputs
        out = self._moe(
            x, routing, layer.mlp, token_mask, self._impl, inputs.out_dtype, self._handed_out
        )
        return out, carry, self._record(x, routing)


def routing_record(x: jax.Array, routing: Routing) -> Routing:
    """The routing alone, for `ResidentExperts`."""
    return routing
