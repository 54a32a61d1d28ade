"""Warnings of programs that run without their kernels, and the line on packing and kernels."""

from collections.abc import Mapping

from moejax.models.leaf_kinds import leaves_of
from moejax.weights import linear as ops
from moejax.weights.linear import ChoiceRecord, KernelChoice
from moejax.weights.qtensor import Weight
from pallas_kernels.target import Target

# Leaves of one product with all tokens; "kept" ones too, since other engines may pack them.
LINEAR_LEAVES = leaves_of("attention", "shared_experts", "mlp", "router", "kept")
KERNELS = ("mosaic", "triton")
PARTS = ("attention", "norms and writes", "delta rule", "routing", ops.EMBEDDINGS, ops.SUMS)


def expected_kernel(target: Target | None) -> str | None:
    """Implementation that packed weights should run on; None on a CPU."""
    if target is None or target.platform != "gpu":
        return None
    return "mosaic" if target.capability == (9, 0) else "triton"


def phase_warnings(phase: str, record: ChoiceRecord, expected: str | None) -> list[str]:
    """Warnings for packed weights, and for plain parts of decode, that miss their kernel.

    In decode, products with plain matrices of a stack should run by
    `pallas_kernels.dequant_matmul`, plain experts by `grouped_dequant_matmul`, attention by
    `decode_attention`, routing by `router_topk`, norms by `residual_norm`, cache writes by
    `qkv_to_cache`, delta rules by `delta_step`, embeddings in host memory by `row_gather`, sums
    over a mesh by `peer_sum`.
    (`experts.cache_planner.CachePlanner.refusal` is of experts that move.)
    """
    if expected is None:
        return []
    lines: dict[str, list[str]] = {}
    for name, of in record.items():
        # Of prompts Triton's kernel is the one of MXFP4 on every GPU: nothing could be mended.
        is_best = phase != "decode" and "mxfp4" in of.form and of.implementation == "triton"
        if of.packed and of.implementation != expected and not is_best:
            lines.setdefault(of.describe(), []).append(name)
    found = [
        f"{phase}: packed weights do not run on the {expected} kernel: {', '.join(names)}: {said}"
        for said, names in lines.items()
    ]
    if phase != "decode":
        return found
    return found + [
        f"{phase}: {name} run without their kernel: {record[name].describe()}"
        for name in record
        if name.startswith("experts") or name in (*PARTS, *LINEAR_LEAVES)
        if not record[name].packed
        if record[name].refusals and record[name].implementation not in KERNELS
    ]


def describe_packing(
    weights: Mapping[str, Weight], products: Mapping[str, Mapping[str, KernelChoice]]
) -> str:
    """Describes packing, and the kernels of programs traced so far, to follow a size in a line."""
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
    return "; ".join([f" ({said})", *runs])
