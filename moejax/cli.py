"""Wrapper of every main: reads flags and config, prints errors as one line on stderr.

    COMMAND = cli.Command(doc=__doc__, default=GenerateConfig(), define_flags=..., body=...)
    if __name__ == "__main__":
        cli.run(COMMAND)

`moejax generate ...`, which pip installs, runs the same as `python -m moejax.generate ...`.

Exit status: 0 done; 1 a mistake in the input (MoejaxError, OSError); 2 flags that cannot be read;
130 interrupted; 141 the reader of stdout has gone. Tracebacks only with `--verbose`, but an error
of another kind is a bug of ours and keeps its traceback.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from logging import LogRecord
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

from absl import flags, logging
from ml_collections import config_dict, config_flags

from moejax.config.options import (
    RunConfig,
    check_field_name,
    check_fields,
    from_config_dict,
    groups,
    moved,
    options,
    to_config_dict,
    value_of,
)
from moejax.errors import MoejaxError, printable

# Commands of `moejax`, each a module of this package; the first line of its docstring describes it.
MAINS = (
    "generate", "serve", "plan", "quantize", "evaluate", "lm_eval", "benchmark", "profile_experts",
    "sweep",
)  # fmt: skip
_Config = TypeVar("_Config", bound=RunConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Generic[_Config]):
    """A main: its help, configuration and body."""

    doc: str  # its help text, before the flags
    default: _Config  # the configuration without flags
    body: Callable[[_Config, flags.FlagValues], None]  # runs it
    # defines the flags beside `--config`
    define_flags: Callable[[flags.FlagValues], None] = lambda values: None
    # whether the command, run again after an interruption, resumes where it stopped
    resumes: Callable[[_Config], bool] = lambda config: False


def main() -> NoReturn:
    """Runs `moejax COMMAND ...`, and ends the process."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "-help", "--help"):
        print(_overview())
        sys.exit(0)
    if name in ("-version", "--version"):
        print(f"moejax {importlib.metadata.version('moejax')}")
        sys.exit(0)
    if name not in MAINS:
        near = difflib.get_close_matches(name, MAINS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(MAINS)
        print(f"error: moejax has no command {name!r}; {meant}commands: {known}", file=sys.stderr)
        sys.exit(2)
    module = importlib.import_module(f"moejax.{name}")
    argv = [f"moejax {name}", *arguments]
    if name == "lm_eval":  # the command line is lm_eval's own
        module.main(argv)
        sys.exit(0)
    run(module.COMMAND, argv)


def _overview() -> str:
    lines = ["Mixture-of-Experts language models in JAX.", "", "moejax COMMAND [FLAGS]:"]
    for name in MAINS:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        said = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:<16} {said}")
    return "\n".join([*lines, "", "moejax COMMAND --help lists its flags; moejax --version"])


def run(command: Command[_Config], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a main on `argv`, by default the process's arguments, and ends the process.

    A process that was interrupted by Ctrl-C, even once in a conversation, ends without the
    interpreter's shutdown: XLA may still be compiling, and the shutdown waits for its threads and
    then crashes on them (jax 0.10.2, 2026-11-24).
    """
    if sys.stderr is None:  # closed by the caller, and print() would take stdout in its place
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115, used to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where stdout is not UTF-8, a character that it lacks becomes a question mark.
        sys.stdout.reconfigure(errors="replace")
    logging.get_absl_logger().addFilter(_escape)
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    def unraisable(lost: Any) -> None:
        if lost.exc_type is KeyboardInterrupt:  # Python drops it in JAX's callback of its collector
            again = (threading.get_ident(), signal.SIGINT)
            threading.Timer(0.01, signal.pthread_kill, again).start()
        else:
            sys.__unraisablehook__(lost)

    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = unraisable
    status = 1
    try:
        status = exit_status(command, sys.argv if argv is None else argv)
    except KeyboardInterrupt:  # one more, while the first was told of
        status = 130
    finally:
        if handles:  # what is left to do is short
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if interrupts:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            end_at_once(status)
    sys.exit(status)


def end_at_once(status: int) -> NoReturn:
    """Flushes output and ends the process without the interpreter's shutdown; see `run`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def _escape(record: LogRecord) -> bool:
    """Makes one printable line of a log record, which may quote a file."""
    record.msg, record.args = printable(record.getMessage()).replace("\n", "\\n"), ()
    return True


def exit_status(command: Command[_Config], argv: Sequence[str]) -> int:
    """Runs a main on `argv` (the program's name first), prints its error; returns the status."""
    verbose = any(re.fullmatch("--?verbose(=(true|t|1|yes|y))?", arg, re.I) for arg in argv)
    config: _Config | None = None
    try:
        if sys.stdout is None:
            raise MoejaxError("standard output is closed; send it to a file, or to /dev/null")
        config, values = parse(command, argv)
        verbose = values.verbose
        if values.help:
            print(_help_text(command, values, config))
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
        again = config is not None and command.resumes(config)
        return _fail(f"interrupted{'; run the same command again to resume' * again}", 130, verbose)
    return 0


def parse(command: Command[_Config], argv: Sequence[str]) -> tuple[_Config, flags.FlagValues]:
    """Parses the run configuration, checked, and the other flags.

    `--config=FILE` names a file with a `get_config()`; without it the command's own defaults apply.
    `--config.FIELD=VALUE` overrides one field. `--FIELD=VALUE` does so too if no flag has that
    name, and so does the last part of a field's name if it is unambiguous.

    Raises:
      MoejaxError: the file or a field is missing or wrong.
      flags.Error: a flag is unknown, malformed, or an argument is not a flag.
    """
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "print this and end (-h)", flag_values=values)
    flags.DEFINE_boolean("verbose", False, "print the traceback of an error", flag_values=values)
    command.define_flags(values)
    given = _arguments(argv, values, command.default)
    rest = values(given.flags)
    if len(rest) > 1:
        raise flags.Error(f"{rest[1]!r} is no flag; quote a text that holds spaces")
    config_class = type(command.default)
    if given.file is None:
        read = to_config_dict(command.default)
    else:
        read = _read_file(given.file, config_class)
    known = {option.name: option for option in options(command.default)}
    try:
        overrides = {name: value_of(known[name], texts) for name, texts in given.fields.items()}
    except MoejaxError as error:
        raise flags.IllegalFlagValueError(str(error)) from error
    return from_config_dict(config_class, read, overrides), values


@dataclasses.dataclass
class _Arguments:
    """A command line, sorted."""

    flags: list[str]  # the program's name, and what absl reads
    fields: dict[str, list[str]]  # texts of the configuration's fields, by their names
    file: str | None = None  # of --config


def _arguments(argv: Sequence[str], values: flags.FlagValues, default: RunConfig) -> _Arguments:
    """Sorts a command line; `--flag value` is `--flag=value`, even if it begins with "-"."""
    found = _Arguments(list(argv[:1]), {})
    booleans = {name for name in values if values[name].boolean}
    booleans |= {f"config.{of.name}" for of in options(default) if isinstance(of.default, bool)}
    rest = iter(argv[1:])
    for arg in rest:
        if arg in ("-", "--") or not arg.startswith("-"):
            found.flags += [arg, *rest]
            break
        name, equals, value = arg.removeprefix("-").removeprefix("-").partition("=")
        name = "help" if name == "h" else name
        flag = _flag_of(name, values, default)
        is_off = not flag and name.startswith("no")
        if is_off and (flag := _flag_of(name[2:], values, default)) not in booleans:
            flag = ""
        if not flag and (new := moved(name, default)):
            raise flags.Error(f"--{name} is now written {new}")
        if not flag:
            raise flags.Error(f"there is no flag --{name}{_near(name, values, default)}")
        if flag in booleans:
            value = value if equals else str(not is_off)
        elif not equals:
            following = next(rest, None)
            if following is None:
                raise flags.Error(f"--{name} needs a value: --{name}=VALUE")
            value = following
        if flag == "config":
            if found.file is not None:
                raise flags.Error("--config names two files; give one")
            found.file = value
        elif flag in values:
            found.flags.append(f"--{flag}={value}")
        else:
            found.fields.setdefault(flag.removeprefix("config."), []).append(value)
    return found


def _flag_of(name: str, values: flags.FlagValues, default: RunConfig) -> str:
    """Flag that a name means, "config.FIELD" for a field; "" for none."""
    if name == "config" or name in values:
        return name
    if name.startswith("config."):
        try:
            check_field_name(name.removeprefix("config."), default)
        except MoejaxError as error:
            raise flags.Error(str(error)) from error
        return name
    known = [option.name for option in options(default)]
    meant = [name] if name in known else [of for of in known if of.rpartition(".")[2] == name]
    if len(meant) > 1:
        said = " or ".join(f"--config.{field}" for field in meant)
        raise flags.Error(f"--{name} may mean several fields: write {said}")
    return f"config.{meant[0]}" if meant else ""


def _near(name: str, values: flags.FlagValues, default: RunConfig) -> str:
    """Suggestion of the flag whose name, or the end of whose name, is near; "" for none."""
    words = {option.name.rpartition(".")[2]: f"config.{option.name}" for option in options(default)}
    words |= {option.name: f"config.{option.name}" for option in options(default)}
    words |= {flag: flag for flag in ("config", *values)}
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return f"; did you mean --{words[near[0]]}?" if near else ""


def _read_file(path: str, config_class: type[RunConfig]) -> config_dict.ConfigDict:
    """Runs a config file's `get_config()`."""
    # Text after a colon is ml_collections' argument of get_config.
    if not Path(path.split(":", 1)[0]).is_file():
        raise MoejaxError(f"config file {path!r} does not exist")
    values = flags.FlagValues()
    argv = ["moejax", f"--config={path}"]
    try:
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        values(argv)
        if not isinstance(values.config, config_dict.ConfigDict):
            kind = type(values.config).__name__
            raise MoejaxError(f"get_config() gave a {kind}, not a ConfigDict")
        check_fields(values.config, config_class)
    except flags.Error as error:
        if str(error).startswith("flag --config="):  # a ValueError of the file's, wrapped by absl
            raise MoejaxError(_one_line(str(error)).removeprefix("flag ")) from error
        raise
    except MoejaxError as error:
        raise MoejaxError(f"config file {path}: {error}") from error
    except Exception as error:  # a config file is the user's code: whatever it raises is input
        said = f"{type(error).__name__}: {_one_line(str(error))}"
        raise MoejaxError(f"config file {path}: {said}") from error
    return values.config


def user_path(name: str) -> Path:
    """Expands `~` and `~name` in a path, which no shell does behind a `=`."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise MoejaxError(f"there is no such place as {name} ({error})") from error


def _help_text(command: Command[_Config], values: flags.FlagValues, config: _Config) -> str:
    rows = [("--config=FILE", "a config file (see configs/); without it the defaults below")]
    rows += [(f"--{name}", " ".join(values[name].help.split())) for name in values]
    flag_lines = [f"  {name:<20} {said}" for name, said in rows if name != "--config"]
    field_lines = [
        f"  --config.{field.name:<19} {field.meaning} (default {field.default!r})"
        for field in options(command.default)
    ]
    fields = (
        "Config (--FIELD=VALUE serves where no other flag or field has that name; lists a,b,c):"
    )
    more = [line for group in groups(config).values() for line in group.more_help()]
    lines = [command.doc.strip(), "\nFlags:", *flag_lines, f"\n{fields}", *field_lines, *more]
    return "\n".join(lines)


def _fail(message: str, status: int, verbose: bool) -> int:
    """Prints the error that is being handled as one line on stderr; returns `status`."""
    if verbose:
        traceback.print_exc()
    print(f"error: {printable(message)}", file=sys.stderr)
    return status


def _one_line(text: str) -> str:
    """Joins a message's first and last line, where a long one names the problem."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines if len(lines) <= 2 else [lines[0], "...", lines[-1]])
