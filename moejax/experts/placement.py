"""Where experts lie on a mesh that hands them out."""

import numpy as np

from moejax.checkpoints.open import Checkpoint
from moejax.devices import asked_experts, mesh_size
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.routing.profile_file import FILE_NAME, load_buddies


def _rows_of_each(num_experts: int, count: int, more: int = 0) -> int:
    """R, experts of a layer that each of `count` devices holds.

    Args:
      more: beyond ceil(E / n), for copies of the hottest.

    Raises:
      MoejaxError: there are fewer experts than devices, or more is asked for than there are.
    """
    if num_experts < count:
        raise MoejaxError(
            f"{num_experts} experts of a layer are too few for a mesh of {count} that hands them "
            "out: take a smaller mesh"
        )
    even = -(-num_experts // count)
    if even + more > num_experts:
        raise MoejaxError(
            f"experts+{more} is more than a layer has: {num_experts}, of which each of {count} "
            f"devices has {even}; the most is experts+{num_experts - even}"
        )
    return even + more


def _hand_out(load: np.ndarray, count: int, rows: int) -> np.ndarray:
    """Chooses the experts of each device: int32[n, M, R], its hottest first.

    Every row has an expert: those beyond E go to copies, one after another of the expert with the
    largest load a copy. Copies go to the emptiest devices, each to another one; then the hottest
    of the others to the device of the least load (Graham 1969).

    Args:
      load: [M, E], how often each expert is needed; ones where that is not known.
      count: n.
      rows: R, of `_rows_of_each`.
    """
    layers = np.asarray(load, np.float64)
    return np.stack([_layer_handed_out(of, count, rows) for of in layers], axis=1)


def _layer_handed_out(load: np.ndarray, count: int, rows: int) -> np.ndarray:
    """int32[n, R] of one layer, load float64[E]."""
    copies = np.ones(len(load), np.int64)
    for _ in range(count * rows - len(load)):
        copies[np.argmax(np.where(copies < count, load / copies, -1.0))] += 1
    share = load / copies
    held: list[list[int]] = [[] for _ in range(count)]
    carried = np.zeros(count)
    for expert in np.lexsort((-share, -copies)).tolist():
        is_copied = copies[expert] > 1
        room = [rows - len(own) for own in held]
        order = sorted(
            (device for device in range(count) if room[device]),
            key=lambda i: (-room[i] if is_copied else 0, carried[i], -room[i]),
        )
        for device in order[: copies[expert]]:
            held[device].append(expert)
            carried[device] += share[expert]
    by_heat = [sorted(own, key=lambda expert: (-share[expert], expert)) for own in held]
    return np.asarray(by_heat, np.int32)


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
    return _rows_of_each(config.num_experts, count, more)


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
    return _hand_out(load, mesh_size(mesh), rows)


def load_of(checkpoint: Checkpoint) -> np.ndarray | None:
    """Load of each expert in the profile beside the checkpoint, [M, E]; None without one."""
    if not (checkpoint.directory / FILE_NAME).is_file():
        return None
    profile = load_buddies(checkpoint.directory, checkpoint.config, checkpoint.directory)
    return np.asarray(profile.activity.activations, np.float64)
