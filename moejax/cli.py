"""The one wrapper of every main: flags and config in, one line on stderr when something is wrong.

    COMMAND = cli.Command(doc=__doc__, default=GenerateConfig(), define_flags=..., body=...)
    if __name__ == "__main__":
        cli.run(COMMAND)

Exit status: 0 done; 1 a mistake in the input (MoejaxError, OSError); 2 flags that cannot be read;
130 interrupted; 141 the reader of stdout has gone. Tracebacks only with `--verbose`, but an error
of another kind is a bug of ours and keeps its traceback.
"""

import dataclasses
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from logging import LogRecord
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from absl import flags, logging
from ml_collections import config_dict, config_flags

from moejax.errors import MoejaxError, printable
from moejax.options import (
    RunConfig,
    check_field_name,
    from_config_dict,
    options,
    to_config_dict,
)

_Config = TypeVar("_Config", bound=RunConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Generic[_Config]):
    """One main: what it says of itself, its flags beside `--config`, its defaults and its body."""

    doc: str
    default: _Config
    define_flags: Callable[[flags.FlagValues], None]
    body: Callable[[_Config, flags.FlagValues], None]


def run(command: Command[_Config]) -> NoReturn:
    """Runs a main on the process's arguments and ends the process."""
    if sys.stderr is None:  # closed by the caller, and print() would take stdout in its place
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115, used to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where stdout is not UTF-8, a character that it lacks becomes a question mark.
        sys.stdout.reconfigure(errors="replace")
    logging.get_absl_handler().addFilter(_escape)
    sys.exit(exit_status(command, sys.argv))


def _escape(record: LogRecord) -> bool:
    """Makes one printable line of a log record, which may name what stands in a file."""
    record.msg, record.args = printable(record.getMessage()).replace("\n", "\\n"), ()
    return True


def exit_status(command: Command[_Config], argv: Sequence[str]) -> int:
    """Runs a main on `argv` (the program's name first); prints its error if any; the status."""
    verbose = any(re.fullmatch("--?verbose(=(true|t|1|yes|y))?", arg, re.I) for arg in argv)
    try:
        if sys.stdout is None:
            raise MoejaxError("standard output is closed; send it to a file, or to /dev/null")
        config, values = parse(command, argv)
        verbose = values.verbose
        if values.help:
            print(_help_text(command, values))
        else:
            command.body(config, values)
        sys.stdout.flush()
    except flags.Error as error:
        return _fail(f"{_one_line(str(error))} (--help lists the flags)", 2, verbose)
    except BrokenPipeError:
        # Python flushes stdout once more on its way out, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("standard output was closed before the end", 141, verbose)
    except (MoejaxError, OSError) as error:
        return _fail(_one_line(str(error)), 1, verbose)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, verbose)
    return 0


def parse(command: Command[_Config], argv: Sequence[str]) -> tuple[_Config, flags.FlagValues]:
    """The checked run configuration and the other flags.

    `--config=FILE` names a file with a `get_config()`; without it the command's own defaults serve.
    `--config.FIELD=VALUE`, after it, overrides one field.

    Raises:
      MoejaxError: the file or a field is missing or wrong.
      flags.Error: a flag is unknown, malformed, or an argument is no flag.
    """
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "print this and end", flag_values=values)
    flags.DEFINE_boolean("verbose", False, "print the traceback of an error", flag_values=values)
    command.define_flags(values)
    argv = _joined(argv, _takes_value(values, command.default))
    read = list(itertools.takewhile(lambda arg: arg != "--", argv))
    path = _config_file(read)
    _check_overrides(read, command.default)
    try:
        if path is None:
            default = to_config_dict(command.default)
            config_flags.DEFINE_config_dict("config", default, flag_values=values, sys_argv=read)
        else:
            config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=read)
        rest = values(argv)
    except flags.Error as error:
        if str(error).startswith("flag --config="):  # a ValueError of the file's, wrapped by absl
            raise MoejaxError(_one_line(str(error)).removeprefix("flag ")) from error
        raise
    except Exception as error:  # a config file is the user's code: whatever it raises is input
        said = f"{type(error).__name__}: {_one_line(str(error))}"
        raise MoejaxError(f"config file {path}: {said}") from error
    if len(rest) > 1:
        raise flags.Error(f"{rest[1]!r} is no flag; quote a text that holds spaces")
    if not isinstance(values.config, config_dict.ConfigDict):
        kind = type(values.config).__name__
        raise MoejaxError(f"config file {path}: get_config() gave a {kind}, not a ConfigDict")
    return from_config_dict(type(command.default), values.config), values


def user_path(name: str) -> Path:
    """A path as a user types it, `~` and `~name` spelt out: no shell does that behind a `=`.

    Raises:
      MoejaxError: nobody knows whose home is meant.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise MoejaxError(f"there is no such place as {name} ({error})") from error


def _takes_value(values: flags.FlagValues, default: RunConfig) -> set[str]:
    """The flags that take the next argument for their value where there is no `=`."""
    fields = options(default)
    named = {f"config.{field.name}" for field in fields if not isinstance(field.default, bool)}
    return named | {"config"} | {name for name in values if not values[name].boolean}


def _joined(argv: Sequence[str], takes_value: set[str]) -> list[str]:
    """`--flag value` as `--flag=value`: no argument before `--` is then taken for another flag."""
    joined = list(argv[:1])
    rest = iter(argv[1:])
    for arg in rest:
        name = arg.removeprefix("-").removeprefix("-")
        if arg == "--":
            return [*joined, arg, *rest]
        following = next(rest, None) if arg.startswith("-") and name in takes_value else None
        joined.append(arg if following is None else f"{arg}={following}")
    return joined


def _config_file(argv: list[str]) -> str | None:
    """The file that `--config` names, checked to be there; None without `--config`."""
    for arg in argv[1:]:
        match = re.fullmatch(r"--?config(?:=(.*))?", arg, re.DOTALL)
        if match:
            path = match[1] or ""
            # What follows a colon is ml_collections' argument of get_config.
            if not Path(path.split(":", 1)[0]).is_file():
                raise MoejaxError(f"config file {path!r} does not exist")
            return path
    return None


def _check_overrides(argv: list[str], default: RunConfig) -> None:
    """Refuses `--config.FIELD` of a field that the run does not have, before flags are parsed."""
    for arg in argv[1:]:
        match = re.match(r"--?(?:no)?config\.([^=]*)", arg)
        if match:
            check_field_name(match[1], default)


def _help_text(command: Command[_Config], values: flags.FlagValues) -> str:
    rows = [("--config=FILE", "a config file (see configs/); without it the defaults below")]
    rows += [(f"--{name}", " ".join(values[name].help.split())) for name in values]
    flag_lines = [f"  {name:<20} {said}" for name, said in rows if name != "--config"]
    field_lines = [
        f"  --config.{field.name:<19} {field.meaning} (default {field.default!r})"
        for field in options(command.default)
    ]
    return "\n".join([command.doc.strip(), "\nFlags:", *flag_lines, "\nConfig:", *field_lines])


def _fail(message: str, status: int, verbose: bool) -> int:
    """Prints the error that is being handled as one line on stderr; returns `status`."""
    if verbose:
        traceback.print_exc()
    print(f"error: {printable(message)}", file=sys.stderr)
    return status


def _one_line(text: str) -> str:
    """The first and the last line of a message, which is where a long one says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines if len(lines) <= 2 else [lines[0], "...", lines[-1]])
