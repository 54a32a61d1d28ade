"""Pages of a running batch: which are free, who uses them, and which tokens they hold."""

import bisect
import collections
import dataclasses
from collections.abc import Sequence

from moejax.models.config import Pages


@dataclasses.dataclass(eq=False)
class _Held:
    """A page whose tokens may be those of other prompts, too, behind those of the pages before.

    Invariant: whoever uses a page uses those before it.
    """

    page: int
    before: "_Held | None"
    tokens: list[int]
    after: list["_Held"] = dataclasses.field(default_factory=list)
    num_users: int = 0  # rows that run


@dataclasses.dataclass(eq=False)
class RowPages:
    """A row's pages.

    Attributes:
      numbers: of its pages, in the order of its tokens; the first ones it may share.
      num_shared: first tokens of its prompt that were there before it.
      source: pages that hold them; the last one is copied if it is not full of them.
    """

    numbers: list[int]
    num_shared: int
    source: list[int]
    held: list[_Held]  # of its first tokens, as others find them
    num_held: int  # those tokens
    copied: _Held | None  # the page that is copied, until it is


class PagePool:
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

    @property
    def num_kept(self) -> int:
        """Pages that no row uses, kept for their tokens."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages of rows that run."""
        return self.number - len(self._free) - len(self._kept)

    def num_found(self, prompt: Sequence[int]) -> int:
        """Counts tokens of a prompt's beginning that pages hold; its last one must be run."""
        return self._find(prompt)[1]

    def take(self, prompt: Sequence[int], num_shared: int, limit: int) -> RowPages | None:
        """Gives a row its pages for `limit` tokens; None: not so many are there.

        `num_shared` tokens of its prompt are as they were found.
        """
        path = self._find(prompt[: num_shared + 1])[0]
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
        return RowPages(
            numbers, num_shared, source, path[:num_whole], num_whole * self._size, copied
        )

    def copied(self, row: RowPages) -> None:
        """Lets go of a row's source, since the call that copies it comes before all others."""
        if row.copied is not None:
            self._leave(row.copied)
            row.copied = None

    def hold(self, row: RowPages, tokens: Sequence[int]) -> None:
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
                same = (held for held in before.after if held.tokens == part)
                held = next(same, None) if len(part) == self._size else None
                if held is None:
                    held = _Held(row.numbers[index], before, part)
                    before.after.append(held)
                    held.num_users = 1
                else:
                    self._use(held)
                row.held.append(held)
            row.num_held += len(part)
            tokens = tokens[len(part) :]

    def release(self, row: RowPages) -> None:
        """Takes a row's pages back; those that hold tokens are kept."""
        self.copied(row)
        held = [of.page for of in row.held]
        for of in reversed(row.held):
            self._leave(of)
        own = [page for i, page in enumerate(row.numbers) if held[i : i + 1] != [page]]
        self._free += reversed(own)

    def _find(self, prompt: Sequence[int]) -> tuple[list[_Held], int]:
        """Pages that hold most of a prompt's beginning, and how many tokens."""
        path: list[_Held] = []
        at, found = self._root, 0
        while True:
            part = prompt[found : found + self._size + 1]
            most = max(at.after, key=lambda held: num_shared(part, held.tokens), default=None)
            count = num_shared(part, most.tokens) if most else 0
            if most is None or not count:
                return path, found
            path.append(most)
            at, found = most, found + count
            if count < self._size:
                return path, found

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
        held.before.after.remove(held)
        return held.page


def num_shared(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Counts tokens of a prompt's beginning that others begin with; its last one must be run."""
    most = min(len(prompt) - 1, len(tokens))
    if list(prompt[:most]) == list(tokens[:most]):
        return most
    return bisect.bisect_left(range(most), 1, key=lambda n: prompt[: n + 1] != tokens[: n + 1])
