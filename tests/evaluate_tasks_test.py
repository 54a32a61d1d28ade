"""Tasks of the evaluate command: wording, figures, what is resumed, what is refused."""

import contextlib
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moejax import MoejaxError, cli, evaluate
from moejax.evaluation import record, task_run
from moejax.evaluation.problems import flexible_answer, same_number, strict_answer
from moejax.evaluation.rows import Rows, read_rows
from moejax.evaluation.tasks import TASKS, contents, documents
from tests import tiny_engine

ARC = {"query": "Question: Why?", "choices": ["It is.", "So."], "gold": 1}
AI2 = {
    "question": "Why?",
    "choices": {"text": ["It is.", "So."], "label": ["1", "2"]},
    "answerKey": "2",
}
KEYED = {"question": "Why?", "choices": ["It is.", "So."], "answerKey": "B"}
UNLABELLED = {"question": "Why?", "choices": {"text": ["It is.", "So."]}, "answerKey": "A"}
PLAIN = {"query": "2+2=", "choices": ["3", "4"], "answer": 1}
HELLASWAG = {
    "activity_label": "Roofs",
    "ctx_a": "[header] How to [title] Do it.",
    "ctx_b": "she",
    "endings": ["[step] is  well.", "runs."],
    "label": "0",
}
PIQA = {"goal": "Where?", "sol1": "Here", "sol2": "There", "label": 1}
MMLU = {"question": " Which? ", "subject": "us_law", "choices": ["x", "y", "z"], "answer": 2}
MMLU_HEADING = "The following are multiple choice questions (with answers) about us law.\n\n"
GSM8K = {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}
HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}


def rows(*found: dict[str, Any]) -> Rows:
    return Rows(list(found), "x.jsonl", "0")


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, run here."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.exit_status(evaluate.COMMAND, ["evaluate", *arguments])
    return status, out.getvalue(), err.getvalue()


class WordingTest(parameterized.TestCase):
    """The prompts are lm_eval's, written out; scripts/compare_lm_eval.py asks lm_eval itself."""

    @parameterized.parameters(
        ("arc_easy", ARC, "Question: Why?\nAnswer:", ("It is.", "So."), 1),
        ("arc_challenge", AI2, "Question: Why?\nAnswer:", ("It is.", "So."), 1),
        ("arc_easy", KEYED, "Question: Why?\nAnswer:", ("It is.", "So."), 1),
        ("arc_easy", {**KEYED, "answerKey": "1"}, "Question: Why?\nAnswer:", ("It is.", "So."), 0),
        ("arc_easy", {**KEYED, "answerKey": 2}, "Question: Why?\nAnswer:", ("It is.", "So."), 1),
        ("arc_easy", UNLABELLED, "Question: Why?\nAnswer:", ("It is.", "So."), 0),
        ("hellaswag", HELLASWAG, "Roofs: How to. Do it. She", (" is well.", "runs."), 0),
        ("piqa", PIQA, "Question: Where?\nAnswer:", ("Here", "There"), 1),
        ("mmlu", MMLU, "Which?\nA. x\nB. y\nC. z\nAnswer:", ("A", "B", "C"), 2),
        ("choices", {"question": "Q", "choices": ["u", "v"], "label": "v"}, "Q", ("u", "v"), 1),
        ("choices", {"query": "Q", "choices": ["u", "v"], "answer": "B"}, "Q", ("u", "v"), 1),
        ("choices", {"query": "Q", "choices": ["u", "v"], "answer": "0"}, "Q", ("u", "v"), 0),
    )
    def test_questions(self, task, row, query, choices, gold):
        [question] = contents(TASKS[task], rows(row))
        self.assertEqual((question.query, question.choices, question.gold), (query, choices, gold))

    def test_examples(self):
        other = {**MMLU, "question": "Else?", "answer": "A"}
        foreign = {**MMLU, "subject": "art"}
        shots = rows(MMLU, foreign, other, {**other, "question": "No"})
        [found] = documents(TASKS["mmlu"], rows(MMLU), shots, fewshot=1, limit=0, seed=0)
        shot = "Else?\nA. x\nB. y\nC. z\nAnswer: A\n\n"
        query = "Which?\nA. x\nB. y\nC. z\nAnswer:"
        self.assertEqual(found.prompt, MMLU_HEADING + shot + query)
        [found] = documents(TASKS["gsm8k"], rows(GSM8K), None, fewshot=0, limit=0, seed=0)
        self.assertEqual(found.prompt, "Question: 1 + 1?\nAnswer:")
        with self.assertRaisesRegex(MoejaxError, "2 examples of us_law, where fewshot=3"):
            documents(TASKS["mmlu"], rows(MMLU), shots, fewshot=3, limit=0, seed=0)

    def test_a_sample_is_the_seeds(self):
        data = rows(*({**PIQA, "goal": str(i)} for i in range(50)))

        def taken(seed: int) -> list[int]:
            found = documents(TASKS["piqa"], data, None, fewshot=0, limit=9, seed=seed)
            return [document.index for document in found]

        self.assertEqual(taken(1), taken(1))
        self.assertNotEqual(taken(1), taken(2))
        self.assertEqual(taken(1), sorted(set(taken(1))))
        self.assertLen(taken(1), 9)

    @parameterized.parameters(
        ("arc_easy", {"query": "Q"}, r"row 0 is no arc_easy \(there is no 'choices'\); it has que"),
        ("choices", {"query": "Q", "choices": ["a"], "gold": 0}, "1 choices; two are the least"),
        ("choices", {"query": "Q", "choices": ["a", "b"], "gold": 2}, "the answer 2 is none of 2"),
        ("choices", {"query": "Q", "choices": ["a", ""], "gold": 1}, "a choice without text"),
        ("choices", {"query": "Q", "choices": ["a", "b"], "gold": "x"}, "is no choices"),
        ("choices", {"choices": ["a", "b"], "gold": 0}, "there is no 'query'"),
        ("mmlu", {**MMLU, "question": None}, r"is no mmlu \(question must be a text, not null\)"),
        ("gsm8k", {"question": "Q"}, "there is no 'answer'"),
        (
            "choices",
            {**PLAIN, "choices": [3, 4]},
            r"row 0 .*\(choices\[0\] must be a text, not 3\)",
        ),
        ("choices", {**PLAIN, "choices": "abcd"}, 'choices must be a list of texts, not "abcd"'),
        ("choices", {**PLAIN, "query": 7}, "query must be a text, not 7"),
        (
            "choices",
            {"question": None, "choices": ["a", "b"], "gold": 1},
            "question must be a text",
        ),
        ("choices", {**PLAIN, "query": "\ud800"}, "query is not Unicode: surrogates not allowed"),
        ("choices", {**PLAIN, "choices": ["a", "\udfff"]}, r"choices\[1\] is not Unicode"),
        ("choices", {**PLAIN, "answer": True}, "answer must be the index of a choice, not true"),
        ("choices", {**PLAIN, "answer": None}, "answer must be the index of a choice, not null"),
        ("choices", {**PLAIN, "answer": 1.0}, "answer must be the index of a choice, not 1.0"),
        ("choices", {**PLAIN, "answer": [1]}, r"answer must be the index of a choice, not \[1\]"),
        ("choices", {**PLAIN, "answer": "E5"}, 'answer "E5" is no index, no letter and none of'),
        ("choices", {**PLAIN, "answer": 10**4000}, r"the answer 10{39}\.\.\. is none of 2 choices"),
        ("choices", {**PLAIN, "group": 3}, "group must be a text, not 3"),
        ("mmlu", {**MMLU, "subject": None}, "subject must be a text, not null"),
        ("mmlu", {**MMLU, "choices": ["x"] * 27}, "27 choices, which is more than there are"),
        ("piqa", {**PIQA, "sol1": 1}, "sol1 must be a text, not 1"),
        ("piqa", {**PIQA, "label": math.inf}, "label must be the index of a choice, not Infinity"),
        ("hellaswag", {**HELLASWAG, "ctx_b": None}, "ctx_b must be a text, not null"),
        ("hellaswag", {**HELLASWAG, "endings": ["a", 2]}, r"endings\[1\] must be a text, not 2"),
        ("hellaswag", {**HELLASWAG, "label": ""}, 'label must be the index of a choice, not ""'),
        ("gsm8k", {**GSM8K, "answer": 2}, "answer must be a text, not 2"),
        ("gsm8k", {**GSM8K, "answer": None}, "answer must be a text, not null"),
        ("humaneval", {**HUMANEVAL, "entry_point": 1}, "entry_point must be a text, not 1"),
        (
            "arc_easy",
            {**KEYED, "answerKey": "E"},
            r'answerKey "E" is none of A\.\. or 1\.\. of 2 choi',
        ),
        ("arc_easy", {**KEYED, "answerKey": "0"}, 'answerKey "0" is none of'),
        ("arc_easy", {**KEYED, "answerKey": "AB"}, 'answerKey "AB" is none of'),
        ("arc_easy", {**AI2, "answerKey": "A"}, 'answerKey "A" is none of 1, 2'),
        (
            "arc_easy",
            {**AI2, "choices": {"text": ["a", "b"], "label": ["A"]}},
            "2 texts and 1 label",
        ),
    )
    def test_a_row_of_another_form(self, task, row, said):
        with self.assertRaisesRegex(MoejaxError, said):
            contents(TASKS[task], rows(row))


class FiguresTest(parameterized.TestCase):
    def test_accuracies(self):
        task = TASKS["choices"]
        [question] = contents(task, rows({"query": "Q", "choices": ["long one", "b"], "gold": 0}))
        cases = (
            ((-2.0, -1.0), 0, 1),  # per character -0.25 and -1
            ((-1.0, -2.0), 1, 1),
            ((-2.0, -2.0), 1, 1),  # the first of equals
            ((-9.0, -1.0), 0, 0),
        )
        for nats, acc, acc_norm in cases:
            self.assertEqual(task.measure(question, nats), {"acc": acc, "acc_norm": acc_norm})

    def test_standard_error(self):
        values = [1.0, 0.0, 0.0, 1.0, 1.0]
        found = task_run.mean(values)
        self.assertAlmostEqual(found["value"], 0.6)
        self.assertAlmostEqual(found["stderr"], np.std(values, ddof=1) / math.sqrt(5))
        self.assertIsNone(task_run.mean([1.0])["stderr"])

    @parameterized.parameters(
        ("so 1,234.\n#### 1,234", "1,234", "1,234"),
        ("#### -7 and then 8", "-7", "8"),
        ("It costs $18.50.", "[invalid]", "$18.50."),
        ("the answer is 5", "[invalid]", "5"),
        ("no number", "[invalid]", "[invalid]"),
        ("#### x", "[invalid]", "[invalid]"),
    )
    def test_numbers_of_texts(self, text, strict, flexible):
        self.assertEqual((strict_answer(text), flexible_answer(text)), (strict, flexible))

    @parameterized.parameters(
        ("1,234", "a\nb #### 1234", True),
        ("$18.", "#### 18", True),
        ("18.0", "#### 18", False),
        ("[invalid]", "#### 18", False),
    )
    def test_numbers_that_are_the_same(self, answer, reference, same):
        self.assertEqual(same_number(answer, reference), same)

    def test_programs_are_judged(self):
        task = TASKS["humaneval"]
        [problem] = contents(task, rows(HUMANEVAL))
        self.assertEqual(task.judge(problem, "    return a + b\n"), {"pass_at_1": 1.0})
        self.assertEqual(task.judge(problem, "    return a - b\n"), {"pass_at_1": 0.0})


class MainTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.checkpoint = cls.folder / "tiny"
        cls.engine = tiny_engine.load_tiny_engine(cls.checkpoint, eos_ids=(3,))
        words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
        cls.rows = [
            {
                "query": f"{a} {b}",
                "choices": [c, "it is", "so"],
                "gold": i % 3,
                "group": f"g{i % 2}",
            }
            for i, (a, b, c) in enumerate(zip(words, words[1:], words[2:], strict=False))
        ]
        cls.data = cls._write("data.jsonl", cls.rows)

    @classmethod
    def _write(cls, name: str, found: list[dict[str, Any]]) -> Path:
        path = cls.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return path

    def _run(self, **fields: Any) -> tuple[int, str, str]:
        fields = {"checkpoint": self.checkpoint, "task": "choices", "data": self.data, **fields}
        return run(*(f"--config.{name}={value}" for name, value in fields.items()))

    def test_choices(self):
        output = self.folder / "c.json"
        status, out, err = self._run(output=output, batch_size=2)
        self.assertEqual(status, 0, err)
        pairs = [(row["query"], f" {choice}") for row in self.rows for choice in row["choices"]]
        scored = self.engine.loglikelihood(pairs, batch_size=2)
        nats = np.array([of.log_likelihood for of in scored]).reshape(-1, 3)
        gold = np.array([row["gold"] for row in self.rows])
        right = nats.argmax(axis=1) == gold
        record = json.loads(output.read_text())
        self.assertAlmostEqual(record["metrics"]["acc"]["value"], right.mean())
        self.assertAlmostEqual(
            record["metrics"]["acc"]["stderr"], right.std(ddof=1) / math.sqrt(len(right))
        )
        self.assertEqual(record["groups"]["g1"]["acc"]["value"], right[1::2].mean())
        self.assertEqual(record["documents"], len(self.rows))
        self.assertEqual(record["protocol"]["seed"], 0)
        self.assertContainsSubset({"versions", "device", "command", "ledger", "policy"}, record)
        self.assertIn(f"choices: acc {right.mean():.4f} ± ", out)
        self.assertIn("  g0: acc", out)

    def test_interrupted_and_resumed(self):
        self.assertEqual(self._run(output=self.folder / "whole.json", batch_size=1)[0], 0)
        output, choose, calls = self.folder / "cut.json", task_run.choose, []

        def interrupted(*arguments: Any) -> Any:
            calls.append(len(arguments[2]))
            if len(calls) == 2:
                raise KeyboardInterrupt
            return choose(*arguments)

        with mock.patch.object(task_run, "choose", interrupted):
            status, _, _ = self._run(output=output, batch_size=1)
        self.assertEqual((status, calls), (130, [4, 4]))
        self.assertFalse(output.exists())
        status, _, err = self._run(output=output, batch_size=1, seed=1)
        self.assertEqual(status, 1)
        self.assertIn("holds answers of another run (protocol differ)", err)
        calls.clear()
        with mock.patch.object(task_run, "choose", lambda *a: calls.append(1) or choose(*a)):
            status, _, err = self._run(output=output, batch_size=1)
        self.assertEqual((status, len(calls)), (0, math.ceil((len(self.rows) - 4) / 4)), err)
        resumed, whole = (
            json.loads((self.folder / name).read_text()) for name in ("cut.json", "whole.json")
        )
        self.assertEqual((resumed["resumed_documents"], whole["resumed_documents"]), (4, 0))
        self.assertEqual(resumed["metrics"], whole["metrics"])

    def test_answers_outlive_a_result_that_cannot_be_written(self):
        output = self.folder / "full.json"
        with mock.patch.object(record, "write_record", side_effect=OSError("no space left")):
            status, _, err = self._run(output=output)
        self.assertEqual(status, 1, err)
        self.assertIn("error: no space left", err)
        status, _, err = self._run(output=output)
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(output.read_text())["resumed_documents"], len(self.rows))

    def test_a_file_of_another_kind_is_found_before_the_model_is_loaded(self):
        notes = self.folder / "n.answers.jsonl"
        notes.write_text("mine")
        with mock.patch.object(task_run, "load_engine") as load:
            status, _, err = self._run(output=self.folder / "n.json")
        self.assertEqual((status, load.called, notes.read_text()), (1, False, "mine"))
        self.assertIn("n.answers.jsonl is no file of answers; move it away", err)

    def test_a_run_goes_on_with_another_batch_size(self):
        policy = {"policy.name": "on_demand", "policy.tiers": "('int4',)", "policy.slots": "('3',)",
                  "policy.quantizer": "rtn", "policy.group_size": 16}  # fmt: skip
        for name, how in (("exact", {}), ("tiered", policy)):
            output = self.folder / f"batch_{name}.json"
            with mock.patch.object(record, "write_record", side_effect=KeyboardInterrupt):
                self._run(output=output, limit=4, batch_size=2, **how)
            status, _, err = self._run(output=output, limit=4, batch_size=4, **how)
            self.assertEqual(status, 0, err)
            written = json.loads(output.read_text())
            self.assertEqual(written["protocol"]["batch_size"], 1 if how else 4)
            self.assertEqual(written["resumed_documents"], 4)

    def test_under_a_policy(self):
        output = self.folder / "p.json"
        status, out, err = self._run(
            output=output, limit=4, **{"policy.name": "on_demand", "policy.tiers": "('int4',)",
            "policy.slots": "('3',)", "policy.quantizer": "rtn", "policy.group_size": 16},
        )  # fmt: skip
        self.assertEqual(status, 0, err)
        record = json.loads(output.read_text())
        self.assertEqual(record["policy"]["name"], "on_demand")
        self.assertIsNotNone(record["ledger"])
        self.assertEqual(record["documents"], 4)
        self.assertGreater(out.count("\n"), 3)

    def test_generation(self):
        data = self._write("g.jsonl", [GSM8K, {**GSM8K, "question": "2 + 2? " * 60}])
        output = self.folder / "g.json"
        status, out, err = self._run(
            task="gsm8k", data=data, fewshot=0, max_new_tokens=5, output=output, batch_size=3
        )
        self.assertEqual(status, 0, err)
        lines = (self.folder / "g.answers.jsonl").read_text().split("\n")
        answers = {a["index"]: a for a in map(json.loads, lines[1:3])}
        [expected] = self.engine.generate("Question: 1 + 1?\nAnswer:", max_new_tokens=5)
        self.assertEqual(answers[0]["text"], expected.text)
        self.assertEqual(answers[0]["cut_tokens"], 0)
        self.assertGreater(answers[1]["cut_tokens"], 0)
        self.assertIn("1 prompts cut", out)

    def test_rows_of_files(self):
        for name, content, said in (
            ("none.jsonl", None, "there is no data file"),
            ("bad.jsonl", "{}\n{", "line 2 is not JSON"),
            ("list.jsonl", "[1]\n", "line 1 is no JSON object"),
            ("deep.jsonl", "{}\n" + "[" * 100_000 + "\n", "line 2 is not JSON: maximum recursion"),
            ("long.jsonl", '{"answer": ' + "7" * 5000 + "}\n", "line 1 is not JSON: Exceeds"),
            ("empty.jsonl", "\n", "holds no rows"),
        ):
            path = self.folder / name
            if content is not None:
                path.write_text(content)
            with self.assertRaisesRegex(MoejaxError, said):
                read_rows(path)

    @parameterized.parameters(
        ({"data": ""}, "task=choices needs data=FILE"),
        ({"task": "gsm8k"}, "with fewshot=5 needs fewshot_data=FILE"),
        ({"fewshot": -2}, "fewshot=-2 must be -1"),
        ({"limit": -1}, "limit=-1 must be 0 or a number"),
        ({"task": "humaneval"}, "allow it: --config.execute=True"),
        ({"task": "piqa"}, "data.jsonl, row 0 is no piqa (there is no 'sol1')"),
        ({"task": "gsm8k", "fewshot": 0, "data": GSM8K, "max_new_tokens": 256}, "leaves no room"),
        ({"data": {**PLAIN, "choices": [3, 4]}}, "row 0 is no choices (choices[0] must be a text"),
        ({"data": {**PLAIN, "query": "\ud800"}}, "row 0 is no choices (query is not Unicode"),
        ({"task": "gsm8k", "fewshot": 0, "data": {**GSM8K, "answer": 2}}, "answer must be a text"),
    )
    def test_what_is_refused(self, fields, said):
        if isinstance(fields.get("data"), dict):
            fields = {**fields, "data": self._write("one.jsonl", [fields["data"]])}
        status, out, err = self._run(**fields)
        self.assertEqual((status, out), (1, ""))
        self.assertIn(said, err.splitlines()[-1])


if __name__ == "__main__":
    absltest.main()
