"""Low-rank terms of one matrix, in time with its walk along K."""

from collections.abc import Sequence

from pallas_kernels.stream.emit import Value
from pallas_kernels.stream.low_rank import BlockTerms
from pallas_kernels.stream.matrix import Matrix
from pallas_kernels.stream.product import BlockOfX, Lane
from pallas_kernels.stream.walk import Walk


class BesideWalk:
    """The terms of one matrix, done while its first tiles are on their way (`walk.Beside`).

    V x is added up, and told to the other blocks of a cluster, before the matrix's products: the
    copies that are under way take longer, and nothing of it is left for the end.
    """

    def __init__(self, terms: BlockTerms, x: Sequence[Value], lane: Lane, like: Matrix | None):
        """Of a thread.

        Args:
          terms: of the block.
          x: as in `walk`.
          lane: of this thread.
          like: the matrix, if its warps take the same blocks of K as V's.
        """
        self.terms, self.x, self.lane, self.like = terms, x, lane, like
        self.ways: list[Walk] = []
        self.of_u = 0  # groups of copies of U

    def start(self) -> int:
        """Copies of V and of words of U."""
        terms = self.terms
        if terms.share.cluster > 1:
            terms.e.mailbox(terms.mailbox, terms.thread)
        self.ways = terms.start(self.x, self.lane)
        self.of_u = terms.copy_u()
        return sum(way.depth for way in self.ways) + self.of_u

    def finish(self, held: list[BlockOfX] | None, behind: int) -> None:
        """V x, but for what other blocks send."""
        e, terms = self.terms.e, self.terms
        terms.when_any(lambda: self._finish(held, behind))
        e.block_barrier()
        if terms.share.cluster > 1:
            e.others_ready()
        terms.reduce()
        if terms.share.borrows([placed.term for placed in terms.placed]):
            e.block_barrier()  # the parts have been read, where sums are put now

    def _finish(self, held: list[BlockOfX] | None, behind: int) -> None:
        terms = self.terms
        if self.of_u:
            terms.e.copies_wait(behind)
        terms.bring_u(self.of_u)
        terms.parts(self.ways, held, self.like, behind + self.of_u)
