"""The demo model's card, written from what the run measured."""

from collections.abc import Sequence
from typing import Any

_SOURCES = (
    ("WikiText-2 training text", "English Wikipedia articles", "CC BY-SA 3.0"),
    (
        "books",
        "English before 1925: ELTeC-eng novels, public-domain books, Standard Ebooks",
        "CC BY 4.0, public domain, CC0",
    ),
    ("textbooks", "OpenStax college textbooks", "CC BY 4.0"),
    (
        "code",
        "Python: the CPython library, pandas, statsmodels, diffusers",
        "PSF, BSD-3-Clause, BSD-3-Clause, Apache-2.0",
    ),
    (
        "math",
        "GSM8K training problems, Lean mathlib3, the Open Logic and HoTT books",
        "MIT, Apache-2.0, CC BY 4.0, CC BY-SA 3.0",
    ),
    (
        "chinese",
        "Classical-Modern (modern side), OI-wiki, Paddle documents",
        "MIT, CC BY-SA 4.0, Apache-2.0",
    ),
    ("chat", "GSM8K training problems as ChatML conversations", "MIT"),
)
_STREAM_TITLES = {
    "test/wikitext": "WikiText-2 test, raw file",
    "test/wikitext_joined": "WikiText-2 test, rows joined by blank lines",
    "valid/wikitext": "WikiText-2 validation, raw file",
    "valid/wikitext_joined": "WikiText-2 validation, rows joined",
}


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _data_table(corpus: dict[str, Any], mixture: dict[str, float], final: dict[str, float]) -> str:
    rows = []
    for title, what, licence in _SOURCES:
        name = "wikitext" if title.startswith("WikiText") else title
        size = corpus["bytes"]["wikitext_masked" if name == "wikitext" else name]
        shares = f"{mixture[name]:.0%} to {final[name]:.0%}"
        rows.append((title, what, licence, f"{size / 1e6:.1f} MB", shares))
    return _table(("stream", "text", "licence", "size", "share of a batch"), rows)


def _score_table(streams: dict[str, dict[str, float]]) -> str:
    rows = []
    for name in sorted(streams, key=lambda n: (not n.startswith("test/"), n)):
        row = streams[name]
        title = _STREAM_TITLES.get(name, f"{name.removeprefix('valid/')}, held out")
        rows.append(
            (
                title,
                f"{int(row['bytes']):,}",
                f"{row['bytes'] / row['tokens']:.2f}",
                f"{row['bits_per_byte_non_overlapping']:.4f}",
                f"{row['bits_per_byte_strided']:.4f}",
            )
        )
    return _table(("text", "bytes", "bytes a token", "bits a byte", "bits a byte, strided"), rows)


def _routing_rows(table: list[dict[str, float]]) -> str:
    rows = [
        (
            str(int(row["layer"])),
            f"{row['min_share']:.2%}",
            f"{row['max_share']:.2%}",
            f"{row['total_variation']:.2f}",
        )
        for row in table
    ]
    return _table(
        ("layer", "least loaded expert", "most loaded expert", "code against prose"), rows
    )


def write_card(
    evaluation: dict[str, Any], corpus: dict[str, Any], log: list[dict[str, Any]], notes: str
) -> str:
    """The card as Markdown.

    Args:
      evaluation: of `evaluate`.
      corpus: corpus.json of `prepare_data`.
      log: rows of the run's log.jsonl.
      notes: what was tried, Markdown; may be empty.
    """
    starts = [row for row in log if row["event"] == "start"]
    train = [row for row in log if row["event"] == "train"]
    config, start, last = starts[-1]["config"], starts[-1], train[-1]
    model, rule = config["model"], config["optimizer"]
    # Each start counts its seconds anew; the last row before the next start ends the segment.
    edges = [*[log.index(row) for row in starts[1:]], len(log)]
    seconds = sum(
        max(r["elapsed_s"] for r in log[:edge][-1:] if "elapsed_s" in r) for edge in edges
    )
    matrix_rule = "Muon on matrices, AdamW on the rest" if rule["name"] == "muon" else "AdamW"
    sections = [
        f"""# The demo model

A Qwen3-MoE small enough to ship: {start["parameters"] / 1e6:.1f} million parameters in bfloat16,
{model["num_layers"]} layers of {model["num_experts"]} experts (top-{model["experts_per_token"]},
width {model["expert_dim"]}), hidden width {model["model_dim"]}, {model["num_heads"]} query and
{model["num_kv_heads"]} key/value heads of {model["head_dim"]}, context {model["max_positions"]},
a byte-level BPE vocabulary of {model["vocab_size"]} and tied embeddings. It exists to show and
test moejax on real routing. It writes fluent nonsense: do not rely on anything it says.""",
        "## Data and licences\n\n"
        + _data_table(corpus, config["mixture"], config["final_mixture"])
        + """

Shares move from the first to the second while the learning rate falls. The training file of
WikiText-2 hides its rare words as `<unk>`; rare words drawn from books and textbooks stand in
their places, and a fifth of the seldom names are replaced through an article
(`scripts/demo_training/wikitext.py`). Training documents that share a line of 100 characters with
any held-out text were dropped: """
        + f"{sum(corpus['dropped_documents'].values())}. "
        + """The texts keep their licences; the weights are
under the project's, Apache-2.0.""",
        f"""## Training

{last["step"]:,} steps of {config["batch_size"]} x {config["context"]} tokens
({last["tokens"] / 1e9:.2f} billion), {seconds / 60:.0f} minutes on one {start["device"]} with JAX
{start["jax"]}. {matrix_rule}, learning rate {rule["learning_rate"]:g}, weight decay
{rule["weight_decay"]:g}, dropout {config["dropout"]:g}, linear decay to zero over the last
{rule["decay_fraction"]:.0%}. Load-balancing loss over the whole mixed batch, coefficient
{config["balance_coefficient"]:g}. Last training loss {last["cross_entropy"]:.3f} nats a token.

![Loss and held-out bits per byte](loss.png)""",
        f"""## Bits per byte

In windows of {evaluation["context"]} tokens that do not overlap, and in windows that advance by
{evaluation["stride"]} (every scored token sees at least
{evaluation["context"] - evaluation["stride"]} before it). Float32; the first window follows
`<|endoftext|>`; separators between documents are not scored.

"""
        + _score_table(evaluation["streams"]),
        """## Routing

Shares of the assignments over the held-out text of the five domains together, and the total
variation distance between the loads of code and of books.

"""
        + _routing_rows(evaluation["routing"]),
    ]
    if notes.strip():
        sections.append("## What was tried\n\n" + notes.strip())
    sections.append(
        """## Make it again

```
python -m scripts.demo_training.prepare_data --data=DIR --output=demo_data
python -m scripts.demo_training.train --config=configs/train_demo.py --data=demo_data \\
    --run_dir=demo_run
python -m scripts.demo_training.evaluate --config=configs/train_demo.py --data=demo_data \\
    --weights=demo_run/weights.safetensors --output=demo_run/evaluation.json
python -m scripts.demo_training.export --data=demo_data --run_dir=demo_run \\
    --notes=scripts/demo_training/notes.md
```"""
    )
    return "\n\n".join(sections) + "\n"
