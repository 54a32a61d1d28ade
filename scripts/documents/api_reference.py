"""docs/api.md: signatures and docstrings of the public names, read from the source with `ast`.

Read and not imported: what `inspect` prints of an annotation depends on the versions of Python and
JAX.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import moejax
from scripts.documents.commands import ROOT

# What the public names take and give beside what they define.
_TAKEN = (
    "moejax.inference.generation.GenerationSettings",
    "moejax.inference.generation.Timing",
    "moejax.experts.budget.Limits",
    "moejax.experts.ledger.Ledger",
    "moejax.experts.ledger.TierLedger",
)
_SECTIONS = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
_Found = ast.ClassDef | ast.FunctionDef


def reference() -> str:
    """The whole reference."""
    lines = ["## moejax", ""]
    for name in dir(moejax):
        lines += _section(f"moejax.{name}", _find(moejax._HOMES[name], name))
    for name in _TAKEN:
        module, _, last = name.rpartition(".")
        lines += _section(name, _find(module, last))
    lines += ["## moejax.policies", ""]
    module = "moejax.policies.base"
    for node in ast.parse(_path(module).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            lines += _section(f"{module}.{node.name}", node)
    lines += _section(
        "moejax.policies.make.make_policy", _find("moejax.policies.make", "make_policy")
    )
    return "\n".join(lines).rstrip()


def _path(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _find(module: str, name: str) -> _Found:
    """Where a name is defined; imports of it are followed."""
    tree = ast.parse(_path(module).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(node.module, alias.name)
    raise LookupError(f"{module} has no {name}")


def _section(name: str, node: _Found) -> list[str]:
    """One name: its signature, its docstring, and a class's public methods."""
    lines = [f"### {name}", "", "```text", _signature(node), "```", ""]
    lines += _prose(ast.get_docstring(node) or "")
    lines += [""]
    if isinstance(node, ast.ClassDef) and "NamedTuple" not in map(ast.unparse, node.bases):
        for part in node.body:  # of a tuple of fields the docstring says all
            if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                text = ast.get_docstring(part) or ""
                if not text or text.startswith("See `"):
                    continue
                lines += [f"**{node.name}.{part.name}**", "", "```text", _signature(part), "```"]
                lines += ["", *_prose(text), ""]
    return lines


def _signature(node: _Found) -> str:
    """`def name(arguments) -> type`, an argument a line where one line is too long."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
        head = f"class {node.name}({bases})" if bases else f"class {node.name}"
        return "\n    ".join([f"{head}:", *fields]) if fields else head
    is_property = any(ast.unparse(of) == "property" for of in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if is_property:
        return f"{node.name}{returns.replace(' ->', ':')}"
    arguments = ast.unparse(node.args)
    text = f"{node.name}({arguments}){returns}"
    if len(text) <= 96:
        return text
    return f"{node.name}(\n    " + ",\n    ".join(_split(arguments)) + f",\n){returns}"


def _split(arguments: str) -> Iterator[str]:
    """Arguments apart, at commas that no bracket holds."""
    depth, part = 0, ""
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()


def _prose(text: str) -> list[str]:
    """A docstring as Markdown: sections of Google's style become lists, indented lines fences."""
    lines: list[str] = []
    section, in_code = False, False
    for line in text.splitlines():
        header = _SECTIONS.match(line)
        is_code = line.startswith("    ") and not section
        if is_code and not in_code:
            lines.append("```text")
        if in_code and not is_code and line.strip():
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
            in_code = False
        in_code = in_code or is_code
        if header:
            section = True
            lines += [f"{header[1]}:", ""]
        elif section and re.match(r"  \S", line):
            entry = re.match(r"  ([\w*, .]+?): (.*)", line)
            lines.append(f"- `{entry[1]}`: {entry[2]}" if entry else f"- {line.strip()}")
        elif section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and line.strip() != "" and line.startswith(" ")
            lines.append(line[4:] if is_code else line)
    if in_code:
        lines.append("```")
    return [line.replace("<-", "&lt;-") if not in_code else line for line in lines]
