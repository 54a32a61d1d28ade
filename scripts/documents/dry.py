"""Dry runs: a command's flags are parsed and its configuration is made; nothing else happens."""

import ast
import functools
import importlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from moejax import cli
from moejax.config.options import options
from moejax.config.policy import PolicyConfig
from moejax.errors import MoejaxError
from scripts.documents.commands import ROOT, Command

_PYTHON = re.compile(r"(?:\S*/)?python3?(?:\.\d+)?")
_OF_ABSL = {"help", "helpfull", "helpshort", "verbosity", "v"}
_NUMBERS = {"integer": int, "float": float}


def check(command: Command) -> None:
    """Raises one of `ERRORS` where a command cannot be read."""
    if command.fate == "term":
        return
    if command.is_program:
        compile(command.text, command.place, "exec")
        return
    for words in command.parts:
        _check_words(words)


def module_of(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Module that Python would run, and its arguments; None where it runs nothing."""
    if words[0].rpartition("/")[2] == "moejax":
        return f"moejax.{words[1]}", list(words[2:])
    if not _PYTHON.fullmatch(words[0]):
        return None
    if words[1] == "-m":
        return words[2], list(words[3:])
    return words[1].removesuffix(".py").replace("/", "."), list(words[2:])


def main_of(module: str) -> cli.Command[Any] | None:
    """The command of a main of the package; None of other modules."""
    if not module.startswith("moejax."):
        return None
    command = getattr(importlib.import_module(module), "COMMAND", None)
    return command if isinstance(command, cli.Command) else None


def _check_words(words: list[str]) -> None:
    found = module_of(words)
    if found is None:
        _check_tool(words)
        return
    module, arguments = found
    if module == "pytest":
        for word in arguments:
            if word.startswith("tests/"):
                _require_file(word)
    elif module == "moejax.lm_eval":
        _check_lm_eval(arguments)
    elif module.startswith("moejax."):
        command = main_of(module)
        if command is None:
            raise ValueError(f"{module} is no main with a COMMAND")
        config, _ = cli.parse(command, [module, *arguments])
        policy = getattr(config, "policy", None)
        if isinstance(policy, PolicyConfig):
            policy.tiering()
    elif module.startswith("scripts."):
        _check_script(module, arguments)
    elif module != "venv":
        raise ValueError(f"{module} is not known here: scripts/documents/dry.py")


def _check_tool(words: list[str]) -> None:
    """pip, pre-commit, jupytext, echo, curl, source, hf, mkdir, shell scripts."""
    tool = words[0].rpartition("/")[2]
    if tool == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        known = project["optional-dependencies"]
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            if missing := set(extra.split(",")) - set(known):
                raise ValueError(f"there is no extra {missing.pop()}")
    elif tool.endswith(".sh"):
        _require_file(words[0])
    elif tool == "jupytext":
        _require_file(next(w for w in words if w.startswith("scripts/")).replace(".ipynb", ".py"))
    elif tool == "echo":
        if words[-2:-1] != [">"] or len(words) != 4:
            raise ValueError("echo makes a file here: echo TEXT > FILE")
    elif tool not in ("pre-commit", "curl", "source", "hf", "mkdir"):
        raise ValueError(f"{tool} is not known here: scripts/documents/dry.py")


def _check_lm_eval(arguments: list[str]) -> None:
    """Ours of lm_eval's arguments, as `moejax.evaluation.lm_eval_model` reads them."""
    if "--model_args" not in arguments:
        return
    from moejax import evaluate

    known = {option.name: option for option in options(evaluate.COMMAND.default)}
    given = ["lm_eval"]
    for pair in arguments[arguments.index("--model_args") + 1].split(","):
        name, _, text = pair.partition("=")
        field = {"pretrained": "checkpoint"}.get(name, name)
        if field in known and isinstance(known[field].default, tuple):
            text = str(tuple(text.split("+")))
        given.append(f"--config.{field}={text}")
    cli.parse(evaluate.COMMAND, given)


def _check_script(module: str, arguments: list[str]) -> None:
    """Flags of a script, which are read from its source: importing them all takes minutes."""
    path = module.replace(".", "/") + ".py"
    _require_file(path)
    known = script_flags(ROOT / path)
    for word in arguments:
        if word == "--":  # what follows goes to a main
            return
        if not word.startswith("--") and takes_words(ROOT / path):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if name.startswith("config."):
            continue
        kind = known.get(name) or known.get(name.removeprefix("no"))
        if kind is None and name not in _OF_ABSL:
            raise ValueError(f"{path} has no flag --{name}; it has {', '.join(sorted(known))}")
        if equals and kind in _NUMBERS:
            try:
                _NUMBERS[kind](value)
            except ValueError as error:
                raise ValueError(f"{path}: --{name}={value} is no {kind}") from error


@functools.cache
def takes_words(path: Path) -> bool:
    """Whether the main of a script reads arguments that are no flags: others delete them."""
    nodes = ast.parse(path.read_text("utf-8")).body
    mains = [one for one in nodes if isinstance(one, ast.FunctionDef) and one.name == "main"]
    return any("del argv" not in ast.unparse(main) for main in mains)


@functools.cache
def script_flags(path: Path) -> dict[str, str]:
    """Kinds of flags by name ("integer", "multi_string", ...), of a script and what it imports."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = node.func.attr.partition("DEFINE_")[2]
            if kind and node.args and isinstance(node.args[0], ast.Constant):
                found[str(node.args[0].value)] = kind
                if kind.startswith("config_"):
                    found.setdefault("config", kind)
        for name in _imported(node):
            other = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("scripts.") and other.is_file() and other != path:
                found = script_flags(other) | found
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _require_file(name: str) -> None:
    if not (ROOT / name).is_file():
        raise ValueError(f"there is no file {name}")


ERRORS = (ValueError, SyntaxError, MoejaxError, flags.Error)


def check_all(found: Sequence[Command]) -> list[str]:
    """Checks the flags of commands; a line each of those that are wrong."""
    wrong = []
    for command in found:
        try:
            check(command)
        except ERRORS as error:
            wrong.append(f"{command.place}: {command.text}\n    {error}")
    return wrong
