"""Scripts are named in a written page or used by another; rows are read by something."""

import ast
import functools
import re
import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest

from scripts import house
from scripts.documents import commands
from tests.script_runs import run_file
from tests.source_files import ROOT, source_files, statements

SCRIPTS = ROOT / "scripts"
# Kinds of files that hold what was measured or printed.
DATA = (".jsonl", ".csv", ".png")


def pages() -> str:
    """Pages that people write or read, without RESULTS.md, which names every row file."""
    return "\n".join(page.read_text("utf-8") for page in commands.pages())


@functools.cache
def imported() -> set[str]:
    """Modules of scripts that a file of scripts or tests imports."""
    found: set[str] = set()
    for tree in (tree for path, (_, tree) in source_files().items() if path[:2] in ("sc", "te")):
        for node in statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
            elif isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
    return found


def words(text: str) -> set[str]:
    """Paths, modules and other words of a text."""
    return {word.strip(".") for word in re.findall(r"[\w./]+", text)}


def unnamed(path: Path, said: set[str], used: set[str]) -> bool:
    """Whether nothing imports a script, and no page names it by path, module or file name."""
    name = path.relative_to(ROOT).as_posix()
    module = name.removesuffix(".py").replace("/", ".")
    return module not in used and not said & {name, module, path.name}


class ScriptsTest(absltest.TestCase):
    @pytest.mark.slow
    def test_a_token_passes_few_files(self):
        found = {name: len(house.files_of_a_token(**load)) for name, load in house.loads().items()}
        for name, most in (("resident", 30), ("slots", 40), ("a policy", 50)):
            self.assertLessEqual(found[name], most, name)

    def test_every_script_is_named_or_used(self):
        said, used = words(pages()), imported()
        paths = [*SCRIPTS.rglob("*.py"), *SCRIPTS.rglob("*.sh")]
        self.assertGreater(len(paths), 50)
        self.assertEmpty([str(path) for path in paths if unnamed(path, said, used)])

    @pytest.mark.slow
    def test_every_script_can_be_imported(self):
        names = [
            path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
            for path in SCRIPTS.rglob("*.py")
            if not path.name.startswith("colab_")  # a notebook runs when it is imported
        ]
        importer = Path(self.enterContext(tempfile.TemporaryDirectory())) / "importer.py"
        importer.write_text("import importlib, sys\nimportlib.import_module(sys.argv[1])\n")
        for name in names:  # each in a process of its own: their flags have the same names
            with self.subTest(name):
                done = run_file(importer, name, cwd=ROOT, PYTHONPATH=str(ROOT))
                self.assertEqual(done.returncode, 0, done.stderr)

    @pytest.mark.slow
    def test_an_unnamed_script_is_found(self):
        for name in ("studies/speed/other.py", "golden_old.py"):
            self.assertTrue(unnamed(SCRIPTS / name, words(pages()), imported()))

    def test_every_file_of_data_is_linked_from_the_page_beside_it(self):
        found = [path for path in SCRIPTS.rglob("*") if path.suffix in DATA]
        self.assertGreater(len(found), 20)
        for path in found:
            page = path.parent / "README.md"
            self.assertIn(f"]({path.name})", page.read_text("utf-8"), path)

    def test_every_study_says_its_question_and_is_listed(self):
        index = (SCRIPTS / "studies/README.md").read_text("utf-8")
        for folder in sorted({path.parent for path in (SCRIPTS / "studies").rglob("*.jsonl")}):
            text = (folder / "README.md").read_text("utf-8")
            self.assertIn("Question: ", text)
            self.assertIn("```bash", text)
            self.assertIn(f"]({folder.name}/README.md)", index)
