"""Notice on stderr while a program is prepared: its name, and the time so far.

XLA does not say whether it compiles a program or loads one that is stored: the words fit both.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

_TERMINAL_S = 0.5  # a terminal's line comes after so long, and is renewed as often
_LINE_S = 5.0  # elsewhere one line is printed, once it takes longer than this
# Behind what stands on the line, an answer's first words for instance: the cursor's place is kept,
# and what does not fit the line is cut off, since a line more could scroll that place away.
_BEGIN, _AGAIN, _END = "\x1b7\x1b[?7l", "\x1b8\x1b[K", "\x1b8\x1b[K\x1b[?7h"


@contextlib.contextmanager
def compile_notice(name: str, stream: TextIO | None = None) -> Iterator[None]:
    """Explains a wait while a program is prepared; one that is quick is not mentioned.

    `stream` is None for stderr as it is then.
    """
    ended = threading.Event()
    arguments = (stream or sys.stderr, name, ended)
    thread = threading.Thread(target=_tell, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(stream: TextIO, name: str, ended: threading.Event) -> None:
    start = time.monotonic()

    def line() -> str:
        return f"preparing the program {name}, {time.monotonic() - start:.0f} s so far"

    with contextlib.suppress(OSError, ValueError):  # stderr was closed
        if not stream.isatty():
            if not ended.wait(_LINE_S):
                # In a log an answer's first words may stand before it.
                print(f"\n{line()}; it is compiled once, and loaded in the next run", file=stream)
            return
        if ended.wait(_TERMINAL_S):
            return
        stream.write(_BEGIN)
        while not ended.is_set():
            stream.write(f"{_AGAIN}[{line()}]")
            stream.flush()
            ended.wait(_TERMINAL_S)
        stream.write(_END)
        stream.flush()
