"""Profile file: buddy lists, the counts they were made from, and their provenance.

`buddies.safetensors`, beside a checkpoint, holds

    buddies                 int32[M, E, K]   lists, the best buddy first, -1 pads
    q                       float32[M, E, K] shares (BuddyMoE eq. 4)
    tau                     float32[M]       of the TAE gate, at the percentile of the profile
    tokens, activations, coactivations, weighted, entropies, following and perhaps cosines:
                            `ExpertActivity`
    plain, bounds, estimates, outputs: `TierErrors`, where tiers were measured

and in its metadata `format` and `provenance`, which is JSON.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from safetensors import safe_open
from safetensors.numpy import save

from moejax.checkpoints.safetensors_reader import StoredTensor, read_array, read_header
from moejax.errors import MoejaxError
from moejax.files.whole import check_output, write_whole
from moejax.models.config import ModelConfig
from moejax.policies.buddy_gates import percentile_tau
from moejax.policies.buddy_lists import (
    BuddyLists,
    Source,
    buddy_lists,
    conditional_coactivation,
    output_gains,
    output_similarity,
)
from moejax.routing.tier_errors import TierErrors
from moejax.routing.trace import has_format

FILE_NAME = "buddies.safetensors"
FORMAT = "moejax buddies 1"
_ERRORS = ("plain", "bounds", "estimates", "outputs")  # of `TierErrors`
_MEND = "profile the model again (python -m moejax.profile_experts)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertActivity:
    """Sums over tokens, each with a weight of its own; whole numbers are exact to 2^24."""

    tokens: jax.Array  # float32[], sum of the weights
    activations: jax.Array  # float32[M, E], A_l(i)
    coactivations: jax.Array  # float32[M, E, E], M_l(i, j), tokens that chose both; 0 where i = j
    weighted: jax.Array  # float32[M, E, E], sums of min(p~_i, p~_j) in place of counts
    entropies: jax.Array  # float32[M, bins], of TAE by `buddy_gates.entropy_bin`
    # float32[M, E, E], over tokens that chose i, of cos(f_i(x), f_j(x)); None where outputs are not
    # compared
    cosines: jax.Array | None = None
    # float32[M, E, E], tokens that chose i in layer l and j in the next sparse one; 0 for the last
    # layer. None in older profiles, which did not count it.
    following: jax.Array | None = None


def _shares(activity: ExpertActivity, source: Source, smoothing: float) -> np.ndarray:
    """Shares q from the counts on the host, float64[M, E, E]; by outputs only if they are compared.

    Args:
      smoothing: epsilon of Laplace; outputs take none.
    """
    if source == "outputs":
        if activity.cosines is None:
            raise ValueError("outputs were not compared")
        return output_similarity(np.asarray(activity.cosines), np.asarray(activity.activations))
    counts = activity.weighted if source == "weighted" else activity.coactivations
    return conditional_coactivation(np.asarray(counts), smoothing)


def _links_of(following: np.ndarray) -> np.ndarray:
    """Share float32[M, E, E] of tokens with expert i one layer earlier that choose j here.

    Rows sum to 1; to 0 for an i that was never chosen, and for the first layer.

    Args:
      following: [M, E, E], of `ExpertActivity`: tokens that chose i in layer l and j in the next.
    """
    counts = np.concatenate([np.zeros_like(following[:1]), following[:-1]]).astype(np.float64)
    total = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class BuddyProfile:
    """Profile of a model: buddy lists, thresholds, counts, and perhaps errors of tiers."""

    lists: BuddyLists  # for `policies.buddymoe.BuddyMoe`
    tau: np.ndarray  # float32[M], for `policies.buddymoe.BuddyMoe` too
    # counts, on the host; `profile_of` makes lists and tau with other options from them
    activity: ExpertActivity
    provenance: dict[str, Any]  # model, text, options, versions, date, command
    errors: TierErrors | None = None  # None where no tiers were measured

    @property
    def links(self) -> np.ndarray | None:
        """Links float32[M, E, E] for `policies.dynaexq.DynaExq`; None if the profile lacks them."""
        following = self.activity.following
        return None if following is None else _links_of(np.asarray(following))

    @property
    def gains(self) -> np.ndarray | None:
        """Gains float64[M, E, E] of outputs for BuddyMoE; None if outputs were not compared."""
        if self.activity.cosines is None:
            return None
        cosines, tokens = self.activity.cosines, self.activity.activations
        return output_gains(np.asarray(cosines), np.asarray(tokens))


def profile_of(
    activity: ExpertActivity,
    provenance: dict[str, Any],
    *,
    source: Source,
    smoothing: float,
    alpha: float | np.ndarray,
    max_buddies: int,
    percentile: float,
) -> BuddyProfile:
    """Makes lists and tau from counts.

    Args:
      provenance: without the options, which are added.
      source: where q comes from. By co-activations, an expert that was never chosen has an empty
        list.
      smoothing: epsilon of Laplace, for co-activations.
      alpha: CFT, one for all layers or [M].
      max_buddies: K_max.
      percentile: percentile of TAE, for tau; 0 is off.
    """
    q = _shares(activity, source, smoothing)
    if source != "outputs":  # of an expert that was never chosen smoothing alone would tell
        q = np.where(np.asarray(activity.activations)[:, :, None] > 0, q, 0.0)
    lists = buddy_lists(q, alpha, max_buddies)
    options = {
        "source": source,
        "smoothing": smoothing,
        "alpha": np.asarray(alpha).tolist(),
        "max_buddies": max_buddies,
        "percentile": percentile,
    }
    tau = percentile_tau(np.asarray(activity.entropies), percentile)
    return BuddyProfile(lists, tau, activity, {**provenance, "lists": options})


def summary(profile: BuddyProfile, output: Path) -> str:
    """Summarises the profile in one line, with the list sizes of section 3.3."""
    sizes, activity, of = profile.lists.sizes(), profile.activity, profile.provenance
    never = int((np.asarray(activity.activations) == 0).sum())
    least, most = sizes.min(), sizes.max()
    options = of["lists"]
    empty = ", whose lists are empty" if never and options["source"] != "outputs" else ""
    tau = f"tau {profile.tau.min():.3f} to {profile.tau.max():.3f}"
    how = f"by {options['source']}, alpha {options['alpha']}"
    by_layer = ", ".join(f"{mean:.1f}" for mean in sizes.mean(axis=1))
    return (
        f"{sizes.shape[0]} layers of {sizes.shape[1]} experts, {of['tokens']} tokens of "
        f"{of['text']['source']}; {never} experts never chosen{empty}; lists {how}, "
        f"of {least} to {most} buddies, by layer {by_layer}; {tau} "
        f"(percentile {options['percentile']:g}); written to {output}"
    )


def check_place(path: Path) -> None:
    """Raises MoejaxError unless `path` is free for a profile, or holds one."""
    check_output(path)
    if path.exists() and not has_format(path, FORMAT):
        raise MoejaxError(f"output {path} is there and is no profile; name another file")


def save_buddies(path: Path, profile: BuddyProfile) -> None:
    """Writes the profile, whole or not at all."""
    counted = dataclasses.asdict(profile.activity)
    tensors = {
        "buddies": profile.lists.ids,
        "q": profile.lists.q,
        "tau": profile.tau,
        **{name: np.asarray(value) for name, value in counted.items() if value is not None},
    }
    if profile.errors is not None:
        tensors |= {name: getattr(profile.errors, name) for name in _ERRORS}
    metadata = {"format": FORMAT, "provenance": json.dumps(profile.provenance, ensure_ascii=False)}
    content = save({k: np.asarray(v, order="C") for k, v in tensors.items()}, metadata)
    write_whole(path, content)


def load_buddies(
    path: Path, config: ModelConfig | None = None, directory: Path | None = None
) -> BuddyProfile:
    """Reads a profile; warns if it comes from another config.json of the model's family.

    Args:
      path: the file, or the checkpoint directory that holds it.

    Raises:
      MoejaxError: the file is missing, is not a profile, is broken, or belongs to another model.
    """
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise MoejaxError(f"there is no profile of experts {path}; {_MEND.replace(' again', '')}")
    stored = read_header(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        said = metadata.get("format", "none")
        raise MoejaxError(f"{path} is no profile of format {FORMAT!r} but {said!r}; {_MEND}")
    try:
        provenance = json.loads(metadata["provenance"])
    except (KeyError, ValueError, RecursionError) as error:  # the last: nested too deeply
        raise MoejaxError(f"{path} does not say where it comes from; {_MEND}") from error
    tiers = _tiers(path, provenance)
    _check(path, stored, config, tiers)
    _check_origin(path, provenance, config, directory)
    arrays = {name: read_array(tensor) for name, tensor in stored.items()}
    fields = {field.name for field in dataclasses.fields(ExpertActivity)} & arrays.keys()
    counted: dict[str, Any] = {name: arrays[name] for name in fields}
    activity = ExpertActivity(**counted)
    lists = BuddyLists(arrays["buddies"], arrays["q"])
    errors, measured = None, _ERRORS if tiers else ()
    if tiers:
        errors = TierErrors(tiers, *(arrays[name] for name in _ERRORS))
    checked = ("q", "tau", *sorted(fields), *measured)
    _check_values(path, lists, {name: arrays[name] for name in checked})
    return BuddyProfile(lists, arrays["tau"], activity, provenance, errors)


def _tiers(path: Path, provenance: Any) -> tuple[str, ...]:
    """Names of the tiers whose errors a profile has; MoejaxError where they are no names."""
    measured = provenance.get("measured", {}) if isinstance(provenance, dict) else {}
    names = measured.get("names", []) if isinstance(measured, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise MoejaxError(f"{path} does not say which tiers it measured; {_MEND}")
    return tuple(names)


def _check_origin(
    path: Path, provenance: Any, config: ModelConfig | None, directory: Path | None
) -> None:
    """Raises MoejaxError for a profile of another family; warns of another config.json."""
    counting = provenance.get("counting", {}) if isinstance(provenance, dict) else None
    if not isinstance(counting, dict):
        raise MoejaxError(f"{path} does not say where it comes from; {_MEND}")
    of, family = provenance.get("checkpoint"), provenance.get("family")
    if config is not None and family not in (None, config.family):
        raise MoejaxError(
            f"{path} is of {of}, a {family} model, and this is a {config.family} one; {_MEND}"
        )
    hashed = provenance.get("config_sha256")
    found = config_sha256(directory) if directory else None
    if None not in (hashed, found) and hashed != found:
        logging.warning("%s is of %s, whose config.json is not this model's", path, of)


def config_sha256(directory: Path) -> str | None:
    """SHA-256 of the checkpoint's config.json; None where there is none."""
    described = directory / "config.json"
    return hashlib.sha256(described.read_bytes()).hexdigest() if described.is_file() else None


def _check_values(path: Path, lists: BuddyLists, numbers: dict[str, np.ndarray]) -> None:
    """Raises MoejaxError if `BuddyLists` breaks an invariant, or a number is NaN."""
    ids, num_experts = lists.ids, lists.ids.shape[1]
    if ids.max(initial=-1) >= num_experts or ids.min(initial=-1) < -1:
        raise MoejaxError(f"{path}: buddies names an expert that there is not; {_MEND}")
    ordered = np.sort(ids, axis=-1)
    if ((np.diff(ordered, axis=-1) == 0) & (ordered[..., 1:] >= 0)).any():
        raise MoejaxError(f"{path}: buddies lists an expert twice; {_MEND}")
    if (ids == np.arange(num_experts)[None, :, None]).any():
        raise MoejaxError(f"{path}: buddies lists an expert as its own; {_MEND}")
    for name, values in numbers.items():
        if not np.isfinite(values).all():
            raise MoejaxError(f"{path}: {name} holds numbers that are not finite; {_MEND}")
        if name not in ("tau", "cosines") and (values < 0).any():
            raise MoejaxError(f"{path}: {name} holds numbers below 0; {_MEND}")
    if (np.diff(lists.q, axis=-1) > 0).any():
        raise MoejaxError(f"{path}: q rises along a list; {_MEND}")


def _check(
    path: Path, stored: dict[str, StoredTensor], config: ModelConfig | None, tiers: tuple[str, ...]
) -> None:
    """Raises MoejaxError for tensors that are missing or have another size."""
    optional = ("cosines", "following")
    names = [field.name for field in dataclasses.fields(ExpertActivity)]
    needed = [name for name in names if name not in optional] + [*(_ERRORS if tiers else ())]
    if missing := [name for name in ("buddies", "q", "tau", *needed) if name not in stored]:
        raise MoejaxError(f"{path} has no {', '.join(missing)}; {_MEND}")
    lists = stored["buddies"].shape
    if len(lists) != 3:
        raise MoejaxError(f"{path}: buddies is of shape {list(lists)}, not [M, E, K]; {_MEND}")
    num_layers, num_experts, places = lists
    if config and (num_layers, num_experts) != (len(config.moe_layers), config.num_experts):
        raise MoejaxError(
            f"{path} is of a model with {num_layers} sparse layers of {num_experts} experts, this "
            f"one has {len(config.moe_layers)} of {config.num_experts}; {_MEND}"
        )
    pairs = (num_layers, num_experts, num_experts)
    shapes = {
        "buddies": lists, "q": (num_layers, num_experts, places), "tau": (num_layers,),
        "tokens": (), "activations": pairs[:2], "coactivations": pairs, "weighted": pairs,
        "cosines": pairs, "following": pairs,
        **dict.fromkeys(_ERRORS[:3], (num_layers, num_experts, len(tiers) + 2)),
        "outputs": (num_layers,),
    }  # fmt: skip
    for name, shape in shapes.items():
        kind = np.dtype(np.int32 if name == "buddies" else np.float32)
        if name in stored and (stored[name].shape != shape or stored[name].dtype != kind):
            found = f"{stored[name].dtype}{list(stored[name].shape)}"
            raise MoejaxError(f"{path}: {name} is {found}, not {kind}{list(shape)}; {_MEND}")
