"""Shared parts of the writers of other engines' formats."""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.errors import MoejaxError
from moejax.weights.qtensor import QTensor

_EMBEDDING = "model.embed_tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedKind:
    """Settings of a matrix that is written, as its config states them."""

    bits: int
    group_size: int
    num_inputs: int
    zero_kind: str
    act_order: bool = False

    @classmethod
    def of(cls, matrix: QTensor) -> "ExportedKind":
        """Returns the kind of a matrix."""
        return cls(
            bits=matrix.bits,
            group_size=matrix.group_size,
            num_inputs=matrix.num_inputs,
            zero_kind=matrix.zero_kind,
            act_order=matrix.permutation is not None,
        )

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self.zero_kind == "symmetric"

    @property
    def stored_group_size(self) -> int:
        """Group size as configs write it: -1 where a group is a whole row."""
        return -1 if self.group_size == self.num_inputs else self.group_size


def common_refusals(prefix: str, matrix: QTensor) -> list[str]:
    """Returns the reasons why neither format can hold a matrix."""
    reasons = []
    if matrix.ndim != 2:
        reasons.append(f"a stack {matrix.shape}")
    if matrix.compensators:
        reasons.append("a low-rank compensator, which only the moejax format has")
    if matrix.zero_kind == "float":
        reasons.append("float zero points, where they have integers (zero=integer or symmetric)")
    if matrix.num_inputs % matrix.group_size:
        reasons.append(
            f"a shorter last group (K = {matrix.num_inputs}, group_size {matrix.group_size})"
        )
    if matrix.zero_kind == "integer" and int(np.max(np.asarray(matrix.zeros))) >= 2**matrix.bits:
        reasons.append(f"a zero point of {2**matrix.bits}, beyond {matrix.bits} bits")
    if prefix == _EMBEDDING:
        reasons.append("an embedding, where only linear layers can be quantized")
    return reasons


def refuse(prefix: str, form: str, reasons: Iterable[str]) -> None:
    """Raises MoejaxError with all the reasons, if there are any."""
    if found := list(reasons):
        raise MoejaxError(f"{form} cannot hold {prefix}: it has {'; '.join(found)}")


def host_codes(matrix: QTensor) -> np.ndarray:
    """uint8[N, K], unpacked, in the order of storage."""
    words = np.asarray(matrix.words)
    return bitstream.unpacked(words, bits=matrix.bits, num_codes=matrix.num_inputs)


def host_zeros(matrix: QTensor) -> np.ndarray:
    """uint8[N, G]."""
    if matrix.zeros is None:
        return np.full(matrix.scales.shape, 2 ** (matrix.bits - 1), np.uint8)
    return np.asarray(matrix.zeros)


def most_common(kinds: Mapping[str, ExportedKind]) -> ExportedKind:
    """Returns the config's default kind; modules that differ are listed by name."""
    per_setting = Counter((k.bits, k.stored_group_size, k.symmetric) for k in kinds.values())
    setting = per_setting.most_common(1)[0][0]
    return next(
        kind
        for kind in kinds.values()
        if (kind.bits, kind.stored_group_size, kind.symmetric) == setting
    )


def patterns(names: Collection[str], others: Collection[str]) -> list[str]:
    """Regular expressions of modules, one for all layers where it concerns none of `others`."""
    found: dict[str, None] = {}
    for name in names:
        exact = f"^{re.escape(name)}$"
        general = re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", exact)
        fits = not any(re.match(general, other) for other in others)
        found[general if fits else exact] = None
    return list(found)
