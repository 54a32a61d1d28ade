"""Bits per weight of a model: each expert form, the rest, and overall."""

import dataclasses
import math
from collections.abc import Mapping

import jax

from moejax.experts.cache import ExpertMemory
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.weights.qtensor import Weight


@dataclasses.dataclass(frozen=True)
class BitsPerWeight:
    """Sizes of a model's weights, scales, zeros and low-rank terms counted."""

    num_weights: int  # parameters, each once however many copies of it there are
    num_expert_weights: int  # of them, those of routed experts
    rest_nbytes: int  # of all but `experts_nbytes`
    # of all experts in each form, by name; {} where they are part of the rest
    experts_nbytes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, a copy of each expert in every form included."""
        return self.rest_nbytes + sum(self.experts_nbytes.values())

    @property
    def overall(self) -> float:
        """Bits per parameter of all weights."""
        return 8 * self.nbytes / self.num_weights

    @property
    def parts(self) -> dict[str, float]:
        """Bits per weight of each expert form and of the rest; {} if all is one."""
        if not self.experts_nbytes:
            return {}
        found = {n: 8 * of / self.num_expert_weights for n, of in self.experts_nbytes.items()}
        return found | {"rest": 8 * self.rest_nbytes / (self.num_weights - self.num_expert_weights)}

    def describe(self, digits: int = 2) -> str:
        """Describes the sizes in a line."""
        return describe_bits(self.overall, self.parts, digits)


def describe_bits(overall: float, parts: Mapping[str, float], digits: int = 2) -> str:
    """Describes sizes in a line.

    Such as "9.36 bits a weight (experts: int4 4.50 and int2 2.50 together; the rest 32.00)".
    """
    said = f"{overall:.{digits}f} bits a weight"
    if not parts:
        return said
    *forms, rest = [f"{name} {bits:.{digits}f}" for name, bits in parts.items()]
    together = " together" if len(forms) > 1 else ""
    return f"{said} (experts: {' and '.join(forms)}{together}; the {rest})"


def bits_of(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    memory: ExpertMemory | None = None,
) -> BitsPerWeight:
    """Sizes of a loaded model; `memory` holds the experts where `weights` lack them."""
    tiers = dict(zip(memory.spec.names, memory.tiers, strict=True)) if memory else {}
    num_devices = memory.mesh.size if memory and memory.mesh else 1
    experts = {
        name: num_devices
        * tier.spec.cache.num_layers
        * tier.spec.cache.num_experts
        * tier.ledger.expert_bytes
        + sum(leaf.nbytes for leaf in jax.tree.leaves(tier.store.terms))
        for name, tier in tiers.items()
    }
    return bits_of_sizes(config, {name: leaf.nbytes for name, leaf in weights.items()}, experts)


def bits_of_sizes(
    config: ModelConfig, weights_nbytes: Mapping[str, int], experts_nbytes: Mapping[str, int]
) -> BitsPerWeight:
    """Sizes of a model by the bytes of leaves that do not move, and of each form of experts."""
    sizes = {name: math.prod(shape) for name, shape in weight_shapes(config).items()}
    in_experts = sum(sizes.get(name, 0) for name in EXPERT_LEAVES)
    return BitsPerWeight(
        sum(sizes.values()), in_experts, sum(weights_nbytes.values()), experts_nbytes
    )
