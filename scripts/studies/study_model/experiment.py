"""An experiment: its model's shapes, the weights to start from, its data."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from moejax.checkpoints.save import save_hf_checkpoint
from moejax.errors import MoejaxError
from moejax.models.attention import AttentionImpl
from moejax.models.hf.config import read_json
from scripts.demo_training.batches import CropSource, crop_source
from scripts.demo_training.corpus import Corpus
from scripts.demo_training.objective import Weights
from scripts.studies.study_model.distillation import Distillation, Parts, split_weights
from scripts.studies.study_model.routers import domain_rows
from scripts.studies.study_model.upcycle import (
    Leaves,
    as_float32,
    parent_config,
    read_parent,
    replicated,
    replicated_config,
)

MODELS = ("model", "parent_as_experts")  # directories that a run makes
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's config beside the parent and the packed text that it starts from."""

    config: ml_collections.ConfigDict
    step: Distillation
    parent_directory: Path
    parent_leaves: Leaves  # as the files have them
    corpus: Corpus

    @property
    def streams(self) -> list[str]:
        """Training streams in the order of `step.mixture`."""
        return list(self.config.mixture)

    def parts(self) -> Parts:
        """The weights that do not change, on the device."""
        leaves = {
            name: jnp.asarray(leaf, self.step.dtype) for name, leaf in self.parent_leaves.items()
        }
        experts, shared = split_weights(leaves)
        return Parts(shared, experts)

    def source(self) -> CropSource:
        """The training streams on the device."""
        return crop_source(self.corpus, self.streams, self.step.context + 1)

    def trained(self, parts: Parts) -> Weights:
        """Routers and experts to start from, float32: replicas of the parent's shards."""
        config, context = self.config, self.step.context
        count = max(1, config.router_tokens // context)
        crops, replicas = [], []
        for name in self.streams:
            ids = self.corpus.stream(name)
            places = np.linspace(0, len(ids) - context, count).astype(np.int64)
            crops.append(ids[places[:, None] + np.arange(context)].astype(np.int32))
            replicas += [config.replicas[name]] * count
        rows = domain_rows(
            parts.shared | parts.parent,
            self.step.parent,
            np.concatenate(crops),
            np.array(replicas),
            num_replicas=config.num_replicas,
            scale=config.router_scale,
            attention=self.step.attention,
        )
        trained, _ = split_weights(as_float32(replicated(self.parent_leaves, rows)))
        return {name: jnp.asarray(leaf) for name, leaf in trained.items()}

    def held_out(self, most_tokens: int) -> Iterator[tuple[str, np.ndarray]]:
        """Names and first tokens of the streams that are not trained on."""
        for name in self.corpus.streams:
            if "/" in name:
                yield name, self.corpus.stream(name)[:most_tokens]

    def save(self, directory: Path, experts: Weights, *, is_parent: bool = False) -> None:
        """Writes a Hugging Face directory in bfloat16: these experts, the rest the parent's."""
        ids = read_json(self.parent_directory / "config.json")
        names = [name for name in _TOKENIZER_FILES if (self.parent_directory / name).is_file()]
        save_hf_checkpoint(
            directory,
            self.step.parent if is_parent else self.step.student,
            self.parent_leaves | {name: np.asarray(leaf) for name, leaf in experts.items()},
            dtype=jnp.bfloat16,
            token_ids={name: ids[name] for name in _TOKEN_IDS if ids.get(name) is not None},
            extra_files={name: (self.parent_directory / name).read_bytes() for name in names},
        )


def open_experiment(config: ml_collections.ConfigDict, parent: Path, corpus: Corpus) -> Experiment:
    """Reads the parent; MoejaxError where it or the config does not fit.

    Args:
      config: of configs/train_study_model.py.
      parent: a Hugging Face directory of a Llama model.
      corpus: of `prepare_data`.
    """
    missing = set(config.mixture) - set(corpus.train_names())
    if missing:
        raise MoejaxError(f"the packed text has no streams {sorted(missing)}; see config.mixture")
    if abs(sum(config.mixture.values()) - 1.0) > 1e-6:
        raise MoejaxError(f"config.mixture sums to {sum(config.mixture.values())}, not to 1")
    used = {config.replicas[name] for name in config.mixture}
    if used != set(range(config.num_replicas)):
        raise MoejaxError(
            f"config.replicas gives streams to replicas {sorted(used)}; give each of "
            f"{config.num_replicas} some"
        )
    on_gpu = jax.default_backend() == "gpu"
    auto: AttentionImpl = "cudnn" if on_gpu and config.dtype == "bfloat16" else "xla"
    one = parent_config(parent, config.num_shards)
    step = Distillation(
        student=replicated_config(one, config.num_replicas),
        parent=one,
        dtype=jnp.dtype(config.dtype),
        attention=auto if config.attention == "auto" else config.attention,
        batch_size=config.batch_size,
        context=config.context,
        mixture=tuple(float(share) for share in config.mixture.values()),
        parent_share=config.parent_share,
        balance_coefficient=config.balance_coefficient,
        router_rate=config.router_rate,
        adam_b2=config.adam_b2,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
    )
    return Experiment(config, step, parent, read_parent(parent, one), corpus)
