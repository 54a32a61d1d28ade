"""Which implementation serves each product with stored matrices, for the record.

The record is computed by the functions that choose while a program is traced (`ops.choose_product`,
`models.expert_products.choose_grouped`, `models.moe.choose_routing`,
`models.decode_layers.choose_token_step`, `models.delta_net.choose_delta_step`), from the same
shapes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.attention import decode_impl
from moejax.models.config import ModelConfig
from moejax.models.decode_layers import choose_token_step, is_plain
from moejax.models.delta_net import choose_delta_step
from moejax.models.expert_products import choose_for_tiers, choose_grouped
from moejax.models.leaf_kinds import ALWAYS_KERNEL_LEAVES, leaves_of
from moejax.models.leaf_kinds import EXPERT_LEAVES as EXPERT_LEAVES
from moejax.models.moe import ExpertImpl, choose_routing, kernel_refusal
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight
from pallas_kernels.target import Choice, Target

# Leaves of one product with all tokens; "kept" ones too, since other engines may pack them.
LINEAR_LEAVES = leaves_of("attention", "shared_experts", "mlp", "router", "kept")
# At one token a sequence heads take what it packs apart (`LatentAttention._to_heads`).
EXPANDING_LEAF = "attention.kv_b"
ABSORBED = "one token's heads take its rows apart, which is no product with rows of outputs"


class KernelChoice(NamedTuple):
    """The implementation chosen for one product."""

    implementation: str  # of `pallas_kernels`, `ops.DEQUANTIZED`, `ops.PLAIN`, or a form of experts
    form: str  # of the stored matrices: "int4g64 float", "bfloat16", "FP8 ..."
    packed: bool
    refusals: Mapping[str, str]  # of the implementations that come before it

    def describe(self) -> str:
        """Describes the choice: "mosaic, int4g64 float", "dequantized, ... (mosaic: ...)"."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return f"{self.implementation}, {self.form}" + (f" ({reasons})" if reasons else "")


def form(weight: Weight) -> str:
    """Describes how a weight is stored, in a few words."""
    if isinstance(weight, jax.Array):
        return str(weight.dtype)
    if ops.kernel_refusal(weight):
        return ops.packing(weight) or str(weight)
    of = jax.eval_shape(ops.operands, weight)
    ranks = "".join(f" + U V {terms.v.describe()}" for terms in of.low_rank)
    return of.weights.describe() + ranks


def kernel_choices(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    dtype: jnp.dtype,
    kernels: ops.Kernels,
    *,
    num_tokens: int,
    num_sequences: int,
    expert_impl: ExpertImpl,
    tiers: Sequence[Sequence[Weight]] = (),
    tier_impls: Sequence[ExpertImpl] = (),
) -> dict[str, KernelChoice]:
    """Kernel choices by leaf; "experts" for both of theirs, "routing" for softmax and top-k.

    Experts stored in several precisions are "experts" (the first tier), "experts, tier 2" and so
    on.

    Args:
      weights: all of the model's.
      num_tokens: rows of every product but the head's. `EXPANDING_LEAF` is that of a prompt's first
        chunk, or of one token a sequence; a later chunk may take either way.
      num_sequences: rows of the head's.
      tiers: `moe.gate_up` and `moe.down` of each tier; (): experts have one precision.
      tier_impls: the form that runs each; one launch runs all tiers if each is "grouped_kernel".
    """
    found = {}
    head = "embed" if config.tied_embeddings else "head"
    rows = {**dict.fromkeys(LINEAR_LEAVES, num_tokens), head: num_sequences}
    for name, num_rows in rows.items():
        if name in weights:
            weight = weights[name]
            always_kernel = name in ALWAYS_KERNEL_LEAVES
            choice = ops.choose_product(
                num_rows, dtype, weight, kernels, always_kernel=always_kernel
            )
            is_packed = ops.packing(weight) is not None
            if name == EXPANDING_LEAF and num_tokens == num_sequences:
                absorbed = Choice(ops.DEQUANTIZED, {"every kernel": ABSORBED})
                choice = absorbed if is_packed else Choice(ops.PLAIN, {})
            found[name] = KernelChoice(
                choice.implementation, form(weight), is_packed, choice.refusals
            )
    if "moe.router" in weights:
        routing = choose_routing(num_tokens, config, kernels)
        found["routing"] = KernelChoice(routing.implementation, "float32", False, routing.refusals)
    experts = [weights[name] for name in EXPERT_LEAVES if name in weights]
    if experts:
        found["experts"] = _expert_choice(config, experts, dtype, kernels, num_tokens, expert_impl)
    together = all(impl == "grouped_kernel" for impl in tier_impls)
    for number, (stacks, impl) in enumerate(zip(tiers, tier_impls, strict=True), 1):
        name = "experts" if number == 1 else f"experts, tier {number}"
        found[name] = _expert_choice(config, stacks, dtype, kernels, num_tokens, impl)
        if together and len(tiers) > 1:
            choice = choose_for_tiers(num_tokens, config, dtype, tiers, kernels)
            found[name] = found[name]._replace(
                implementation=choice.implementation, refusals=choice.refusals
            )
    return found


def attention_choices(
    attention: Choice,
    config: ModelConfig,
    dtype: jnp.dtype,
    kernels: ops.Kernels,
    *,
    is_token: bool,
) -> dict[str, KernelChoice]:
    """Kernel choices of attention and, in a decode step, of norms, writes and delta rule.

    A decode step adds "norms and writes" and, in models that have such layers, the "delta rule".

    Args:
      attention: the choice made for it.
      dtype: of queries, keys and values.
    """
    found = {"attention": attention}
    if is_token and (decode_impl(attention) == "kernel" or not is_plain(config)):
        found["norms and writes"] = choose_token_step(config, dtype, kernels)
    elif is_token:  # their kernels come with that of attention
        found["norms and writes"] = Choice("xla", attention.refusals)
    if is_token and config.delta_net:
        found["delta rule"] = choose_delta_step(config, dtype, kernels)
    return {
        name: KernelChoice(choice.implementation, str(dtype), False, choice.refusals)
        for name, choice in found.items()
    }


def _expert_choice(
    config: ModelConfig,
    experts: Sequence[Weight],
    dtype: jnp.dtype,
    kernels: ops.Kernels,
    num_tokens: int,
    impl: ExpertImpl,
) -> KernelChoice:
    forms = " and ".join(dict.fromkeys(map(form, experts)))
    is_packed = any(ops.packing(weight) for weight in experts)
    if impl == "kernel":
        return KernelChoice("expert_mlp", forms, is_packed, {})
    choice = choose_grouped(num_tokens, config, dtype, experts, kernels)
    if impl == "grouped_kernel":
        return KernelChoice(choice.implementation, forms, is_packed, choice.refusals)
    if is_packed:
        return KernelChoice(ops.DEQUANTIZED, f"{forms}, {impl}", is_packed, choice.refusals)
    refusal = kernel_refusal(config, dtype, experts)
    return KernelChoice(impl, forms, is_packed, {"expert_mlp": refusal} if refusal else {})


def expected_kernel(target: Target | None) -> str | None:
    """Implementation that packed weights should run on; None on a CPU."""
    if target is None or target.platform != "gpu":
        return None
    return "mosaic" if target.capability == (9, 0) else "triton"


def unexpected(
    choices: Mapping[str, KernelChoice], expected: str | None
) -> dict[str, KernelChoice]:
    """Choices in which packed weights do not run on the expected implementation."""
    if expected is None:
        return {}
    return {name: of for name, of in choices.items() if of.packed and of.implementation != expected}


def kernel_warnings(choices: Mapping[str, KernelChoice], expected: str | None) -> list[str]:
    """Warnings, one per kind of packed weight that misses the expected kernel."""
    lines: dict[str, list[str]] = {}
    for name, of in unexpected(choices, expected).items():
        lines.setdefault(of.describe(), []).append(name)
    return [
        f"packed weights do not run on the {expected} kernel: {', '.join(names)}: {said}"
        for said, names in lines.items()
    ]


def plain_kernel_warnings(choices: Mapping[str, KernelChoice], expected: str | None) -> list[str]:
    """Warnings, one per unpacked part of a decode step that misses its kernel.

    Products with plain matrices of a stack should run by `pallas_kernels.dequant_matmul`, plain
    experts by `expert_mlp`, attention by `decode_attention`, routing by `router_topk`, norms by
    `residual_norm`, cache writes by `qkv_to_cache`, delta rules by `delta_step`. (Experts that move
    are planned by `cache_plan`: `moejax.experts.cache_plan.Placing.refusal`.)
    """
    parts = ("experts", "attention", "norms and writes", "delta rule", "routing", *LINEAR_LEAVES)
    found = {name: choices[name] for name in parts if expected and name in choices}
    return [
        f"{name} run without their kernel: {of.describe()}"
        for name, of in found.items()
        if not of.packed and of.refusals
    ]


def describe_packing(
    weights: Mapping[str, Weight], products: Mapping[str, Mapping[str, KernelChoice]]
) -> str:
    """Describes packing and kernel choices, to follow the weights' size in a line.

    Args:
      weights: flat dict of leaves.
      products: kernel choices, by phase.
    """
    packed = {name: ops.packing(leaf) for name, leaf in weights.items()}
    kinds = {kind: [n for n in packed if packed[n] == kind] for kind in packed.values() if kind}
    if not kinds:
        return ", none packed"
    said = "; ".join(f"{', '.join(names)}: {kind}" for kind, names in kinds.items())
    runs = []
    for phase, found in products.items():
        used = sorted({of.implementation for of in found.values() if of.packed})
        how = "dequantized for each product" if used == [ops.DEQUANTIZED] else ", ".join(used)
        runs.append(f"{phase}: {how}")
    return f" ({said}); {'; '.join(runs)}"
