"""Host memory through which a kernel and threads of the host talk, as bytes."""

import dataclasses

MOST = 16  # experts of a job
ROWS, WEIGHTS, X = 64, 128, 192  # bytes of a request; its number is at 0
LATE, Y = 4, 64  # bytes of a reply; its number is at 0
_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Layout for inputs and sums of `model_dim` numbers, float32 each.

    A request has its number, written last, rows int32[MOST] of the host store (-1: none), float32
    weights and x; a reply its number, whether the kernel found it late, and y.
    """

    model_dim: int

    @property
    def reply(self) -> int:
        """Byte at which the reply begins, on a page of its own."""
        return -(-(X + 4 * self.model_dim) // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.reply + -(-(Y + 4 * self.model_dim) // _PAGE) * _PAGE
