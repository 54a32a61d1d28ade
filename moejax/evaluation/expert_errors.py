"""Measures what each tier loses of each expert's output, on a text."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.resolve import resolve_checkpoint
from moejax.config.commands import EvaluateConfig, GenerateConfig
from moejax.errors import MoejaxError
from moejax.experts.ledger import Ledger
from moejax.experts.tiering import Tiering, made_scheme, open_tier
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from moejax.models.expert_products import ExpertPairs, ExpertStacks, products_by_block
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import ResidentExperts, Routing, SparseMoe
from moejax.models.transformer import ChunkSpec, merge_weights
from moejax.quantization.pipeline.expert_rows import quantized_form
from moejax.quantization.pipeline.quantizers import Program, quantize_stack
from moejax.routing.profile_file import FILE_NAME, load_buddies
from moejax.routing.tier_errors import TierErrors
from moejax.text.windows import Windowing, windows
from moejax.weights.qtensor import Weight, dense

if TYPE_CHECKING:
    from moejax.engine import Engine

_PIECE = 512  # tokens at a time: bounds the memory of their outputs in all forms
GATHERED_BYTES = 2**26  # of weights at a time

Experts = tuple[Weight, Weight]  # gate and up, down, of all layers


def load_tiers(
    own: Checkpoint, tiering: Tiering, weights: Mapping[str, Weight], device: jax.Device
) -> dict[str, Experts | None]:
    """Loads the experts of every tier whole, on the device; None of the model's own.

    Args:
      tiering: of which tiers, quantizer and group size are read.

    Raises:
      MoejaxError: as of a run with such tiers.
    """
    found: dict[str, Experts | None] = {}
    for named in tiering.stored():
        tier, source = open_tier(named, own)
        if tier.bits:
            made = [_made(weights[leaf], tiering, tier.bits) for leaf in EXPERT_LEAVES]
            found[tier.name] = made[0], made[1]
        elif source is own:
            found[tier.name] = None
        else:
            leaves = source.load(dtype="auto", device=device, progress=False)
            found[tier.name] = leaves[EXPERT_LEAVES[0]], leaves[EXPERT_LEAVES[1]]
    return found


def measured_tiers(tiering: Tiering | None) -> dict[str, Any]:
    """Records what was measured, for `_refusal`; empty without tiers."""
    if tiering is None:
        return {}
    return {
        "names": [tier.name for tier in tiering.stored()],
        "tiers": list(tiering.tiers),  # with the checkpoints that they are read from
        **{part: getattr(tiering, part) for part in ("quantizer", "group_size")},
    }


def _refusal(measured: Mapping[str, Any], tiering: Tiering) -> str | None:
    """Reason why a profile's errors are not those of a run's tiers, or None."""
    wanted = measured_tiers(tiering)
    missing = [tier for tier in wanted["tiers"] if tier not in measured.get("tiers", [])]
    if missing:
        return f"the profile has no errors of {', '.join(missing)}"
    if any(tier.bits for tier in tiering.stored()):
        for part in ("quantizer", "group_size"):
            if measured.get(part) != wanted[part]:
                return f"the profile's tiers have {part}={measured.get(part)}, not {wanted[part]}"
    return None


def layer_errors(config: GenerateConfig | EvaluateConfig, engine: "Engine") -> list[str]:
    """Describes the errors of a run's layers by the profile of `tier_errors`, or why not.

    Nothing, where no profile is named and the checkpoint has none with errors.
    """
    tiering, ledger = config.policy.tiering(), engine.ledger
    if tiering is None or ledger is None:
        return []
    if config.tier_errors:
        path = Path(config.tier_errors).expanduser()
    elif not (path := resolve_checkpoint(config.checkpoint) / FILE_NAME).is_file():
        return []
    found = _describe_errors(path, tiering, ledger, engine.config)
    return found if config.tier_errors or len(found) > 1 else []


def _describe_errors(
    path: Path, tiering: Tiering, ledger: Ledger, config: ModelConfig
) -> list[str]:
    """Describes the errors of a run's layers by a profile, a line each, or one line why not."""
    try:
        profile = load_buddies(path, config)
    except MoejaxError as error:
        return [f"errors of layers are not known: {error}"]
    if profile.errors is None or ledger.gate is None:
        return ["errors of layers are not known: the profile was made without tiers"]
    if reason := _refusal(profile.provenance["measured"], tiering):
        return [f"errors of layers are not known: {reason}; profile again with --config.tiers"]
    found = profile.errors.of_gate(list(ledger.tiers), ledger.gate)
    mean = found.mean
    return [
        *(
            f"layer {i}: error of its output about {100 * near:.2f} %, aligned {100 * most:.2f} %"
            for i, (near, most) in enumerate(zip(*found, strict=True))
        ),
        f"root mean square over layers: about {100 * mean[0]:.2f} %, {100 * mean[1]:.2f} % if the "
        "errors of a token's experts are aligned (docs/policies.md)",
    ]


def _made(weight: Weight, tiering: Tiering, bits: int) -> Weight:
    program = Program(scheme=made_scheme(tiering, bits), max_rank=0, passes=1)
    quantized_form(weight, program)  # raises where there is none
    layers = []
    for layer in range(weight.shape[0]):
        rows = dense(jax.tree.map(lambda leaf, at=layer: leaf[at], weight), jnp.float32)
        ranks = jnp.zeros(len(rows), jnp.int32)
        layers.append(quantize_stack(rows.astype(jnp.float32), ranks, None, program).tensor)
    stacked: Weight = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return stacked


class _Sums(NamedTuple):
    """Sums of `TierErrors`."""

    plain: jax.Array
    bounds: jax.Array
    estimates: jax.Array
    outputs: jax.Array


def _no_sums(shape: tuple[int, ...]) -> _Sums:
    """Zeros [..., E, K], of which outputs have the axes before E."""
    zeros = [jnp.zeros(shape, jnp.float32) for _ in range(3)]
    return _Sums(zeros[0], zeros[1], zeros[2], jnp.zeros(shape[:-2], jnp.float32))


def measure_errors(
    runner: Runner,  # its model holds its experts
    tiers: Mapping[str, Experts | None],  # of `load_tiers`; donated
    buddies: np.ndarray,  # int32[M, E], what stands in for each expert; -1: nothing
    ids: np.ndarray,  # integer[n], at least two; the last one is not fed
    window: int,
    batch_size: int,
    on_batch: Callable[[int], None] = lambda num_tokens: None,
) -> TierErrors:
    """Measures the tiers on a stream of tokens, in windows that do not overlap."""
    config = runner.config
    shape = len(config.moe_layers), config.num_experts, len(tiers) + 2
    state = jax.device_put((_no_sums(shape), jnp.asarray(buddies, jnp.int32)), runner.device)
    carried: Any = (*state, tuple(tiers.values()))
    for tokens, lengths, _ in windows(np.asarray(ids), Windowing(window, window), batch_size):
        carried = runner.scan_windows(_error_chunk, carried, tokens, lengths)
        on_batch(int(lengths.sum()))
    return TierErrors(tuple(tiers), *map(np.asarray, jax.device_get(carried[0])))


def _error_chunk(
    program: steps.StepProgram,
    spec: ChunkSpec,
    state: Any,
    experts: None,
    inputs: steps.StepInputs,
    chunk: steps.TokenChunk,
) -> steps.StepResult[Any]:
    """A step for `Runner.scan_windows`."""
    del experts  # the model holds all of them
    cache, (sums, buddies, tiers) = state
    model = merge_weights(program.definition, inputs.weights)
    positions, mask = steps.chunk_positions(chunk)
    run = ResidentExperts(model.moe, spec.experts, lambda *found: found)
    cache, _, _, (x, routing) = model(
        chunk.tokens, positions, mask, cache, spec, run, chunk.lengths
    )
    for layer in range(len(x)):
        of_layer = Routing(*(part[layer] for part in routing))
        found = _of_layer(model.moe, layer, tiers, buddies[layer], x[layer], of_layer, mask)
        sums = jax.tree.map(lambda old, new, at=layer: old.at[at].add(new), sums, found)
    return steps.StepResult((cache, (sums, buddies, tiers)), None, None, None)


def _of_layer(
    moe: SparseMoe,
    layer: int,
    tiers: Sequence[Experts | None],
    buddies: jax.Array,
    x: jax.Array,
    routing: Routing,
    mask: jax.Array,
) -> _Sums:
    """Sums of one layer, some tokens at a time."""
    size = math.gcd(len(x), _PIECE)
    product = functools.partial(_outputs, moe, layer)
    exact = moe.gate_up[...], moe.down[...]
    num_experts = moe.config.num_experts

    def piece(total: _Sums, part: tuple[jax.Array, ...]) -> tuple[_Sums, None]:
        x, ids, weights, counted = part
        own = product(exact, x, ids, counted)
        buddy = buddies[ids]
        in_place = product(exact, x, jnp.maximum(buddy, 0), counted)
        lost = [own - (product(of, x, ids, counted) if of else own) for of in tiers]
        lost += [own, own - jnp.where(buddy[..., None] >= 0, in_place, 0.0)]
        squares = jnp.stack([jnp.sum(d * d, axis=-1) for d in lost], axis=-1)  # [N, A, K]
        weights = jnp.where(counted[:, None], weights, 0.0)
        whole = jnp.sum(weights, axis=-1, keepdims=True)
        y = jnp.einsum("na,nad->nd", weights, own)

        def by_expert(factor: jax.Array) -> jax.Array:
            zeros = jnp.zeros((num_experts, squares.shape[-1]), jnp.float32)
            return zeros.at[ids].add(factor[..., None] * squares)

        ones = jnp.broadcast_to(counted[:, None], weights.shape).astype(jnp.float32)
        new = _Sums(
            by_expert(ones), by_expert(weights * whole), by_expert(weights**2), jnp.sum(y * y)
        )
        return jax.tree.map(jnp.add, total, new), None

    parts = x, routing.ids, routing.weights, mask.reshape(-1)
    parts = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), parts)
    return jax.lax.scan(piece, _no_sums((num_experts, len(tiers) + 2)), parts)[0]


def _outputs(
    moe: SparseMoe, layer: int, experts: Experts, x: jax.Array, ids: jax.Array, counted: jax.Array
) -> jax.Array:
    """float32[N, A, D], outputs of the experts int32[N, A] of a layer on tokens [N, D]."""
    active = jnp.broadcast_to(counted[:, None], ids.shape)
    biases = None if moe.biases is None else moe.biases.of_pairs(layer, ids)
    pairs = ExpertPairs(ids, active, biases=biases)
    stacks = ExpertStacks(*experts, layer)
    found = products_by_block(
        x.astype(jnp.float32), pairs, stacks, moe.config.num_experts, GATHERED_BYTES,
        moe.config.gating,
    )[0]  # fmt: skip
    if biases is not None:
        found = found + biases.down.astype(jnp.float32)
    return jnp.where(active[..., None], found, 0.0)
