"""Prompts that begin together, for generate, streams and the benchmark; the text of rows."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moejax.errors import MoejaxError
from moejax.inference.generation import AnswerBuilder, FinishReason, GenerationSettings, Timing
from moejax.inference.runner import Runner
from moejax.inference.steps import NOT_FINITE, StepOutput
from moejax.text.tokenizer import Tokenizer


class TokenLogprob(NamedTuple):
    """A new token, the logarithm of its probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RowDelta(NamedTuple):
    """A row's new text, thoughts and tokens; `error` is why it ended without a reason."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # () where none are computed
    finish_reason: FinishReason | None
    error: str = ""
    num_shared: int = 0  # first tokens of its prompt that pages held, and that were not run
    thoughts: str = ""  # before the text, if the model's tokens tell them apart


class _HostOutput(NamedTuple):
    """The tokens of a call on the host."""

    tokens: list[list[int]]  # of each row, negative where there is none
    logprobs: tuple[np.ndarray, ...]  # of the token, of the likeliest, and their ids; () if untold


def read_output(runner: Runner, emitted: StepOutput, failures_before: int) -> _HostOutput:
    """Waits for a call and reads its tokens; `failures_before`: see `ExpertMemory.failure_count`.

    Raises:
      MoejaxError: the disk failed meanwhile.
    """
    with runner.reading(failures_before):
        tokens, told = np.asarray(emitted.tokens).tolist(), emitted.logprobs
        values = (told.chosen, told.top, told.top_ids) if told else ()
        return _HostOutput(tokens, tuple(map(np.asarray, values)))


def row_delta(runner: Runner, answer: AnswerBuilder, output: _HostOutput, row: int) -> RowDelta:
    """Adds a row's new tokens to its answer, up to its end."""
    text, kept, logprobs, error, num_thought = "", [], [], "", len(answer.thoughts)
    for i, token in enumerate(output.tokens[row]):
        if token < 0 or answer.finish_reason:
            is_lost = token == NOT_FINITE and not answer.finish_reason
            error = runner.not_finite() if is_lost else ""
            break
        text += answer.push(token)
        kept.append(token)
        if output.logprobs:
            chosen, top, top_ids = (value[row, i].tolist() for value in output.logprobs)
            pairs = tuple(zip(top_ids, top, strict=True))
            logprobs.append(TokenLogprob(token, chosen, pairs))
    return RowDelta(
        text, tuple(kept), tuple(logprobs), answer.finish_reason, error,
        thoughts=answer.thoughts[num_thought:],
    )  # fmt: skip


class RowBatch:
    """Prompts that pass through the model together, each row with settings of its own.

    A row's answer is what its prompt would get alone (see `Engine.generate` on rounding). A row
    that has ended rests: its experts are neither run nor counted.

    Attributes:
      answers: the answer of each row so far.
      timing: times of the whole batch so far.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,  # makes text of tokens; None: answers have none
        prompts: Sequence[list[int]],  # token ids, none empty
        settings: Sequence[GenerationSettings],  # of each prompt, with an integer seed
        cache_length: int,  # S, longer than every prompt
        eos_ids: tuple[int, ...],  # tokens that end a row, unless its settings ignore them
        *,
        # likeliest tokens given with each new one, and its own logprob; 0: none
        top_logprobs: int = 0,
        # decode steps of a call, at most, for which the programs are compiled
        steps_per_call: int = 1,
    ):
        self._runner = runner
        self._prompts, self._settings = list(prompts), list(settings)
        # The last token of an answer is not written to the cache.
        self._room = [
            min(own.max_new_tokens, cache_length - len(prompt) + 1)
            for prompt, own in zip(prompts, settings, strict=True)
        ]
        self.answers = [
            AnswerBuilder(
                tokenizer, stop=own.stop, eos_ids=() if own.ignore_eos else eos_ids, max_tokens=room
            )
            for own, room in zip(settings, self._room, strict=True)
        ]
        self._cache_length = cache_length
        self._eos_ids = eos_ids
        self._top_logprobs = top_logprobs
        self._steps_per_call = steps_per_call
        self._ended = np.zeros(len(self._prompts), bool)
        self._to_end = self._ended.copy()  # the device does not know it yet
        self.timing = Timing(0.0, 0.0, 0, 0.0)

    def steps(self) -> Iterator[list[RowDelta | None]]:
        """Yields what each call adds to each row, None for rows that have ended, until all have.

        The first token is read before decoding is dispatched, so that its time is its own; later, a
        call is dispatched before the tokens of the last one are read.
        """
        runner, programs = self._runner, self._runner.programs
        started, compiled = time.perf_counter(), programs.seconds
        session = runner.prefill(
            self._prompts, self._cache_length, self._settings, self._eos_ids, self._top_logprobs
        )
        num_steps, ttft_s, decoded = 1, 0.0, 0
        per_call = self._steps_per_call
        whole = _runs_whole(max(self._room) - 1, per_call)

        def dispatch() -> StepOutput | None:
            nonlocal num_steps
            live = [room for room, ended in zip(self._room, self._ended, strict=False) if not ended]
            left = max(live, default=0) - num_steps
            if left <= 0:
                return None
            if self._to_end.any():
                runner.end_rows(session, self._to_end)
                self._to_end = np.zeros_like(self._to_end)
            count = min(per_call, left)
            runner.decode(session, count, per_call, whole)
            num_steps += count
            return session.emitted

        def timing() -> Timing:
            spent = programs.seconds - compiled
            return Timing(ttft_s, time.perf_counter() - started - spent - ttft_s, decoded, spent)

        deltas = self._read(session.emitted, session.failures_before)
        ttft_s = timing().decode_s
        self.timing = Timing(ttft_s, 0.0, 0, programs.seconds - compiled)
        yield deltas
        pending = dispatch()
        while pending is not None and not self._ended[: len(self._room)].all():
            following = dispatch()
            deltas = self._read(pending, session.failures_before)
            decoded += max(len(delta.tokens) for delta in deltas if delta is not None)
            self.timing = timing()
            yield deltas
            pending = following

    def _read(self, emitted: StepOutput, failures_before: int) -> list[RowDelta | None]:
        output = read_output(self._runner, emitted, failures_before)
        deltas: list[RowDelta | None] = []
        for row, answer in enumerate(self.answers):
            if self._ended[row]:
                deltas.append(None)
                continue
            delta = row_delta(self._runner, answer, output, row)
            self._ended[row] = bool(delta.finish_reason or delta.error)
            # The device knows of an end by a token alone.
            self._to_end[row] = self._ended[row] and delta.finish_reason != "eos"
            deltas.append(delta)
        return deltas


def _runs_whole(num_steps: int, steps_per_call: int) -> bool:
    """Whether the last call runs all its steps: only if few of them are too many."""
    return 4 * (-num_steps % steps_per_call) <= num_steps


def raise_errors(deltas: Sequence[RowDelta | None]) -> None:
    """Raises MoejaxError where a row ended by an error."""
    for row, delta in enumerate(deltas, 1):
        if delta is not None and delta.error:
            which = f"prompt {row} of {len(deltas)}: " if len(deltas) > 1 else ""
            raise MoejaxError(which + delta.error)
