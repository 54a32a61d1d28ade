"""The notebooks under scripts/: their cells, what they use of moejax, and what they print."""

import ast
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from tests.script_runs import ROOT, run_file

SCRIPTS = {path.stem: path for path in sorted((ROOT / "scripts").glob("colab_*.py"))}
PICTURES = {
    "colab_first_steps": ["first_steps_next_token"],
    "colab_look_at_experts": ["experts_chosen", "experts_over_time", "experts_together"],
    "colab_offload_12gib": ["offload_demo", "offload_link_time"],
    "colab_quantize_and_compare": ["quantize_and_compare"],
    "colab_write_a_policy": ["write_a_policy"],
}
MARKER = re.compile(r"# %%.*")


def cells(text: str) -> list[tuple[str, str]]:
    """(marker, body) of each cell of a file in the percent format; what is before the first too."""
    markers = ["", *(found.group() for found in MARKER.finditer(text) if found)]
    return list(zip(markers, MARKER.split(text), strict=True))


def ran(name: str) -> str:
    """Runs a script with small settings, checks its pictures, returns its output."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_file(
            SCRIPTS[name],
            cwd=Path(folder),
            MOEJAX_QUICK="1",
            MOEJAX_PICTURES=folder,
            MPLBACKEND="Agg",
            TMPDIR=folder,
        )
        if done.returncode:
            raise AssertionError(f"{name} ended with {done.returncode}:\n{done.stderr}")
        pictures = sorted(path.stem for path in Path(folder).glob("*.png"))
        for picture in pictures:
            size = (Path(folder) / f"{picture}.png").stat().st_size
            assert size > 5_000, f"{picture}.png has {size} bytes"
        assert pictures == PICTURES[name], pictures
        return done.stdout


class InstallTest(parameterized.TestCase):
    def test_readme_gives_the_installation(self):
        for page in ("README.md", "docs/notebooks.md"):
            self.assertIn("pip install '.[evaluation]'", (ROOT / page).read_text("utf-8"), page)

    @parameterized.parameters(*SCRIPTS)
    def test_what_is_missing_is_named_with_the_extra_that_has_it(self, name):
        # `pip install .`, as the README has it, brings no matplotlib.
        first = next(body for marker, body in cells(SCRIPTS[name].read_text()) if marker == "# %%")
        own = importlib.util.find_spec
        with (
            mock.patch.object(
                importlib.util, "find_spec", lambda of: None if of == "matplotlib" else own(of)
            ),
            mock.patch.dict(os.environ, clear=True),
            self.assertRaisesRegex(SystemExit, r"^matplotlib not installed: .*\[evaluation\]"),
        ):
            exec(first, {})
        exec(first, {})


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of an output: a dict by the heads for each row."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        split = [[cell.strip() for cell in row.strip("|").split("|")] for row in block.split("\n")]
        heads, _, *rows = split[:-1]
        found.append([dict(zip(heads, row, strict=True)) for row in rows])
    return found


class CellsTest(parameterized.TestCase):
    def test_all_are_known(self):
        self.assertCountEqual(SCRIPTS, PICTURES)

    @parameterized.parameters(*PICTURES)
    def test_cells(self, name):
        (_, before), (first, title), *others = cells(SCRIPTS[name].read_text(encoding="utf-8"))
        self.assertEqual(before, "")
        self.assertEqual(first, "# %% [markdown]")
        self.assertStartsWith(title.strip(), "# # ")
        self.assertGreater(len(others), 10)
        for marker, body in others:
            self.assertIn(marker, ("# %%", "# %% [markdown]"))
            if marker == "# %%":
                self.assertNotEmpty(ast.parse(body).body, body)
                self.assertNotRegex(body, r"(?m)^\s*[%!]")
            else:
                prose = [line for line in body.split("\n") if line]
                self.assertNotEmpty(prose)
                for line in prose:
                    self.assertStartsWith(line, "#")

    @parameterized.parameters(*PICTURES)
    def test_nothing_private_is_used(self, name):
        tree = ast.parse(SCRIPTS[name].read_text(encoding="utf-8"))
        used = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                used += [*str(node.module).split("."), *(item.name for item in node.names)]
            elif isinstance(node, ast.Import):
                used += [part for item in node.names for part in item.name.split(".")]
        private = [u for u in used if u.startswith("_") and not u.startswith("__")]
        # A NamedTuple's `_replace` is public in spite of its name.
        self.assertEqual(set(private) - {"_replace"}, set())


class OutputTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_first_steps(self):
        printed = ran("colab_first_steps")
        first, _, again = re.findall(r"^seed \d: (.*)$", printed, re.MULTILINE)
        self.assertEqual(first, again)
        nats = re.findall(r"(-[\d.]+) nats +.* (\w+)$", printed, re.MULTILINE)
        self.assertEqual(max(nats, key=lambda pair: float(pair[0]))[1], "east")
        shares = [float(x) for x in re.findall(r"^ *([\d.]+) %  '", printed, re.MULTILINE)]
        self.assertLen(shares, 10)
        self.assertEqual(shares, sorted(shares, reverse=True))

    @pytest.mark.slow
    def test_quantized_is_smaller_and_worse(self):
        [rows] = tables(ran("colab_quantize_and_compare"))
        by_name = {row["form"]: row for row in rows}
        plain, int4, int3 = (by_name[name] for name in ("plain", "rtn INT4", "rtn INT3"))
        for figure, sign in (("perplexity", 1), ("MB", -1), ("bits a weight", -1)):
            values = [sign * float(row[figure]) for row in (plain, int4, int3)]
            self.assertEqual(values, sorted(values), figure)
            self.assertLen(set(values), 3, figure)

    @pytest.mark.slow
    def test_the_own_policy(self):
        printed = ran("colab_write_a_policy")
        [rows] = tables(printed)
        hits = {row["policy"]: float(row["hits"]) for row in rows}
        skipped = {row["policy"]: float(row["skipped"].removesuffix(" %")) for row in rows}
        for share in hits.values():
            self.assertBetween(share, 0.01, 0.99)
        exact, sparing = (f"skip_unwanted decay=0.9 least={least}" for least in ("0", "0.2"))
        self.assertEqual(hits[exact], hits["on_demand"])
        self.assertNotEqual(hits[exact], hits[sparing])
        self.assertLessEqual(hits[exact], float(rows[0]["best"]))
        self.assertEqual(skipped[exact], 0)
        self.assertGreater(skipped[sparing], 0)
        ran_exact = re.search(r"least=0: (\d+) of (\d+) tokens", printed)
        self.assertEqual(ran_exact[1], ran_exact[2])
        by_engine = [float(x) for x in re.findall(r"^  hits ([\d.]+)", printed, re.MULTILINE)]
        self.assertLen(by_engine, 2)
        self.assertGreater(by_engine[1], by_engine[0])

    @pytest.mark.slow
    def test_offload(self):
        printed = ran("colab_offload_12gib")
        by_bits, demo = tables(printed)
        self.assertEqual([row["bits"] for row in by_bits], ["16", "8", "4", "3", "2"])
        whole = [float(row["all weights GiB"]) for row in by_bits]
        said = [row["slots of a layer under 12 GiB"] for row in by_bits]
        slots = [128 if cell.startswith("all") else int(cell.split()[0]) for cell in said]
        self.assertBetween(whole[0], 56, 58)  # 30.5e9 weights of two bytes
        self.assertEqual(whole, sorted(whole, reverse=True))
        self.assertEqual(slots, sorted(slots))
        self.assertIn("the smallest that would do is", printed)
        for row in demo:
            self.assertEqual(row["same tokens"], "True")
            self.assertBetween(float(row["hits"]), 0, 1)
            self.assertGreater(float(row["fetched MiB a token"]), 0)

    @pytest.mark.slow
    def test_experts(self):
        printed = ran("colab_look_at_experts")
        self.assertEqual(re.findall(r"^(\w+): \d+ tokens", printed, re.MULTILINE), KINDS)
        for line in re.findall(r"^\w+ and \w+: (.*)  \(layer", printed, re.MULTILINE):
            for apart in line.split():
                self.assertBetween(float(apart), 0.01, 1)
        sure = re.findall(r"^ +\d  +([\d.]+)  +([\d.]+)$", printed, re.MULTILINE)
        self.assertLen(sure, 7)
        for wavering, held in sure:
            self.assertBetween(float(wavering), 1, 32)
            self.assertBetween(float(held), 4 / 32, 1)


KINDS = ["prose", "python", "chinese"]

if __name__ == "__main__":
    absltest.main()
