"""Mains run in this process, by flags and by fields of their configuration."""

import contextlib
import io
import sys
from typing import Any
from unittest import mock

from moejax import cli


def run(
    command: cli.Command,
    *arguments: str,
    stdin: bytes | None = None,
    terminal: bool = False,
    **fields: Any,
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a main.

    Args:
      arguments: flags as they are written.
      stdin: piped to the command; None leaves what is there.
      terminal: whether stdout says that it is one.
      fields: of the configuration; they become flags `--config.NAME=VALUE`.
    """
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    out, err = _Terminal() if terminal else io.StringIO(), io.StringIO()
    piped = contextlib.nullcontext()
    if stdin is not None:
        piped = mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with piped, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.exit_status(command, ["main", *arguments, *flags])
    return status, out.getvalue(), err.getvalue()


def succeed(command: cli.Command, *arguments: str, **how: Any) -> tuple[str, str]:
    """Stdout and stderr of a main that ends with status 0."""
    status, out, err = run(command, *arguments, **how)
    assert status == 0, err
    return out, err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
