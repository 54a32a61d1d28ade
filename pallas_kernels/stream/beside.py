"""What else a warp does on its way along K (`walk`)."""

from typing import Protocol

from pallas_kernels.stream.product import BlockOfX


class Beside(Protocol):
    """What a walk does besides, while its first tiles are on their way."""

    def start(self) -> int:
        """Starts copies of its own; the number of their groups.

        The rest of the ring comes after: what is asked for behind it takes long.
        """

    def finish(self, held: list[BlockOfX] | None, behind: int) -> None:
        """Products; with block barriers.

        Args:
          held: x of the warp's only stage, if it has no more.
          behind: the walk's groups of copies that were started after its own.
        """
