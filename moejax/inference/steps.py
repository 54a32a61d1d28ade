"""Compiled steps: prefill of a chunk, the first token, and several decode steps.

Plain functions over a flat dict of weights; the engine jits them. Donated operands are returned
first, in the order of the arguments (jax#39625). Where experts are pooled
(`moejax.experts.cached_experts`), the pool goes through every step and the store is read; else both
are None. The recorded routing (`moejax.inference.recorder`) is the last output; None without
recording.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.experts.cached_experts import CachedExperts
from moejax.experts.expert_pool import ExpertStore
from moejax.experts.tiered import ExpertCache, ExpertCacheSpec
from moejax.inference.recorder import (
    Recorded,
    RecordingExperts,
    RecordSpec,
    empty_record,
    recorded_of,
)
from moejax.inference.sampling import Logprobs, Sampling, draw, logprobs_of, penalized
from moejax.inference.step_output import (
    NO_TOKEN,
    NOT_FINITE,
    StepOutput,
    empty_step_output,
    names_a_token,
)
from moejax.models.assembly import merge_weights
from moejax.models.config import ModelConfig
from moejax.models.experts import Experts, ResidentExperts
from moejax.models.kv_cache import KVCache, empty_cache
from moejax.models.transformer import ChunkSpec, Transformer
from moejax.weights.qtensor import Weight

Weights = Mapping[str, Weight]

Pool = ExpertCache | None
Store = tuple[ExpertStore, ...] | None


class Program(NamedTuple):
    """Static facts that all steps of a model share."""

    definition: nnx.GraphDef[Transformer]
    pool: ExpertCacheSpec | None = None  # None: the weights hold all experts
    record: RecordSpec | None = None  # None: nothing is recorded
    top_logprobs: int = 0  # likeliest tokens told beside each token, with its own; 0: nothing is


SCORED_BYTES = 2**26  # of the float32 logits that exist at a time in scoring


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Carry of a decode step; donated.

    Invariants: shapes and dtypes never change; `tokens[b]` is not in the cache yet and belongs at
    `positions[b]`; a row that is done emits -1 and keeps its position.
    """

    cache: KVCache
    tokens: jax.Array  # int32[B], the newest token of each row
    positions: jax.Array  # int32[B], where it goes
    done: jax.Array  # bool[B]
    keys: jax.Array  # key[B], the random stream of each row
    seen: jax.Array | None  # bool[B, V], for the repetition penalty; None when it is off


def init_batch(
    config: ModelConfig, cache_length: int, dtype: jnp.dtype, seeds: jax.Array
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Initial state of a batch: an empty cache, zero `last_hidden`, and a key per row.

    Args:
      config: static.
      cache_length: static, S.
      dtype: static, of the activations.
      seeds: uint32[B].
    """
    batch = seeds.shape[0]
    hidden = jnp.zeros((batch, config.model_dim), dtype)
    keys = jax.vmap(jax.random.key)(seeds)
    return empty_cache(config, batch, cache_length, dtype), hidden, keys


def run_layers(
    program: Program,
    spec: ChunkSpec,
    model: Transformer,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: KVCache,
    pool: Pool,
    store: Store,
    lengths: jax.Array | None = None,
) -> tuple[KVCache, Pool, jax.Array, Recorded | None]:
    """Runs the model, with its own or pooled experts; the record comes last.

    `lengths`, int32[B], of the whole prompts, is used by some kinds of rope.
    """
    num_prefilled = tokens.size if tokens.shape[1] > 1 else None
    experts: Experts | None = None
    if program.pool is not None:
        assert pool is not None and store is not None
        experts = CachedExperts(
            program.pool, model.config, pool, store, spec.tiers or (spec.experts,), model.kernels,
            num_prefilled=num_prefilled,
        )  # fmt: skip
    if program.record is not None:
        inner = experts or ResidentExperts(model.moe, spec.experts)
        experts = RecordingExperts(program.record, model.config, inner, num_prefilled)
    cache, hidden, carry, records = model(tokens, positions, mask, cache, spec, experts, lengths)
    recorded = None
    if program.record is not None:
        carry, recorded = carry.inner, recorded_of(records, positions, mask)
    return cache, None if program.pool is None else carry.cache, hidden, recorded


def prefill_chunk(
    program: Program,
    spec: ChunkSpec,
    cache: KVCache,
    last_hidden: jax.Array,
    pool: Pool,
    weights: Weights,
    store: Store,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
) -> tuple[KVCache, jax.Array, Pool, Recorded | None]:
    """Runs positions `start`..`start + T` of every prompt.

    Args:
      program: static, of the model.
      spec: static, how the chunk stands to the cache.
      cache: donated.
      last_hidden: [B, D], donated; rows whose prompt ends in this chunk are filled.
      pool: donated.
      tokens: int32[B, T], padded at the end.
      start: int32[].
      lengths: int32[B], of the whole prompts.

    Returns:
      The cache, `last_hidden`, the pool, and what was recorded.
    """
    model = merge_weights(program.definition, weights)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(start + steps, tokens.shape)
    mask = positions < lengths[:, None]
    cache, pool, hidden, recorded = run_layers(
        program, spec, model, tokens, positions, mask, cache, pool, store, lengths
    )
    last = lengths - 1 - start
    ends_here = (last >= 0) & (last < tokens.shape[1])
    chosen = jnp.take_along_axis(hidden, jnp.clip(last, 0, tokens.shape[1] - 1)[:, None, None], 1)
    return cache, jnp.where(ends_here[:, None], chosen[:, 0], last_hidden), pool, recorded


def chunk_logits(
    program: Program,
    spec: ChunkSpec,
    cache: KVCache,
    pool: Pool,
    weights: Weights,
    store: Store,
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
) -> tuple[KVCache, Pool, jax.Array, Recorded | None]:
    """Runs a chunk of rows of one length; returns logits float32[B, T, V] of every position."""
    model = merge_weights(program.definition, weights)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(start + steps, tokens.shape)
    mask = positions < length
    cache, pool, hidden, recorded = run_layers(
        program, spec, model, tokens, positions, mask, cache, pool, store,
        jnp.broadcast_to(length, len(tokens)),
    )  # fmt: skip
    return cache, pool, model.project_to_vocab(hidden), recorded


def score_chunk(
    program: Program,
    spec: ChunkSpec,
    cache: KVCache,
    pool: Pool,
    weights: Weights,
    store: Store,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    places: jax.Array,
    targets: jax.Array,
) -> tuple[KVCache, Pool, jax.Array, Recorded | None]:
    """Runs `prefill_chunk` and sums the negative log-likelihood of scored targets.

    The logits live on the device, `SCORED_BYTES` of them at a time.

    Args:
      program: static, of the model.
      spec: static, how the chunk stands to the cache.
      cache: donated.
      pool: donated.
      tokens: int32[B, T], padded at the end.
      start: int32[].
      lengths: int32[B], inputs of each window.
      places: int32[P], positions in the chunk of which a row's target may count; P may be 0.
      targets: int32[B, P], the tokens after them; -1 does not count.

    Returns:
      The cache, the pool, float32[B] nats, and what was recorded.
    """
    model = merge_weights(program.definition, weights)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(start + steps, tokens.shape)
    mask = positions < lengths[:, None]
    cache, pool, hidden, recorded = run_layers(
        program, spec, model, tokens, positions, mask, cache, pool, store, lengths
    )
    if not places.size:
        return cache, pool, jnp.zeros(len(tokens), jnp.float32), recorded
    nats = model.negative_log_likelihood(hidden[:, places], targets, SCORED_BYTES)
    return cache, pool, nats, recorded


def _next_tokens(
    model: Transformer,
    hidden: jax.Array,
    keys: jax.Array,
    seen: jax.Array | None,
    sampling: Sampling,
    all_greedy: bool,
    top_logprobs: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None, Logprobs | None]:
    """Chooses next tokens int32[B] for [B, D]; returns keys, seen tokens and logprobs too.

    `NOT_FINITE` stands where the logits name no token.
    """
    logits = own = model.project_to_vocab(hidden)
    if seen is not None:
        logits = penalized(logits, seen, sampling.repetition_penalty)
    tokens, keys = draw(logits, keys, sampling, all_greedy=all_greedy)
    if seen is not None:
        seen = seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
    logprobs = logprobs_of(own, tokens, top_logprobs) if top_logprobs else None
    return jnp.where(names_a_token(own), tokens, NOT_FINITE), keys, seen, logprobs


def first_token(
    program: Program,
    all_greedy: bool,
    cache: KVCache,
    keys: jax.Array,
    seen: jax.Array | None,
    weights: Weights,
    last_hidden: jax.Array,
    lengths: jax.Array,
    sampling: Sampling,
    eos_ids: jax.Array,
) -> tuple[DecodeState, StepOutput]:
    """Chooses the first new token of each prompt, not yet in the cache.

    A row without a prompt (of length 0, to fill a batch) is done from the start.

    Args:
      program: static, of the model.
      all_greedy: static, see `moejax.inference.sampling.draw`.
      cache: donated, holds the prompts.
      keys: key[B], donated.
      seen: bool[B, V] of the prompts, donated, or None.
      last_hidden: [B, D], from `prefill_chunk`.
      lengths: int32[B].
      sampling: settings of each row.
      eos_ids: int32[B, n], tokens that end each row; -1 matches none.

    Returns:
      The state, and its tokens once more as int32[B, 1], which outlive its donation.
    """
    model = merge_weights(program.definition, weights)
    tokens, keys, seen, logprobs = _next_tokens(
        model, last_hidden, keys, seen, sampling, all_greedy, program.top_logprobs
    )
    done = jnp.any(tokens[:, None] == eos_ids, axis=1) | (lengths == 0) | (tokens < 0)
    emitted = empty_step_output(len(tokens), 1, program.top_logprobs)
    emitted = emitted.at_step(jnp.int32(0), tokens, logprobs)
    tokens = jnp.maximum(tokens, 0)  # what a row that is done holds is a token, too
    return DecodeState(cache, tokens, lengths, done, keys, seen), emitted


def end_rows(state: DecodeState, ended: jax.Array) -> DecodeState:
    """Marks the rows of bool[B] as done in the donated state."""
    return dataclasses.replace(state, done=state.done | ended)


def _tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """One of two states; leaves that are the same array are not looked at."""

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        return a if a is b else jnp.where(condition, a, b)

    return jax.tree.map(leaf, new, old)


def decode(
    program: Program,
    spec: ChunkSpec,
    all_greedy: bool,
    buffer_length: int,
    fixed_trip_count: bool,
    state: DecodeState,
    pool: Pool,
    weights: Weights,
    store: Store,
    sampling: Sampling,
    eos_ids: jax.Array,
    num_steps: jax.Array,
) -> tuple[DecodeState, Pool, StepOutput, Recorded | None]:
    """Runs several decode steps in one call; the host reads the tokens later.

    Args:
      program: static, of the model.
      spec: static, how the tokens stand to the cache.
      all_greedy: static, see `moejax.inference.sampling.draw`.
      buffer_length: static, most steps of a call.
      fixed_trip_count: static, runs steps beyond `num_steps` too, in which all rows rest: they take
        time and advance the pool's clock, and change nothing else. If a loop's end is known, XLA's
        host thread on a GPU does not wait for a look at its condition after each step, and the call
        returns before the device is done.
      state: donated.
      pool: donated.
      sampling: settings of each row.
      eos_ids: int32[B, n], tokens that end each row; -1 matches none.
      num_steps: int32[], at most `buffer_length`; taken to be 1 where that is 1.

    Returns:
      The state, the pool, int32[B, buffer_length] new tokens, `NO_TOKEN` after a row's end
      and beyond `num_steps`, and what was recorded.
    """
    model = merge_weights(program.definition, weights)

    def step(
        index: jax.Array, carry: tuple[DecodeState, Pool, StepOutput, Recorded | None]
    ) -> tuple[DecodeState, Pool, StepOutput, Recorded | None]:
        state, pool, emitted, kept = carry
        before = pool
        tokens, positions = state.tokens[:, None], state.positions[:, None]
        rests = state.done | (index >= num_steps) if fixed_trip_count else state.done
        cache, pool, hidden, recorded = run_layers(
            program, spec, model, tokens, positions, ~rests[:, None], state.cache, pool, store
        )
        if recorded is not None and kept is not None:
            kept = recorded.at_position(kept, index)
        tokens, keys, seen, logprobs = _next_tokens(
            model, hidden[:, 0], state.keys, state.seen, sampling, all_greedy, program.top_logprobs
        )
        if fixed_trip_count:
            keys = jnp.where(index < num_steps, keys, state.keys)
            if pool is not None and before is not None:
                held = _tree_where(index < num_steps, pool.state, before.state)
                pool = dataclasses.replace(pool, state=held)
            if seen is not None and state.seen is not None:
                seen = jnp.where(index < num_steps, seen, state.seen)
        tokens = jnp.where(rests, state.tokens, tokens)
        emitted = emitted.at_step(index, jnp.where(rests, NO_TOKEN, tokens), logprobs)
        positions = jnp.where(rests, state.positions, state.positions + 1)
        done = state.done | jnp.any(tokens[:, None] == eos_ids, axis=1) | (tokens < 0)
        tokens = jnp.maximum(tokens, 0)
        return DecodeState(cache, tokens, positions, done, keys, seen), pool, emitted, kept

    batch, kept = state.tokens.shape[0], None
    if program.record is not None:
        kept = empty_record(program.record, model.config, batch, buffer_length)
    emitted = empty_step_output(batch, buffer_length, program.top_logprobs)
    if buffer_length == 1:  # no loop: on a GPU one would wait for the host's look at its condition
        return step(jnp.int32(0), (state, pool, emitted, kept))
    end = buffer_length if fixed_trip_count else num_steps
    return jax.lax.fori_loop(0, end, step, (state, pool, emitted, kept))
