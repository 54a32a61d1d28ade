"""Compiled steps: prefill of a chunk, the first token, and several decode steps.

Plain functions over a flat dict of weights; the engine jits them. A step through the layers takes,
after what is static, what it donates: its own state and the expert cache (None where the weights
hold all experts); then what it reads (`StepInputs`) and operands of its own. Static are `program`,
of the model, `spec`, how the tokens stand to the cache, and `all_greedy`, as in `_draw`. `sampling`
and `eos_ids`, int32[B, n], are of each row; -1 in `eos_ids` matches no token. A step gives a
`StepResult`, donated operands first (jax#39625).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.experts.cached_experts import CachedExperts
from moejax.experts.state import CacheSpec, ExpertCache, HostRows
from moejax.inference.recorder import Recorded, RecordingExperts, RecordSpec, recorded_of
from moejax.models.config import ModelConfig, Pages
from moejax.models.kv_cache import KVCache, empty_cache
from moejax.models.moe import Experts, ResidentExperts
from moejax.models.transformer import ChunkSpec, Transformer, merge_weights
from moejax.weights.handed_out import OwnExperts
from moejax.weights.qtensor import Weight


class Sampling(NamedTuple):
    """Sampling settings of B sequences; arrays, so that they change without a retrace."""

    temperature: jax.Array  # float32[B]; 0 is greedy
    top_k: jax.Array  # int32[B]; 0 is off
    top_p: jax.Array  # float32[B] in (0, 1]; 1 is off
    min_p: jax.Array  # float32[B] in [0, 1]; 0 is off
    repetition_penalty: jax.Array  # float32[B]; 1 is off


class _Logprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities: no penalty, temperature or filter.

    Axes: B rows, n tokens of a call (absent while one is chosen), N likeliest tokens.
    """

    chosen: jax.Array  # float32[B, n], of the token that was taken
    top: jax.Array  # float32[B, n, N], falling
    top_ids: jax.Array  # int32[B, n, N]


def _logprobs_of(logits: jax.Array, tokens: jax.Array, num_top: int) -> _Logprobs:
    """Log-probabilities of the chosen tokens and of the likeliest ones.

    Args:
      logits: float32[B, V], as the model gives them.
      num_top: static, N; where V is less, the rest is -inf of token 0.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    count = min(num_top, logits.shape[-1])
    top, top_ids = jax.lax.top_k(logprobs, count)
    rest = ((0, 0), (0, num_top - count))
    return _Logprobs(chosen, jnp.pad(top, rest, constant_values=-jnp.inf), jnp.pad(top_ids, rest))


def _penalized(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divides logits of seen tokens by the penalty, or multiplies them if negative.

    Keskar et al. 2019 (CTRL), section 4.1, with the sign rule of Hugging Face.

    Args:
      seen: bool[B, V], tokens of the prompt and of the answer so far.
      penalty: float32[B].
    """
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Applies temperature, then top-k, top-p and min-p; excluded logits become -inf.

    Top-p keeps the smallest set of most likely tokens whose mass reaches p (Holtzman et al. 2020,
    section 3.1), min-p what has at least p times the best token's probability (Nguyen et al. 2024,
    section 3.2). Ties at the edge of top-k all stay. The best token always stays.

    Args:
      sampling: settings of each row; rows of temperature 0 are left unscaled.

    Returns:
      float32[B, V], shifted so that the best logit of each row is 0.
    """
    vocab_size = logits.shape[-1]
    smallest = jnp.finfo(jnp.float32).tiny
    temperature = jnp.maximum(sampling.temperature, smallest)
    temperature = jnp.where(sampling.temperature > 0, temperature, 1.0)
    best = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - best) / temperature[:, None]  # at most 0: no temperature overflows
    falling = -jnp.sort(-logits, axis=-1)

    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size)
    edge = jnp.take_along_axis(falling, (k - 1)[:, None], axis=-1)
    falling = jnp.where(falling < edge, -jnp.inf, falling)
    logits = jnp.where(logits < edge, -jnp.inf, logits)

    probability = jax.nn.softmax(falling, axis=-1)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    # A sum of float32 reaches 1 before the last token does, so "off" is asked for by itself.
    within = (mass_before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1.0)
    kept = within & (falling > -jnp.inf)
    edge = jnp.min(jnp.where(kept, falling, falling[:, :1]), axis=-1, keepdims=True)
    logits = jnp.where(logits < edge, -jnp.inf, logits)

    best = jnp.max(logits, axis=-1, keepdims=True)
    floor = best + jnp.log(sampling.min_p)[:, None]  # log(0) is -inf: off
    return jnp.where(logits < floor, -jnp.inf, logits)


def _draw(
    logits: jax.Array, keys: jax.Array, sampling: Sampling, *, all_greedy: bool
) -> tuple[jax.Array, jax.Array]:
    """Draws the next token of each row from its own random stream.

    Args:
      keys: B typed keys; each row's draw depends on its key and logits alone.
      all_greedy: static; True skips the sort and the draw.

    Returns:
      int32[B] and the keys for the next draw.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if all_greedy:
        return greedy, keys
    split = jax.vmap(jax.random.split)(keys)
    drawn = jax.vmap(jax.random.categorical)(split[:, 0], _filtered(logits, sampling))
    return jnp.where(sampling.temperature > 0, drawn.astype(jnp.int32), greedy), split[:, 1]


NO_TOKEN = -1  # in the place of a token: the row has ended, or rests
NOT_FINITE = -2  # the row's logits named none, and it ends here


class StepOutput(NamedTuple):
    """The new tokens of a call of n steps.

    Invariant: the leading axes of all arrays are those of `tokens`.
    """

    tokens: jax.Array  # int32[B, n], NO_TOKEN or NOT_FINITE where there is none
    logprobs: _Logprobs | None  # None where the program tells none

    def _at_step(
        self, index: jax.Array, tokens: jax.Array, logprobs: _Logprobs | None
    ) -> "StepOutput":
        """Writes the result of step `index`, int32[]: int32[B] and its logprobs or None."""

        def place(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, index].set(new)

        return jax.tree.map(place, self, StepOutput(tokens, logprobs))


def _names_a_token(logits: jax.Array) -> jax.Array:
    """bool[B], whether a softmax of logits [B, V] is a distribution.

    It is none of a NaN, of +inf, or of -inf alone; -inf beside a finite logit masks its token.
    """
    # XLA's maximum on a CPU loses a NaN (jax 0.10.2, 2026-11-24).
    numbers = jnp.where(jnp.isnan(logits), jnp.inf, logits)
    return jnp.isfinite(jnp.max(numbers, axis=-1))


def _empty_step_output(batch: int, length: int, top_logprobs: int) -> StepOutput:
    """Empty output for `length` tokens of each row.

    Args:
      top_logprobs: N, likeliest tokens told beside each; 0: no logprobs at all.
    """
    tokens = jnp.full((batch, length), NO_TOKEN, jnp.int32)
    if not top_logprobs:
        return StepOutput(tokens, None)
    top = jnp.zeros((batch, length, top_logprobs), jnp.float32)
    return StepOutput(tokens, _Logprobs(top[..., 0], top, jnp.zeros(top.shape, jnp.int32)))


Weights = Mapping[str, Weight]

State = TypeVar("State")


class StepInputs(NamedTuple):
    """Operands that every step through the layers reads and does not donate."""

    weights: Weights
    rows: tuple[HostRows, ...] | None  # of the expert cache, of each tier
    # int32[K, M, E], see `handed_out.OwnExperts`; None: a device has all experts, or shares of all
    own_experts: jax.Array | None = None


class StepResult(NamedTuple, Generic[State]):
    """Results of a step; `state` and `experts` reuse the donated operands."""

    state: State
    experts: ExpertCache | None
    output: Any
    recorded: Recorded | None  # None without recording


class TokenChunk(NamedTuple):
    """Tokens `start`..`start + T` of B given texts."""

    tokens: jax.Array  # int32[B, T], padded at the end
    start: jax.Array  # int32[]
    lengths: jax.Array  # int32[B], of the whole texts


class PrefillState(NamedTuple):
    """Carry of a prompt's chunks; donated."""

    cache: KVCache
    last_hidden: jax.Array  # [B, D], of each prompt's last token, once that has run


class StepProgram(NamedTuple):
    """Static facts that all steps of a model share."""

    definition: nnx.GraphDef[Transformer]
    experts: CacheSpec | None = None  # None: the weights hold all experts
    record: RecordSpec | None = None  # None: nothing is recorded
    top_logprobs: int = 0  # likeliest tokens told beside each token, with its own; 0: nothing is


SCORED_BYTES = 2**26  # of the float32 logits that exist at a time in scoring


class DecodeState(NamedTuple):
    """Carry of a decode step; donated.

    Invariants: shapes and dtypes never change; `tokens[b]` is not in the cache yet and belongs at
    `positions[b]`; a row that is done emits -1 and keeps its position. Steps write the slot at that
    position of rows that are done, too, unless the cache is in pages: they may be another row's.
    """

    cache: KVCache
    tokens: jax.Array  # int32[B], the newest token of each row
    positions: jax.Array  # int32[B], where it goes
    done: jax.Array  # bool[B]
    keys: jax.Array  # key[B], the random stream of each row
    seen: jax.Array | None  # bool[B, V], for the repetition penalty; None when it is off
    # int32[B], positions at which rows are done; None: the host ends them
    limits: jax.Array | None = None


def init_batch(
    config: ModelConfig, cache_length: int, dtype: jnp.dtype, seeds: jax.Array
) -> tuple[PrefillState, jax.Array]:
    """Initial state of a batch, before any token, and a key per row.

    Args:
      cache_length: static, S.
      dtype: static, of the activations.
      seeds: uint32[B].
    """
    batch = seeds.shape[0]
    hidden = jnp.zeros((batch, config.model_dim), dtype)
    keys = jax.vmap(jax.random.key)(seeds)
    return PrefillState(empty_cache(config, batch, cache_length, dtype), hidden), keys


def run_layers(
    program: StepProgram,
    spec: ChunkSpec,
    model: Transformer,
    cache: KVCache,
    experts: ExpertCache | None,
    inputs: StepInputs,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    lengths: jax.Array | None = None,
) -> StepResult[KVCache]:
    """Runs the model, with its own or cached experts; the output is [B, T, D].

    `tokens` and `positions` are int32[B, T], `mask` bool[B, T]; `lengths`, int32[B], of the whole
    prompts, is used by some kinds of rope.
    """
    num_prefilled = tokens.size if tokens.shape[1] > 1 else None
    run: Experts | None = None
    own = None if inputs.own_experts is None else OwnExperts(inputs.own_experts)
    if program.experts is not None:
        assert experts is not None and inputs.rows is not None
        run = CachedExperts(
            program.experts, model.config, experts, inputs.rows, spec.tiers or (spec.experts,),
            model.kernels, num_prefilled=num_prefilled, handed_out=own,
        )  # fmt: skip
    elif own is not None or program.record is not None:
        run = ResidentExperts(model.moe, spec.experts, handed_out=own)
    if program.record is not None:
        assert run is not None
        run = RecordingExperts(program.record, model.config, run, num_prefilled)
    cache, hidden, carry, records = model(tokens, positions, mask, cache, spec, run, lengths)
    recorded = None
    if program.record is not None:
        carry, recorded = carry.inner, recorded_of(records, positions, mask)
    return StepResult(cache, carry.cache if program.experts else None, hidden, recorded)


def run_chunk(
    program: StepProgram,
    spec: ChunkSpec,
    cache: KVCache,
    experts: ExpertCache | None,
    inputs: StepInputs,
    chunk: TokenChunk,
) -> tuple[Transformer, StepResult[KVCache]]:
    """Runs `run_layers` on a chunk of given texts; returns the model too."""
    model = merge_weights(program.definition, inputs.weights)
    positions, mask = chunk_positions(chunk)
    return model, run_layers(
        program, spec, model, cache, experts, inputs, chunk.tokens, positions, mask, chunk.lengths
    )


def chunk_positions(chunk: TokenChunk) -> tuple[jax.Array, jax.Array]:
    """int32[B, T], positions of a chunk's tokens; bool[B, T], False for padding."""
    steps = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(chunk.start + steps, chunk.tokens.shape)
    return positions, positions < chunk.lengths[:, None]


def prefill_chunk(
    program: StepProgram,
    spec: ChunkSpec,
    state: PrefillState,
    experts: ExpertCache | None,
    inputs: StepInputs,
    chunk: TokenChunk,
) -> StepResult[PrefillState]:
    """Runs a chunk of every prompt, without an output."""
    _, found = run_chunk(program, spec, state.cache, experts, inputs, chunk)
    last, size = chunk.lengths - 1 - chunk.start, chunk.tokens.shape[1]
    ends_here = (last >= 0) & (last < size)
    chosen = jnp.take_along_axis(found.output, jnp.clip(last, 0, size - 1)[:, None, None], 1)
    last_hidden = jnp.where(ends_here[:, None], chosen[:, 0], state.last_hidden)
    state = PrefillState(found.state, last_hidden)
    return StepResult(state, found.experts, None, found.recorded)


def chunk_logits(
    program: StepProgram,
    spec: ChunkSpec,
    cache: KVCache,
    experts: ExpertCache | None,
    inputs: StepInputs,
    chunk: TokenChunk,
) -> StepResult[KVCache]:
    """Runs a chunk; the output is the logits float32[B, T, V] of every position."""
    model, found = run_chunk(program, spec, cache, experts, inputs, chunk)
    return found._replace(output=model.project_to_vocab(found.output))


def score_chunk(
    program: StepProgram,
    spec: ChunkSpec,
    cache: KVCache,
    experts: ExpertCache | None,
    inputs: StepInputs,
    chunk: TokenChunk,
    places: jax.Array,
    targets: jax.Array,
) -> StepResult[KVCache]:
    """Runs a chunk and sums the negative log-likelihood of scored targets: float32[B] nats.

    The logits live on the device, `SCORED_BYTES` of them at a time.

    Args:
      places: int32[P], positions in the chunk of which a row's target may count; P may be 0.
      targets: int32[B, P], the tokens after them; -1 does not count.
    """
    model, found = run_chunk(program, spec, cache, experts, inputs, chunk)
    nats = jnp.zeros(len(targets), jnp.float32)
    if places.size:
        nats = model.negative_log_likelihood(found.output[:, places], targets, SCORED_BYTES)
    return found._replace(output=nats)


def _next_tokens(
    model: Transformer,
    hidden: jax.Array,
    keys: jax.Array,
    seen: jax.Array | None,
    sampling: Sampling,
    all_greedy: bool,
    top_logprobs: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None, _Logprobs | None]:
    """Chooses next tokens int32[B] for [B, D]; returns keys, seen tokens and logprobs too.

    `NOT_FINITE` stands where the logits name no token.
    """
    logits = own = model.project_to_vocab(hidden)
    if seen is not None:
        logits = _penalized(logits, seen, sampling.repetition_penalty)
    tokens, keys = _draw(logits, keys, sampling, all_greedy=all_greedy)
    if seen is not None:
        seen = seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
    logprobs = _logprobs_of(own, tokens, top_logprobs) if top_logprobs else None
    return jnp.where(_names_a_token(own), tokens, NOT_FINITE), keys, seen, logprobs


def first_token(
    program: StepProgram,
    all_greedy: bool,
    cache: KVCache,  # donated, holds the prompts
    keys: jax.Array,  # key[B], donated
    seen: jax.Array | None,  # bool[B, V] of the prompts, donated, or None
    weights: Weights,
    last_hidden: jax.Array,  # [B, D], from `prefill_chunk`
    lengths: jax.Array,  # int32[B]
    sampling: Sampling,
    eos_ids: jax.Array,
) -> tuple[DecodeState, StepOutput]:
    """Chooses the first new token of each prompt, not yet in the cache.

    A row without a prompt (of length 0, to fill a batch) is done from the start.

    Returns:
      The state, and its tokens once more as int32[B, 1], which outlive its donation.
    """
    model = merge_weights(program.definition, weights)
    tokens, keys, seen, logprobs = _next_tokens(
        model, last_hidden, keys, seen, sampling, all_greedy, program.top_logprobs
    )
    done = jnp.any(tokens[:, None] == eos_ids, axis=1) | (lengths == 0) | (tokens < 0)
    emitted = _empty_step_output(len(tokens), 1, program.top_logprobs)
    emitted = emitted._at_step(jnp.int32(0), tokens, logprobs)
    tokens = jnp.maximum(tokens, 0)  # what a row that is done holds is a token, too
    return DecodeState(cache, tokens, lengths, done, keys, seen), emitted


class _PromptChunk(NamedTuple):
    """A chunk of the prompt of one row, in its lane of a running batch."""

    chunk: TokenChunk  # of one text
    lane: jax.Array  # int32[], the row's
    source: jax.Array  # int32[n], pages that hold the prompt's tokens before `chunk.start`
    pages: jax.Array  # int32[n], the row's: those before that position's as in `source`
    prompt: jax.Array  # int32[S], for the penalty alone, padded with the vocabulary's size
    seed: jax.Array  # uint32[]
    limit: jax.Array  # int32[], of `DecodeState.limits`

    @classmethod
    def of(cls, packed: jax.Array, cache: KVCache) -> "_PromptChunk":
        """Takes apart int32[5 + 2 n + S + T]: the host sends one array sooner than nine.

        Start, length, lane, limit and seed, then source, pages, prompt and the chunk's tokens.
        """
        assert cache.table is not None
        num_pages = cache.table.shape[1]
        ends = np.cumsum([5, num_pages, num_pages, cache.length])
        numbers, source, pages, prompt, tokens = jnp.split(packed, ends)
        start, _, lane, limit, seed = numbers
        chunk = TokenChunk(tokens[None], start, numbers[1:2])
        seed = jax.lax.bitcast_convert_type(seed, jnp.uint32)
        return cls(chunk, lane, source, pages, prompt, seed, limit)


def empty_lanes(
    config: ModelConfig, cache_length: int, pages: Pages, dtype: jnp.dtype, seeds: jax.Array
) -> DecodeState:
    """State of a running batch without rows: all are done.

    Args:
      cache_length: static, S.
      dtype: static, of the activations.
      seeds: uint32[B], for its number of rows alone.
    """
    batch, keys = len(seeds), jax.vmap(jax.random.key)(seeds)
    cache = empty_cache(config, batch, cache_length, dtype, pages)
    zeros = jnp.zeros(batch, jnp.int32)
    seen = jnp.zeros((batch, config.vocab_size), bool)
    return DecodeState(cache, zeros, zeros, jnp.ones(batch, bool), keys, seen, zeros)


def prompt_chunk(
    program: StepProgram,
    spec: ChunkSpec,
    all_greedy: bool,
    spare: int,  # static, see `KVCache.lane`
    state: DecodeState,
    experts: ExpertCache | None,
    inputs: StepInputs,
    packed: jax.Array,  # see `_PromptChunk.of`
    sampling: Sampling,
    eos_ids: jax.Array,
) -> StepResult[DecodeState]:
    """Runs a chunk of one row's prompt; the last chunk chooses its first token and starts it.

    The row's tokens are copied out of pages, and back: what it holds already may come from those of
    others. Until its last chunk the row rests, at the position after its tokens so far.

    Returns:
      The output is a `StepOutput` of the row's first token, int32[1, 1], or of `NO_TOKEN`.
    """
    row = _PromptChunk.of(packed, state.cache)
    chunk, lane = row.chunk, row.lane
    length, size = chunk.lengths[0], chunk.tokens.shape[1]
    num_read = -(-spec.kv_length // state.cache.keys.shape[3])
    own = state.cache.lane(lane, row.source[:num_read], chunk.start, spare)
    model, found = run_chunk(program, spec, own, experts, inputs, chunk)
    last = jnp.clip(length - 1 - chunk.start, 0, size - 1)
    hidden = jax.lax.dynamic_index_in_dim(found.output, last, axis=1, keepdims=False)

    def of_lane(array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, lane, 1)

    seen = None
    if state.seen is not None:
        seen = jnp.zeros((1, state.seen.shape[1]), bool).at[0, row.prompt].set(True, mode="drop")
    tokens, keys, seen, logprobs = _next_tokens(
        model, hidden, jax.random.key(row.seed)[None], seen, jax.tree.map(of_lane, sampling),
        all_greedy, program.top_logprobs,
    )  # fmt: skip
    starts = (length > 0) & (length <= chunk.start + size)
    position = jnp.minimum(length, chunk.start + size)
    done = jnp.any(tokens[:, None] == of_lane(eos_ids)) | (tokens[0] < 0)
    done |= position >= row.limit

    def placed(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[lane].set(value)

    assert state.limits is not None
    after = DecodeState(
        state.cache.with_lane(lane, row.pages, chunk.start, size, found.state),
        placed(state.tokens, jnp.maximum(tokens[0], 0)),
        placed(state.positions, position),
        placed(state.done, done | ~starts),
        placed(state.keys, keys[0]),
        None if state.seen is None or seen is None else placed(state.seen, seen[0]),
        placed(state.limits, row.limit),
    )
    emitted = _empty_step_output(1, 1, program.top_logprobs)
    emitted = emitted._at_step(jnp.int32(0), jnp.where(starts, tokens, NO_TOKEN), logprobs)
    return StepResult(after, found.experts, emitted, found.recorded)


def end_rows(state: DecodeState, ended: jax.Array) -> DecodeState:
    """Marks the rows of bool[B] as done in the donated state."""
    return state._replace(done=state.done | ended)


def clear_pages(state: DecodeState, pages: jax.Array) -> DecodeState:
    """Fills pages int32[n] of the donated state's cache with zeros."""
    return state._replace(cache=state.cache.without_pages(pages))


def _tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """One of two states; leaves that are the same array are not looked at."""

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        return a if a is b else jnp.where(condition, a, b)

    return jax.tree.map(leaf, new, old)


def decode(
    program: StepProgram,
    spec: ChunkSpec,
    all_greedy: bool,
    buffer_length: int,
    fixed_trip_count: bool,
    state: DecodeState,
    experts: ExpertCache | None,
    inputs: StepInputs,
    sampling: Sampling,
    eos_ids: jax.Array,
    num_steps: jax.Array,
) -> StepResult[DecodeState]:
    """Runs several decode steps in one call; the host reads the tokens later.

    Args:
      buffer_length: static, most steps of a call.
      fixed_trip_count: static, runs steps beyond `num_steps` too, in which all rows rest: they take
        time and advance the expert cache's clock, and change nothing else. If a loop's end is
        known, XLA's host thread on a GPU does not wait for a look at its condition after each step,
        and the call returns before the device is done.
      num_steps: int32[], at most `buffer_length`; taken to be 1 where that is 1.

    Returns:
      The output is a `StepOutput` of `buffer_length` tokens, `NO_TOKEN` after a row's end and
      beyond `num_steps`.
    """
    model = merge_weights(program.definition, inputs.weights)

    def step(index: jax.Array, before: StepResult[DecodeState]) -> StepResult[DecodeState]:
        state, kept = before.state, before.recorded
        tokens, positions = state.tokens[:, None], state.positions[:, None]
        rests = state.done | (index >= num_steps) if fixed_trip_count else state.done
        cache, experts, hidden, recorded = run_layers(
            program, spec, model, state.cache, before.experts, inputs, tokens, positions,
            ~rests[:, None],
        )  # fmt: skip
        if recorded is not None and kept is not None:
            kept = jax.tree.map(
                lambda whole, one: whole.at[:, index].set(one[:, 0]), kept, recorded
            )
        tokens, keys, seen, logprobs = _next_tokens(
            model, hidden[:, 0], state.keys, state.seen, sampling, all_greedy, program.top_logprobs
        )
        if fixed_trip_count:
            keys = jnp.where(index < num_steps, keys, state.keys)
            if experts is not None and before.experts is not None:
                held = _tree_where(index < num_steps, experts.state, before.experts.state)
                experts = dataclasses.replace(experts, state=held)
            if seen is not None and state.seen is not None:
                seen = jnp.where(index < num_steps, seen, state.seen)
        tokens = jnp.where(rests, state.tokens, tokens)
        output = before.output._at_step(index, jnp.where(rests, NO_TOKEN, tokens), logprobs)
        positions = jnp.where(rests, state.positions, state.positions + 1)
        done = state.done | jnp.any(tokens[:, None] == eos_ids, axis=1) | (tokens < 0)
        if state.limits is not None:
            done |= positions >= state.limits
        tokens = jnp.maximum(tokens, 0)
        state = DecodeState(cache, tokens, positions, done, keys, seen, state.limits)
        return StepResult(state, experts, output, recorded if kept is None else kept)

    batch = state.tokens.shape[0]
    emitted = _empty_step_output(batch, buffer_length, program.top_logprobs)
    carry = StepResult(state, experts, emitted, None)
    if buffer_length == 1:  # no loop: on a GPU one would wait for the host's look at its condition
        return step(jnp.int32(0), carry)
    if program.record is not None:
        one = jax.eval_shape(step, jnp.int32(0), carry).recorded
        kept = jax.tree.map(lambda a: jnp.zeros((batch, buffer_length, *a.shape[2:]), a.dtype), one)
        carry = carry._replace(recorded=kept)
    return jax.lax.fori_loop(0, buffer_length if fixed_trip_count else num_steps, step, carry)
