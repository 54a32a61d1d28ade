"""The decoder of every family, one module over layer-stacked weights; its flat dict of weights."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import (
    Attended,
    Attention,
    AttentionFn,
    AttentionImpl,
    CachedAttention,
    CachedAttentionImpl,
    Total,
    causal_attention,
    token_attention,
)
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.delta_net import DeltaNet
from moejax.models.expert_products import gated
from moejax.models.kv_cache import KVCache, cache_shape
from moejax.models.latent_attention import LatentAttention
from moejax.models.layer_index import (
    LAYERS_A_PASS,
    LayerIndex,
    layer_indices,
    scan_plan,
    scanned_layer,
)
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import (
    ExpertImpl,
    Experts,
    MoeInputs,
    ResidentExperts,
    Routing,
    SparseMoe,
    routing_record,
)
from moejax.models.rope import Angles, model_angles
from moejax.models.stacked import (
    StackedModule,
    norm_of_sum,
    rounded,
    stacked_norm,
    stacked_parameter,
)
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Weight
from pallas_kernels import op, peer_sum, qkv_to_cache, residual_norm
from pallas_kernels.target import Choice, Target


def _choose_token_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> Choice:
    """Chooses norms, rotation and cache writes of a decode step; see `linear.choose_part`.

    Where one kernel takes queries, keys and values to the cache depends on attention
    (`_choose_cache_writes`); layers by a delta rule and latent attention write for themselves.
    """

    def choose(target: Target) -> Choice:
        x = jax.ShapeDtypeStruct((1, config.model_dim), dtype)
        found = [residual_norm.OPERATION.choose(x, target=target)]
        if _is_plain(config):
            found.append(_choose_cache_writes(config, dtype, target))
        reasons = dict.fromkeys(choice.refusals["triton"] for choice in found if choice.refusals)
        return Choice("xla", {"triton": "; ".join(reasons)}) if reasons else Choice("triton", {})

    return ops.choose_part("norms and writes", str(dtype), kernels, choose)


def _is_plain(config: ModelConfig) -> bool:
    """Whether `qkv_to_cache` supports the model's attention.

    Else the layers mix by `Transformer.mix`, whatever serves attention.
    """
    gated = config.attention_gate or config.zero_centred_norm or config.joint_qk_norm
    turned = config.rotary_dim != config.head_dim or config.interleaved_rope
    return config.latent is None and not gated and not turned


def _choose_cache_writes(config: ModelConfig, dtype: jnp.dtype, target: Target) -> Choice:
    """Chooses the implementation that splits a qkv product into queries and cache writes."""
    qkv = jax.ShapeDtypeStruct((1, config.qkv_dim), dtype)
    keys = jax.ShapeDtypeStruct(cache_shape(config, 1, 1), dtype)
    return qkv_to_cache.OPERATION.choose(qkv, keys, target=target)


@functools.partial(jax.jit, static_argnames="eps")
def _queries_and_cache(
    qkv: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    *,
    eps: float,
) -> tuple[jax.Array, KVCache]:
    """Rotated queries [B, H, C], and the cache with the tokens; jitted as `norm_of_sum`."""
    q, keys, values = qkv_to_cache.qkv_to_cache(
        qkv, cache.keys, cache.values, layer=layer, positions=positions, cos=cos, sin=sin,
        norms=None if scales is None else qkv_to_cache.HeadNorms(*scales, eps),
        pages=cache.table, implementation="triton",
    )  # fmt: skip
    return q, cache._replace(keys=keys, values=values)


class ChunkSpec(NamedTuple):
    """Static facts of a chunk of tokens and its cache."""

    kv_length: int  # slots that attention reads; at least every position of the chunk plus one
    is_first: bool  # the chunk starts at position 0: attend within it, read no cache
    experts: ExpertImpl
    attention: AttentionImpl
    cached: CachedAttentionImpl = "xla"  # to the cache
    tiers: tuple[ExpertImpl, ...] = ()  # the form of each, where experts are stored in several
    kv_lengths: tuple[int, ...] = ()  # fewer slots, among which the step chooses by its positions


class _DenseMlp(StackedModule):
    """The MLPs of all N layers that have no experts."""

    part = "mlp"

    def __call__(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D] to [N, D]; `layer` is the index among the dense layers."""
        hidden = gated(self.linear(x, "gate_up", layer), self.config.gating)
        return self.linear(hidden, "down", layer)


class _SharedExpert(StackedModule):
    """The experts of all M sparse layers that every token takes, as one MLP a layer.

    Always on the device, with a precision of its own; policies never see it. It is multiplied by
    the sigmoid of a product of its own where the model has one.
    """

    part = "shared"

    def __call__(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D] to [N, D]; `layer` is the index among the sparse layers."""
        hidden = gated(self.linear(x, "gate_up", layer), self.config.gating)
        out = self.linear(hidden, "down", layer)
        if not self.config.shared_gate:
            return out
        wide = jnp.dtype(jnp.float32)
        opening = self.linear(x, "gate", layer, wide, always_kernel=True)
        return out * jax.nn.sigmoid(opening).astype(out.dtype)


class Transformer(nnx.Module):
    """Mixture-of-Experts decoder with the leaves of `weight_shapes(config)`.

    Tokens and positions are int32[B, T]; the token mask, bool[B, T], is False for padding, which
    takes no part in the experts and changes no state.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype = jnp.float32,
        kernels: ops.Kernels = ops.NO_KERNELS,
        holds_experts: bool = True,
        share_axis: str = "",
        by_heads: bool = False,
        has_mailboxes: bool = False,
    ):
        self.config = config
        self.kernels = kernels
        self.holds_experts = holds_experts
        self.share_axis = share_axis
        self.by_heads = by_heads
        # int32[1, 1 + 2 P], see `peer_sum.mailboxes_of`
        self.peers = nnx.Param(jnp.zeros((1, 1), jnp.int32)) if has_mailboxes else None
        self.embed = stacked_parameter("embed", config, rngs, dtype)
        how: dict[str, Any] = {"rngs": rngs, "dtype": dtype, "kernels": kernels}
        if config.latent:
            self.attention: Attention | LatentAttention = LatentAttention(config, **how)
        else:
            self.attention = Attention(config, **how)
        if config.delta_net:
            self.delta = DeltaNet(config, rngs=rngs, dtype=dtype, kernels=kernels)
        self.mlp_norm = stacked_parameter("mlp_norm", config, rngs, dtype)
        if config.moe_layers:
            elsewhere = () if holds_experts else EXPERT_LEAVES
            self.moe = SparseMoe(config, rngs=rngs, dtype=dtype, kernels=kernels, without=elsewhere)
        if config.moe_layers and config.shared_dim:
            self.shared = _SharedExpert(config, rngs=rngs, dtype=dtype, kernels=kernels)
        if config.dense_layers:
            self.mlp = _DenseMlp(config, rngs=rngs, dtype=dtype, kernels=kernels)
        self.final_norm = stacked_parameter("final_norm", config, rngs, dtype)
        if not config.tied_embeddings:
            self.head = stacked_parameter("head", config, rngs, dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the activations: that of the norms, which are never packed."""
        return self.final_norm[...].dtype

    def mix(
        self,
        normed: jax.Array,
        index: LayerIndex,
        angles: Angles,
        token_mask: jax.Array,
        attend: AttentionFn,
    ) -> jax.Array:
        """Runs a layer's attention or delta rule; returns its residual addition, [B, T, D]."""
        if index.is_delta:
            return self.delta(normed, index, token_mask, attend)
        if isinstance(self.attention, LatentAttention):
            return self.attention(normed, index, angles, attend)
        return self.attention(normed, index, angles, attend, self._total_of_heads)

    @property
    def _total_of_heads(self) -> Total | None:
        """Adds what the devices' heads give; None where each has all heads."""
        return self._total if self.by_heads else None

    def _total(self, parts: jax.Array) -> jax.Array:
        """Adds what each device of the mesh has, [..., D], in the activations' dtype."""
        peers = None if self.peers is None else self.peers[...]
        choice = ops.choose_part(
            ops.SUMS, str(parts.dtype), self.kernels,
            lambda target: peer_sum.OPERATION.choose(parts, peers is not None, target=target),
        )  # fmt: skip
        found = "triton" if choice.implementation == "triton" else op.REFERENCE
        return peer_sum.peer_sum(
            parts, peers, axis=self.share_axis, dtype=self.dtype, implementation=found
        )

    def mix_norm(self, x: jax.Array, index: LayerIndex) -> jax.Array:
        """Normalises [B, T, D] for `mix`."""
        return self._norm(x, self.attention.norm[...], index.layer)

    def mlp_block(
        self,
        x: jax.Array,
        index: LayerIndex,
        token_mask: jax.Array,
        experts: Experts,
        carry: Any,
        attended: Attended | None = None,
        *,
        normed: jax.Array | None = None,  # [N, D], x after the norm, where that is done
    ) -> tuple[jax.Array, Any, Any]:
        """Runs norm, then experts or dense MLP, on [B, T, D]; returns carry and record too."""
        flat = self._mlp_normed(x, index.layer) if normed is None else normed
        if not index.is_sparse:
            return self.mlp(flat, index.mlp).reshape(x.shape), carry, None
        mask = token_mask.reshape(-1)
        routing = experts.route(carry, self.moe, index.mlp, flat)
        ahead = self._next_routing(x, index, experts, carry)
        parts = jnp.dtype(jnp.float32) if self.share_axis else None
        inputs = MoeInputs(index, flat, routing, mask, ahead, attended, self.moe.biases, parts)
        out, carry, record = experts(carry, inputs)
        if self.share_axis:  # each device ran its share of every expert
            out = self._total(out)
        if self.config.shared_dim:
            out = out + self.shared(flat, index.mlp)
        return out.reshape(x.shape), carry, record

    def _next_routing(
        self, x: jax.Array, index: LayerIndex, experts: Experts, carry: Any
    ) -> Callable[[], Routing] | None:
        """Routes this layer's input by the next sparse layer's router (DyMoE eq. 6)."""
        if index.next_moe is None:
            return None
        layer, mlp = index.next_moe
        return lambda: experts.route(
            carry, self.moe, mlp, self._mlp_normed(x, layer), is_ahead=True
        )

    def _mlp_normed(self, x: jax.Array, layer: Index) -> jax.Array:
        """Input of a layer's MLP for [B, T, D], as [N, D]."""
        return self._norm(x, self.mlp_norm[...], layer).reshape(-1, self.config.model_dim)

    def _norm(self, x: jax.Array, scales: jax.Array, layer: Index) -> jax.Array:
        c = self.config
        return stacked_norm(
            x, scales, layer, c.norm_eps, self.kernels, zero_centred=c.zero_centred_norm
        )

    def project_to_vocab(self, hidden: jax.Array) -> jax.Array:
        """Applies the last norm and the head: [..., D] to float32[..., V]."""
        wide = jnp.dtype(jnp.float32)
        leaf = "embed" if self.config.tied_embeddings else "head"
        head = self._stored_head()
        logits = ops.product(self._last_norm(hidden), head, wide, self.kernels, leaf=leaf)
        return self._whole_logits(logits)

    def _whole_logits(self, logits: jax.Array) -> jax.Array:
        """Joins the devices' logits [..., V / n], padded, to [..., V]."""
        if not self._has_rows(self._stored_head()):
            return logits
        whole = jax.lax.all_gather(logits, self.share_axis, axis=logits.ndim - 1, tiled=True)
        return whole[..., : self.config.vocab_size]

    def _has_rows(self, matrix: Weight) -> bool:
        """Whether a device has some rows alone of a matrix [V, D]."""
        return bool(self.share_axis) and matrix.shape[0] < self.config.vocab_size

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., D] of tokens int32[...]."""
        rows = self.embed[...]
        if not self._has_rows(rows):
            return ops.take_rows(rows, tokens, self.dtype)
        local = tokens - jax.lax.axis_index(self.share_axis) * rows.shape[0]
        mine = (local >= 0) & (local < rows.shape[0])
        found = ops.take_rows(rows, jnp.where(mine, local, 0), self.dtype)
        zero = jnp.zeros((), found.dtype)
        return self._total(jnp.where(mine[..., None], found, zero))

    def _last_norm(self, hidden: jax.Array) -> jax.Array:
        return self._norm(hidden, self.final_norm[...][None], 0)

    def _stored_head(self) -> Weight:
        return self.embed[...] if self.config.tied_embeddings else self.head[...]

    def negative_log_likelihood(
        self, hidden: jax.Array, targets: jax.Array, logits_bytes: int
    ) -> jax.Array:
        """Sums -log p(target) over each row, in nats.

        Args:
          hidden: [B, P, D], before the last norm.
          targets: int32[B, P]; -1 is not counted.
          logits_bytes: bytes of logits computed at a time; at least one position's.

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
            logits = self._whole_logits(ops.product(part, head, jnp.dtype(jnp.float32)))
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
        attend: AttentionFn,
        experts: Experts,
        lengths: jax.Array | None = None,  # int32[B], see `rope.model_angles`
    ) -> tuple[jax.Array, Any, Any]:
        """Embeds tokens and runs all layers one by one, with attention by `attend`.

        Returns:
          The last layer's output [B, T, D], the experts' carry, and their records with the axis of
          the M sparse layers in front.
        """
        angles = model_angles(self.config, positions, lengths)
        every, x = layer_indices(self.config), self._embedded(tokens)
        return self._some_layers(x, every, angles, token_mask, attend, experts, experts.init())

    def _some_layers(
        self,
        x: jax.Array,
        indices: Iterable[LayerIndex],
        angles: Angles,
        token_mask: jax.Array,
        attend: AttentionFn,
        experts: Experts,
        carry: Any,
    ) -> tuple[jax.Array, Any, Any]:
        """Runs [B, T, D] through some layers; returns carry and records, as `layers`."""
        records = []
        for index in indices:
            x = x + self.mix(self.mix_norm(x, index), index, angles, token_mask, attend)
            attended = None
            if index.is_sparse and isinstance(attend, CachedAttention):
                attended = attend.take_attended()
                if attended is not None and self.by_heads:
                    attended = attended._replace(axis=self.share_axis)
            out, carry, record = self.mlp_block(x, index, token_mask, experts, carry, attended)
            x = x + out
            x = rounded(x) if x.shape[1] > 1 or self._is_for_cpu else x
            if index.is_sparse:
                records.append(record)
        return x, carry, _stacked(records)

    def __call__(
        self,
        tokens: jax.Array,
        # int32[B, T]; consecutive, and the same start for all rows where T > 1
        positions: jax.Array,
        token_mask: jax.Array,  # bool[B, T], False for padding: it takes no part in the experts
        cache: KVCache,
        spec: ChunkSpec,
        experts: Experts | None = None,  # None: those that the model holds, by `spec.experts`
        lengths: jax.Array | None = None,
    ) -> tuple[KVCache, jax.Array, Any, Any]:
        """Runs T new tokens of each sequence, writing the cache.

        Layers of one kind may run in a loop, which compiles one layer instead of all. On a GPU,
        chunks of more than one token do. (Kernels of Qwen3-30B's 48 layers took most of a minute.)
        A decode step stays unrolled there: its launches are few and short, and a loop adds to them.
        On a CPU both run in a loop, of models that hold their experts: the demo's step took no
        longer, and compiling it 2.2 s of processor time, not 6.9 (jax 0.10.2, 2026-11-24).

        Returns:
          The cache, the last layer's output [B, T, D] before the last norm, the experts' carry, and
          their records with the axis of the M sparse layers in front.
        """
        if experts is None:
            moe = self.moe if self.config.moe_layers else None
            experts = ResidentExperts(moe, spec.experts)
        if self.loops(tokens.shape[1]):
            return self._looped(tokens, positions, token_mask, cache, spec, experts, lengths)
        if self._has_token_step(tokens, spec):
            return _decode_layers(
                self, tokens, positions, token_mask, cache, spec, experts, lengths
            )
        attend = self.attention_of(cache, positions, spec, token_mask, experts.observes_attention)
        found = self.layers(tokens, positions, token_mask, attend, experts, lengths)
        return attend.cache, *found

    @property
    def _sinks(self) -> jax.Array | None:
        """[U, H], see `attention.cached_attention`; None of most families."""
        if not isinstance(self.attention, Attention) or not self.config.attention_sinks:
            return None
        return self.attention.sinks[...]

    @property
    def _is_for_cpu(self) -> bool:
        target = self.kernels.target
        return target is not None and target.platform != "gpu"

    def _has_token_step(self, tokens: jax.Array, spec: ChunkSpec) -> bool:
        """Whether kernels run norms and cache writes."""
        is_token = tokens.shape[1] == 1 and not spec.is_first
        if not is_token or (spec.cached == "xla" and _is_plain(self.config)):
            return False
        chosen = _choose_token_step(self.config, self.dtype, self.kernels)
        return chosen.implementation == "triton"

    def loops(self, length: int) -> bool:
        """Whether layers run in a loop, for so many tokens of each sequence."""
        return self.holds_experts if self._is_for_cpu else length > 1

    def _looped(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
        cache: KVCache,
        spec: ChunkSpec,
        experts: Experts,
        lengths: jax.Array | None,
    ) -> tuple[KVCache, jax.Array, Any, Any]:
        """Runs `__call__` with layers in a loop; layers outside whole passes are unrolled."""
        c = self.config
        angles = model_angles(c, positions, lengths)
        # Alone on a CPU layers gain nothing from one another, and each takes time to compile.
        layers_a_pass = 1 if self._is_for_cpu else LAYERS_A_PASS
        loop = scan_plan(c, experts.layers_per_iteration, layers_a_pass)

        def some(carried: Any, indices: Iterable[LayerIndex]) -> tuple[Any, Any]:
            x, cache, carry = carried
            attend = self.attention_of(
                cache, positions, spec, token_mask, experts.observes_attention
            )
            x, carry, records = self._some_layers(
                x, indices, angles, token_mask, attend, experts, carry
            )
            return (x, attend.cache, carry), records

        def one_pass(carried: Any, number: jax.Array) -> tuple[Any, Any]:
            turns = range(loop.num_turns)
            return some(carried, (scanned_layer(c, loop, turn, number) for turn in turns))

        x = self._embedded(tokens)
        carried, first = some((x, cache, experts.init()), layer_indices(c)[: loop.first])
        looped = None
        if loop.num_passes:
            numbers = jnp.arange(loop.num_passes, dtype=jnp.int32)
            carried, looped = jax.lax.scan(one_pass, carried, numbers)
            looped = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), looped)
        (x, cache, carry), last = some(carried, layer_indices(c)[loop.end :])
        parts = [part for part in (first, looped, last) if part is not None]
        records = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts) if parts else None
        return cache, x, carry, records

    def attention_of(
        self, cache: KVCache, positions: jax.Array, spec: ChunkSpec, token_mask: jax.Array,
        is_observed: bool = False,
    ) -> CachedAttention:  # fmt: skip
        """Builds the attention of a chunk's tokens to one another and to a cache."""
        length = None if spec.is_first else spec.kv_length
        how = (length, spec.attention, spec.cached, self.config.score_scale)
        reads = jnp.where(token_mask, positions, 0)
        writes = positions
        if cache.table is not None:
            writes = jnp.where(token_mask, positions, cache.length)
        return CachedAttention(
            cache, positions, reads, writes, *how, self._sinks, is_observed, token_mask,
            self._is_for_cpu, spec.kv_lengths,
        )  # fmt: skip


def _stacked(records: Sequence[Any]) -> Any:
    """Stacks records of layers; None without any."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *records) if records else None


def _decode_layers(
    model: Transformer,
    tokens: jax.Array,
    positions: jax.Array,
    token_mask: jax.Array,
    cache: KVCache,
    spec: ChunkSpec,
    experts: Experts,
    lengths: jax.Array | None = None,
) -> tuple[KVCache, jax.Array, Any, Any]:
    """`Transformer.__call__` of one token a sequence where `_choose_token_step` says "triton"."""
    c = model.config
    angles = model_angles(c, positions, lengths)
    x, carry = model._embedded(tokens[:, 0]), experts.init()
    delta: jax.Array | None = None  # what the layer before adds to x
    attend = model.attention_of(cache, positions, spec, token_mask)
    norm = functools.partial(norm_of_sum, eps=c.norm_eps, zero_centred=c.zero_centred_norm)
    records = []
    for index in layer_indices(c):
        layer = jnp.int32(index.layer)
        x, normed = norm(x, delta, model.attention.norm[...], layer)
        if _is_plain(c) and not index.is_delta:
            delta = _attended(model, normed, index, angles, spec, attend)
        else:
            delta = model.mix(normed[:, None], index, angles, token_mask, attend)[:, 0]
        x, normed = norm(x, delta, model.mlp_norm[...], layer)
        out, carry, record = model.mlp_block(
            x[:, None], index, token_mask, experts, carry, normed=normed
        )
        delta = out[:, 0]
        if index.is_sparse:
            records.append(record)
    hidden = x if delta is None else x + delta
    return attend.cache, hidden[:, None], carry, _stacked(records)


def _attended(
    model: Transformer,
    normed: jax.Array,
    index: LayerIndex,
    angles: Angles,
    spec: ChunkSpec,
    attend: CachedAttention,
) -> jax.Array:
    """Runs attention on [B, D]; one launch writes the tokens to the cache."""
    c, attention, mixer = model.config, model.attention, jnp.int32(index.mixer)
    assert isinstance(attention, Attention)
    scales = (attention.q_norm[...], attention.k_norm[...]) if c.qk_norm else None
    cos, sin = (of[:, 0] for of in angles)
    qkv = attention.product(normed[:, None], index.mixer)[:, 0]
    q, attend.cache = _queries_and_cache(
        qkv, attend.cache, mixer, attend.write_positions[:, 0], cos, sin, scales, eps=c.norm_eps
    )
    attended = token_attention(
        q[:, None], attend.cache.keys, attend.cache.values, layer=mixer,
        positions=attend.read_positions, kv_length=spec.kv_length, window=index.window,
        scale=c.score_scale, sinks=model._sinks, pages=attend.cache.table,
    )  # fmt: skip
    return attention.output(attended, index.mixer, total=model._total_of_heads)[:, 0]


def whole_attention(model: Transformer, impl: AttentionImpl) -> AttentionFn:
    """Attention of whole sequences to themselves, without a cache."""

    def attend(index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        sinks = None if model._sinks is None else model._sinks[index.mixer]
        return causal_attention(q, k, v, index.window, impl, model.config.score_scale, sinks)

    return attend


def forward(
    model: Transformer,
    tokens: jax.Array,  # int32[B, T]
    *,
    experts: ExpertImpl = "dense",
    attention: AttentionImpl = "xla",
    # of a layer's input [N, D] and its routing gives the layer's record, N = B T
    record: Callable[[jax.Array, Routing], Any] = routing_record,
) -> tuple[jax.Array, Any]:
    """Runs whole sequences without a cache, differentiably: for training and analysis.

    Returns:
      The last layer's output [B, T, D], before the last norm (`project_to_vocab` follows), and the
      records with a leading axis of M sparse layers; by default the routing: probabilities
      float32[M, N, E], weights float32[M, N, A], ids int32[M, N, A].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    mask = jnp.ones(tokens.shape, bool)
    attend = whole_attention(model, attention)
    run = ResidentExperts(model.moe, experts, record)
    hidden, _, records = model.layers(tokens, positions, mask, attend, run)
    return hidden, records


def model_definition(
    config: ModelConfig,
    kernels: ops.Kernels = ops.NO_KERNELS,
    *,
    holds_experts: bool = True,  # False where its experts come from elsewhere (`Experts`)
    # axis of a mesh whose devices have a share of every expert each, and may have rows of the
    # vocabulary; "": none
    share_axis: str = "",
    by_heads: bool = False,  # whether they have the heads of `config` each, of more (`head_shares`)
    has_mailboxes: bool = False,  # whether they add through mailboxes, a leaf "peers"
) -> nnx.GraphDef[Transformer]:
    """Builds the graph of a Transformer without weights; allocates nothing."""

    def build() -> Transformer:
        return Transformer(
            config, rngs=nnx.Rngs(0), kernels=kernels, holds_experts=holds_experts,
            share_axis=share_axis, by_heads=by_heads, has_mailboxes=has_mailboxes,
        )  # fmt: skip

    abstract = nnx.eval_shape(build)
    return nnx.split(abstract)[0]


def merge_weights(
    definition: nnx.GraphDef[Transformer], weights: Mapping[str, Weight]
) -> Transformer:
    """Builds a Transformer from a flat dict of weights, inside a jitted function.

    Args:
      weights: named and shaped as `weight_shapes`; matrices may be packed.
    """
    leaves: dict[Any, Any] = {
        tuple(name.split(".")): nnx.Param(leaf) for name, leaf in weights.items()
    }
    return nnx.merge(definition, nnx.from_flat_state(leaves))


def flat_weights(model: Transformer) -> dict[str, jax.Array]:
    """Plain weights of a model as a flat dict, in the order of `weight_shapes`."""
    flat = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    return {name: flat[name] for name in weight_shapes(model.config)}
