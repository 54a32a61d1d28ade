"""Scores a trained demo model: bits per byte, and how its routers load the experts.

    python -m scripts.demo_training.evaluate --config=configs/train_demo.py --data=demo_data \
        --weights=demo_run/weights.safetensors --output=demo_run/evaluation.json

Float32 arithmetic on the bfloat16 weights. Every held-out stream is scored in windows of the
model's context that do not overlap, and in windows that advance by `--stride`.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.flax
from absl import app, flags
from ml_collections import config_flags

from moejax.models.config import ModelConfig
from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training.scoring import cut_windows, make_scorer, routing_table, score_windows

_CONFIG = config_flags.DEFINE_config_file("config", None, "the experiment", lock_config=True)
_DATA = flags.DEFINE_string("data", None, "packed corpus", required=True)
_WEIGHTS = flags.DEFINE_string("weights", None, "flat weights", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write", required=True)
_STRIDE = flags.DEFINE_integer("stride", 512, "advance of the overlapping windows")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "windows at once")

DOMAINS = ("books", "textbooks", "code", "math", "chinese")
CODE, PROSE = "code", "books"


def main(argv: list[str]) -> None:
    """Scores all held-out streams and writes one JSON file."""
    del argv
    config = _CONFIG.value
    model = ModelConfig.from_fields(config.model.to_dict())
    corpus = corpus_lib.read_corpus(Path(_DATA.value))
    weights = safetensors.flax.load_file(_WEIGHTS.value)
    weights = {name: leaf.astype(jnp.float32) for name, leaf in weights.items()}
    jax.config.update("jax_default_matmul_precision", "highest")
    scorer = make_scorer(model, jnp.float32, "xla")

    streams: dict[str, Any] = {}
    loads = {}
    for name, stream in corpus.streams.items():
        if "/" not in name:
            continue
        row: dict[str, Any] = {"bytes": stream.num_bytes, "tokens": stream.length}
        for key, stride in (("non_overlapping", config.context), ("strided", _STRIDE.value)):
            windows = cut_windows(corpus.stream(name), config.context, stride)
            score = score_windows(scorer, weights, windows, batch_size=_BATCH_SIZE.value)
            row[f"bits_per_byte_{key}"] = score.bits / stream.num_bytes
            if stride == config.context and name.removeprefix("valid/") in DOMAINS:
                loads[name.removeprefix("valid/")] = score.expert_counts
        streams[name] = row
        print(name, json.dumps(row), flush=True)
    table = routing_table(loads, CODE, PROSE)
    for entry in table:
        print(json.dumps(entry))
    result = {
        "context": config.context,
        "stride": _STRIDE.value,
        "streams": streams,
        "routing": table,
        "expert_counts": {name: load.astype(int).tolist() for name, load in loads.items()},
    }
    Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
