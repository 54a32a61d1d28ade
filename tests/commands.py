"""Mains run in this process, by flags and by fields of their configuration."""

import contextlib
import io
from typing import Any

from moejax import cli


def run(command: cli.Command, *arguments: str, **fields: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a main; `fields` become flags `--config.NAME=VALUE`."""
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.exit_status(command, ["main", *arguments, *flags])
    return status, out.getvalue(), err.getvalue()


def succeed(command: cli.Command, *arguments: str, **fields: Any) -> tuple[str, str]:
    """Stdout and stderr of a main that ends with status 0."""
    status, out, err = run(command, *arguments, **fields)
    assert status == 0, err
    return out, err
