"""moejax behind lm_eval: arguments, and the same scores as lm_eval's Hugging Face class."""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from moejax import MoejaxError, lm_eval
from tests import tiny_engine
from tests.folder_case import FolderTestCase

ROOT = Path(__file__).parents[1]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "then", "rests"]


def samples() -> dict[str, list[dict[str, Any]]]:
    """Rows of the files of a data folder; ARC's are of the form without AI2's labels."""
    arc, hellaswag, piqa, mmlu, gsm8k = [], [], [], [], []
    for i in range(7):
        a, b, c, d = WORDS[i : i + 4]
        arc.append({"query": f"Question: {a} {b}?", "choices": [c, d, a], "gold": i % 3})
        hellaswag.append(
            {"activity_label": a, "ctx_a": f"{b} [title] {c}.", "ctx_b": d, "ctx": f"{b} {c}. {d}",
             "endings": [f"{a} {c}.", f"[step] {d}", b, f"{c} {b} {a}"], "label": str(i % 4)}
        )  # fmt: skip
        piqa.append({"goal": f"{a} {b}", "sol1": f"{c} {d}", "sol2": d, "label": i % 2})
        mmlu.append(
            {"question": f" {a} {b}", "subject": "high_school_geography",
             "choices": [a, b, c, d], "answer": i % 4}
        )  # fmt: skip
        gsm8k.append({"question": f"{a} {i}?", "answer": f"{b} {i} #### {i}"})
    return {
        "arc_easy.train": arc,
        "hellaswag.train": hellaswag,
        "piqa.train": piqa,
        "arc_easy.test": arc,
        "arc_challenge.test": arc,
        "hellaswag.validation": hellaswag,
        "piqa.validation": piqa,
        "mmlu.test": mmlu,
        "mmlu.dev": [{**row, "question": f"so {row['question']}"} for row in mmlu],
        "gsm8k.test": gsm8k,
        "gsm8k.train": [{**row, "question": f"so {row['question']}"} for row in gsm8k],
    }


def run(*arguments: str) -> str:
    """The last words of the command, run here: its error, or "" where it has none."""
    argv = ["lm_eval", *arguments]
    with warnings.catch_warnings(), mock.patch.object(sys, "argv", argv):
        warnings.simplefilter("ignore")  # lm_eval's dependencies do as they are imported
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                lm_eval.main()
            except SystemExit as ended:
                return str(ended.code)
    return ""


class LmEvalTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from lm_eval import tasks

        class FewTasks(tasks.TaskManager):
            """Knows the tasks that are run here: reading the others takes ten seconds."""

            def __init__(self, metadata: Any = None, **_: Any):
                root = Path(tasks.__file__).parent
                folders = [root / name for name in ("arc", "hellaswag", "piqa", "mmlu", "gsm8k",
                                                    "sciq")]  # fmt: skip
                super().__init__(include_path=folders, include_defaults=False, metadata=metadata)

        cls.enterClassContext(mock.patch.object(tasks, "TaskManager", FewTasks))
        cls.folder = cls.class_folder()
        cls.checkpoint = cls.folder / "tiny"
        tiny_engine.load_tiny_engine(cls.checkpoint, eos_ids=(3,))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "#"}
        (cls.checkpoint / "tokenizer_config.json").write_text(json.dumps(names))
        for name, rows in samples().items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (cls.folder / f"{name}.jsonl").write_text(text)

    def run_tasks(self, model: str, *arguments: str) -> str:
        """Runs the command on the checkpoint; everything is float32 on the CPU."""
        of_model = f"pretrained={self.checkpoint},dtype=float32"
        return run(
            "--model", model, "--model_args", of_model, "--device", "cpu", "--batch_size", "3",
            *arguments,
        )  # fmt: skip

    @pytest.mark.slow
    def test_the_scores_are_those_of_hugging_face_models(self):
        tasks = ("arc_easy", "hellaswag", "piqa", "mmlu_high_school_geography", "gsm8k")
        found = {}
        for model in ("moejax", "hf"):
            output = self.folder / model
            error = self.run_tasks(
                model, "--tasks", ",".join(tasks), "--data", str(self.folder), "--num_fewshot", "2",
                "--gen_kwargs", "max_gen_toks=8", "--log_samples", "--output_path", str(output),
            )  # fmt: skip
            self.assertEqual(error, "")
            for task in tasks:
                [path] = output.rglob(f"samples_{task}_*.jsonl")
                rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
                rows = [row for row in rows if row["filter"] in ("none", "strict-match")]
                self.assertLen(rows, 7)
                found[model, task] = sorted(rows, key=lambda row: row["doc_id"])
        for task in tasks:
            for ours, theirs in zip(found["moejax", task], found["hf", task], strict=True):
                self.assertEqual(ours["arguments"], theirs["arguments"])
                if task == "gsm8k":
                    self.assertEqual(ours["resps"], theirs["resps"])
                    continue
                nats = [[float(resp[0][0]) for resp in of["resps"]] for of in (ours, theirs)]
                np.testing.assert_allclose(*nats, atol=1e-3)
                self.assertEqual(ours["acc"], theirs["acc"])

    def under_limits(self) -> tuple[str, ...]:
        return (
            "--model", "moejax", "--tasks", "piqa", "--limit", "2", "--data", str(self.folder),
            "--model_args", f"pretrained={self.checkpoint},memory.slots=4",
        )  # fmt: skip

    @pytest.mark.slow
    def test_the_command_in_its_own_process(self):
        environment = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, "-m", "moejax.lm_eval", *self.under_limits()], cwd=ROOT,
            env=os.environ | environment, capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertRegex(done.stdout, r"piqa .*\|acc ")

    def test_what_a_data_folder_lacks_is_named(self):
        lacks = "error: arc_challenge takes 3 examples .* 'train', .* no arc_challenge.train.jsonl"
        for arguments, said in (
            (("--tasks", "arc_challenge", "--num_fewshot", "3", "--data", str(self.folder)), lacks),
            (("--tasks", "sciq", "--data", str(self.folder)), "error: sciq asks .* 'test'"),
            (("--tasks", "piqa", "--data", "no/where"), "error: --data no/where is no folder"),
        ):
            self.assertRegex(self.run_tasks("moejax", *arguments), said)

    def test_files_of_a_data_set(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moejax.evaluation.local_data import LocalData

        def task(name: str, path: str, part: str | None = None, **changed: Any) -> Any:
            known = {"test_split": "test", "validation_split": None, "training_split": None}
            shots = types.SimpleNamespace(split="dev")
            return types.SimpleNamespace(
                task=name, dataset_path=path, dataset_name=part, num_fewshot=None,
                fewshot_config=shots, **(known | changed),
            )  # fmt: skip

        data = LocalData(self.folder)
        arc = data._splits(task("arc_easy", "allenai/ai2_arc", "ARC-Easy"))["test"][1]
        self.assertEqual(
            arc,
            {"question": "quick brown?", "answerKey": "B",
             "choices": {"label": ["A", "B", "C"], "text": ["fox", "jumps", "quick"]}},
        )  # fmt: skip
        mmlu = task("mmlu_x", "cais/mmlu", "high_school_geography")
        splits = LocalData(self.folder, 5)._splits(mmlu)
        self.assertEqual({name: len(of) for name, of in splits.items()}, {"dev": 7, "test": 7})
        self.assertLen(splits["train"], 0)  # a split that is not there has no rows
        with self.assertRaisesRegex(MoejaxError, "no rows whose subject is 'anatomy'"):
            data._splits(task("mmlu_anatomy", "cais/mmlu", "anatomy"))
        with self.assertRaisesRegex(MoejaxError, "gsm8k asks the questions of the split 'val'"):
            data._splits(task("gsm8k", "openai/gsm8k", "main", test_split="val"))

    def test_arguments(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moejax.evaluation.lm_eval_model import MoejaxLM, _read_arguments

        config = _read_arguments(
            {"pretrained": "x", "policy.name": "dymoe", "policy.tiers": "int4+int2",
             "memory.slots": 3, "batch_size": "4"}
        )  # fmt: skip
        self.assertEqual((config.checkpoint, config.batch_size), ("x", 4))
        self.assertEqual((config.policy.name, config.policy.tiers), ("dymoe", ("int4", "int2")))
        self.assertEqual(config.memory.slots, 3)
        with self.assertRaisesRegex(MoejaxError, "did you mean 'dtype'"):
            _read_arguments({"dtpe": "float32"})
        model = MoejaxLM(pretrained=str(self.checkpoint), device="cpu", batch_size="auto")
        self.assertEqual((model.batch_size, model.max_length), (8, 256))
        self.assertEqual((model.eot_token_id, model.prefix_token_id), (3, 3))
        [expected] = model.engine.generate("the quick", max_new_tokens=6)
        asked = mock.Mock(args=("the quick", {"until": ["zz"], "max_gen_toks": 6}))
        self.assertEqual(model.generate_until([asked], disable_tqdm=True), [expected.text])
        asked = mock.Mock(args=("the quick", {"num_beams": 2}))
        with self.assertRaisesRegex(MoejaxError, r"does not have: \['num_beams'\]"):
            model.generate_until([asked], disable_tqdm=True)

    def test_without_lm_eval(self):
        missing = {"lm_eval": None, "moejax.evaluation.lm_eval_model": None}
        with (
            mock.patch.dict(sys.modules, missing),
            mock.patch.object(sys, "argv", ["lm_eval"]),
            self.assertRaisesRegex(SystemExit, r"lm_eval is not installed .* '\.\[evaluation"),
        ):
            lm_eval.main()

    def test_errors_of_ours_are_one_line(self):
        def cli_evaluate() -> None:
            raise MoejaxError("config.dtpe is not there;\ndid you mean 'dtype'?")

        fake = types.SimpleNamespace(cli_evaluate=cli_evaluate)
        known = {"lm_eval": fake, "lm_eval.__main__": fake}
        known["moejax.evaluation.lm_eval_model"] = fake
        ended = self.assertRaises(SystemExit)
        argv = mock.patch.object(sys, "argv", ["lm_eval"])
        with argv, mock.patch.dict(sys.modules, known), ended as ended:
            lm_eval.main()
        self.assertEqual(
            ended.exception.code, "error: config.dtpe is not there; did you mean 'dtype'?"
        )


class DocsTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_tasks_of_the_page_are_lm_evals(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from lm_eval import tasks
        page = (ROOT / "docs/evaluation.md").read_text("utf-8")
        lists = re.findall(r"--tasks ([\w,-]+)", page)
        named = {name for names in lists for name in names.split(",")} - {"NAME"}
        self.assertGreater(len(named), 6)
        # A task's folder has the beginning of its name; reading all folders takes ten seconds.
        folders = [
            path for path in Path(tasks.__file__).parent.iterdir()
            if path.is_dir() and any(name.startswith(path.name) for name in named)
        ]  # fmt: skip
        manager = tasks.TaskManager(include_path=folders, include_defaults=False)
        self.assertContainsSubset(named, manager.all_tasks)


class ModelArgumentsTest(parameterized.TestCase):
    """On what stands in for lm_eval: its base class and its registry."""

    def setUp(self):
        super().setUp()
        ours = "moejax.evaluation.lm_eval_model"
        names = ("lm_eval", "lm_eval.models", "lm_eval.api", "lm_eval.api.model",
                 "lm_eval.api.registry")  # fmt: skip
        kept = {name: sys.modules.pop(name, None) for name in (*names, ours)}
        self.addCleanup(self._put_back, kept)
        sys.modules.update({name: types.ModuleType(name) for name in names})
        sys.modules["lm_eval.api.model"].TemplateLM = type("TemplateLM", (), {})
        sys.modules["lm_eval.api.registry"].register_model = lambda name: lambda model: model
        self.module = importlib.import_module(ours)

    def _put_back(self, kept: dict[str, types.ModuleType | None]) -> None:
        """Only these: what was imported meanwhile must not be imported twice."""
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module

    @parameterized.parameters(
        ({"dtpe": "float32"}, "did you mean 'dtype'"),
        ({"memory.slots": "many"}, r"model arguments: memory.slots='many' must be"),
        ({"batch_size": "auto:4"}, r"model arguments: batch_size='auto:4' must be"),
        ({"pretrained": "no/where"}, "no/where"),
        ({"max_gen_toks": "x"}, "max_gen_toks=x must be a number of tokens"),
        ({"config": "no/such.py"}, "config file 'no/such.py' does not exist"),
    )
    def test_what_is_wrong(self, arguments, said):
        with self.assertRaisesRegex(MoejaxError, said):
            self.module.MoejaxLM(**arguments)
