"""Recipe: a default scheme for every matrix, and ordered rules that change it.

    PATTERN[, PATTERN ...]: KEY=VALUE KEY=VALUE ...

A pattern is a class ("experts", "attention", "shared_experts", "mlp", "router", "embed", "head"), a
glob on Hugging Face names ("model.layers.0.*", "*.o_proj"), or a regular expression after "re:".
Rules apply in order, so a later one wins. Attention (or what a layer has in its place), experts,
shared experts and dense MLPs begin with the default scheme; router, embedding and head stay as they
are stored unless a rule gives them a method; what is `leaf_kinds.NEVER_PACKED` stays in any case.
"""

import dataclasses
import fnmatch
import re
from typing import Any

from moejax.errors import MoejaxError
from moejax.models.leaf_kinds import KINDS, NEVER_PACKED
from moejax.quantization.grid import Grid
from moejax.quantization.pipeline.inventory import Entry, Inventory
from moejax.weights.qtensor import CodesKind, planes_refusal
from pallas_kernels import layout

METHODS = ("none", "rtn", "hqq", "least_squares", "gptq", "autoround", "milo", "milo+")
CALIBRATED = ("gptq", "autoround")
COMPENSATED = ("milo", "milo+")
ZERO_KINDS = ("auto", "float", "integer", "symmetric")
SCALE_DTYPES = ("float16", "float32")
FACTOR_BITS = (3, 4, 8, 16)
FORMATS = ("moejax", "gptq", "compressed-tensors")
MATRIX_KINDS = tuple(kind for kind in KINDS if kind not in NEVER_PACKED)
# These choose the codes of one width.
_ONE_WIDTH = ("autoround", "milo+")
# These solve for a float zero point, so they have no other.
_FLOAT_ONLY = ("hqq", "milo")
_QUANTIZED_KINDS = ("attention", "experts", "shared_experts", "mlp")
_SPELLINGS = {"group": "group_size", "zero": "zero_kind", "scale": "scale_dtype"}
_KEYS = (
    "method", "bits", "planes", "group", "group_size", "zero", "zero_kind", "scale", "scale_dtype",
    "rank", "factor_bits", "rank_divisor",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """Scheme that quantizes one matrix."""

    method: str  # one of `METHODS`
    bits: int
    group_size: int  # 0: per channel
    zero_kind: str  # one of `ZERO_KINDS`; "auto" is what the method and the format take
    scale_dtype: str  # "float16" | "float32"
    factor_bits: int  # of the compensator; 16 is bfloat16
    rank: int | None = None  # None: what the rank policy says
    act_order: bool = False  # gptq visits inputs by falling Hessian, in groups fixed beforehand
    planes: tuple[int, ...] = ()  # widths of bit planes, rising, the last one `bits`; (): none
    plane_weight: float | None = None  # see `Grid`
    rank_divisor: int = 0  # of compensators of bit planes, see `width_ranks`

    @property
    def kind(self) -> CodesKind:
        """Stored form of the codes; of a resolved scheme."""
        return CodesKind(
            bits=self.bits,
            group_size=self.group_size,
            zero_kind=self.zero_kind,
            scale_dtype=self.scale_dtype,
            by_planes=bool(self.planes),
        )

    @property
    def grid(self) -> Grid:
        """Grid of the codes; of a resolved scheme."""
        return Grid(
            bits=self.bits,
            group_size=self.group_size,
            zero_kind=self.zero_kind,
            planes=self.planes,
            plane_weight=self.plane_weight,
        )

    def check(self) -> None:
        """Raises MoejaxError naming the first field whose value is not allowed."""
        for name, known in (
            ("method", METHODS),
            ("bits", layout.BITS),
            ("zero_kind", ZERO_KINDS),
            ("scale_dtype", SCALE_DTYPES),
            ("factor_bits", FACTOR_BITS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise MoejaxError(f"{name}={value} is none of {', '.join(map(str, known))}")
        if self.group_size < 0:
            raise MoejaxError(f"group_size={self.group_size} must be 0 (per channel) or positive")
        if self.rank is not None and self.rank < 0:
            raise MoejaxError(f"rank={self.rank} must be 0 or positive")
        if self.planes and (reason := planes_refusal(self.planes)):
            raise MoejaxError(reason)
        if self.plane_weight is not None and not 0 <= self.plane_weight <= 1:
            raise MoejaxError(f"plane_weight={self.plane_weight} must be from 0 to 1")
        if self.rank_divisor < 0:
            raise MoejaxError(f"rank_divisor={self.rank_divisor} must be 0 or positive")
        if self.planes and self.method in _ONE_WIDTH:
            raise MoejaxError(
                f"method={self.method} chooses codes of one width; planes go with rtn, hqq, "
                "least_squares, gptq and milo"
            )
        if self.planes and self.zero_kind not in ("auto", "float"):
            raise MoejaxError(f"planes have float zero points, not zero_kind={self.zero_kind}")
        if self.method in _FLOAT_ONLY and self.zero_kind not in ("auto", "float"):
            raise MoejaxError(
                f"method={self.method} solves for a float zero point; zero_kind={self.zero_kind} "
                "goes with rtn, least_squares, milo+, gptq and autoround"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecipeRule:
    """One rule of a recipe."""

    text: str
    patterns: tuple[str, ...]
    changes: dict[str, Any]

    def _matches(self, entry: Entry) -> bool:
        """Whether the rule applies to a tensor."""
        names = (entry.prefix, entry.name)
        for pattern in self.patterns:
            if pattern in KINDS:
                found = entry.kind == pattern
            elif pattern.startswith("re:"):
                found = re.fullmatch(pattern[3:], entry.prefix) is not None
            else:
                found = any(fnmatch.fnmatchcase(name, pattern) for name in names)
            if found:
                return True
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A default scheme and the rules that change it."""

    default: Scheme
    rules: tuple[_RecipeRule, ...]
    format: str


def parse_planes(text: str) -> tuple[int, ...]:
    """Parses the widths of bit planes, "2,4"; MoejaxError if they are no widths of one code."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MoejaxError(f"planes={text} must be widths, such as 2,4")
    planes = tuple(map(int, parts))
    if reason := planes_refusal(planes):
        raise MoejaxError(reason)
    return planes


def parse_rules(text: str) -> tuple[_RecipeRule, ...]:
    """Parses rules, with ";" or line ends between them; a MoejaxError names one not understood."""
    parts = [part.strip() for line in text.splitlines() for part in line.split(";")]
    return tuple(_parse_rule(part) for part in parts if part)


def schemes(recipe: Recipe, inventory: Inventory) -> dict[str, Scheme]:
    """Resolved schemes of the matrices that are quantized, by name; the others stay plain.

    "auto" zero kinds are resolved, and group size 0 is K. MoejaxError names a rule that matches
    nothing, and a matrix that its scheme or the format does not fit.
    """
    recipe.default.check()
    if recipe.format != "moejax" and inventory.config.expert_bias:
        raise MoejaxError(
            f"format={recipe.format}: no other engine loads experts of "
            f"{inventory.config.family} in that format, with their biases; take format=moejax"
        )
    used: set[str] = set()
    found = {
        entry.name: _scheme_of(recipe, entry, used)
        for entry in inventory.entries
        if entry.kind not in NEVER_PACKED
    }
    for rule in recipe.rules:
        if rule.text not in used:
            raise _useless(rule, inventory)
    by_name = {entry.name: entry for entry in inventory.entries}
    for name, scheme in found.items():
        arranged = by_name[name].arranged
        is_coded = arranged is not None and arranged[0].kind is not None
        if scheme.method == "none" and is_coded:  # a plain file would not keep its codes
            raise MoejaxError(
                f"{by_name[name].prefix} is stored in MXFP4, and method=none would write it in "
                "bfloat16, four times its bytes; give the experts a method, such as rtn"
            )
    found = {name: scheme for name, scheme in found.items() if scheme.method != "none"}
    if not found:
        raise MoejaxError("the recipe leaves every matrix as it is; nothing is to be done")
    for rule in recipe.rules:
        if "rank_divisor" in rule.changes and not any(
            scheme.planes and scheme.method in COMPENSATED and rule._matches(by_name[name])
            for name, scheme in found.items()
        ):
            raise MoejaxError(
                f"rule {rule.text!r}: rank_divisor is of milo's compensators of bit planes, and no "
                "matrix of the rule has them; leave it out"
            )
    if recipe.default.act_order and all(scheme.method != "gptq" for scheme in found.values()):
        raise MoejaxError("act_order is gptq's, and no matrix takes method=gptq")
    return {name: _resolved(scheme, by_name[name], recipe.format) for name, scheme in found.items()}


def _scheme_of(recipe: Recipe, entry: Entry, used: set[str]) -> Scheme:
    scheme = recipe.default
    if entry.kind not in _QUANTIZED_KINDS:
        scheme = dataclasses.replace(scheme, method="none")
    for rule in recipe.rules:
        if not rule._matches(entry):
            continue
        used.add(rule.text)
        scheme = dataclasses.replace(scheme, **rule.changes)
        try:
            scheme.check()
        except MoejaxError as error:
            raise MoejaxError(f"rule {rule.text!r}, {entry.prefix}: {error}") from error
        if scheme.method == "none" and set(rule.changes) - {"method"}:
            raise MoejaxError(
                f"rule {rule.text!r} concerns {entry.prefix}, which is not quantized; give the "
                "rule a method too, such as method=rtn"
            )
    return scheme


def _resolved(scheme: Scheme, entry: Entry, target: str) -> Scheme:
    """Spells out zero kind and group size."""
    if scheme.method in CALIBRATED and entry.kind in ("embed", "head", "router"):
        raise MoejaxError(
            f"{entry.prefix}: method={scheme.method} sees the inputs of attention, experts and "
            f"MLPs only; take rtn or hqq for {entry.kind}"
        )
    num_inputs = entry.shape[-1]
    group_size = scheme.group_size or num_inputs
    fitting = [str(size) for size in (32, 64, 128) if size <= num_inputs]
    fitting.append(f"0 (per channel, one group of {num_inputs})")
    if group_size > num_inputs:
        raise MoejaxError(
            f"{entry.prefix}: group_size {group_size} does not fit K = {num_inputs}; what fits is "
            f"any size up to {num_inputs}, for instance {', '.join(fitting)}"
        )
    zero_kind = scheme.zero_kind
    if zero_kind == "auto" and scheme.method == "milo+":
        zero_kind = "symmetric"  # the bytes of the zeros buy more as ranks
    elif zero_kind == "auto":
        is_float = target == "moejax" or scheme.method in _FLOAT_ONLY or scheme.planes
        zero_kind = "float" if is_float else "integer"
    resolved = dataclasses.replace(scheme, group_size=group_size, zero_kind=zero_kind)
    if target != "moejax" and (reason := _unfit(resolved, entry, target)):
        raise MoejaxError(f"{entry.prefix}: the {target} format {reason}; take format=moejax")
    return resolved


def _unfit(scheme: Scheme, entry: Entry, target: str) -> str | None:
    """Reason why other engines' formats cannot hold a scheme's result, or None."""
    num_rows, num_inputs = entry.shape
    if entry.kind == "embed":
        return "quantizes linear layers only"
    if scheme.method in COMPENSATED:
        return f"has no place for the compensators of {scheme.method}"
    if scheme.planes:
        return "has no bit planes"
    if scheme.zero_kind == "float":
        return f"has no float zero points ({scheme.method})"
    if num_inputs % scheme.group_size:
        return f"has no shorter last group (K = {num_inputs}, group_size {scheme.group_size})"
    if target == "gptq" and (num_rows % 32 or num_inputs % 32):
        return f"packs 32 inputs or outputs at a time (N = {num_rows}, K = {num_inputs})"
    if target == "gptq" and scheme.scale_dtype != "float16":
        return "has scales in float16 only"
    return None


def _parse_rule(text: str) -> _RecipeRule:
    # A regular expression may hold colons; what follows the pattern never does.
    pattern_text, colon, changes_text = text.rpartition(":")
    words = changes_text.split()
    patterns = (
        (pattern_text.strip(),)
        if pattern_text.startswith("re:")
        else tuple(part.strip() for part in pattern_text.split(","))
    )
    if not colon or not words or not all(patterns):
        raise MoejaxError(
            f"rule {text!r} is not of the form PATTERN: KEY=VALUE ..., such as "
            "'head: method=rtn bits=8'"
        )
    changes: dict[str, Any] = {}
    if {"bits", "planes"} <= {word.partition("=")[0] for word in words}:
        raise MoejaxError(f"rule {text!r}: planes are widths in place of bits; give one of them")
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise MoejaxError(f"rule {text!r}: {word!r} is none of {'=, '.join(_KEYS)}=")
        field = _SPELLINGS.get(key, key)
        if field in ("method", "zero_kind", "scale_dtype"):
            changes[field] = value
        elif field == "planes":
            planes = parse_planes(value)
            changes |= {"planes": planes, "bits": planes[-1]}
        elif value.isdecimal():
            changes[field] = int(value)
            if field == "bits":  # of codes in one array
                changes["planes"] = ()
        else:
            raise MoejaxError(f"rule {text!r}: {key}={value} must be a number")
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise MoejaxError(f"rule {text!r}: {pattern[3:]!r}: {error}") from error
    return _RecipeRule(text=text, patterns=patterns, changes=changes)


def _useless(rule: _RecipeRule, inventory: Inventory) -> MoejaxError:
    if any(rule._matches(entry) for entry in inventory.entries):
        return MoejaxError(
            f"rule {rule.text!r} concerns norms or biases, or projections that are kept as they "
            "are, never quantized"
        )
    there = {entry.kind for entry in inventory.entries}
    kinds = ", ".join(kind for kind in MATRIX_KINDS if kind in there)
    example = next(e.prefix for e in inventory.entries if e.kind in _QUANTIZED_KINDS)
    tied = "" if "head" in there else " (its head is the embedding)"
    return MoejaxError(
        f"rule {rule.text!r} matches nothing; the model has the classes {kinds}{tied}, and names "
        f"such as {example}"
    )
