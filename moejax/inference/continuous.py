"""Continuous batching: rows join a running batch and leave it between compiled calls."""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.errors import MoejaxError
from moejax.inference.batch import RowDelta, read_output, row_delta
from moejax.inference.chunking import FixedSizes
from moejax.inference.generation import AnswerBuilder, GenerationSettings
from moejax.inference.runner import Runner, Session
from moejax.inference.steps import StepOutput
from moejax.inference.turns import PromptTurns
from moejax.models.config import Pages
from moejax.text.tokenizer import Tokenizer

CALL_STEPS = 4  # decode steps of a call: what a row that joins waits for, and a stream's step


@dataclasses.dataclass(eq=False)
class _Held:
    """A page whose tokens may be those of other prompts, too, behind those of the pages before.

    Invariant: whoever uses a page uses those before it.
    """

    page: int
    before: "_Held | None"
    tokens: list[int]
    # Those behind it, by their first token: a prompt is compared with few of them.
    after: dict[int, list["_Held"]] = dataclasses.field(default_factory=dict)
    num_users: int = 0  # rows that run


@dataclasses.dataclass(eq=False)
class _RowPages:
    """A row's pages."""

    numbers: list[int]  # of its pages, in the order of its tokens; the first ones it may share
    num_shared: int  # first tokens of its prompt that were there before it
    source: list[int]  # pages that hold them; the last one is copied if it is not full of them
    held: list[_Held]  # of its first tokens, as others find them
    num_held: int  # those tokens
    copied: _Held | None  # the page that is copied, until it is


class _PagePool:
    """Pages of a cache: free, used by rows, or kept for what they hold.

    Tokens that rows have written are held in a tree of pages, in which the longest beginning of a
    prompt is found. A page that no row uses any more is kept until no free one is left; then that
    goes first which was used longest ago.
    """

    def __init__(self, pages: Pages):
        self._size, self.number = pages.size, pages.number
        self._free = list(range(pages.number, 0, -1))  # page 0 belongs to nobody
        self._root = _Held(0, None, [])
        self._kept: collections.OrderedDict[_Held, None] = collections.OrderedDict()
        self._unclean: set[int] = set()  # may hold what is not finite

    @property
    def num_kept(self) -> int:
        """Pages that no row uses, kept for their tokens."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages of rows that run."""
        return self.number - len(self._free) - len(self._kept)

    def find(self, prompt: list[int]) -> tuple[list[_Held], int]:
        """Pages that hold most of a prompt's beginning, but for its last token; how many tokens."""
        path: list[_Held] = []
        at, found = self._root, 0
        while True:
            part = prompt[found : found + self._size + 1]
            beside = at.after.get(part[0], [])
            shared = [_num_shared(part, held.tokens) for held in beside]
            count = max(shared, default=0)
            if count:
                at, found = beside[shared.index(count)], found + count
                path.append(at)
            if count < self._size:
                return path, found

    def take(self, found: list[_Held], num_shared: int, limit: int) -> _RowPages | None:
        """Gives a row its pages for `limit` tokens; None: not so many are there.

        It shares `num_shared` tokens of the pages that were `found`: all that they hold, or none.
        """
        path = found if num_shared else []
        for held in path:  # before others are given away
            self._use(held)
        num_whole = num_shared // self._size
        needed = -(-limit // self._size) - num_whole
        if needed > len(self._free) + len(self._kept):
            for held in reversed(path):
                self._leave(held)
            return None
        source = [held.page for held in path]
        numbers = source[:num_whole] + [self._give() for _ in range(needed)]
        copied = path[num_whole] if len(path) > num_whole else None
        return _RowPages(
            numbers, num_shared, source, path[:num_whole], num_whole * self._size, copied
        )

    def copied(self, row: _RowPages) -> None:
        """Lets go of a row's source, since the call that copies it comes before all others."""
        if row.copied is not None:
            self._leave(row.copied)
            row.copied = None

    def hold(self, row: _RowPages, tokens: Sequence[int]) -> None:
        """Adds a row's next tokens to what prompts may begin with.

        They must be in its pages once calls so far have run, with finite values.
        """
        while tokens:
            index, used = divmod(row.num_held, self._size)
            part = list(tokens[: self._size - used])
            if used:
                row.held[-1].tokens += part
            else:
                before = row.held[-1] if row.held else self._root
                beside = before.after.setdefault(part[0], [])
                same = (held for held in beside if held.tokens == part)
                held = next(same, None) if len(part) == self._size else None
                if held is None:
                    held = _Held(row.numbers[index], before, part)
                    beside.append(held)
                    held.num_users = 1
                else:
                    self._use(held)
                row.held.append(held)
            row.num_held += len(part)
            tokens = tokens[len(part) :]

    def clean(self, row: _RowPages) -> list[int]:
        """Pages of a row that has just got them that must be filled with zeros."""
        found = [page for page in row.numbers if page in self._unclean]
        self._unclean -= {*found}
        return found

    def release(self, row: _RowPages, is_clean: bool = True) -> None:
        """Takes a row's pages back; those that hold tokens are kept.

        `is_clean`: whether all that it has written is known to be finite.
        """
        self.copied(row)
        if not is_clean:
            self._unclean |= {*row.numbers[row.num_held // self._size :]}
        held = [of.page for of in row.held]
        for of in reversed(row.held):
            self._leave(of)
        own = [page for i, page in enumerate(row.numbers) if held[i : i + 1] != [page]]
        self._free += reversed(own)

    def _use(self, held: _Held) -> None:
        self._kept.pop(held, None)
        held.num_users += 1

    def _leave(self, held: _Held) -> None:
        held.num_users -= 1
        if not held.num_users:  # pages after it are further ahead in the order
            self._kept[held] = None

    def _give(self) -> int:
        if self._free:
            return self._free.pop()
        held, _ = self._kept.popitem(last=False)
        assert held.before is not None and not held.after
        beside = held.before.after[held.tokens[0]]
        beside.remove(held)
        if not beside:
            del held.before.after[held.tokens[0]]
        return held.page


def _num_shared(prompt: list[int], tokens: list[int]) -> int:
    """Counts tokens of a prompt's beginning that others begin with; its last one must be run."""
    most = min(len(prompt) - 1, len(tokens))
    if prompt[:most] == tokens[:most]:
        return most
    return bisect.bisect_left(range(most), 1, key=lambda n: prompt[: n + 1] != tokens[: n + 1])


@dataclasses.dataclass
class BatchCounts:
    """Counts since the batch was made."""

    chunks: int = 0  # of prompts
    decode_calls: int = 0
    decode_rows: int = 0  # rows of all decode calls
    prompt_tokens: int = 0  # of rows that joined
    prefix_hits: int = 0  # rows whose prompt began with tokens that pages held
    prefix_tokens: int = 0  # those tokens, which were not run again


@dataclasses.dataclass(eq=False)
class _Row:
    """A prompt on its way to an answer."""

    number: int
    prompt: list[int]
    settings: GenerationSettings
    answer: AnswerBuilder
    is_plain: bool  # greedy, without penalty and log-probabilities
    limit: int  # position at which it ends
    client: str
    lane: "_Lane | None" = None  # None while it waits
    pages: _RowPages | None = None  # None while it waits
    position: int = 0  # tokens in the cache once the calls so far have run, at most
    newest: int | None = None  # its newest token, which is not in the cache
    known: list[int] = dataclasses.field(default_factory=list)  # tokens in the cache, with `newest`
    num_shared: int = 0  # first tokens of its prompt that pages held
    leader: "_Row | None" = None  # for whose prompt it waits, to begin behind it
    has_ended: bool = False

    @property
    def in_prompt(self) -> bool:
        """Whether tokens of its prompt are to be run."""
        return self.position < len(self.prompt)

    @property
    def is_starting(self) -> bool:
        """Whether it runs in a lane, and the host has not read its first token."""
        return self.lane is not None and self.newest is None and not self.has_ended

    @property
    def decodes(self) -> bool:
        """Whether the next call of decode steps is to give it tokens."""
        return self.lane is not None and len(self.prompt) <= self.position < self.limit

    @property
    def num_left(self) -> int:
        """Tokens of its prompt that are to be run."""
        return len(self.prompt) - max(self.position, self.num_shared)


@dataclasses.dataclass(eq=False)
class _Lane:
    """A row's place in decode calls, with the state of layers that have one in place of slots."""

    index: int
    row: _Row | None = None  # the last one that joined
    tokens: list[int] = dataclasses.field(default_factory=list)  # of its state; []: unknown
    last_used: int = -1  # a clock's time when its row ended; -1: never used

    @property
    def is_free(self) -> bool:
        """Whether its row ends with the calls so far, which the host need not have read."""
        return self.row is None or self.row.has_ended or self.row.position >= self.row.limit


class _Call(NamedTuple):
    """A call whose tokens the host has not read."""

    emitted: StepOutput
    rows: list[tuple[int, _Row]]  # with the index of each in `emitted`


class ContinuousBatch:
    """A running batch: rows wait, join where a lane and pages are free, and leave when they end.

    A lane is a row's place in decode calls; the cache is in pages. A row joins, in the order of
    arrival, when the pages of its prompt and of its longest answer are free, so that it never waits
    for one once it runs. In a `step`, first chunks of new prompts run, in the order of
    `moejax.inference.turns` and together no longer than the longest chunk, or where experts move a
    single chunk; then one call of decode steps of all rows whose prompts are done; then the host
    reads the call before it. So a row's tokens wait for one chunk at most. If all rows of the call
    are new, the host reads their first tokens before it dispatches it. A row's answer is what its
    prompt would get alone (see `Engine.generate` on rounding), unless a policy decides by the
    routing of all.

    Pages keep their tokens when a row ends, until others need them. A prompt that begins with
    tokens that pages hold, as the next turn of a conversation or behind a system prompt, shares
    those that are full of them, and copies the last (`_PagePool`). If another row is
    running most of that beginning, as with several answers to one prompt, it waits for that row's
    first token, and rows behind it pass it.

    Not safe across threads. After an error of `step`, all rows are lost; `reset` makes it usable.

    Attributes:
      num_lanes: rows that run at once.
      counts: what happened since the batch was made.
      pool: which pages are used.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,  # makes text of tokens; None: answers have none
        eos_ids: tuple[int, ...],  # tokens that end a row, unless its settings ignore them
        *,
        num_lanes: int,
        pages: Pages,  # of the cache, at least one more than a row of all its slots takes
        sizes: FixedSizes,  # of prompt chunks and of a row's slots
        top_logprobs: int = 0,  # likeliest tokens told beside each one of rows that want them
        steps_per_call: int = CALL_STEPS,
    ):
        self._runner, self._tokenizer, self._eos_ids = runner, tokenizer, eos_ids
        self.num_lanes, self._pages, self._sizes = num_lanes, pages, sizes
        if pages.number <= (least := pages.of(self.context)):
            raise ValueError(f"{pages.number} pages: a row of {self.context} slots takes {least}")
        self._top_logprobs, self._steps_per_call = top_logprobs, steps_per_call
        self.counts = BatchCounts()
        config = runner.config
        scaling = config.rope_scaling
        # Keys of other prompts may be turned by other angles.
        self._shares_prefixes = scaling is None or not scaling.depends_on_length
        self._forgets = config.delta_net is None
        self._numbers = itertools.count()
        self._session: Session | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets all rows and what pages hold; the cache is allocated with the next step."""
        self._session = None
        self._lanes = [_Lane(index) for index in range(self.num_lanes)]
        self.pool = _PagePool(self._pages)
        self._settings = [GenerationSettings()] * self.num_lanes
        self._to_end = np.zeros(self.num_lanes, bool)
        self._rows: dict[int, _Row] = {}
        self._waiting: collections.deque[_Row] = collections.deque()
        self._lacks_pages = False  # the first row that waits, when rows were last admitted
        self._turns: PromptTurns[_Row] = PromptTurns()
        self._unread: collections.deque[_Call] = collections.deque()

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer, S."""
        return self._sizes.kv_lengths[-1]

    @property
    def num_rows(self) -> int:
        """Rows that wait or run."""
        return len(self._rows)

    @property
    def num_free(self) -> int:
        """Further rows that have a lane, and do not wait behind one that lacks pages."""
        if self._lacks_pages and self._waiting:
            return 0
        return max(0, sum(lane.is_free for lane in self._lanes) - len(self._waiting))

    def submit(
        self, prompt: Sequence[int], settings: GenerationSettings, wants_logprobs: bool = False,
        client: str = "", is_chat: bool = False,
    ) -> int:  # fmt: skip
        """Adds a row, which joins when a lane is free; returns its number.

        Args:
          settings: with an integer seed.
          wants_logprobs: whether its deltas tell log-probabilities.
          client: among whose prompts it has its turns.
          is_chat: whether deltas have what is between <think> and </think> as thoughts, not text.

        Raises:
          MoejaxError: the prompt is empty, or leaves no room for an answer.
        """
        if not 0 < len(prompt) < self.context:
            raise MoejaxError(
                f"a prompt of {len(prompt)} tokens: a row takes 1 to {self.context - 1}"
            )
        limit = min(len(prompt) + settings.max_new_tokens - 1, self.context)
        answer = AnswerBuilder(
            self._tokenizer, stop=settings.stop, max_tokens=limit - len(prompt) + 1,
            eos_ids=() if settings.ignore_eos else self._eos_ids,
            chat_prompt=prompt if is_chat else None,
        )  # fmt: skip
        is_greedy = settings.temperature == 0 and settings.repetition_penalty == 1
        row = _Row(
            next(self._numbers), list(prompt), settings, answer, is_greedy and not wants_logprobs,
            limit, client,
        )  # fmt: skip
        self._rows[row.number] = row
        self._waiting.append(row)
        return row.number

    def end(self, number: int) -> None:
        """Ends a row before its answer does; it gets no more deltas."""
        if (row := self._rows.get(number)) is not None:
            self._finish(row, is_known=False)

    def step(self) -> list[tuple[int, RowDelta]]:
        """Runs chunks of prompts and a decode call; what earlier calls added, by row number.

        A row's last delta has its `finish_reason`, or an `error`. Without rows nothing runs.

        Raises:
          MoejaxError: experts could not be read.
        """
        if self._session is None and self._rows:
            self._session = self._open()
        self._admit()
        self._run_chunks()
        rows = [row for row in self._rows.values() if row.decodes]
        # If nobody else waits for tokens, first ones are told before more is dispatched.
        are_first = bool(rows) and all(row.is_starting for row in rows)
        if rows and not are_first:
            self._dispatch_decode(rows)
        keeps = int(bool(rows or self._turns))  # one more than is read runs beside the host
        deltas = []
        while len(self._unread) > keeps or (are_first and any(row.is_starting for row in rows)):
            deltas += self._read(self._unread.popleft())
        return deltas

    def warm_up(self) -> None:
        """Compiles all programs, by calls without rows, and runs a row, which may move experts."""
        self.reset()
        self._session = session = self._open()
        self._runner.end_rows(session, np.ones(self.num_lanes, bool))
        self._runner.clear_pages(session, [])
        for is_plain in (True, False):
            self._take_programs(is_plain)
            for kv_length in self._sizes.kv_lengths:
                for size in [size for size in self._sizes.chunks if size <= kv_length]:
                    start = max(0, kv_length - size)
                    self._runner.run_prompt_chunk(session, 0, [], [], [], start, size, 0, 0)
                session.next_position = kv_length - 1
                self._runner.decode(session, 1, self._steps_per_call)
        length = min(self._sizes.chunks[-1] + 1, self.context - 1)
        few = GenerationSettings(max_new_tokens=2 * self._steps_per_call, ignore_eos=True)
        self.submit([0] * length, few)
        while self._rows:
            self.step()
        self.reset()
        self.counts = BatchCounts()

    def _open(self) -> Session:
        return self._runner.open_lanes(self.num_lanes, self._pages, self._sizes, self._eos_ids)

    def _take_programs(self, is_plain: bool) -> None:
        """Chooses the form of the next call: greedy without a sort, or all that a row may want."""
        assert self._session is not None
        self._session.all_greedy, self._session.penalizes = is_plain, not is_plain
        self._session.top_logprobs = 0 if is_plain else self._top_logprobs

    def _admit(self) -> None:
        """Gives free lanes and pages to rows that wait, but for those with a leader."""
        has_joined = self._lacks_pages = False
        for row in [*self._waiting]:
            free = [lane for lane in self._lanes if lane.is_free]
            if not free:
                break
            if row.leader is not None and row.leader.is_starting:
                continue
            lane, found, row.num_shared = self._shared(row.prompt, free)
            row.leader = self._leader(row)
            if row.leader is not None:
                continue
            row.pages = self.pool.take(found, row.num_shared, row.limit)
            if row.pages is None:
                self._lacks_pages = True
                break
            if unclean := self.pool.clean(row.pages):
                assert self._session is not None
                self._runner.clear_pages(self._session, unclean)
            self._waiting.remove(row)
            lane.row, lane.tokens, row.lane, has_joined = row, [], lane, True
            self._settings[lane.index] = row.settings
            self._turns.add(row)
        if has_joined:
            assert self._session is not None
            self._runner.set_rows(self._session, self._settings, self._eos_ids)

    def _leader(self, row: _Row) -> _Row | None:
        """The starting row that saves most of a prompt, and half of its own rest; or None.

        A delta rule's state cannot be shared: the leader's is beyond the prompt once it is known.
        """
        if not (self._shares_prefixes and self._forgets):
            return None
        best, most = None, self._sizes.chunks[0] - 1
        for other in self._rows.values():
            if other.is_starting:
                saved = _num_shared(row.prompt, other.prompt) - row.num_shared
                waits = other.num_left  # no more than for its own prompt
                if saved > most and waits <= min(2 * saved, len(row.prompt) - row.num_shared):
                    best, most = other, saved
        return best

    def _shared(self, prompt: list[int], free: Sequence[_Lane]) -> tuple[_Lane, list[_Held], int]:
        """The free lane in which a prompt should run; pages of its first tokens, and how many.

        A delta rule's state is that after the last token of the lane's row: it serves with all of
        them or not at all.
        """
        oldest = min(free, key=lambda lane: lane.last_used)
        if not self._shares_prefixes:
            return oldest, [], 0
        if self._forgets:
            found, count = self.pool.find(prompt)
            return oldest, found, self._worth(count)
        for lane in sorted(free, key=lambda lane: -len(lane.tokens)):
            count = self._worth(_num_shared(prompt, lane.tokens))
            if 0 < count == len(lane.tokens):
                found, num_found = self.pool.find(prompt[: count + 1])
                if num_found == count:
                    return lane, found, count
        return oldest, [], 0

    def _worth(self, num_shared: int) -> int:
        """Tokens to share: less than the smallest chunk, such as a first token, saves nothing."""
        return num_shared if num_shared >= self._sizes.chunks[0] else 0

    def _run_chunks(self) -> None:
        """Dispatches chunks of prompts, up to the positions of the longest."""
        left = self._sizes.chunks[-1]
        while self._turns:
            row = self._turns.next()
            start = max(row.position, row.num_shared)
            size = self._sizes.next_chunk(start, len(row.prompt))
            if size > left:
                return
            # Where experts move, every chunk fetches its own: one in a step.
            left -= size if self._runner.memory is None else left
            self._turns.count(row)
            self._run_chunk(row, start, size)
            if not row.in_prompt:
                self._turns.remove(row)

    def _run_chunk(self, row: _Row, start: int, size: int) -> None:
        assert row.lane is not None and row.pages is not None and self._session is not None
        source = row.pages.numbers
        if row.position == 0:
            self.counts.prompt_tokens += len(row.prompt)
            self.counts.prefix_hits += start > 0
            self.counts.prefix_tokens += start
            source = row.pages.source
        self._take_programs(row.is_plain)
        self._runner.run_prompt_chunk(
            self._session, row.lane.index, source, row.pages.numbers, row.prompt, start, size,
            row.settings.seeds(1)[0], row.limit,
        )  # fmt: skip
        self.pool.copied(row.pages)
        self.counts.chunks += 1
        row.position = min(start + size, len(row.prompt))
        # It is of the row before, which rests now.
        self._to_end[row.lane.index] = False
        self._expect([] if row.in_prompt else [(0, row)])

    def _expect(self, rows: list[tuple[int, _Row]]) -> None:
        """Keeps the output of a call to be read."""
        assert self._session is not None
        self._unread.append(_Call(self._session.emitted, rows))

    def _dispatch_decode(self, rows: Sequence[_Row]) -> None:
        """Dispatches a call of decode steps for these rows."""
        session = self._session
        assert session is not None
        if self._to_end.any():
            self._runner.end_rows(session, self._to_end)
            self._to_end = np.zeros_like(self._to_end)
        self._take_programs(all(row.is_plain for row in rows))
        count = min(self._steps_per_call, max(row.limit - row.position for row in rows))
        session.next_position = max(row.position for row in rows)
        self._runner.decode(session, count, self._steps_per_call)
        self.counts.decode_calls += 1
        self.counts.decode_rows += len(rows)
        for row in rows:
            row.position = min(row.position + count, row.limit)
        self._expect([(row.lane.index, row) for row in rows if row.lane is not None])

    def _read(self, call: _Call) -> list[tuple[int, RowDelta]]:
        assert self._session is not None
        output = read_output(self._runner, call.emitted, self._session.failures_before)
        deltas = []
        for index, row in call.rows:
            if row.has_ended:
                continue
            self._hold(row, [token for token in output.tokens[index] if token >= 0])
            delta = row_delta(self._runner, row.answer, output, index)
            if delta.error:
                row.known = []
            if delta.finish_reason or delta.error:
                # The device ends rows by tokens and limits; not by texts.
                self._finish(row, is_known=delta.finish_reason != "stop")
            deltas.append((row.number, delta._replace(num_shared=row.num_shared)))
        return deltas

    def _hold(self, row: _Row, tokens: list[int]) -> None:
        """Lets others share a row's tokens, up to the one before its newest.

        Their values are finite, as the token after them shows.
        """
        if not tokens:
            return
        assert row.pages is not None
        row.known += [*(() if row.known else row.prompt), *tokens]
        row.newest = tokens[-1]
        if self._shares_prefixes:
            self.pool.hold(row.pages, row.known[row.pages.num_held : -1])

    def _finish(self, row: _Row, *, is_known: bool) -> None:
        """Frees a row's lane and pages; a device that does not know is told with the next call."""
        row.has_ended = True
        del self._rows[row.number]
        if row.lane is None or row.pages is None:
            self._waiting.remove(row)
            return
        if row.in_prompt:
            self._turns.remove(row)
        self.pool.release(row.pages, is_clean=is_known and bool(row.known))
        lane = row.lane
        if lane.row is row:  # else another one has joined
            self._to_end[lane.index] |= not is_known
            lane.tokens = row.known[:-1] if is_known else []
            lane.last_used = self.counts.decode_calls + self.counts.chunks
