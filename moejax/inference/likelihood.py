"""Log-likelihoods of continuations after contexts, which score multiple choice.

Texts become tokens as in the Hugging Face model class of EleutherAI's lm_eval, so that figures can
be set side by side: context and continuation are encoded as one text, and the tokens after those of
the context alone are the continuation's; white space at the end of a context belongs to the
continuation; the bos token, or eos if there is none, stands for an empty context.

There is one difference. A tokenizer may put an eos behind texts (`add_eos_token`, or its
post-processor). That class takes what the tokenizer gives: the context ends with the eos, and as
many tokens fewer of the continuation are scored, then the eos behind it. Here no token is put
behind a text: contexts and prompts go on, and of continuations and whole texts only their own
tokens are scored.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.devices import put
from moejax.errors import MoejaxError
from moejax.experts.state import ExpertCache
from moejax.inference import steps
from moejax.inference.chunking import MIN_PREFILL_LENGTH, length_bucket
from moejax.inference.runner import Runner
from moejax.models.kv_cache import KVCache
from moejax.models.transformer import ChunkSpec, Transformer, merge_weights
from moejax.text.tokenizer import Tokenizer

MIN_PLACES = 8  # scored positions of a row, in buckets of four times as many
MAX_ALTERNATIVES = 16  # continuations that share one row's input

TokenPair = tuple[Sequence[int], Sequence[int]]  # context, continuation


class Scored(NamedTuple):
    """Score of one continuation."""

    log_likelihood: float  # in nats, the sum over its tokens
    is_greedy: bool  # whether each of its tokens is the model's likeliest
    num_tokens: int


class _Places(NamedTuple):
    """Positions and targets to look up in a batch of rows, and results so far; donated."""

    positions: jax.Array  # int32[B, P] of the inputs, of which what comes next is scored
    # int32[B, P, N], the tokens that may come there, of N continuations of one input; -1 for none
    targets: jax.Array
    log_probabilities: jax.Array  # float32[B, P, N]
    likeliest: jax.Array  # bool[B, P, N], whether the target is the model's first choice


def _scores(
    model: Transformer, hidden: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes log p(wanted) and whether it is the largest, [B, P, N], of hidden [B, P, D].

    The logits exist `steps.SCORED_BYTES` at a time.
    """
    batch, num_places, _ = wanted.shape
    size = steps.SCORED_BYTES // (4 * batch * model.config.vocab_size)
    size = max(1, min(num_places, size))
    missing = -num_places % size
    hidden = jnp.pad(hidden, ((0, 0), (0, missing), (0, 0)))
    wanted = jnp.pad(wanted, ((0, 0), (0, missing), (0, 0)), constant_values=-1)

    def part(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = jax.lax.dynamic_slice_in_dim(hidden, first, size, axis=1)
        tokens = jax.lax.dynamic_slice_in_dim(wanted, first, size, axis=1)
        logits = model.project_to_vocab(here)
        picked = jnp.take_along_axis(logits, jnp.maximum(tokens, 0), axis=-1)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        best = jnp.argmax(logits, axis=-1, keepdims=True).astype(tokens.dtype)
        return picked - total, tokens == best

    def joined(parts: jax.Array) -> jax.Array:  # [slices, B, size, N]
        return jnp.moveaxis(parts, 0, 1).reshape(batch, -1, wanted.shape[2])[:, :num_places]

    scores, first = jax.lax.map(part, jnp.arange(0, num_places + missing, size, dtype=jnp.int32))
    return joined(scores), joined(first)


def _hidden_chunk(
    program: steps.StepProgram,
    spec: ChunkSpec,
    state: tuple[KVCache, None],
    experts: ExpertCache | None,
    inputs: steps.StepInputs,
    chunk: steps.TokenChunk,
) -> steps.StepResult[tuple[KVCache, None]]:
    """Step for `Runner.scan_windows`: its output is the last hidden states [B, T, D]."""
    _, found = steps.run_chunk(program, spec, state[0], experts, inputs, chunk)
    return steps.StepResult((found.state, None), found.experts, found.output, found.recorded)


def _look_up(
    definition: Any, places: _Places, weights: steps.Weights, hidden: jax.Array, start: jax.Array
) -> _Places:
    """Second program for `Runner.scan_windows`: scores hidden [B, T, D] from position `start` on.

    Batches have many shapes of places, which are donated, and few of tokens.
    """
    model = merge_weights(definition, weights)
    length, relative = hidden.shape[1], places.positions - start
    here = (relative >= 0) & (relative < length)
    wanted = jnp.where(here[..., None], places.targets, -1)
    index = jnp.clip(relative, 0, length - 1)[..., None]

    def found() -> _Places:
        scores, first = _scores(model, jnp.take_along_axis(hidden, index, axis=1), wanted)
        return places._replace(
            log_probabilities=jnp.where(wanted >= 0, scores, places.log_probabilities),
            likeliest=jnp.where(wanted >= 0, first, places.likeliest),
        )

    return jax.lax.cond(jnp.any(wanted >= 0), found, lambda: places)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One input, and its continuations: (index, tokens)."""

    inputs: tuple[int, ...]
    wanted: list[tuple[int, Sequence[int]]]


class PairScorer:
    """Scores continuations with one model."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, eos_ids: Sequence[int]):
        self._runner, self._tokenizer = runner, tokenizer
        self.max_length = runner.config.context_limit  # most tokens that a prediction sees
        named = tokenizer.special_tokens if tokenizer else {}
        by_name = [named[name] for name in ("bos_token", "eos_token") if name in named]
        ids = [tokenizer.token_id(text) for text in by_name] if tokenizer else []
        known = [i for i in (*ids, *eos_ids) if i is not None]
        # stands for an empty context: bos, or eos; None if the model has neither
        self.prefix_id = known[0] if known else None

    def of_texts(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        batch_size: int = 8,
        on_done: Callable[[int], None] = lambda count: None,
    ) -> list[Scored]:
        """Scores each continuation after its context.

        Args:
          pairs: (context, continuation); the context may be empty.
          batch_size: rows per batch; one under a policy. Pairs of one context whose continuations
            differ in their last token only share a row.
          on_done: called with the number of pairs that a batch finished.

        Raises:
          MoejaxError: the model has no tokenizer, or a continuation no tokens.
        """
        tokens = [self._encode_pair(*pair) for pair in pairs]
        return self.of_tokens(tokens, batch_size=batch_size, on_done=on_done)

    def of_tokens(
        self,
        pairs: Sequence[TokenPair],
        *,
        batch_size: int = 8,
        on_done: Callable[[int], None] = lambda count: None,
    ) -> list[Scored]:
        """Scores pairs of token ids like `of_texts`; no context is empty.

        A context that does not fit is cut at its beginning; a continuation longer than the
        model's context is scored in windows (`_token_windows`).

        Raises:
          MoejaxError: a pair has nothing to score, or no finite log-likelihood.
        """
        owners: list[int] = []
        windows: list[TokenPair] = []
        for index, (context, continuation) in enumerate(pairs):
            if not context or not continuation:
                missing = "context" if continuation else "continuation"
                raise MoejaxError(f"pair {index} has a {missing} without tokens: there is nothing")
            parts = [(context, continuation)]
            if len(continuation) > self.max_length:
                parts = list(_token_windows(continuation, context[-1], self.max_length))
            windows += parts
            owners += [index] * len(parts)
        batch_size = 1 if self._runner.one_stream else batch_size
        totals = [Scored(0.0, True, 0)] * len(pairs)
        left = np.bincount(owners, minlength=len(pairs))
        for batch in self._batches(windows, batch_size):
            finished = 0
            for window, scored in self._run(batch, batch_size):
                owner = owners[window]
                if not math.isfinite(scored.log_likelihood):
                    raise MoejaxError(f"pair {owner}: {self._runner.not_finite()}")
                total, is_greedy, num_tokens = totals[owner]
                totals[owner] = Scored(
                    total + scored.log_likelihood, is_greedy and scored.is_greedy,
                    num_tokens + scored.num_tokens,
                )  # fmt: skip
                left[owner] -= 1
                finished += not left[owner]
            on_done(finished)
        return totals

    def of_whole_texts(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 8,
        on_done: Callable[[int], None] = lambda count: None,
    ) -> list[Scored]:
        """Scores every token of each text, in windows of which only the last may overlap.

        lm_eval's rolling log-likelihood: the first token follows `prefix_id`, and each is scored
        once. A text without tokens scores nothing.
        """
        ids = [self.encode(text) for text in texts]
        pairs = [([self._prefix()], tokens) for tokens in ids if tokens]
        found = iter(self.of_tokens(pairs, batch_size=batch_size, on_done=on_done))
        return [next(found) if tokens else Scored(0.0, True, 0) for tokens in ids]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text, with those that the tokenizer puts before it if `special`.

        A text that begins with a bos (or its replacement) gets no second one. No text gets an eos;
        see the module.
        """
        if self._tokenizer is None:
            raise MoejaxError("this checkpoint has no tokenizer.json: give token ids")
        if special and self.prefix_id is not None:
            bos = self._tokenizer.decode([self.prefix_id], skip_special_tokens=False)
            special = not (bos and text.startswith(bos))
        return self._tokenizer.encode(text, add_special_tokens=special, goes_on=True)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes context and continuation; see the module."""
        if not context:
            prefix, ids = self._prefix(), self.encode(continuation, special=False)
            return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
        stem = context.rstrip()
        continuation = context[len(stem) :] + continuation
        first = self.encode(stem)
        whole = self.encode(stem + continuation)
        return first, whole[len(first) :]

    def _prefix(self) -> int:
        if self.prefix_id is None:
            raise MoejaxError("an empty context needs a bos or eos token, and the model has none")
        return self.prefix_id

    def _batches(self, pairs: Sequence[TokenPair], batch_size: int) -> Iterator[list[_Row]]:
        """Rows of like length, the longest first."""
        rows: dict[tuple[int, ...], list[_Row]] = {}
        vocab_size = self._runner.config.vocab_size
        for index, (context, continuation) in enumerate(pairs):
            whole = (*context, *continuation)[-(self.max_length + 1) :]
            wrong = [token for token in whole if not 0 <= token < vocab_size]
            if wrong:
                raise MoejaxError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size}")
            same = rows.setdefault(whole[:-1], [])
            if not same or len(same[-1].wanted) == MAX_ALTERNATIVES:
                same.append(_Row(whole[:-1], []))
            same[-1].wanted.append((index, continuation))
        ordered = [row for same in rows.values() for row in same]
        ordered.sort(key=lambda row: (-len(row.inputs), row.inputs))
        for first in range(0, len(ordered), batch_size):
            yield ordered[first : first + batch_size]

    def _run(self, rows: Sequence[_Row], batch_size: int) -> Iterator[tuple[int, Scored]]:
        """Yields each pair of a batch and its score; missing rows are empty."""
        longest = max(len(row.inputs) for row in rows)
        num_places = max(len(tokens) for row in rows for _, tokens in row.wanted)
        num_places = length_bucket(num_places, MIN_PLACES, self.max_length, factor=4)
        shared = max(len(row.wanted) for row in rows)
        shared = length_bucket(shared, 1, MAX_ALTERNATIVES, factor=4)
        size = length_bucket(longest, MIN_PREFILL_LENGTH, self.max_length)
        tokens, lengths = np.zeros((batch_size, size), np.int32), np.zeros(batch_size, np.int32)
        positions = np.zeros((batch_size, num_places), np.int32)
        targets = np.full((batch_size, num_places, shared), -1, np.int32)
        for i, row in enumerate(rows):
            lengths[i] = len(row.inputs)
            tokens[i, : lengths[i]] = row.inputs
            positions[i] = np.arange(lengths[i] - num_places, lengths[i])
            for n, (_, wanted) in enumerate(row.wanted):
                targets[i, num_places - len(wanted) :, n] = wanted
        empty = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, bool)
        places = _Places(*put((positions, targets, *empty), self._runner.place))
        places = self._runner.scan_windows(_hidden_chunk, places, tokens, lengths, _look_up)
        scores = np.asarray(places.log_probabilities).astype(np.float64)
        likeliest = np.asarray(places.likeliest)
        for i, row in enumerate(rows):
            for n, (index, wanted) in enumerate(row.wanted):
                last = slice(num_places - len(wanted), None)
                total, greedy = float(scores[i, last, n].sum()), bool(likeliest[i, last, n].all())
                yield index, Scored(total, greedy, len(wanted))


def _token_windows(
    ids: Sequence[int], before: int, max_length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (context, continuation) pairs that score each of the tokens once.

    The first window predicts `max_length` tokens after `before`, later ones as many after the token
    before them; the last, where it is not full, sees as much before it as fits (lm_eval's rolling
    windows).
    """
    stream = [before, *ids]
    for first in range(1, len(stream), max_length):
        end = min(first + max_length, len(stream))
        begin = max(0, end - 1 - max_length) if first > 1 else 0
        yield stream[begin:first], stream[first:end]
