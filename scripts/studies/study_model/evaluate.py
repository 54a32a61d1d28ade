"""Measures a trained study model beside its parent, on held-out text.

    python -m scripts.studies.study_model.evaluate --config=configs/train_study_model.py \
        --parent=PARENT --corpus=CORPUS --run_dir=RUN  # gpu

Reads RUN/model, writes RUN/evaluation.json: perplexity and bits a byte of both models in windows
that do not overlap, KL and greedy agreement, the use of experts by layer and domain, and the cosine
of experts' outputs, replicas of one shard apart from others.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import app, flags
from ml_collections import config_flags

from moejax.checkpoints.reader import CheckpointReader
from moejax.files.whole import write_json
from moejax.models.hf.config import read_model_config
from scripts.demo_training.corpus import read_corpus
from scripts.studies.study_model.distillation import split_weights
from scripts.studies.study_model.experiment import open_experiment
from scripts.studies.study_model.measure import make_meter, measure_stream

_CONFIG = config_flags.DEFINE_config_file("config", None, "the experiment", lock_config=True)
_PARENT = flags.DEFINE_string("parent", None, "Hugging Face directory of the parent", required=True)
_CORPUS = flags.DEFINE_string("corpus", None, "packed text", required=True)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "directory of the run", required=True)


def evaluate(
    config: ml_collections.ConfigDict, parent: Path, corpus: Path, run_dir: Path
) -> dict[str, Any]:
    """Measures every held-out stream; fields of evaluation.json."""
    experiment = open_experiment(config, parent, read_corpus(corpus))
    steps, model = experiment.step, run_dir / "model"
    reader = CheckpointReader(model, read_model_config(model), dtype=steps.dtype)
    leaves, _ = split_weights(reader.load(jax.devices()[0], progress=False))
    trained = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    parts = experiment.parts()
    meter = make_meter(steps.student, steps.parent, steps.dtype, steps.attention)
    streams = {}
    for name, ids in experiment.held_out(config.evaluation_tokens):
        measures = measure_stream(meter, trained, parts, ids, context=steps.context)
        stream = experiment.corpus.streams[name]
        streams[name] = measures.fields(stream.num_bytes / stream.length)
    return {"context": steps.context, "device": jax.devices()[0].device_kind, "streams": streams}


def main(argv: list[str]) -> None:
    """Measures by the flags."""
    del argv
    parent, corpus, run_dir = (Path(of.value) for of in (_PARENT, _CORPUS, _RUN_DIR))
    write_json(run_dir / "evaluation.json", evaluate(_CONFIG.value, parent, corpus, run_dir))


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
