"""The commands of docs/benchmark.md and the README: their flags are there, their figures too."""

import re
import shlex
from pathlib import Path

from absl.testing import absltest

from moejax import benchmark, cli
from moejax.benchmarking.record import COLUMNS

ROOT = Path(__file__).parents[1]
START = "python -m moejax.benchmark"


def commands(name: str) -> list[list[str]]:
    """Words of every command of the benchmark in a file's blocks, or in a docstring."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", "")
    lines = (line.strip() for line in text.split("\n"))
    return [shlex.split(line, comments=True) for line in lines if line.startswith(START)]


class DocsTest(absltest.TestCase):
    def test_flags(self):
        places = {"docs/benchmark.md": 7, "README.md": 2, "moejax/benchmark.py": 4}
        for name, count in (*places.items(), ("configs/benchmark_dynaexq.py", 2)):
            found = commands(name)
            self.assertLen(found, count, name)
            for words in found:
                config, _ = cli.parse(benchmark.COMMAND, words[2:])  # raises where a flag is wrong
                self.assertIsNotNone(config)

    def test_dynaexqs_workload(self):
        argv = ["benchmark", f"--config={ROOT / 'configs/benchmark_dynaexq.py'}"]
        config, _ = cli.parse(benchmark.COMMAND, argv)
        sizes = (config.num_prompts, config.prompt_tokens, config.new_tokens)
        self.assertEqual(sizes, (128, 2048, 256))
        self.assertEqual((min(config.batches), max(config.batches)), (1, 32))

    def test_every_figure_of_the_table_is_explained(self):
        text = (ROOT / "docs/benchmark.md").read_text(encoding="utf-8")
        explained = " ".join(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))
        for _, name, _ in COLUMNS:
            words = name.removesuffix(" median").removesuffix(" p99")
            said = "link bytes" if words.startswith("link bytes") else words
            said = "of decode" if said == "hit rate of decode" else said
            self.assertIn(said, explained)


if __name__ == "__main__":
    absltest.main()
