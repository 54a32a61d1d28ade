"""Writes the study model's card from what its run measured.

    python -m scripts.studies.study_model.card --run_dir=RUN  # gpu

Reads log.jsonl, evaluation.json, corpus.json and the task results under RUN/tasks, as far as there
are any; writes RUN/model/README.md.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import app, flags

from moejax.files.whole import write_whole
from scripts.demo_training.plotting import read_log
from scripts.studies.study_model.experiment import MODELS
from scripts.studies.tables.paper import markdown_table

_RUN_DIR = flags.DEFINE_string("run_dir", None, "directory of the run", required=True)

_SOURCES = """WikiText-2 (CC BY-SA 3.0), English books before 1925 (CC BY 4.0, public domain, CC0),
OpenStax textbooks (CC BY 4.0), Python (PSF, BSD-3-Clause, Apache-2.0), GSM8K's training problems,
mathlib3 and logic books (MIT, Apache-2.0, CC BY 4.0, CC BY-SA 3.0), modern Chinese (MIT,
CC BY-SA 4.0, Apache-2.0)"""


def task_scores(run_dir: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Score and standard error by task and model directory, in per cent.

    The score is accuracy normalised by length where the task has it, else accuracy.
    """
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    for model in MODELS:
        for path in sorted((run_dir / "tasks" / model).rglob("results_*.json")):
            for task, row in json.loads(path.read_text())["results"].items():
                name = "acc_norm,none" if "acc_norm,none" in row else "acc,none"
                error = float(row[name.replace(",", "_stderr,")])
                scores.setdefault(task, {})[model] = (100 * float(row[name]), 100 * error)
    return scores


def _score_rows(scores: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[list[str]]:
    rows = [
        [task, *(f"{of[m][0]:.1f} ± {of[m][1]:.1f}" if m in of else "not run" for m in MODELS)]
        for task, of in scores.items()
    ]
    whole = [of for of in scores.values() if set(of) == set(MODELS)]
    if whole:
        means = [f"{np.mean([of[model][0] for of in whole]):.1f}" for model in MODELS]
        rows.append(["mean", *means])
    return rows


def write_card(run_dir: Path) -> str:
    """The card as Markdown."""
    log = read_log(run_dir / "log.jsonl")
    start = next(row for row in log if row["event"] == "start")
    last = [row for row in log if row["event"] == "train"][-1]
    seconds = sum(row["elapsed_s"] for row in log if row["event"] == "stop")
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    config, streams = start["config"], evaluation["streams"]
    shards, replicas = config["num_shards"], config["num_replicas"]
    mixture = ", ".join(f"{name} {share:.0%}" for name, share in config["mixture"].items())
    text_rows = [
        [
            name,
            f"{row['tokens']:,}",
            f"{row['perplexity']:.2f}",
            f"{row['parent_perplexity']:.2f}",
            f"{row['divergence']:.3f}",
            f"{row['agreement']:.1%}",
        ]
        for name, row in streams.items()
    ]
    names = list(streams)
    layers = range(len(streams[names[0]]["top_quarter"]))
    use_rows = [
        [
            str(layer),
            *(f"{streams[name]['top_quarter'][layer]:.0%}" for name in names),
            *(
                f"{np.mean([streams[name][of][layer] for name in names]):.2f}"
                for of in ("replica_cosine", "other_cosine")
            ),
        ]
        for layer in layers
    ]
    later = ", ".join(f"{name} {streams[name]['top_quarter_later']:.0%}" for name in names)
    cosine = np.mean([streams[name]["replica_cosine"] for name in names])
    scores = task_scores(run_dir)
    sections = [
        f"""# Study model

A Mixture-of-Experts model of the family Mixtral with {start["parameters"] / 1e6:.0f} million
parameters, made from the dense SmolLM2-135M-Instruct (Apache-2.0): each MLP was cut into {shards}
shards and each shard copied {replicas} times, {shards * replicas} experts of which {shards} run;
expert e is a replica of shard e mod {shards}.
Routers and experts were trained; embeddings, attention and norms are the parent's. It exists to
measure what policies and quantizers do to a model that knows something.""",
        f"""## Training

{last["step"]:,} steps of {config["batch_size"]} x {config["context"]} tokens
({last["tokens"] / 1e6:.0f} million), {seconds / 60:.0f} minutes with loading and compiling on one
{start["device"]} with JAX {start["jax"]}. Loss: {config["parent_share"]:g} of KL from the parent's
distribution, {1 - config["parent_share"]:g} of next tokens, load balance times
{config["balance_coefficient"]:g}. Adam in float32 at {config["learning_rate"]:g}, routers at
{config["router_rate"]:g} of it, linear decay over the last {config["decay_fraction"]:.0%}. Each
replica's router rows start from the text of its own domains, so part of the use of experts by
domain is given, not found. Last: KL {last["divergence"]:.3f}, cross entropy
{last["cross_entropy"]:.3f} nats a token.""",
        f"## Data\n\nShares of a batch: {mixture}. Sources: {_SOURCES}.",
        f"""## Held-out text

Windows of {evaluation["context"]} tokens that do not overlap, after `<|endoftext|>`.

"""
        + markdown_table(
            ("text", "tokens", "perplexity", "parent", "KL to parent", "same greedy token"),
            text_rows,
        ),
        """## Tasks

Zero-shot by lm_eval, per cent with standard error; the parent runs as experts that all run.

"""
        + (
            markdown_table(("task", "study model", "parent"), _score_rows(scores))
            if scores
            else "Not run."
        ),
        f"""## Use of experts

Share of a layer's assignments that the busiest quarter of experts takes, by held-out text
({1 / replicas:.0%} to 100 %), then the mean cosine of experts' outputs on one input: replicas of
one shard, and experts of different shards. Mean of the later half of the layers: {later}. Mean
cosine of replicas: {cosine:.2f}.

"""
        + markdown_table(("layer", *names, "replicas", "others"), use_rows),
    ]
    return "\n\n".join(sections) + "\n"


def main(argv: list[str]) -> None:
    """Writes the card."""
    del argv
    run_dir = Path(_RUN_DIR.value)
    write_whole(run_dir / "model" / "README.md", write_card(run_dir))


if __name__ == "__main__":
    app.run(main)
