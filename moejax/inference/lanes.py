"""Lanes of a running batch: which tokens they hold, and which prompt starts from them."""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(eq=False)
class CacheLane:
    """One sequence's part of the cache.

    Invariant: its first slots hold `tokens`, as far as calls that were dispatched have run.
    """

    index: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    row: int | None = None  # number of the row that runs in it; None: it is free
    owner: int = -1  # number of the row whose tokens it holds, perhaps one that has ended
    # so many first tokens may be the prefix of others: their values are finite, as a token after
    # them showed
    num_sound: int = 0
    last_used: int = -1  # a clock's time when it was freed; -1: never used
    num_unread: int = 0  # calls that may have added tokens which the host does not know

    def hold(self, owner: int, tokens: list[int], num_shared: int) -> None:
        """Replaces what it holds by the tokens of a row, the first ones from a lane's prefix."""
        if owner != self.owner:
            self.owner, self.num_sound = owner, num_shared
        self.tokens = tokens

    def grow(self, owner: int, token: int | None) -> None:
        """Adds a token of its owner, whose next one has come; None: it was the first.

        A token of a row before the owner is gone.
        """
        if owner == self.owner:
            self.tokens += [] if token is None else [token]
            self.num_sound = len(self.tokens)

    def free(self, now: int) -> None:
        """Ends its row; the tokens stay."""
        self.row, self.last_used = None, now


def num_shared(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Counts tokens of a prompt's beginning that others begin with; its last one must be run."""
    most = min(len(prompt) - 1, len(tokens))
    return bisect.bisect_left(range(most), 1, key=lambda n: prompt[: n + 1] != tokens[: n + 1])


def longest_prefix(
    prompt: Sequence[int], lanes: Iterable[CacheLane], forgets: bool
) -> tuple[CacheLane | None, int]:
    """The lane that holds most of a prompt's beginning, and how many tokens; None and 0: no lane.

    Args:
      forgets: whether a lane serves up to any of its tokens. A delta rule's state is that after the
        last one, so a lane without it serves with all tokens, which the host must know.
    """
    best: CacheLane | None = None
    most = 0
    for lane in lanes:
        count = num_shared(prompt, lane.tokens[: lane.num_sound])
        is_whole = count == len(lane.tokens) and not lane.num_unread
        if count > most and (forgets or is_whole):
            best, most = lane, count
    return best, most


def free_lane_for(
    lanes: Iterable[CacheLane], source: CacheLane | None, num_shared: int
) -> CacheLane | None:
    """The free lane in which a prompt should run; None: none is free.

    It is the source if the prompt continues all that it holds, so that nothing is lost; else the
    one that was used longest ago.
    """
    if source is not None and source.row is None and num_shared == len(source.tokens):
        return source
    free = [lane for lane in lanes if lane.row is None]
    return min(free, key=lambda lane: lane.last_used, default=None)
