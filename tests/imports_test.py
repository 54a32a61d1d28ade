"""Rules of the sources, read with `ast`: imports, lengths, names, first lines of docstrings."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator

from absl.testing import absltest, parameterized

from tests.source_files import ROOT, source_files, statements

# Pure parts do not know each other; they meet in the engine.
PURE_PARTS = (
    "moejax.models",
    "moejax.policies",
    "moejax.quantization",
    "moejax.experts.budget",
    "moejax.experts.residency",
)
# Inside a pure part, but where others meet it.
MEETING_PLACES = ("moejax.quantization.pipeline",)
# Modules that a pure part may import beside itself: plain data, operations on plain arrays.
SHARED = ("moejax.errors", "moejax.files.small", "moejax.weights", "moejax.models.kv_cache")
# Plain data of another part that one of them reads: a plan is made of a model's shape.
READ_BY = {"moejax.experts.budget": ("moejax.models.config",)}
# `jaxlib` has the MLIR dialects in which Mosaic GPU takes what it has no primitive for.
KERNELS_MAY_IMPORT = ("jax", "jaxlib", "numpy", "pallas_kernels", *sys.stdlib_module_names)
# A policy may not read clocks, log or put arrays on devices; without these modules it cannot.
POLICIES_MAY_NOT_IMPORT = ("time", "datetime", "logging", "absl")
SEE_CONFIGS = ("moejax.config.options", "moejax.cli")
LAUNCHERS = ("jax.experimental.pallas.pallas_call", "jax.experimental.pallas.mosaic_gpu.kernel")
LAUNCH_FILE = "pallas_kernels/launch.py"
CATCH_ALLS = ("utils", "util", "common", "helpers", "misc")
MAX_LINES, MAX_MAIN_LINES = 700, 200
MAX_ROOT_MODULES = 18
# The parts of moejax from the ground up: a module imports from its own line and those above it.
LAYERS = (
    ("errors", "demo"),
    ("files",),
    ("devices", "programs"),
    ("weights",),
    ("models",),
    ("text",),
    ("policies",),
    ("checkpoints",),
    ("quantization",),
    ("quantization.pipeline",),
    ("routing",),
    ("experts",),
    ("inference",),
    ("config",),
    ("routing.simulate",),
    ("cli",),
    ("engine",),
    ("loading",),
    ("evaluation", "benchmarking", "serving", "planning"),
    ("generate", "quantize", "evaluate", "benchmark", "profile_experts", "sweep", "plan", "serve",
     "lm_eval"),
    ("__init__", "__main__"),
)  # fmt: skip


def breaches(path: str, source: str) -> list[str]:
    """Lists the breaches of the rules in one file.

    Args:
      path: relative to the repository, such as "moejax/models/moe.py".
      source: its text.
    """
    return [f"{path}: {said}" for said in _breaches(path, source, ast.parse(source, path))]


def _breaches(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    module = module_of(path)
    for part in module.split("."):
        if part in CATCH_ALLS or part.rpartition("_")[2] in CATCH_ALLS:
            yield f"a module named {part} collects what has no place"
    num_lines = len(source.splitlines())
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines; at most {MAX_LINES}"
    if path.startswith("moejax/") and _is_main(tree) and num_lines >= MAX_MAIN_LINES:
        yield f"{num_lines} lines in a main; under {MAX_MAIN_LINES}"
    aliases: dict[str, str] = {}
    for name, alias in _imports(tree):
        aliases[alias] = name
        yield from _import_breaches(module, name)
    if path != LAUNCH_FILE:
        used = set(aliases.values())
        of_jax = "|".join(alias for alias, of in aliases.items() if _within(of, "jax", "jaxlib"))
        if re.search(rf"\b({of_jax})\.([\w.]+\.)?(_|pallas_call|kernel)", source):
            nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            used |= {_dotted(node, aliases) for node in nodes}
        for name in sorted(used & set(LAUNCHERS)):
            yield f"{name} belongs to {LAUNCH_FILE}"
        for name in sorted({_private_part(name) for name in used} - {""}):
            yield f"private {name} belongs to {LAUNCH_FILE}"


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _import_breaches(module: str, name: str) -> Iterator[str]:
    if name == ".":
        yield "a relative import"
    if _within(module, "pallas_kernels") and not _within(name, *KERNELS_MAY_IMPORT):
        yield f"pallas_kernels imports {name}"
    if _within(module, "moejax.policies") and _within(name, *POLICIES_MAY_NOT_IMPORT):
        yield f"a policy imports {name}"
    if _within(module, "moejax") and _within(name, "ml_collections") and module not in SEE_CONFIGS:
        yield f"{name}: below the mains nothing sees a ConfigDict"
    for part in PURE_PARTS:
        if _within(module, *MEETING_PLACES):
            continue
        allowed = (part, *SHARED, *READ_BY.get(part, ()))
        if _within(module, part) and _within(name, "moejax") and not _within(name, *allowed):
            yield f"{part} is pure, but imports {name}"


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(full dotted name, name that it is bound to) of every import, wherever it stands."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                # `import a.b` binds a; `import a.b as c` binds a.b.
                yield item.name, item.asname or item.name
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                name = "." if node.level else f"{node.module}.{item.name}"
                yield name, item.asname or item.name


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """The full name that an expression such as `pl.pallas_call` means; "" if it is none."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _private_part(name: str) -> str:
    """`jax._src` of `jax._src.core.Primitive`; "" of names that are not private to JAX."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if _within(name, "jax", "jaxlib") and part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[: i + 1])
    return ""


def _is_main(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in tree.body
    )


def _within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


@functools.cache
def module_imports() -> dict[str, set[str]]:
    """Modules of moejax that each of its modules imports, those for types alone counted."""
    files = {path: tree for path, (_, tree) in source_files().items() if path[:7] == "moejax/"}
    modules = {module_of(path): tree for path, tree in files.items()}
    found = {}
    for module, tree in modules.items():
        names = {name for name, _ in _imports(tree)}
        known = {name if name in modules else name.rpartition(".")[0] for name in names}
        found[module] = known & set(modules) - {module}
    return found


def layer_of(module: str) -> int:
    """The line of `LAYERS` on which a module stands, by the longest name that fits."""
    inner = module.removeprefix("moejax").removeprefix(".") or "__init__"
    fits = [
        (len(part), height)
        for height, parts in enumerate(LAYERS) for part in parts if _within(inner, part)
    ]  # fmt: skip
    if not fits:
        raise ValueError(f"{module} stands on no line of LAYERS")
    return max(fits)[1]


class LayersTest(absltest.TestCase):
    def test_nothing_is_imported_from_above(self):
        upward = [
            f"{module} imports {name}"
            for module, names in module_imports().items()
            for name in names
            if layer_of(name) > layer_of(module)
        ]
        self.assertEmpty(upward, "\n".join(upward))

    def test_no_circle(self):
        try:
            graphlib.TopologicalSorter(module_imports()).prepare()
        except graphlib.CycleError as error:
            self.fail(" imports ".join(reversed(error.args[1])))

    def test_root_stays_small(self):
        self.assertLessEqual(len(list((ROOT / "moejax").glob("*.py"))), MAX_ROOT_MODULES)

    def test_layers(self):
        self.assertLess(layer_of("moejax.experts.budget"), layer_of("moejax.inference.steps"))
        self.assertLess(layer_of("moejax.routing.trace"), layer_of("moejax.experts"))
        self.assertLess(layer_of("moejax.experts"), layer_of("moejax.routing.simulate.replay"))
        self.assertLess(layer_of("moejax.serve"), layer_of("moejax"))
        with self.assertRaisesRegex(ValueError, "no line"):
            layer_of("moejax.elsewhere")


class ImportsTest(parameterized.TestCase):
    def test_every_file_obeys(self):
        found = [
            f"{path}: {said}"
            for path, (source, tree) in source_files().items()
            for said in _breaches(path, source, tree)
        ]
        self.assertEmpty(found, "\n".join(found))

    @parameterized.parameters(
        ("pallas_kernels/x.py", "from moejax.errors import MoejaxError", "imports moejax"),
        ("pallas_kernels/x/y.py", "def f():\n    import torch", "imports torch"),
        ("moejax/models/x.py", "from moejax.quantization import rtn", "moejax.models is pure"),
        ("moejax/models/x.py", "from moejax import engine", "imports moejax.engine"),
        ("moejax/policies/x.py", "import time", "a policy imports time"),
        ("moejax/experts/budget.py", "from moejax.experts import residency", "budget is pure"),
        ("moejax/engine.py", "from . import models", "a relative import"),
        ("moejax/x.py", "from jax._src import core", "private jax._src"),
        ("moejax/x.py", "import jax\njax._src.core.x()", "private jax._src"),
        ("moejax/x.py", "from ml_collections import config_dict", "nothing sees a ConfigDict"),
        ("moejax/x.py", "from jax.experimental import pallas as pl\npl.pallas_call()", "belongs"),
        ("tests/x.py", "from jax.experimental.pallas import pallas_call as p\np()", "belongs"),
        (
            "pallas_kernels/x/mosaic.py",
            "import jax.experimental.pallas.mosaic_gpu as plgpu\nk = plgpu.kernel",
            "mosaic_gpu.kernel belongs",
        ),
        ("moejax/utils.py", "", "a module named utils"),
        ("tests/model_common.py", "", "a module named model_common"),
        ("moejax/x.py", "\n" * 701, "701 lines"),
        ("moejax/x.py", "\n" * 200 + "if __name__ == '__main__':\n    pass", "in a main"),
    )
    def test_planted_breach_is_caught(self, path, source, said):
        found = breaches(path, source)
        self.assertLen(found, 1)
        self.assertIn(said, found[0])

    @parameterized.parameters(
        ("pallas_kernels/x.py", "import jax.numpy as jnp\nimport functools\nimport numpy as np"),
        ("pallas_kernels/x.py", "from jaxlib.mlir.dialects import llvm"),
        ("pallas_kernels/launch.py", "from jax._src import core"),
        ("pallas_kernels/launch.py", "from jax.experimental import pallas as pl\npl.pallas_call()"),
        ("pallas_kernels/x.py", "from jax.experimental import pallas as pl\npl.BlockSpec()"),
        ("moejax/models/x.py", "from moejax.errors import MoejaxError\nimport moejax.models.moe"),
        ("moejax/engine.py", "from moejax import models, policies"),
        ("moejax/engine.py", "import jax\nprint(jax.__version__)"),
        ("moejax/policies/x.py", "import jax\nimport timeit"),
    )
    def test_what_is_allowed_passes(self, path, source):
        self.assertEmpty(breaches(path, source))


# A genitive or a relative clause in place of a subject makes a riddle of a first line.
FORBIDDEN = (
    "Of", "As", "What", "That", "Those", "Its", "Who", "Around", "Likewise", "The same", "See",
)  # fmt: skip
STARTS = tuple(word + mark for word in FORBIDDEN for mark in (" ", ",", ".", ":", ";", "\n"))


def riddles(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields a line for each docstring that begins with a forbidden word."""
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node, clean=False) or "").lstrip()
            if text in FORBIDDEN or text.startswith(STARTS):
                yield f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


class ProseTest(parameterized.TestCase):
    def test_docstrings_begin_with_a_subject_or_a_verb(self):
        files = source_files().items()
        found = [line for path, (_, tree) in files for line in riddles(path, tree)]
        self.assertEmpty(found, "\n".join(found))

    @parameterized.parameters(*FORBIDDEN)
    def test_planted_riddle_is_caught(self, word):
        for text in (f"{word} a layer.", f"{word}: a layer.", f"{word}."):
            for source in (f'"""{text}"""', f'class C:\n    def f(self):\n        """{text}"""'):
                self.assertLen(list(riddles("x.py", ast.parse(source))), 1, source)

    @parameterized.parameters("Offsets of a row.", "Assigns slots.", "Whose slot it is.", "")
    def test_plain_first_line_passes(self, text):
        tree = ast.parse(f'def f():\n    """{text}"""')
        self.assertEmpty(list(riddles("x.py", tree)))
