"""Perplexity by `moejax.evaluate` beside a loop over transformers that shares no code with it.

    python -m scripts.compare_perplexity --text=wiki.test.raw --max_tokens=32768 \
        --output=scripts/results/evaluation.jsonl

Both in float32 on the CPU, from one directory, by both protocols that papers use. Ends with status
1 where they differ by more than `--tolerance`, relative.
"""

import json
import lzma
import math
import sys
import tempfile
from pathlib import Path

import jax
import torch
import transformers
from absl import app, flags

from moejax import cli, evaluate
from moejax.files import result_rows as results

_TEXT = flags.DEFINE_string("text", None, "WikiText's raw rows, plain or .xz", required=True)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "moejax/demo", "a Hugging Face directory")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 32768, "of the text's beginning; 0: all")
_WINDOW = flags.DEFINE_integer("window", 2048, "tokens that a prediction sees")
_STRIDES = flags.DEFINE_list("strides", ["2048", "512"], "the protocols")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append rows to")
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-4, "relative, of a perplexity")


def read_rows(path: Path) -> list[str]:
    """The rows of WikiText: a blank line is an empty one, any other keeps its newline."""
    stored = path.read_bytes()
    text = (lzma.decompress(stored) if path.suffix == ".xz" else stored).decode()
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return ["" if not line.strip() else line + "\n" for line in lines]


def perplexity(model: torch.nn.Module, ids: torch.Tensor, window: int, stride: int) -> float:
    """exp of the mean of -log p of every token but the first.

    Windows of `window` inputs begin every `stride` tokens; each predicts what follows its inputs,
    and of a token that several windows predict the first one counts.
    """
    nats = torch.full((len(ids),), math.nan, dtype=torch.float64)
    for begin in range(0, len(ids) - 1, stride):
        if not nats[begin + 1 :].isnan().any():
            break
        inputs = ids[begin : begin + window]
        targets = ids[begin + 1 : begin + 1 + window]
        with torch.no_grad():
            logits = model(inputs[None]).logits[0, : len(targets)].double()
        scores = -torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
        place = nats[begin + 1 : begin + 1 + len(targets)]
        place[place.isnan()] = scores[place.isnan()]
        print(f"{begin + len(inputs)} of {len(ids)} tokens", end="\r", file=sys.stderr)
    return math.exp(float(nats[1:].mean()))


def main(argv: list[str]) -> None:
    """Measures both ways, prints and writes rows."""
    del argv
    text = "\n\n".join(read_rows(Path(_TEXT.value)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(_CHECKPOINT.value)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])[: _MAX_TOKENS.value or None]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        _CHECKPOINT.value, dtype=torch.float32
    ).eval()
    rows, farthest = [], 0.0
    for stride in map(int, _STRIDES.value):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "x.json"
            status = cli.exit_status(
                evaluate.COMMAND,
                ["evaluate", f"--config.checkpoint={_CHECKPOINT.value}",
                 f"--config.text={_TEXT.value}", "--config.join=wikitext",
                 f"--config.window={_WINDOW.value}", f"--config.stride={stride}",
                 f"--config.max_tokens={_MAX_TOKENS.value}", "--config.batch_size=2",
                 "--config.dtype=float32", "--config.platform=cpu", f"--config.output={output}"],
            )  # fmt: skip
            if status:
                sys.exit(status)
            ours = json.loads(output.read_text())["perplexity"]
        theirs = perplexity(model, ids, _WINDOW.value, stride)
        farthest = max(farthest, abs(ours / theirs - 1))
        what = f"perplexity, {Path(_CHECKPOINT.value).name}, float32, WikiText-2 test, first "
        what += f"{len(ids)} tokens, window {_WINDOW.value}, stride {stride}"
        rows.append(
            results.ResultRow(
                what=what,
                figure=ours,
                unit="perplexity",
                baseline={"transformers": theirs},
                device=results.describe_device(jax.devices("cpu")[0]),
                versions=results.package_versions("jax", "torch", "transformers"),
                date=results.today(),
                command=results.command_line(),
            )
        )
        print(f"{what}: {ours:.6f}, transformers {theirs:.6f}, {ours / theirs - 1:+.2e}")
    if _OUTPUT.value:
        results.append_rows(Path(_OUTPUT.value), rows)
    if farthest > _TOLERANCE.value:
        sys.exit(f"they differ by {farthest:.2e}, which is more than {_TOLERANCE.value:g}")


if __name__ == "__main__":
    app.run(main)
