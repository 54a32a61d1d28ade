"""The commands of docs/evaluation.md: their flags are there, and lm_eval has their tasks."""

import re
import shlex
import warnings
from pathlib import Path

from absl.testing import absltest

from moejax import cli, evaluate

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")


def commands(start: str) -> list[list[str]]:
    """Words of every command that begins so, in blocks and in the table."""
    blocks = "\n".join(re.findall(r"```bash[^\n]*\n(.*?)```", TEXT, re.DOTALL)).split("\n")
    spans = re.findall(r"`([^`\n]+)`", TEXT)
    found = [line for line in (*blocks, *spans) if line.startswith(start)]
    return [shlex.split(line, comments=True) for line in found]


class DocsTest(absltest.TestCase):
    def test_flags_of_evaluate(self):
        found = commands("python -m moejax.evaluate")
        self.assertGreater(len(found), 1)
        for words in found:
            config, _ = cli.parse(evaluate.COMMAND, words[2:])  # raises where a flag is wrong
            self.assertIsNotNone(config)

    def test_tasks_of_lm_eval(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from lm_eval.tasks import TaskManager

            from moejax.evaluation.lm_eval_model import read_arguments

            known = TaskManager().all_tasks
        found = commands("python -m moejax.lm_eval --model moejax") + commands("... --tasks")
        self.assertGreater(len(found), 10)
        for words in found:
            if "--tasks" in words:
                for name in words[words.index("--tasks") + 1].split(","):
                    self.assertTrue(name in known or name == "NAME", name)
            if "--model_args" in words:
                given = words[words.index("--model_args") + 1].split(",")
                read_arguments(dict(pair.split("=", 1) for pair in given))


if __name__ == "__main__":
    absltest.main()
