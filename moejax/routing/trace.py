"""Routing traces: what the routers said while a model ran, in a file that is small.

A trace is a safetensors file of version 2. Its rows are tokens, in the order in which they ran.
Axes: N rows, M sparse layers, A experts a token, E experts, P experts that are foreseen.

| tensor | dtype, shape | what |
| --- | --- | --- |
| `step` | int32[N] | call of the model; its rows ran at once |
| `sequence` | int32[N] | whose token it is |
| `position` | int32[N] | in its sequence |
| `phase` | uint8[N] | 0 prefill, 1 decode |
| `ids` | uint8 or uint16[N, M, A] | the router's choice, by falling probability |
| `weights` | float16[N, M, A] | of the sum of the chosen experts |
| `predicted_ids` | as `ids` [N, M - 1, P] | at will: of layer m + 1, as foreseen at m |
| `predicted_probabilities` | float16[N, M - 1, P] | theirs, falling |
| `probabilities` | float16[N, M, E] | at will: the full softmax |
| `importance` | float16[N, M] | at will: attention that a token received |

Its metadata are strings: `format` "moejax-trace", `version` "2", `num_experts`, `checksum` of the
header and all tensors (version 1 has none and is read too), at will
`steps_per_call` (most decode steps of one call: between two, experts move) and `tiers` (forms of
the experts of falling fidelity and the bytes of one, "int4=2654208, int2=1474560"), and facts for
people: `model`, `text`, `date`, `versions`, `command`. Qwen3-30B-A3B takes 1.2 KB a token without
the parts at will, which are there or not for the whole file.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import safetensors

from moejax.errors import MoejaxError
from moejax.files.checksums import checksum
from moejax.files.whole import check_output

FORMAT, VERSION = "moejax-trace", "2"
WITHOUT_CHECKSUM = "1"  # a version that is read still
PREFILL, DECODE = 0, 1
STEPS_PER_CALL, TIERS = "steps_per_call", "tiers"  # facts that the replay reads
_MOST_STEPS = 2**16
REQUIRED = ("step", "sequence", "position", "phase", "ids", "weights")
OPTIONAL = ("predicted_ids", "predicted_probabilities", "probabilities", "importance")
_DTYPES: dict[str, np.dtype] = {
    **dict.fromkeys(("step", "sequence", "position"), np.dtype(np.int32)),
    **dict.fromkeys(("weights", *OPTIONAL[1:]), np.dtype(np.float16)),
    "phase": np.dtype(np.uint8),
}


def id_dtype(num_experts: int) -> np.dtype:
    """Smallest dtype of expert ids."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace in memory; its fields are the file's tensors, None for missing ones.

    Invariants (`check`): the shapes and dtypes of the module's table; steps do not fall; the rows
    of a step are of one phase; ids are experts, and a token's are different from each other;
    weights, probabilities and importance are finite and not negative, and a token's weights not
    all 0; there are tokens, layers and experts.
    """

    num_experts: int
    step: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    phase: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    predicted_ids: np.ndarray | None = None
    predicted_probabilities: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    importance: np.ndarray | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def num_layers(self) -> int:
        """Number of sparse layers, M."""
        return self.ids.shape[1]

    @property
    def width(self) -> int:
        """Experts per token, A."""
        return self.ids.shape[2]

    @property
    def steps_per_call(self) -> int | None:
        """Most decode steps in one call of the model; None if unknown."""
        return int(self.facts[STEPS_PER_CALL]) if STEPS_PER_CALL in self.facts else None

    @property
    def tiers(self) -> dict[str, int] | None:
        """Bytes of an expert in each form, of falling fidelity; None if unknown."""
        if TIERS not in self.facts:
            return None
        pairs = (tier.partition("=") for tier in self.facts[TIERS].split(", "))
        return {name: int(nbytes) for name, _, nbytes in pairs}

    def tensors(self) -> dict[str, np.ndarray]:
        """Arrays of the trace, by name."""
        found = {name: getattr(self, name) for name in (*REQUIRED, *OPTIONAL)}
        return {name: array for name, array in found.items() if array is not None}

    def check(self) -> None:
        """Raises MoejaxError naming the first invariant that does not hold."""
        if self.ids.ndim != 3:
            raise MoejaxError(
                f"ids have shape {self.ids.shape}, expected [tokens, layers, experts]"
            )
        rows, layers, width = self.ids.shape
        names = ("tokens", "layers", "experts of a token", "experts")
        for name, count in zip(names, (rows, layers, width, self.num_experts), strict=True):
            if count < 1:
                raise MoejaxError(f"there are no {name}; record it again")
        if self.num_experts > 2**16:
            raise MoejaxError(f"there are {self.num_experts} experts; ids have 16 bits")
        foreseen = (rows, layers - 1, None)
        shapes: dict[str, tuple[int | None, ...]] = {
            **dict.fromkeys(("step", "sequence", "position", "phase"), (rows,)),
            "weights": (rows, layers, width),
            "predicted_ids": foreseen,
            "predicted_probabilities": foreseen,
            "probabilities": (rows, layers, self.num_experts),
            "importance": (rows, layers),
        }
        dtypes = _DTYPES | dict.fromkeys(("ids", "predicted_ids"), id_dtype(self.num_experts))
        for name, array in self.tensors().items():
            wanted = shapes.get(name, self.ids.shape)
            same = len(wanted) == array.ndim and all(
                size in (None, found) for size, found in zip(wanted, array.shape, strict=True)
            )
            if not same or array.dtype != dtypes[name]:
                expected = ", ".join("*" if size is None else str(size) for size in wanted)
                raise MoejaxError(
                    f"{name} is {array.dtype}{list(array.shape)}, expected "
                    f"{dtypes[name]}[{expected}]"
                )
        if (self.predicted_ids is None) != (self.predicted_probabilities is None):
            raise MoejaxError("predicted_ids and predicted_probabilities go together")
        self._check_facts()
        self._check_values()

    def _check_facts(self) -> None:
        per_call = self.facts.get(STEPS_PER_CALL, "1")
        if not per_call.isdecimal() or not 1 <= int(per_call) <= _MOST_STEPS:
            raise MoejaxError(f"{STEPS_PER_CALL} is {per_call!r}, no number of steps")
        for tier in self.facts.get(TIERS, "stored=1").split(", "):
            name, _, nbytes = tier.partition("=")
            if not name or not nbytes.isdecimal() or not int(nbytes):
                raise MoejaxError(f"{TIERS} has {tier!r}, which is not NAME=BYTES")

    def _check_values(self) -> None:
        if (np.diff(self.step) < 0).any():
            raise MoejaxError("a step is smaller than the one before it")
        if self.phase.max(initial=0) > DECODE:
            raise MoejaxError(f"phase {self.phase.max()} is neither 0 (prefill) nor 1 (decode)")
        if (np.diff(self.phase.astype(np.int8))[np.diff(self.step) == 0] != 0).any():
            raise MoejaxError("a step has rows of both phases")
        for name in ("weights", *OPTIONAL[1:]):
            array = getattr(self, name)
            if array is not None and not (np.isfinite(array) & (array >= 0)).all():
                raise MoejaxError(f"{name} hold numbers that are negative or not finite")
        if not self.weights.any(axis=-1).all():
            raise MoejaxError("weights of a token are all 0")
        for name in ("ids", "predicted_ids"):
            array = getattr(self, name)
            if array is None or not array.size:
                continue
            if array.max() >= self.num_experts:
                raise MoejaxError(f"{name} holds {array.max()}, there are {self.num_experts}")
            if (np.diff(np.sort(array, axis=-1).astype(np.int32), axis=-1) == 0).any():
                raise MoejaxError(f"{name} of a token hold an expert twice")


def _seal(facts: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """Checksum of metadata, and of each tensor's name, dtype, shape and bytes."""
    found = {n: (str(a.dtype), list(a.shape), checksum([a])) for n, a in tensors.items()}
    said = json.dumps([sorted(facts.items()), sorted(found.items())])
    return f"{zlib.crc32(said.encode()):08x}"


def check_place(path: Path) -> None:
    """Raises MoejaxError unless `path` is free for a trace, or holds one."""
    check_output(path, "trace")
    if path.exists() and not has_format(path, FORMAT):
        raise MoejaxError(f"trace {path} is there and is no trace; name another file")


def has_format(path: Path, name: str) -> bool:
    """Whether a file's header names a format of ours, or the file is empty."""
    if not path.is_file() or not path.stat().st_size:
        return path.is_file()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get("format") == name
    except safetensors.SafetensorError:
        return False


class TraceWriter:
    """Collects rows of a trace in memory; `close` writes the file, whole.

    An exception inside the context leaves no file.
    """

    def __init__(self, path: Path, num_experts: int, facts: Mapping[str, str] | None = None):
        """Begins a trace at a path that `check_place` allows."""
        check_place(path)
        # A path among them may have bytes that are no text.
        known = {name: of.encode("utf-8", "replace").decode() for name, of in (facts or {}).items()}
        self.path, self.num_experts, self.facts = path, num_experts, known
        self._rows: dict[str, list[np.ndarray]] = {}

    def append(self, **rows: np.ndarray) -> None:
        """Appends rows of every tensor of the first call, cast to the module's table.

        Raises:
          ValueError: a tensor is missing, new or has another shape than before.
        """
        ids = id_dtype(self.num_experts)
        dtypes = _DTYPES | dict.fromkeys(("ids", "predicted_ids"), ids)
        if missing := [name for name in REQUIRED if name not in rows]:
            raise ValueError(f"rows without {', '.join(missing)}")
        arrays = {name: np.array(a, dtypes[name], order="C") for name, a in rows.items()}
        if len({len(array) for array in arrays.values()}) != 1:
            raise ValueError(f"rows of different numbers: { {n: len(a) for n, a in rows.items()} }")
        shapes = {name: array.shape[1:] for name, array in arrays.items()}
        known = {name: parts[0].shape[1:] for name, parts in self._rows.items()}
        if known and shapes != known:
            raise ValueError(f"rows of {shapes}, the trace has {known}")
        for name, array in arrays.items():
            self._rows.setdefault(name, []).append(array)

    def close(self) -> None:
        """Writes the file; nothing else may be called after it.

        Raises:
          MoejaxError: no row was appended, so there is no file.
        """
        if not any(map(len, self._rows.get("step", ()))):
            raise MoejaxError(f"nothing ran, so there is no trace for {self.path}")
        tensors = {name: np.concatenate(self._rows.pop(name)) for name in list(self._rows)}
        facts = {"format": FORMAT, "version": VERSION, "num_experts": str(self.num_experts)}
        facts = {**self.facts, **facts}
        sealed = {**facts, "checksum": _seal(facts, tensors)}
        from moejax.checkpoints.safetensors_writer import write_safetensors  # which loads JAX

        write_safetensors(self.path, tensors, metadata=sealed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def write_trace(path: Path, trace: Trace) -> None:
    """Checks and writes a trace that is in memory."""
    trace.check()
    with TraceWriter(path, trace.num_experts, trace.facts) as writer:
        writer.append(**trace.tensors())


def read_trace(path: Path) -> Trace:
    """Reads and checks a trace.

    Raises:
      MoejaxError: the file is missing, is not a trace, has another version, has changed since it
        was written, or breaks an invariant.
    """
    if not path.is_file():
        raise MoejaxError(f"there is no trace {path}")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            facts = dict(file.metadata() or {})
            if facts.get("format") != FORMAT:
                raise MoejaxError(f"{path} is a safetensors file, but no trace of routing")
            version, said = facts.get("version", "?"), facts.pop("checksum", "none")
            if version not in (WITHOUT_CHECKSUM, VERSION):
                raise MoejaxError(
                    f"{path} is a trace of version {version}; this reads {WITHOUT_CHECKSUM} and "
                    f"{VERSION}"
                )
            names = set(file.keys())
            if missing := [name for name in REQUIRED if name not in names]:
                raise MoejaxError(f"trace {path} lacks {', '.join(missing)}")
            tensors = {n: file.get_tensor(n) for n in (*REQUIRED, *OPTIONAL) if n in names}
        if version == VERSION and (found := _seal(facts, tensors)) != said:
            raise MoejaxError(
                f"trace {path} is not what was written (its checksum is {found}, {said} by its "
                "header): the file was changed, or the disk fails; copy or record it again"
            )
        del facts["format"], facts["version"]
        trace = Trace(num_experts=int(facts.pop("num_experts", "")), facts=facts, **tensors)
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise MoejaxError(f"{path} cannot be read as a trace: {error}") from error
    try:
        trace.check()
    except MoejaxError as error:
        raise MoejaxError(f"trace {path}: {error}") from error
    return trace


def trace_of_replay(replay: np.ndarray, num_experts: int) -> Trace:
    """Makes a trace of one sequence that decodes int32[steps, M, A], with equal weights."""
    rows, _, width = replay.shape
    count = np.arange(rows, dtype=np.int32)
    trace = Trace(
        num_experts=num_experts,
        step=count,
        sequence=np.zeros(rows, np.int32),
        position=count,
        phase=np.full(rows, DECODE, np.uint8),
        ids=replay.astype(id_dtype(num_experts)),
        weights=np.full(replay.shape, 1 / width, np.float16),
    )
    trace.check()
    return trace


def replay_of_trace(trace: Trace, sequence: int | None = None) -> np.ndarray:
    """Decoded tokens as int32[steps, M, A], `HostRows.replay` without its token axis.

    Args:
      sequence: which one; None if the trace decodes one token per step.

    Raises:
      MoejaxError: nothing was decoded, or several tokens per step.
    """
    chosen = trace.phase == DECODE
    if sequence is not None:
        chosen &= trace.sequence == sequence
    if not chosen.any():
        raise MoejaxError(
            "the trace holds no decoded token to replay; record one with moejax.generate"
        )
    if (np.diff(trace.step[chosen]) == 0).any():
        raise MoejaxError("the trace decodes several sequences a step: name one of them")
    return trace.ids[chosen].astype(np.int32)
