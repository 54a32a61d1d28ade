"""A bound on what the compiled steps take beside weights, pools and cache."""

import dataclasses
from typing import NamedTuple

from moejax.experts.budget.planned import RunSizes
from moejax.models.config import LatentConfig

# Sizes of `moejax.models.moe`, for the forms that run experts on a CPU.
CPU_UNROLLED = 32
CPU_STEP_BYTES = 2**20
# Same as in `moejax.inference.chunking`; a context that is no multiple of it leaves shorter ones.
MIN_CHUNK = 16
# Tokens of a block of the chunked delta rule, as in `moejax.models.delta_net`.
DELTA_BLOCK = 64
# Bytes of float32 scores at once, and of keys and values that are expanded for a later chunk, as in
# `moejax.models.latent_attention`.
LATENT_SCORE_BYTES = 256 * 2**20
LATENT_EXPANDED_BYTES = 2**30


def workspace_nbytes(
    run: RunSizes, num_turns: int = 1, *, num_tiers: int = 1, is_packed: bool = False,
    has_terms: bool = False,
) -> int:  # fmt: skip
    """Peak bytes of a prefill chunk or of a decode step, the larger of them.

    It bounds every call of at most so many sequences, positions and tokens a chunk, also where
    fewer tokens take more, as with plain experts on a CPU.

    Layers take the memory that those before them have left, and experts that of attention; but XLA
    on a CPU keeps what attention reads of the cache for all layers. There, numbers of two bytes are
    not served as such: the weights are widened, which is not counted.

    While a program is compiled, a GPU's XLA runs its products to choose a form for each: of the
    largest, attention's scores, it has two results at once, beside all that stays. That is more
    than the chunk takes where the cache is long (16.7 GiB where 16.5 were planned without it,
    Qwen3-30B at 4,096 slots; H200, jax 0.11.2, 2026-11-23).

    Compiled for an H100 without one (jax 0.11.2, 2026-11-21), prefill of Qwen3-30B and Mixtral
    shapes with INT4 experts took 0.61 to 0.97 of this, and decode 0.17 to 0.97.

    Args:
      num_turns: arrays in which layers have their slots in turn (`TierBudget.banks`); where there
        are two, XLA gives some of what products take and give a place of its own for each.
      num_tiers: a layer has the products of all of them at once.
      is_packed: whether the experts are stored in codes; a CPU never unrolls the products of such.
      has_terms: whether the experts have low-rank compensators.
    """
    steps = _Steps(run, num_turns, num_tiers, is_packed, has_terms)
    of_prompts = dataclasses.replace(run, batch=run.prefill_batch)
    prompts = steps._replace(run=of_prompts)
    # Six arrays like the logits: penalized, sorted with their places, summed.
    sampling = 6 * 4 * run.batch * run.config.vocab_size
    return max(prompts.nbytes(run.chunk), prompts._tried(run.chunk), steps.nbytes(1) + sampling)


class _Steps(NamedTuple):
    """Steps of `tokens` tokens a sequence; bytes."""

    run: RunSizes
    num_turns: int
    num_tiers: int
    is_packed: bool
    has_terms: bool

    def nbytes(self, tokens: int) -> int:
        """Bytes that the layers of a step of so many tokens take at once."""
        # The residual stream, what a norm gives, what a layer adds; sines and cosines.
        c, num_tokens = self.run.config, self.run.batch * tokens
        stream = num_tokens * (4 * c.model_dim * self.run.itemsize + 4 * c.rotary_dim)
        apart = stream + self._values(tokens) + self._hidden(tokens) // 3
        more = (self.num_turns - 1) * apart if tokens > 1 else 0
        most = max(self._attention(tokens), self._delta_rule(tokens), self._experts(tokens))
        return stream + more + self._reads(tokens) + most

    def _tried(self, tokens: int) -> int:
        """Bytes of a chunk's largest product while it is compiled: two float32 results."""
        return 0 if self.run.is_cpu else 2 * 4 * self._scores(tokens) + self._values(tokens)

    def _by_kernel(self, tokens: int) -> bool:
        """Whether a kernel serves attention of a decode step, of the cache as it lies there.

        A context that is no multiple of `MIN_CHUNK` may leave a chunk of one token, which XLA runs.
        """
        return tokens == 1 and not self.run.copies_cache and self.run.context % MIN_CHUNK == 0

    def _reads(self, tokens: int) -> int:
        """Bytes of keys and values read from the cache; for one query a GPU widens them."""
        c = self.run.config
        if self._by_kernel(tokens):
            return 0
        position = c.cached_heads * sum(c.cached_dims) * self.run.itemsize
        read = self.run.batch * self.run.context * position
        if self.run.is_cpu:
            return read * len(c.attention_layers)
        return 3 * read if tokens == 1 else read

    def _attention(self, tokens: int) -> int:
        c = self.run.config
        if not c.attention_layers:
            return 0
        # Products in float32 and what the softmax gives; on a CPU its parts are not fused.
        score_nbytes = 4 + self.run.itemsize + (4 if self.run.is_cpu else 0)
        expanded = self._expanded(c.latent, tokens) if c.latent else 0
        return self._values(tokens) + self._scores(tokens) * score_nbytes + expanded

    def _scores(self, tokens: int) -> int:
        """Number of attention scores at once."""
        c = self.run.config
        if not c.attention_layers or (tokens > 1 and not self.run.stores_scores):
            return 0
        if self._by_kernel(tokens):
            return 0
        row = self.run.batch * c.num_heads * self.run.context
        # Latent attention takes one block of queries after another.
        most = max(LATENT_SCORE_BYTES // 4, row) if c.latent else tokens * row
        return min(tokens * row, most)

    def _values(self, tokens: int) -> int:
        c = self.run.config
        if c.latent:
            return self._latent_values(c.latent, tokens)
        values = 2 * c.qkv_dim + c.num_heads * c.head_dim
        return self.run.batch * tokens * values * self.run.itemsize

    def _latent_values(self, of: LatentConfig, tokens: int) -> int:
        """Bytes of queries, latents, and the keys and values of new tokens.

        One token has no keys and values of heads: its queries, and what attention returns, have the
        latents' width instead.
        """
        c = self.run.config
        latents = 2 * (of.kv_rank + of.rope_dim) + 2 * (of.query_rank or 0)
        queries = 2 * c.num_heads * c.head_dim
        heads = c.num_heads * (2 * of.nope_dim + of.rope_dim + 3 * of.value_dim)
        if tokens == 1:
            heads = c.num_heads * (2 * of.kv_rank + of.rope_dim + of.value_dim)
        return self.run.batch * tokens * (latents + queries + heads) * self.run.itemsize

    def _expanded(self, of: LatentConfig, tokens: int) -> int:
        """Bytes of cached latents, expanded for a later chunk; a token expands none."""
        if tokens == 1:
            return 0
        c, run = self.run.config, self.run
        slot = c.num_heads * (2 * of.nope_dim + of.rope_dim + of.value_dim)
        expanded = min(run.batch * run.context * slot * run.itemsize, LATENT_EXPANDED_BYTES)
        absorbed = tokens * c.num_heads * (2 * of.kv_rank + of.rope_dim)
        return max(expanded, run.batch * absorbed * run.itemsize)

    def _delta_rule(self, tokens: int) -> int:
        """Bytes of a delta rule: projections, convolution, the rule in float32."""
        of = self.run.config.delta_net
        if of is None:
            return 0
        blocks = -(-tokens // DELTA_BLOCK)
        length = blocks * DELTA_BLOCK if tokens > 1 else 1
        projected = 2 * (of.conv_dim + of.value_width) * self.run.itemsize + 2 * 4 * of.conv_dim
        # Keys and values; both times the strength of writing; what the triangular system makes of
        # them; queries and keys with their decays; what is read.
        rule = 4 * of.num_value_heads * (5 * of.key_dim + 5 * of.value_dim)
        pairs = 4 * 4 * of.num_value_heads * DELTA_BLOCK if tokens > 1 else 0
        states = 3 * 4 * of.num_value_heads * of.key_dim * of.value_dim
        return self.run.batch * (length * (projected + rule + pairs) + states)

    def _hidden(self, tokens: int) -> int:
        c = self.run.config
        return self.run.batch * tokens * c.experts_per_token * 3 * c.expert_dim * self.run.itemsize

    def _experts(self, tokens: int) -> int:
        c = self.run.config
        num_tokens = self.run.batch * tokens
        pairs = num_tokens * c.experts_per_token
        routing = 3 * 4 * num_tokens * c.num_experts
        hidden = self._hidden(tokens)
        # Products of the pairs so far, of a further wave, and weighted. A further tier has its own
        # and those of the tiers up to it.
        products = pairs * c.model_dim * (2 * self.run.itemsize + 4 + 8 * (self.num_tiers - 1))
        sparse = routing + hidden + products + (self._matrices(tokens) if self.run.is_cpu else 0)
        if self.has_terms and not self.run.is_cpu:  # gates and ups stay in float32 until then
            sparse += pairs * 2 * c.expert_dim * (4 - self.run.itemsize)
        if c.expert_bias:  # gathered for each pair, and products to which they are added
            gathered = 2 * c.expert_dim + c.model_dim
            sparse += pairs * (gathered * self.run.itemsize + 4 * c.model_dim)
        if c.shared_dim:  # XLA may run it before, between or after the experts' products
            # Gates and ups, and their product; a CPU has the gates once more.
            width = (4 if self.run.is_cpu else 3) * c.shared_dim + c.model_dim
            sparse += num_tokens * width * self.run.itemsize
        dense = num_tokens * 3 * c.mlp_dim * self.run.itemsize
        has_dense = len(c.moe_layers) < c.num_layers
        return max(sparse if c.moe_layers else 0, dense if has_dense else 0)

    def _matrices(self, tokens: int) -> int:
        """Bytes of plain experts copied from their stack, or of dequantized ones.

        Few pairs are unrolled, and the copies of all of them live at once; more go by blocks, some
        experts at a time. Among calls of at most so many tokens, the largest that is unrolled takes
        the most: a chunk of a prompt (at least `MIN_CHUNK` tokens where that divides the context),
        or a decode step of fewer sequences.
        """
        c, num_tokens = self.run.config, self.run.batch * tokens
        expert = 3 * c.model_dim * c.expert_dim * self.run.itemsize
        few = CPU_UNROLLED // c.experts_per_token
        is_some_unrolled = min(tokens, few) >= MIN_CHUNK or tokens < MIN_CHUNK
        is_some_unrolled |= self.run.context % MIN_CHUNK > 0
        unrolled = 0
        if is_some_unrolled and not self.is_packed:
            unrolled = min(few, num_tokens) * c.experts_per_token * expert
        blocks = max(CPU_STEP_BYTES, expert) if num_tokens > few or self.is_packed else 0
        return max(unrolled, blocks)
