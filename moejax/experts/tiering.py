"""Chooses the policy of a run and the stored forms of its experts."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moejax.checkpoints.experts import have_planes
from moejax.checkpoints.formats.registry import quantization_fields
from moejax.checkpoints.open import Checkpoint, open_checkpoint
from moejax.checkpoints.verify import verify_checkpoint
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.policies.base import AnyPolicy
from moejax.policies.make import make_policy, parts_of
from moejax.policies.settings import check_number
from moejax.quantization.pipeline.recipe import Scheme
from moejax.routing.profile_file import BuddyProfile, load_buddies
from pallas_kernels import mxfp4

MADE = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}  # tiers that can be made at load
MXFP4 = "mxfp4"  # the name of a shape's experts in that form
PLAIN = ("bf16", "bfloat16", "float16", "float32")  # names of experts that are in no codes
STORED = "stored"  # the name of the only tier where none are named
QUANTIZERS = ("rtn", "hqq", "least_squares")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiering:
    """The expert policy, and the tiers that experts are stored in."""

    policy: str | AnyPolicy = "on_demand"  # its name, "module:Class", or the policy
    # for a named policy; those not given have its defaults. For buddymoe, `lists` is the path of a
    # profile ("": beside the checkpoint), as `links` is of dynaexq, and `gains` and `tae_tau` may
    # be "profile"; with such a tau, `tae_temperature` is the profile's.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # in order of falling fidelity, each NAME=CHECKPOINT, another checkpoint of the same model; or
    # NAME alone: int8, int4, int3 and int2 are made of the model's own plain or MXFP4 experts while
    # they are read, or are prefixes of its bit planes; any other name is the checkpoint as it is.
    # (): the checkpoint as it is.
    tiers: tuple[str, ...] = ()
    # experts of a layer that each tier caches; (): see `budget.make_budget`
    slots: tuple[int, ...] = ()
    quantizer: str = "hqq"  # makes tiers at load: rtn, hqq or least_squares
    group_size: int = 64  # inputs of a group of such a tier
    # every expert of every tier stays on the device, and the slots are tables only: the tokens of
    # the policy, not its times
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.quantizer not in QUANTIZERS:
            said = ", ".join(QUANTIZERS)
            raise MoejaxError(f"policy.quantizer={self.quantizer!r} must be one of {said}")
        if self.group_size < 1:
            raise MoejaxError(f"policy.group_size={self.group_size} must be at least 1")
        names = [tier.name for tier in self.stored()]
        if len(set(names)) < len(names):
            raise MoejaxError(f"policy.tiers: {', '.join(names)} has a name twice")

    def stored(self) -> tuple["StoredTier", ...]:
        """The tiers; MoejaxError for an entry that is neither NAME nor NAME=CHECKPOINT."""
        found = []
        for entry in self.tiers or (STORED,):
            name, _, source = entry.partition("=")
            if not name or (not source and "=" in entry):
                raise MoejaxError(
                    f"policy.tiers: {entry!r} is neither NAME=CHECKPOINT nor one of "
                    f"{', '.join(MADE)} to be made at load"
                )
            like_made = re.fullmatch(r"int\d*", name) or not name.isidentifier()
            if not source and like_made and name not in MADE:
                raise MoejaxError(
                    f"policy.tiers: {entry!r} cannot be made at load: {', '.join(MADE)} can; "
                    "another form is NAME=CHECKPOINT, and several are ('int4','int2')"
                )
            found.append(StoredTier(name, source))
        bare = [tier.name for tier in found if not tier.source and tier.bits is None]
        if len(bare) > 1:
            raise MoejaxError(
                f"policy.tiers: {', '.join(bare)} all mean the checkpoint as it is; "
                f"{', '.join(MADE)} can be made at load, another form is NAME=CHECKPOINT"
            )
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class StoredTier:
    """One form of the experts; `source` is a checkpoint, "" for the run's own."""

    name: str
    source: str

    @property
    def bits(self) -> int | None:
        """Bits of codes made at load; None: the experts are as they are stored."""
        return None if self.source else MADE.get(self.name)

    def bits_of_shape(self, stored: int) -> int:
        """Bits of a weight by the tier's name, where there are no files.

        Args:
          stored: bits of a tier that stands for the checkpoint as it is.
        """
        if self.source:
            raise MoejaxError(
                f"policy.tiers: a shape takes no checkpoint {self.source}: {self.name} alone"
            )
        named = {**MADE, **dict.fromkeys(PLAIN, 16), MXFP4: mxfp4.BITS, STORED: stored}
        if self.name not in named:
            raise MoejaxError(
                f"policy.tiers: {self.name!r} says no bits, which a shape's tiers do by their "
                f"names: {PLAIN[0]}, {MXFP4}, {', '.join(MADE)}, or {STORED} for the shape's own"
            )
        return named[self.name]


def made_scheme(tiering: Tiering, bits: int) -> Scheme:
    """Scheme of a tier that is made at load."""
    return Scheme(
        method=tiering.quantizer,
        bits=bits,
        group_size=tiering.group_size,
        zero_kind="float",
        scale_dtype="float16",
        factor_bits=8,
    )


def shape_is_mxfp4(asked: bool, tiers: Sequence[StoredTier]) -> bool:
    """Whether a shape's codes of 4 bits are those of MXFP4: if asked for, or named by a tier."""
    names = [tier.name for tier in tiers]
    found = asked or MXFP4 in names
    if found and "int4" in names:
        raise MoejaxError("policy.tiers: of a shape in mxfp4 there is no tier int4 beside it")
    return found


def open_like(source: str, own: Checkpoint, option: str, read_bits: int = 0) -> Checkpoint:
    """Opens a checkpoint of the run's own model ("": its own); errors begin with `option`."""
    if not source:
        return own
    found = open_checkpoint(source, read_bits)
    if found.config != own.config:
        raise MoejaxError(f"{option}{source} holds another model than {own.directory}")
    return found


def open_tier(tier: StoredTier, own: Checkpoint) -> tuple[StoredTier, Checkpoint]:
    """Opens a tier's checkpoint; of experts by bit planes int4 and the like are their prefixes."""
    found = open_like(tier.source, own, "policy.tiers: ")
    fields = quantization_fields(found.directory) if found.is_quantized else None
    if tier == StoredTier(MXFP4, "") and (fields or {}).get("quant_method") != MXFP4:
        raise MoejaxError(
            f"policy.tiers: {MXFP4!r} means the checkpoint as it is, but {found.directory} has no "
            "experts in MXFP4: give them another name, such as 'bf16'"
        )
    if (bits := MADE.get(tier.name)) in found.planes and have_planes(found):
        tier = StoredTier(tier.name, tier.source or str(found.directory))
        found = dataclasses.replace(found, read_bits=bits)
    return tier, found


def verify_all(checkpoint: str, disk_path: str, tiering: Tiering | None) -> list[str]:
    """Verifies every checkpoint of a run: its own, the disk copy ("": none), the tiers'."""
    names = [checkpoint, disk_path, *(t.source for t in (tiering.stored() if tiering else ()))]
    return [verify_checkpoint(name) for name in dict.fromkeys(filter(None, names))]


class _Chosen(NamedTuple):
    """A policy, and how often its profile chose each expert, int[M, E]; None without one."""

    policy: AnyPolicy
    activations: Any = None


def choose(
    tiering: Tiering, directory: Path | None = None, config: ModelConfig | None = None
) -> _Chosen:
    """Makes the policy of a run, with its profile where it reads one.

    Args:
      directory: the checkpoint's, where a profile may lie.
      config: of the model; None: any.
    """
    if not isinstance(tiering.policy, str):
        return _Chosen(tiering.policy)
    name, given = tiering.policy, dict(tiering.settings)
    parts = parts_of(name, given)
    if "dynaexq" in parts and isinstance(given.get("links", ""), str):
        _take_links(given, directory, config)
    if "buddymoe" not in parts or not isinstance(given.get("lists", ""), str):
        return _Chosen(make_policy(name, **given))
    profile = _load_profile(given.pop("lists", ""), "buddymoe", "lists", directory, config)
    if isinstance(given.get("tae_tau"), str) and given["tae_tau"] == "profile":
        _take_temperature(given, profile)
    for setting, value in (("gains", profile.gains), ("tae_tau", profile.tau)):
        if isinstance(given.get(setting), str) and given[setting] == "profile":
            if value is None:
                raise MoejaxError(
                    f"{setting}=profile, but the profile compared no outputs: make it with "
                    "--config.outputs=True"
                )
            given[setting] = value
    policy = make_policy(name, lists=profile.lists, **given)
    return _Chosen(policy, profile.activity.activations)


def _take_links(given: dict[str, Any], directory: Path | None, config: ModelConfig | None) -> None:
    """Replaces a profile's path by its cross-layer shares, where they are used."""
    text = given.pop("links", "")
    if not given.get("foresight") or given.get("foresee_by") != "links":
        if text:
            raise MoejaxError(f"links={text} is for foresight above 0 with foresee_by=links")
        return
    profile = _load_profile(text, "foresee_by=links", "links", directory, config)
    if profile.links is None:
        raise MoejaxError(
            f"{text or directory}: the profile does not say which experts follow which; profile "
            "the model again (python -m moejax.profile_experts)"
        )
    given["links"] = profile.links


def _load_profile(
    text: str, who: str, setting: str, directory: Path | None, config: ModelConfig | None
) -> BuddyProfile:
    """Reads the profile at a path; "": that beside the checkpoint."""
    path = Path(text).expanduser() if text else directory
    if path is None:
        raise MoejaxError(f"{who} needs a profile: {setting}=FILE of moejax.profile_experts")
    return load_buddies(path, config, directory)


def _take_temperature(given: dict[str, Any], profile: BuddyProfile) -> None:
    """Sets the temperature at which the profile found its tau, or raises MoejaxError."""
    found = profile.provenance.get("counting", {}).get("temperature", 1.0)
    check_number("the profile's temperature", found, 0, above=True)
    if given.setdefault("tae_temperature", found) != found:
        raise MoejaxError(
            f"tae_temperature={given['tae_temperature']}, but tae_tau=profile is of "
            f"temperature {found:g}: leave the setting out, or profile again"
        )
