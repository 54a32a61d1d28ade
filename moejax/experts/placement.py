"""Where experts lie on a mesh that hands them out."""

import numpy as np

from moejax.checkpoints.open import Checkpoint
from moejax.devices import asked_experts, mesh_size
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.routing.profile_file import FILE_NAME, load_buddies
from moejax.weights.handed_out import hand_out, rows_of_each


def num_handed_out(mesh: str | int, config: ModelConfig) -> int:
    """Experts of a layer that each device of a mesh holds whole; 0: shares of all.

    Raises:
      MoejaxError: the model has none, or too few for the devices.
    """
    count, more = mesh_size(mesh), asked_experts(mesh)
    if more is None or count == 1:
        return 0
    if not config.moe_layers:
        raise MoejaxError(f"mesh={mesh}: the model has no experts to hand out")
    return rows_of_each(config.num_experts, count, more)


def handed_out(
    mesh: str | int, config: ModelConfig, load: np.ndarray | None = None
) -> np.ndarray | None:
    """Experts of each device, int32[n, M, R]; None where the mesh hands none out.

    Args:
      load: [M, E], how often each expert is needed; None: alike.
    """
    if not (rows := num_handed_out(mesh, config)):
        return None
    load = np.ones((len(config.moe_layers), config.num_experts)) if load is None else load
    return hand_out(load, mesh_size(mesh), rows)


def load_of(checkpoint: Checkpoint) -> np.ndarray | None:
    """Load of each expert in the profile beside the checkpoint, [M, E]; None without one."""
    if not (checkpoint.directory / FILE_NAME).is_file():
        return None
    profile = load_buddies(checkpoint.directory, checkpoint.config, checkpoint.directory)
    return np.asarray(profile.activity.activations, np.float64)
