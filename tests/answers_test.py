"""The file of answers: what is gone on from, what is kept, what is refused."""

import contextlib
import json
import tempfile
from pathlib import Path

from absl.testing import absltest

from moejax import MoejaxError
from moejax.evaluation.answers import AnswerFile
from moejax.evaluation.perplexity import WindowScore

SCORE = WindowScore(0.5, 3)


class AnswersTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = Path(folder) / "x.answers.jsonl"

    def test_goes_on_where_it_was(self):
        answers = AnswerFile(self.path, {"task": "a", "n": (1, 2)})
        answers.add({4: SCORE, 2: WindowScore(1e-9, 1)})
        with self.path.open("a") as file:
            file.write('{"index": 7, "na')  # killed while it wrote
        again = AnswerFile(self.path, {"task": "a", "n": (1, 2)})
        self.assertEqual(again.known, answers.known)
        self.assertEqual(again.num_resumed, 2)
        again.add({7: SCORE})
        third = AnswerFile(self.path, {"task": "a", "n": (1, 2)})
        self.assertEqual(sorted(third.known), [2, 4, 7])
        third.finish()
        self.assertEqual(AnswerFile(self.path, {"task": "b"}).known, {})  # that one was complete

    def _write(self, *lines: bytes) -> None:
        self.path.write_bytes(b"".join(line + b"\n" for line in lines))

    def test_what_is_no_file_of_answers_is_kept(self):
        for content in (b"my notes", b"my notes\n", b"a,b\n1,2\n", b"[1]\n", b"5\n", b"\xff\n",
                        b"[" * 99_999 + b"\n", b'{"head": 1}\n'):  # fmt: skip
            self.path.write_bytes(content)
            with self.assertRaisesRegex(
                MoejaxError, "x.answers.jsonl is no file of answers; move it away, or name another"
            ):
                AnswerFile(self.path, {"task": "a"})
            self.assertEqual(self.path.read_bytes(), content)
        self.path.write_bytes(b"")
        self.assertEqual(AnswerFile(self.path, {"task": "a"}).known, {})

    def test_a_finished_run_of_other_settings_is_kept(self):
        for seed in (1, 2, 3):
            before = self.path.read_bytes() if self.path.exists() else b""
            with contextlib.nullcontext() if seed == 1 else self.assertLogs() as said:
                answers = AnswerFile(self.path, {"seed": seed})
            self.assertEqual(self.path.read_bytes() if before else b"", before)  # no answer yet
            answers.add({seed: SCORE})
            answers.finish()
            if said:
                self.assertLen(said.output, 1)
                self.assertIn(f"kept in x.answers.{seed - 1}.jsonl", said.output[0])
        for seed, name in ((1, "x.answers.1.jsonl"), (2, "x.answers.2.jsonl"), (3, self.path.name)):
            head, answer, end = self.path.with_name(name).read_text().splitlines()
            self.assertEqual(json.loads(head), {"head": {"seed": seed}})
            self.assertEqual(json.loads(answer), {"index": seed, "nats": 0.5, "tokens": 3})
            self.assertEqual(end, '{"end": 1}')
        again = AnswerFile(self.path, {"seed": 3})  # finished, with these settings: begun anew
        self.assertEqual(again.known, {})
        again.add({0: SCORE})
        self.assertLen(list(self.path.parent.iterdir()), 3)

    def test_garbage_between_answers(self):
        self._write(
            b'{"head": {"task": "a"}}', b'{"index": 0, "nats": 1.0, "tokens": 3}',
            b'{"index": 1, "na', b"\xff", b'{"index": "4", "nats": 0.0, "tokens": 3}',
            b'{"index": 2}', b'{"index": 3, "nats": NaN, "tokens": 3}', b"[7]",
            b'{"index": 6, "nats": 1e999, "tokens": 1}', b'{"index": 5, "nats": 0.0, "tokens": 3}',
        )  # fmt: skip
        with self.assertLogs() as said:
            answers = AnswerFile(self.path, {"task": "a"})
        self.assertLen(said.output, 1)
        self.assertIn("x.answers.jsonl: 7 lines are no answers and are left out", said.output[0])
        self.assertEqual(sorted(answers.known), [0, 5])
        answers.add({1: SCORE})
        with self.assertNoLogs():
            again = AnswerFile(self.path, {"task": "a"})
        self.assertEqual(sorted(again.known), [0, 1, 5])
