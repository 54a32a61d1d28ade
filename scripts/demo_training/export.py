"""Makes the packaged demo checkpoint from a finished, evaluated run.

    python -m scripts.demo_training.export --data=demo_data --run_dir=demo_run

Reads weights.safetensors, log.jsonl and evaluation.json of the run, tokenizer.json and corpus.json
of the data. Writes a Hugging Face directory with its loss curve; the card is written by hand.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import safetensors.flax
from absl import app, flags

from moejax.checkpoints.save import save_hf_checkpoint
from moejax.models.config import ModelConfig
from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training import plotting

_DATA = flags.DEFINE_string("data", None, "directory of prepare_data", required=True)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "directory of the run", required=True)
_OUTPUT = flags.DEFINE_string("output", "moejax/demo", "directory to write")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer_config(max_positions: int) -> dict[str, object]:
    """Settings that transformers needs beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "bos_token": None,
        "eos_token": corpus_lib.CHAT_END,
        "pad_token": corpus_lib.END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def main(argv: list[str]) -> None:
    """Writes the Hugging Face directory."""
    del argv
    data, run, output = Path(_DATA.value), Path(_RUN_DIR.value), Path(_OUTPUT.value)
    log = plotting.read_log(run / "log.jsonl")
    starts = [row for row in log if row["event"] == "start"]
    fields = starts[-1]["config"]["model"]
    model = ModelConfig.from_fields(fields)
    plotting.draw_loss_curve(run / "log.jsonl", run / "loss.png")
    settings = tokenizer_config(model.max_positions)
    save_hf_checkpoint(
        output,
        model,
        safetensors.flax.load_file(run / "weights.safetensors"),
        dtype=jnp.bfloat16,
        token_ids={
            "eos_token_id": [corpus_lib.CHAT_END_ID, corpus_lib.END_OF_TEXT_ID],
            "pad_token_id": corpus_lib.END_OF_TEXT_ID,
        },
        extra_files={
            "tokenizer.json": (data / "tokenizer.json").read_bytes(),
            "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
            "loss.png": (run / "loss.png").read_bytes(),
            "evaluation.json": (run / "evaluation.json").read_bytes(),
        },
    )
    size = sum(path.stat().st_size for path in output.iterdir() if path.is_file())
    print(f"{output}: {size:,} bytes in all")


if __name__ == "__main__":
    app.run(main)
