"""What a process does of its own when it is asked to end."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def removed_by_sigterm(folder: Path) -> Iterator[None]:
    """Around work that SIGTERM would leave half-made in `folder`, which goes before the process.

    Nothing is raised: an exception is lost where Python runs JAX's callback of the garbage
    collector. A program that has a handler of its own keeps it.
    """

    def end(number: int, frame: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
