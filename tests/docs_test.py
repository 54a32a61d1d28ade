"""The documents: their commands run, what is made of them is current, what they quote is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized

from moejax.benchmarking.record import COLUMNS
from moejax.config.options import options
from moejax.config.policy import SETTINGS
from moejax.models.hf.config import ARCHITECTURES
from pallas_kernels.dequant_matmul import low_rank
from pallas_kernels.dequant_matmul import mosaic as dense
from pallas_kernels.grouped_dequant_matmul import mosaic as grouped
from pallas_kernels.mosaic_decode import low_rank_spec
from scripts import make_documents
from scripts.documents import commands, config_tables, dry
from scripts.documents.config_tables import MAINS
from tests import error_messages

ROOT = Path(__file__).parents[1]
PAGES = commands.pages()
# Links of two kinds: [text](target) and, of a picture, ![text](target).
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchor_of(heading: str) -> str:
    """Makes a heading's anchor like GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The headings of a page that can be linked to."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


class CommandsTest(absltest.TestCase):
    def test_all_can_be_read(self):
        """Files, flags and settings of every command, whether it can run here or not."""
        found = commands.of_documents()
        self.assertGreater(len(found), 200)
        self.assertEqual(dry.check_all(found), [])

    @pytest.mark.slow
    def test_they_run(self):
        """Commands that run offline on a CPU are run, in one process."""
        # Programs are kept beside those of the other tests.
        kept = os.environ.get("MOEJAX_DOCUMENTS_PROGRAMS")
        kept = kept or str(ROOT / ".pytest_cache/d/xla-documents")
        done = subprocess.run(
            [sys.executable, "-m", "scripts.check_documents"],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": kept},
            capture_output=True,
            text=True,
            check=False,
        )
        wrong = [line for line in done.stderr.splitlines() if not line.startswith("I")]
        self.assertEqual(done.returncode, 0, "\n".join(wrong) + done.stdout)
        ran = re.search(r"(\d+) run", done.stdout)
        assert ran is not None, done.stdout
        self.assertGreater(int(ran[1]), 15)

    def test_of_every_page(self):
        found = commands.of_documents()
        for page in ("README.md", "WORKSPACE.md", "docs/benchmark.md", "docs/evaluation.md"):
            self.assertTrue(any(one.place.startswith(page) for one in found), page)
        two = [one.text for one in found if one.place.startswith("README.md")][:2]
        self.assertIn("python -m moejax.generate --prompt", two[0])
        self.assertEqual(two[1], "scripts/run_tests.sh")

    def test_readme_makes_what_it_names(self):
        """Quantized demos, profiles and traces: by a command above the first that reads them."""
        name = re.compile(r"(?<![\w/.-])(?:demo-\w+|buddies\.safetensors|x\.trace)(?![\w.-])")
        made: set[str] = set()
        for command in commands.of_page("README.md", PAGES[0].read_text(encoding="utf-8")):
            written = re.findall(r"--config\.(?:output|record_trace)=(\S+)", command.text)
            self.assertLessEqual(set(name.findall(command.text)) - set(written), made, command)
            made |= set(written)
        self.assertLessEqual({"demo-int4", "buddies.safetensors", "x.trace"}, made)

    def test_what_a_newcomer_types_names_what_is_there(self):
        """Files that README, the recipe and docstrings of mains name: there, or made above."""
        named = re.compile(
            r"--(?:prompt_file|config\.text|config\.checkpoint)=(?!DIR|path/)([\w./-]+)"
        )
        count = 0
        pages = {
            name: commands.of_page(name, (ROOT / name).read_text(encoding="utf-8"))
            for name in ("README.md", "docs/recipe_qwen3_30b_12gb.md")
        }
        for path in (ROOT / "moejax").glob("*.py"):
            source = path.read_text(encoding="utf-8")
            pages[path.name] = commands.of_docstring(path.name, source, commands.RUN)
        for found in pages.values():
            made = {"demo", "-"}
            for command in found:
                for file in named.findall(command.text):
                    self.assertTrue(file in made or (ROOT / file).is_file(), command)
                    count += 1
                if command.fate != commands.DRY_RUN:
                    writes = r"(?:> |--config\.output=|--local-dir )([\w./-]+)"
                    made |= set(re.findall(writes, command.text))
        self.assertGreater(count, 5)

    def test_what_is_wrong_is_found(self):
        """A flag, a file, a shell's fence, a mark, an extra, a script's flag that there are not."""
        for text in (
            "python -m moejax.generate --config.temperatur=1",
            "python -m moejax.generate --config=configs/nowhere.py",
            "python -m moejax.evaluate --config.policy.name=dymo",
            "python -m moejax.lm_eval --model moejax --model_args pretrained=x,slots=3",
            "python -m scripts.studies.kernels.bench_kernels --no_such_flag=1",
            "python -m scripts.make_trace --tokens=many",
            "python -m scripts.make_trace results/",
            "pip install 'moejax[nothing]'",
            "scripts/nowhere.sh",
            "python -m pytest tests/nowhere_test.py",
        ):
            [command] = commands.of_page("x.md", f"```bash\n{text}\n```\n")
            with self.assertRaises(dry.ERRORS, msg=text):
                dry.check(command)
        with self.assertRaisesRegex(ValueError, "mark it"):
            commands.of_page("x.md", "```sh\npython -m moejax.generate\n```\n")
        with self.assertRaisesRegex(ValueError, "mark it"):
            commands.of_page("x.md", "```\npython -m moejax.generate\n```\n")
        with self.assertRaisesRegex(ValueError, "'later' is none of"):
            commands.of_page("x.md", "```bash later\npython -m moejax.generate\n```\n")

    def test_marks(self):
        first = ("python -m moejax.plan \\", "  --verbose # gpu: x", "", "# words")
        text = "\n".join(("```bash", *first, "ls && \\", " pwd", "```", ""))
        plan, second = commands.of_page("x.md", text)
        self.assertEqual((plan.place, plan.fate), ("x.md:2", "gpu"))
        self.assertEqual(plan.parts, [["python", "-m", "moejax.plan", "--verbose"]])
        self.assertEqual((second.fate, second.parts), (commands.RUN, [["ls"], ["pwd"]]))


class PackagesTest(parameterized.TestCase):
    @parameterized.parameters(*sorted(path.parent.name for path in ROOT.glob("moejax/*/README.md")))
    def test_the_page_of_a_package_names_its_modules(self, name):
        folder = ROOT / "moejax" / name
        page = (folder / "README.md").read_text(encoding="utf-8")
        names = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        names |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
        self.assertEmpty([module for module in names if f"`{module}`" not in page])

    def test_every_package_has_a_page(self):
        folders = {path.parent for path in ROOT.glob("moejax/*/__init__.py")}
        self.assertEmpty([f.name for f in folders if not (f / "README.md").is_file()])


class PagesTest(absltest.TestCase):
    def test_made_parts_are_current(self):
        for page in make_documents.pages():
            text = page.read_text(encoding="utf-8")
            said = f"{page.name} is not current: run python -m scripts.make_documents"
            self.assertEqual(text, make_documents.made(text), said)

    def test_every_family_is_named(self):
        """Where a message says what else to take, and in the table of models."""
        page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
        (line,) = (one for one in page.splitlines() if "made: families" in one)
        self.assertEqual(set(re.findall(r"`(\w+)`", line.split("|")[3])), set(ARCHITECTURES))
        models = (ROOT / "docs/models.md").read_text(encoding="utf-8")
        table = models[models.index("| `model_type` |") : models.index("## What a cache holds")]
        self.assertEqual(set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)),
                         {"model_type"} | set(ARCHITECTURES))  # fmt: skip

    def test_what_serves_low_rank_terms(self):
        """The limits that docs/kernels.md names are those of the code."""
        page = " ".join((ROOT / "docs/kernels.md").read_text(encoding="utf-8").split())
        for text in (
            f"up to {dense.MOST_STREAMED} rows of x and {grouped.FEW_TOKENS} tokens of experts",
            f"at most {grouped.MOST_STREAMED}, and at most {grouped.MOST_PAIRS} pairs",
            f"up to {low_rank_spec.MAX_TERMS} low-rank terms of a matrix, "
            f"each up to rank {low_rank_spec.MAX_RANK}",
            f"above {low_rank.MAX_FEW_ROWS} rows of x",
        ):
            self.assertIn(text, page)
        for width, most in ((2, 32), (4, 40), (8, 64), (10, 51)):
            self.assertTrue(grouped._streams(most, width, None))
            self.assertFalse(grouped._streams(most + 1, width, None))

    def test_every_main_has_its_fields_listed(self):
        mains = {
            path.stem
            for path in (ROOT / "moejax").glob("*.py")
            if re.search(r"^COMMAND = ", path.read_text(encoding="utf-8"), re.MULTILINE)
        }
        self.assertEqual(mains, set(config_tables.MAINS))

    def test_links(self):
        for page in PAGES:
            for link in _LINK.findall(page.read_text(encoding="utf-8")):
                if link.startswith("http"):
                    continue
                name, _, anchor = link.partition("#")
                target = (page.parent / name).resolve() if name else page
                self.assertTrue(target.exists(), f"{page.name}: {link}")
                if anchor:
                    self.assertIn(anchor, anchors(target), f"{page.name}: {link}")

    def test_every_page_is_listed(self):
        index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
        for page in sorted((ROOT / "docs").glob("*.md")):
            self.assertTrue(page.name == "README.md" or f"]({page.name})" in index, page.name)

    def test_every_setting_is_in_a_command_a_config_or_a_written_page(self):
        # The generated lists name all of them, and count for nothing.
        pages = "".join(
            re.sub(r"<!-- made: \w+ -->\n.*?<!-- end -->", "", page.read_text("utf-8"), flags=re.S)
            for page in make_documents.pages()
        )
        files = [*(ROOT / "configs").glob("*.py"), *(ROOT / "scripts").rglob("*.py")]
        text = "\n".join([pages, *(path.read_text("utf-8") for path in files)])
        names = {of.name.rpartition(".")[2] for main in MAINS.values() for of in options(main)}
        for name in sorted(names | set(SETTINGS)):
            self.assertRegex(text, rf"(?<![A-Za-z_]){name}\b", f"{name}: nothing uses it")

    def test_messages_are_in_the_source(self):
        page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
        known = [text for texts in error_messages.templates().values() for text in texts]
        quoted = error_messages.quoted(page)
        self.assertGreater(len(quoted), 60)
        for text in quoted:
            start = text.rstrip(f"{error_messages.OPEN} ")
            self.assertTrue(any(one.startswith(start) for one in known), text)

    def test_no_machine_is_named(self):
        for page in PAGES:
            self.assertNotRegex(page.read_text(encoding="utf-8"), r"/(work|tmp|home|root)/")

    def test_readme_is_short(self):
        self.assertLess(len((ROOT / "README.md").read_text("utf-8").splitlines()), 150)


class BenchmarkTest(absltest.TestCase):
    def test_every_figure_of_the_table_is_explained(self):
        text = (ROOT / "docs/benchmark.md").read_text(encoding="utf-8")
        explained = " ".join(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))
        for _, name, _ in COLUMNS:
            words = name.removesuffix(" median").removesuffix(" p99")
            said = "link bytes" if words.startswith("link bytes") else words
            said = "of decode" if said == "hit rate of decode" else said
            self.assertIn(said, explained)
