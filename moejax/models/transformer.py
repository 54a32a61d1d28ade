"""The decoder: Qwen3-MoE and Mixtral, one module over layer-stacked weights."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import ops
from moejax.cache import KVCache
from moejax.models.attention import (
    Attention,
    AttentionVia,
    CachedVia,
    WatchAttention,
    WritingAttention,
    causal_attention,
)
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.moe import DenseMlp, ExpertsVia, Routing, SparseMoe
from moejax.models.norm import rounded, stacked_norm
from moejax.models.parameter import stacked_parameter
from moejax.models.rope import rotary_angles
from moejax.models.run_experts import LoopedExperts, RunExperts, among_sparse
from moejax.models.token_step import serves_token_step, token_layers
from moejax.ops import Index
from moejax.qtensor import Weight

# Of the loop over a chunk's layers: the same wherever experts are. XLA on a CPU (jax 0.11.2) may
# end a float32 sum in another last bit where a pass ends than between two layers of one.
LAYERS_A_PASS = 2

Attend = Callable[[Index, jax.Array, jax.Array, jax.Array], jax.Array]


class ChunkSpec(NamedTuple):
    """How a chunk of tokens stands to the cache; all static."""

    kv_length: int  # slots that attention reads; at least every position of the chunk plus one
    is_first: bool  # the chunk starts at position 0: attend within it, read no cache
    experts: ExpertsVia
    attention: AttentionVia
    cached: CachedVia = "xla"  # of one token a sequence; longer chunks read the cache by XLA
    tiers: tuple[ExpertsVia, ...] = ()  # the form of each, where experts are stored in several


class Transformer(nnx.Module):
    """A Mixture-of-Experts decoder whose leaves are those of `weight_shapes(config)`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype = jnp.float32,
        kernels: ops.Kernels = ops.NO_KERNELS,
        holds_experts: bool = True,
    ):
        self.config = config
        self.kernels = kernels
        self.embed = stacked_parameter("embed", config, rngs, dtype)
        self.attention = Attention(config, rngs=rngs, dtype=dtype, kernels=kernels)
        self.mlp_norm = stacked_parameter("mlp_norm", config, rngs, dtype)
        if config.moe_layers:
            self.moe = SparseMoe(
                config, rngs=rngs, dtype=dtype, kernels=kernels, holds_experts=holds_experts
            )
        if config.dense_layers:
            self.mlp = DenseMlp(config, rngs=rngs, dtype=dtype, kernels=kernels)
        self.final_norm = stacked_parameter("final_norm", config, rngs, dtype)
        if not config.tied_embeddings:
            self.head = stacked_parameter("head", config, rngs, dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the activations: that of the norms, which are plain whatever the matrices are."""
        return self.final_norm[...].dtype

    def mlp_block(
        self,
        x: jax.Array,
        layer: Index,
        token_mask: jax.Array,
        via: ExpertsVia,
        run: RunExperts | None = None,
        *,
        normed: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """Norm, then experts or dense MLP, on [B, T, D]; the routing of sparse layers.

        Args:
          x: [B, T, D].
          layer: among all layers; int32[] where all of them are sparse.
          token_mask: bool[B, T], False for padding.
          via: which form runs experts that the model holds.
          run: what runs them otherwise.
          normed: [N, D], x after the norm, where that is done.
        """
        c = self.config
        flat = self._normed(x, layer) if normed is None else normed
        if isinstance(layer, int) and layer in c.dense_layers:
            return self.mlp(flat, c.dense_layers.index(layer)).reshape(x.shape), None
        index, following = among_sparse(c, layer)
        mask = token_mask.reshape(-1)
        if run is None:
            out, routing = self.moe(flat, index, mask, via)
            return out.reshape(x.shape), routing
        routing = self.moe.route(flat, index)
        if following is None:
            return run(index, flat, routing, mask, None).reshape(x.shape), routing
        next_layer, next_index = following

        def ahead() -> Routing:
            return self.moe.route(self._normed(x, next_layer), next_index)

        return run(index, flat, routing, mask, ahead).reshape(x.shape), routing

    def _normed(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D]: what the MLP of a layer would see of [B, T, D]."""
        normed = stacked_norm(x, self.mlp_norm[...], layer, self.config.norm_eps, self.kernels)
        return normed.reshape(-1, self.config.model_dim)

    def project_to_vocab(self, hidden: jax.Array) -> jax.Array:
        """[..., D] through the last norm and the head to float32[..., V]."""
        wide = jnp.dtype(jnp.float32)
        return ops.product(self._last_norm(hidden), self._stored_head(), wide, self.kernels)

    def _last_norm(self, hidden: jax.Array) -> jax.Array:
        scales = self.final_norm[...][None]
        return stacked_norm(hidden, scales, 0, self.config.norm_eps, self.kernels)

    def _stored_head(self) -> Weight:
        return self.embed[...] if self.config.tied_embeddings else self.head[...]

    def negative_log_likelihood(
        self, hidden: jax.Array, targets: jax.Array, logits_bytes: int
    ) -> jax.Array:
        """-log p(target), summed over each row, in nats.

        Args:
          hidden: [B, P, D], before the last norm.
          targets: int32[B, P]; -1 counts as nothing.
          logits_bytes: of the logits that are computed at a time; at least one position's are.

        Returns:
          float32[B].
        """
        batch, length = targets.shape
        hidden = self._last_norm(hidden)
        head = ops.matrix(self._stored_head(), (), self.dtype)
        size = max(1, min(length, logits_bytes // (4 * batch * self.config.vocab_size)))
        missing = -length % size
        hidden = jnp.pad(hidden, ((0, 0), (0, missing), (0, 0)))
        targets = jnp.pad(targets, ((0, 0), (0, missing)), constant_values=-1)

        def step(total: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
            part = jax.lax.dynamic_slice_in_dim(hidden, first, size, axis=1)
            wanted = jax.lax.dynamic_slice_in_dim(targets, first, size, axis=1)
            logits = ops.product(part, head, jnp.dtype(jnp.float32))
            picked = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], axis=-1)
            nats = jax.nn.logsumexp(logits, axis=-1) - picked[..., 0]
            return total + jnp.sum(jnp.where(wanted >= 0, nats, 0.0), axis=1), None

        firsts = jnp.arange(0, length + missing, size, dtype=jnp.int32)
        return jax.lax.scan(step, jnp.zeros(batch, jnp.float32), firsts)[0]

    def layers(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
        attend: Attend,
        experts: ExpertsVia,
        run: RunExperts | None = None,
    ) -> tuple[jax.Array, list[Routing]]:
        """Embedding and all layers; what attention sees is the caller's business.

        Args:
          tokens: int32[B, T].
          positions: int32[B, T].
          token_mask: bool[B, T], False for padding.
          attend: layer, rotated q [B, T, H, C], k and v [B, T, K, C] to [B, T, H, C].
          experts: which form runs the experts.
          run: what runs those that the model does not hold.

        Returns:
          The last layer's output [B, T, D], and the routing of each sparse layer.
        """
        c = self.config
        angles = rotary_angles(positions, c.head_dim, c.rope_theta)
        x = ops.take_rows(self.embed[...], tokens, self.dtype)
        routings = []
        for layer in range(c.num_layers):
            x, routing = self._layer(x, layer, angles, token_mask, attend, experts, run)
            if routing is not None:
                routings.append(routing)
        return x, routings

    def _layer(
        self,
        x: jax.Array,
        layer: Index,
        angles: tuple[jax.Array, jax.Array],
        token_mask: jax.Array,
        attend: Attend,
        experts: ExpertsVia,
        run: RunExperts | None,
    ) -> tuple[jax.Array, Routing | None]:
        """[B, T, D] through one layer; arguments as of `layers`."""
        attended = attend(layer, *self.attention.project(x, layer, *angles))
        x = x + self.attention.output(attended, layer)
        out, routing = self.mlp_block(x, layer, token_mask, experts, run)
        x = x + out
        return x if x.shape[1] == 1 else rounded(x), routing

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
        cache: KVCache,
        spec: ChunkSpec,
        run: RunExperts | None = None,
        watch: WatchAttention | None = None,
    ) -> tuple[KVCache, jax.Array]:
        """Runs T new tokens of each sequence, writing the cache.

        On a GPU more than one token a sequence goes through the layers in a loop, where these are
        alike: one layer is compiled, not all. (Kernels of Qwen3-30B's 48 layers took most of a
        minute.) A decode step stays unrolled: its launches are few and short, and a loop adds to
        them.

        Args:
          tokens: int32[B, T].
          positions: int32[B, T]; consecutive, and the same start for all rows where T > 1.
          token_mask: bool[B, T], False for padding: it takes no part in the experts.
          cache: written at `positions`.
          spec: static facts.
          run: what runs experts that the model does not hold.
          watch: who sees the queries and keys.

        Returns:
          The cache and the last layer's output [B, T, D], before the last norm.
        """
        if tokens.shape[1] == 1 or not self.loops(spec.experts, run):
            cache, hidden, _ = self.routed(tokens, positions, token_mask, cache, spec, run, watch)
            return cache, hidden
        assert run is None or isinstance(run, LoopedExperts)
        return self._looped(tokens, positions, token_mask, cache, spec, run, watch)

    def loops(self, experts: ExpertsVia, run: RunExperts | None) -> bool:
        """Whether the layers of a chunk of tokens run in a loop: all sparse, and numbers serve."""
        if self.config.dense_layers or experts == "kernel":  # whose layer is static
            return False
        target = self.kernels.target
        if target is not None and target.platform != "gpu":  # XLA copies the cache in a CPU's loop
            return False
        return run is None or isinstance(run, LoopedExperts)

    def _looped(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
        cache: KVCache,
        spec: ChunkSpec,
        run: LoopedExperts | None,
        watch: WatchAttention | None,
    ) -> tuple[KVCache, jax.Array]:
        """As a call, layer numbers on the device; what is left of the last pass is unrolled."""
        c = self.config
        angles = rotary_angles(positions, c.head_dim, c.rope_theta)
        num_turns = max(LAYERS_A_PASS, run.num_turns if run else 1)
        num_looped = c.num_layers // num_turns * num_turns
        if num_looped == num_turns:  # of a loop of one pass XLA copies the cache
            num_looped = 0

        def one(x: jax.Array, layer: Index, cache: KVCache) -> tuple[jax.Array, KVCache]:
            attend = self._attention_of(cache, positions, spec, watch, token_mask)
            x, _ = self._layer(x, layer, angles, token_mask, attend, spec.experts, run)
            return x, attend.cache

        def some(carried: Any, first: jax.Array) -> tuple[Any, Any]:
            x, cache, state = carried
            if run:
                run.resume(state)
            for turn in range(num_turns):
                x, cache = one(x, first + turn, cache)
            return (x, cache, run.state if run else None), run.kept() if run else None

        x = ops.take_rows(self.embed[...], tokens, self.dtype)
        if num_looped:
            firsts = jnp.arange(0, num_looped, num_turns, dtype=jnp.int32)
            carried = (x, cache, run.state if run else None)
            (x, cache, state), kept = jax.lax.scan(some, carried, firsts)
            if run:
                run.resume(state)
                run.keep(jax.tree.map(lambda leaf: leaf.reshape(num_looped, *leaf.shape[2:]), kept))
        for layer in range(num_looped, c.num_layers):
            x, cache = one(x, layer, cache)
        return cache, x

    def _attention_of(
        self, cache: KVCache, positions: jax.Array, spec: ChunkSpec,
        watch: WatchAttention | None, token_mask: jax.Array,
    ) -> WritingAttention:  # fmt: skip
        length = None if spec.is_first else spec.kv_length
        how = (length, self.config.sliding_window, spec.attention, spec.cached, watch, token_mask)
        return WritingAttention(cache, positions, *how)

    def routed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
        cache: KVCache,
        spec: ChunkSpec,
        run: RunExperts | None = None,
        watch: WatchAttention | None = None,
    ) -> tuple[KVCache, jax.Array, list[Routing]]:
        """As a call, unrolled, with each sparse layer's routing; for those who count experts."""
        is_token = tokens.shape[1] == 1 and spec.cached == "kernel" and not spec.is_first
        if is_token and watch is None and serves_token_step(self.config, self.dtype, self.kernels):
            return token_layers(self, tokens, positions, token_mask, cache, spec, run)
        attend = self._attention_of(cache, positions, spec, watch, token_mask)
        found = self.layers(tokens, positions, token_mask, attend, spec.experts, run)
        return attend.cache, *found


def forward(
    model: Transformer,
    tokens: jax.Array,
    *,
    experts: ExpertsVia = "dense",
    attention: AttentionVia = "xla",
) -> tuple[jax.Array, Routing]:
    """Whole sequences without a cache, differentiable: for training and analysis.

    Args:
      model: any Transformer.
      tokens: int32[B, T].
      experts: which form runs the experts.
      attention: which implementation runs causal attention.

    Returns:
      The last layer's output [B, T, D], before the last norm (`project_to_vocab` follows), and the
      routing with a leading axis of M sparse layers: probabilities float32[M, N, E], weights
      float32[M, N, A], ids int32[M, N, A], N = B T.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    mask = jnp.ones(tokens.shape, bool)

    def attend(layer: Index, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        del layer
        return causal_attention(q, k, v, model.config.sliding_window, attention)

    hidden, routings = model.layers(tokens, positions, mask, attend, experts)
    return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)


def model_definition(
    config: ModelConfig, kernels: ops.Kernels = ops.NO_KERNELS, *, holds_experts: bool = True
) -> nnx.GraphDef[Transformer]:
    """The graph of a Transformer without weights; nothing is allocated.

    Args:
      config: of the model.
      kernels: which may serve products with packed weights.
      holds_experts: False where its experts come from elsewhere (`RunExperts`).
    """

    def build() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0), kernels=kernels, holds_experts=holds_experts)

    abstract = nnx.eval_shape(build)
    return nnx.split(abstract)[0]


def merge_weights(
    definition: nnx.GraphDef[Transformer], weights: Mapping[str, Weight]
) -> Transformer:
    """A Transformer around a flat dict of weights; to be called inside a jitted function.

    Args:
      definition: of `model_definition`.
      weights: named and shaped as `weight_shapes`; matrices may be packed.
    """
    leaves: dict[Any, Any] = {
        tuple(name.split(".")): nnx.Param(leaf) for name, leaf in weights.items()
    }
    return nnx.merge(definition, nnx.from_flat_state(leaves))


def flat_weights(model: Transformer) -> dict[str, jax.Array]:
    """The plain weights of a model as a flat dict, in the order of `weight_shapes`."""
    flat = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    return {name: flat[name] for name in weight_shapes(model.config)}
