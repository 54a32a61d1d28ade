"""Orbax save and restore of the loaded form: the stacked leaves as they are in memory.

moejax.json            the model's shape and the leaves' dtype; written last
weights/               the leaves, by Orbax
generation_config.json eos tokens, and the sampling that it asks for; and the tokenizer's files
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from moejax.devices import choose_device
from moejax.errors import MoejaxError
from moejax.files.whole import write_json
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.hf.config import read_json
from moejax.text.tokenizer import TOKENIZER_FILES, read_eos_ids
from moejax.weights.qtensor import Weight

_DESCRIPTION = "moejax.json"
_WEIGHTS = "weights"
_FORMAT = 2
# Chunks are copied one by one; without a limit a leaf of many GiB is one chunk.
_CHUNK_BYTES = 256 * 2**20


def is_orbax_directory(directory: Path) -> bool:
    """True for a directory that `save_orbax` finished."""
    return (directory / _DESCRIPTION).exists()


def save_orbax(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, Weight],
    *,
    tokenizer_from: Path | None = None,
) -> None:
    """Writes what `Checkpoint.load` returned, to be restored without conversion.

    Args:
      directory: made if need be; what `save_orbax` wrote there before is replaced.
      weights: plain leaves (MoejaxError otherwise) of one dtype.
      tokenizer_from: a checkpoint whose tokenizer and eos tokens are kept beside the weights.
    """
    plain = {n: leaf for n, leaf in weights.items() if isinstance(leaf, jax.Array)}
    if packed := [name for name in weights if name not in plain]:
        raise MoejaxError(
            f"{packed[0]} is quantized, and Orbax directories hold plain weights; keep the "
            "quantized checkpoint, which loads without conversion"
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _DESCRIPTION).unlink(missing_ok=True)
    save_args = {leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for leaf in plain}
    with _checkpointer() as checkpointer:
        checkpointer.save(
            (directory / _WEIGHTS).absolute(),
            args=ocp.args.PyTreeSave(plain, save_args=save_args),
            force=True,
        )
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).exists():
                shutil.copyfile(tokenizer_from / name, directory / name)
        eos_ids = list(read_eos_ids(tokenizer_from, vocab_size=config.vocab_size))
        settings = tokenizer_from / "generation_config.json"
        fields = read_json(settings) if settings.exists() else {}
        write_json(directory / settings.name, fields | {"eos_token_id": eos_ids})
    description = {
        "format": _FORMAT,
        "dtype": str(plain["final_norm"].dtype),
        "config": dataclasses.asdict(config),
    }
    write_json(directory / _DESCRIPTION, description)


def read_orbax_description(directory: Path) -> tuple[ModelConfig, jnp.dtype]:
    """Shape and stored dtype of a model; raises MoejaxError if moejax.json is not understood."""
    fields = read_json(directory / _DESCRIPTION)
    if fields.get("format") != _FORMAT:
        raise MoejaxError(
            f"{directory / _DESCRIPTION} has format {fields.get('format')!r}, this version reads "
            f"{_FORMAT}; save it again from the original checkpoint"
        )
    try:
        return ModelConfig.from_fields(fields["config"]), jnp.dtype(fields["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise MoejaxError(f"{directory / _DESCRIPTION} is broken: {error}") from error


def load_orbax(
    directory: Path, *, dtype: jnp.dtype | None = None, device: jax.Device | None = None
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """Restores what `save_orbax` wrote, in the stored dtype and on JAX's device by default.

    MoejaxError if a file is missing or broken, or the leaves do not fit moejax.json.
    """
    config, stored = read_orbax_description(directory)
    sharding = jax.sharding.SingleDeviceSharding(device or choose_device("auto"))
    shapes = weight_shapes(config)
    leaves = {
        leaf: jax.ShapeDtypeStruct(shape, leaf_dtype(leaf, dtype or stored), sharding=sharding)
        for leaf, shape in shapes.items()
    }
    path = (directory / _WEIGHTS).absolute()
    try:
        with _checkpointer() as checkpointer:
            saved = checkpointer.metadata(path).item_metadata.tree
            found = {leaf: tuple(metadata.shape) for leaf, metadata in saved.items()}
            if found == shapes:
                restore_args = ocp.checkpoint_utils.construct_restore_args(leaves)
                args = ocp.args.PyTreeRestore(leaves, restore_args=restore_args)
                return config, checkpointer.restore(path, args=args)
    except Exception as error:  # Orbax and TensorStore raise bare exceptions for broken files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise MoejaxError(f"cannot restore {path}: {reason}; save it again") from error
    differing = sorted(
        f"{leaf} {found.get(leaf, 'missing')}, expected {shapes.get(leaf, 'none')}"
        for leaf in found.keys() | shapes.keys()
        if found.get(leaf) != shapes.get(leaf)
    )
    raise MoejaxError(
        f"{path} does not fit {_DESCRIPTION}: {'; '.join(differing[:3])}"
        f"{'; ...' if len(differing) > 3 else ''}; save it again"
    )


def _checkpointer() -> ocp.Checkpointer:
    """Orbax without compression.

    Weights hardly compress, and restoring 0.8 GiB took 3.5 s with it and 1.2 s without (two CPU
    cores, orbax-checkpoint 0.12.8, 2026-11-21).
    """
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
