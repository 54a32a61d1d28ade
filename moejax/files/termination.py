"""Clean-up when the process is asked to end."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def delete_on_sigterm(folder: Path) -> Iterator[None]:
    """Deletes `folder` if SIGTERM ends the process inside this context.

    The handler raises nothing: an exception is lost if Python is running JAX's garbage collector
    callback. A program's own handler stays in place.
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
