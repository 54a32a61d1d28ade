"""The same tasks by `moejax.evaluate`, by moejax in lm_eval and by lm_eval's Hugging Face class.

    python -m scripts.compare_lm_eval --data=EVAL_DIR --documents=100 \
        --output=scripts/results/lm_eval.jsonl

Needs lm_eval, torch and transformers; no network. Tasks are lm_eval's own, their data replaced by
local files (the names are in `FILES`). All run in float32 on the CPU, from one directory. Ends with
status 1 where a log-likelihood differs by more than `--tolerance` nats, or an accuracy for another
reason than a tie.

Routers have ties, too: where the last expert that is chosen and the first that is not are within
rounding of each other, another batch may choose otherwise, and the scores jump. A document that
differs is therefore run once more in float64: it counts as tied, and is told apart in the rows,
only if two such logits of its routers are within `ROUTER_TIE` there.
"""

import functools
import json
import lzma
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when lm_eval imports datasets
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import jax
import lm_eval
import lm_eval.tasks
import numpy as np
import torch
import transformers
import yaml
from absl import app, flags
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from moejax import cli, evaluate, results
from moejax.evaluation.lm_eval_model import MoejaxLM

_DATA = flags.DEFINE_string("data", None, "folder of the files, .jsonl or .jsonl.xz", required=True)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "moejax/demo", "a Hugging Face directory")
_DOCUMENTS = flags.DEFINE_integer("documents", 100, "of each task, a random sample")
_TASKS = flags.DEFINE_list("tasks", None, "some of them only")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append rows to")
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-3, "nats, of a log-likelihood")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "sequences at once")

FILES = {
    "arc_easy": "arc_easy.test",
    "arc_challenge": "arc_challenge.test",
    "hellaswag": "hellaswag.validation",
    "piqa": "piqa.validation",
    "mmlu": "mmlu.test",
    "gsm8k": "gsm8k.test",
}
SHOTS = {"mmlu": ("mmlu.dev", 5), "gsm8k": ("gsm8k.train", 2)}
SUBJECT = "high_school_geography"  # one of MMLU's 57 tasks in lm_eval
ANSWER_TOKENS = 96
ROUTER_TIE = 1e-5  # of logits of a few units: what float32 leaves uncertain after some layers
PUBLISHED = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "mmlu": f"mmlu/default/mmlu_{SUBJECT}.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
}


def read(name: str) -> list[dict[str, Any]]:
    """The rows of one of the files."""
    plain = Path(_DATA.value) / f"{name}.jsonl"
    packed = plain.with_suffix(".jsonl.xz")
    text = plain.read_text() if plain.exists() else lzma.decompress(packed.read_bytes()).decode()
    return [json.loads(line) for line in text.split("\n") if line]


def as_ai2(row: dict[str, Any]) -> dict[str, Any]:
    """An ARC row in AI2's own form, which lm_eval reads."""
    labels = "ABCDEFGH"[: len(row["choices"])]
    return {
        "question": row["query"].removeprefix("Question: "),
        "choices": {"text": row["choices"], "label": list(labels)},
        "answerKey": labels[row["gold"]],
    }


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "arc_easy": as_ai2,
    "arc_challenge": as_ai2,
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(task: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Files of a sample, the task for lm_eval, and the arguments for `moejax.evaluate`."""
    rows = read(FILES[task])
    shots, fewshot = [], 0
    if task in SHOTS:
        name, fewshot = SHOTS[task]
        shots = read(name)
    if task == "mmlu":
        rows = [row for row in rows if row["subject"] == SUBJECT]
        shots = [row for row in shots if row["subject"] == SUBJECT]
    rows = random.Random(0).sample(rows, min(_DOCUMENTS.value, len(rows)))
    form = FORMS.get(task, dict)
    # lm_eval skips HellaSwag's original numbers as texts; both read the same file.
    files = {"test": write(folder / f"{task}.jsonl", [form(row) for row in rows])}
    argv = [f"--config.task={task}", f"--config.data={files['test']}"]
    if shots:
        files["train"] = write(folder / f"{task}.shots.jsonl", shots)
        argv += [f"--config.fewshot_data={files['train']}", f"--config.fewshot={fewshot}"]
    published = Path(lm_eval.tasks.__file__).parent / PUBLISHED[task]
    split = "train" if shots else None
    wanted: dict[str, Any] = {
        "include": str(published),
        "task": f"local_{task}",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {name: str(path) for name, path in files.items()}},
        "training_split": split,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": split,
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": fewshot,
    }
    if task == "gsm8k":
        until = ["Question:", "</s>", "<|im_end|>"]
        wanted["generation_kwargs"] = {
            "until": until, "do_sample": False, "temperature": 0.0, "max_gen_toks": ANSWER_TOKENS,
        }  # fmt: skip
        argv.append(f"--config.max_new_tokens={ANSWER_TOKENS}")
    return wanted, argv


def by_lm_eval(model: Any, names: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task, in the order of its file."""
    manager = lm_eval.tasks.TaskManager(include_path=str(folder))
    found = lm_eval.simple_evaluate(
        model=model, tasks=[f"local_{name}" for name in names], task_manager=manager,
        log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    samples = found["samples"]
    return {
        name: sorted(samples[f"local_{name}"], key=lambda sample: sample["doc_id"])
        for name in names
    }


def whole_texts(folder: Path, names: list[str]) -> list[tuple[int, str]]:
    """A text of each task, all of its documents together: some are longer than the context."""
    return [(i, (folder / f"{name}.jsonl").read_text()[:12000]) for i, name in enumerate(names)]


def by_evaluate(argv: list[str], folder: Path) -> list[dict[str, Any]]:
    """The answers of `moejax.evaluate`, in the order of the file."""
    output = folder / "evaluate.json"
    common = [
        f"--config.checkpoint={_CHECKPOINT.value}", f"--config.batch_size={_BATCH_SIZE.value}",
        "--config.dtype=float32", "--config.platform=cpu", f"--config.output={output}",
    ]  # fmt: skip
    status = cli.exit_status(evaluate.COMMAND, ["evaluate", *argv, *common])
    if status:
        raise SystemExit(status)
    lines = output.with_name("evaluate.answers.jsonl").read_text().split("\n")[:-1]
    answers = [json.loads(line) for line in lines]
    return sorted((a for a in answers if "index" in a), key=lambda answer: answer["index"])


def compare_choices(
    task: str, ours: list[dict[str, Any]], peers: dict[str, list[dict[str, Any]]]
) -> list[results.ResultRow]:
    """Rows of a task of multiple choice."""
    nats = [np.array(answer["log_likelihoods"]) for answer in ours]
    rows = []
    for metric in ("acc", "acc_norm"):
        if metric not in peers["lm_eval hf"][0]:
            continue
        figures = {name: [sample[metric] for sample in of] for name, of in peers.items()}
        mine = [answer[metric] for answer in ours]
        scales = [1.0] * len(ours)
        if metric == "acc_norm":
            scales = [
                np.array([len(continuation) - 1 for _, continuation in texts_of(sample)])
                for sample in peers["lm_eval hf"]
            ]
        for name, theirs in figures.items():
            for i in np.flatnonzero(np.array(theirs) != np.array(mine)):
                first, second = np.sort(nats[i] / scales[i])[::-1][:2]
                if first - second > 2 * _TOLERANCE.value:
                    raise SystemExit(f"{task}, document {i}: {metric} of {name} is {theirs[i]}")
        means = {name: float(np.mean(values)) for name, values in figures.items()}
        rows.append(row(f"{metric}, {task}, {len(ours)} documents, moejax.evaluate",
                        float(np.mean(mine)), "share", means))  # fmt: skip
    for name, samples in peers.items():
        theirs = [np.array([resp[0][0] for resp in sample["resps"]], float) for sample in samples]
        far = [float(np.abs(a - b).max()) for a, b in zip(nats, theirs, strict=True)]
        tied = {
            i: gap for i, difference in enumerate(far) if difference > _TOLERANCE.value
            and (gap := router_gap(texts_of(samples[i]))) < ROUTER_TIE
        }  # fmt: skip
        most = max(difference for i, difference in enumerate(far) if i not in tied)
        what = f"largest difference of a log-likelihood, {task}, {len(ours)} documents, {name}"
        rows.append(row(what, most, "nats", {"allowed": _TOLERANCE.value}))
        if tied:
            what = f"documents with a tied router, left out of it, {task}, {name}"
            found = {"largest gap of two logits": max(tied.values())}
            found["largest difference, nats"] = max(far[i] for i in tied)
            rows.append(row(what, len(tied), "documents", found))
        if most > _TOLERANCE.value:
            print(f"{task}: {name} differs by {most} nats", file=sys.stderr)
    return rows


def texts_of(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) of each choice of one of lm_eval's samples."""
    arguments = sample["arguments"]
    if isinstance(arguments, dict):
        return [(pair["arg_0"], pair["arg_1"]) for pair in arguments.values()]
    return [(pair[0], pair[1]) for pair in arguments]


@functools.cache
def exact_model() -> tuple[Any, Any]:
    """Transformers' model in float64, and its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        _CHECKPOINT.value, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    return model, transformers.AutoTokenizer.from_pretrained(_CHECKPOINT.value)


def router_gap(pairs: list[tuple[str, str]]) -> float:
    """The least difference of the last chosen and the first other logit of any router."""
    model, tokenizer = exact_model()
    chosen, least = model.config.num_experts_per_tok, math.inf
    for context, continuation in pairs:
        with torch.no_grad():
            ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
            logits = model(ids, output_router_logits=True).router_logits
        for layer in logits:
            ordered = layer.double().sort(dim=-1, descending=True).values
            least = min(least, float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))
    return least


def compare_texts(
    task: str, ours: list[dict[str, Any]], peers: dict[str, list[dict[str, Any]]]
) -> list[results.ResultRow]:
    """Rows of a task of generation: shares of answers that are the same to the letter."""
    rows = []
    for name, samples in peers.items():
        # lm_eval has a sample a filter; the texts are the same.
        texts = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
        same = [answer["text"] == texts[i] for i, answer in enumerate(ours)]
        what = f"same text, {task}, {len(ours)} documents, moejax.evaluate and {name}"
        rows.append(row(what, float(np.mean(same)), "share", {}))
        for filtered, metric in (
            ("strict-match", "exact_match_strict"), ("flexible-extract", "exact_match_flexible"),
        ):  # fmt: skip
            theirs = np.mean([s["exact_match"] for s in samples if s["filter"] == filtered])
            mine = float(np.mean([answer[metric] for answer in ours]))
            what = f"{metric}, {task}, {len(ours)} documents, moejax.evaluate"
            rows.append(row(what, mine, "share", {name: float(theirs)}))
    return rows


def row(what: str, figure: float, unit: str, baseline: dict[str, float]) -> results.ResultRow:
    """One figure as the other scripts write it."""
    return results.ResultRow(
        what=f"{what}, {Path(_CHECKPOINT.value).name}, float32", figure=figure, unit=unit,
        baseline=baseline, device=results.describe_device(jax.devices("cpu")[0]),
        versions=results.package_versions("jax", "torch", "transformers", "lm_eval"),
        date=results.today(), command=results.command_line(),
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Runs all, prints and writes rows."""
    del argv
    names = _TASKS.value or list(FILES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = {}
        for task in names:
            config, arguments[task] = prepare(task, folder)
            (folder / f"{task}.yaml").write_text(yaml.safe_dump(config))
        how = {"pretrained": _CHECKPOINT.value, "dtype": "float32", "device": "cpu"}
        ours = {task: by_evaluate(arguments[task], folder) for task in names}
        models: dict[str, Callable[[], Any]] = {
            "lm_eval moejax": lambda: MoejaxLM(**how, batch_size=_BATCH_SIZE.value),
            "lm_eval hf": lambda: HFLM(**how, batch_size=_BATCH_SIZE.value),
        }
        found, rolling = {}, {}
        texts = whole_texts(folder, names)
        for name, make in models.items():
            model = make()
            found[name] = by_lm_eval(model, names, folder)
            asked = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in texts]
            rolling[name] = model.loglikelihood_rolling(asked)
    far = np.abs(np.subtract(*rolling.values())) / [len(text) for _, text in texts]
    what = f"largest difference of a rolling log-likelihood, {len(texts)} texts, lm_eval moejax"
    rows = [row(what, float(far.max()), "nats a character", {"allowed": _TOLERANCE.value})]
    for task in names:
        peers = {name: of[task] for name, of in found.items()}
        compare = compare_texts if task == "gsm8k" else compare_choices
        rows += compare(task, ours[task], peers)
    for of in rows:
        beside = ", ".join(f"{name} {value:.6g}" for name, value in of.baseline.items())
        print(f"{of.what}: {of.figure:.6g} {of.unit} ({beside})")
    if _OUTPUT.value:
        results.append_rows(Path(_OUTPUT.value), rows)
    if any(of.unit.startswith("nats") and of.figure > _TOLERANCE.value for of in rows):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
