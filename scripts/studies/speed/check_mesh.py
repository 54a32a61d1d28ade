"""Compares a mesh with one device on random weights of a real shape, kernels included.

    python -m scripts.studies.speed.check_mesh --devices=2
    python -m scripts.studies.speed.check_mesh --devices=2,heads
    python -m scripts.studies.speed.check_mesh --devices=2,experts
    python -m scripts.studies.speed.check_mesh --devices=2 --shape=tiny --group_size=32

Prints the relative difference of the logits of mesh and device, and how many greedy tokens agree;
whether experts in slots change a bit on the mesh; the time of a decode step of each. Ends with an
error where a bit differs, or the median token's logits by over 3 %.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from moejax.benchmarking.models import on_mesh
from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.devices import DeviceMesh, choose_device, make_mesh
from moejax.errors import MoejaxError
from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.experts.host_store import HostStore
from moejax.experts.placement import handed_out
from moejax.experts.residency import CacheSizes
from moejax.experts.share_rows import OwnRows, ShareRows
from moejax.experts.state import TierSpec
from moejax.inference.batch import RowBatch, raise_errors
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.shapes import CONFIGS, with_layers
from scripts.studies.speed.whole_experts import WholeExperts

_DEVICES = flags.DEFINE_string("devices", "2", "of the mesh")

_SHAPE = flags.DEFINE_string("shape", "Qwen3-30B-A3B", "whose widths are taken")
_LAYERS = flags.DEFINE_integer("layers", 2, "of the model")
_BITS = flags.DEFINE_integer("bits", 4, "of experts and attention; 16: plain")
_GROUP_SIZE = flags.DEFINE_integer("group_size", 64, "inputs per scale")
_SLOTS = flags.DEFINE_integer("slots", 3, "of a layer's experts in eight that have one")
NUM_TOKENS, BATCH, LENGTH = 32, 2, 64
MOST_ERROR = 0.03  # of bfloat16 sums in another order, over a few layers


def split(
    rows: ShareRows | OwnRows, weights: dict[str, Any], mesh: DeviceMesh, config: ModelConfig
) -> dict[str, Any]:
    """Weights on a mesh: a share of every expert, or its own experts, on each device; all else."""
    found: dict[str, Any] = on_mesh(
        {name: leaf for name, leaf in weights.items() if name not in EXPERT_LEAVES}, mesh, config
    )

    def part_of(name: str, host: Any, device: int) -> Any:
        if isinstance(rows, ShareRows):
            take = rows.shares.gate_up if name == EXPERT_LEAVES[0] else rows.shares.down
            return take(host, device)
        assert mesh.handed_out is not None
        own = np.arange(rows.num_layers)[:, None], mesh.handed_out[device]
        return jax.tree.map(lambda leaf: leaf[own], host)

    for name in EXPERT_LEAVES:
        host = jax.tree.map(np.asarray, weights[name])
        parts = [
            jax.device_put(part_of(name, host, i), device) for i, device in enumerate(mesh.devices)
        ]
        found[name] = jax.tree.map(lambda *leaves: mesh.join(leaves), *parts)
    return found


def in_slots(
    rows: ShareRows | OwnRows, mesh: DeviceMesh, slots: int, config: ModelConfig
) -> ExpertMemory:
    """Experts in host memory, some of them in slots."""
    store = HostStore(rows, rows.num_layers * rows.num_experts, mesh.devices[0], mesh)
    store.fill(progress=False)
    cache = CacheSizes(
        num_layers=rows.num_layers, num_experts=rows.num_experts, slots=slots,
        transient=config.experts_per_token, banks=1,
    )  # fmt: skip
    forms = rows.gate_up, rows.down
    gate_up, down = jax.tree.unflatten(jax.tree.structure(forms), store.arrays)
    spec = TierSpec(cache, handed_out=config.num_experts if mesh.num_handed_out else 0)
    return ExpertMemory([TierMemory(spec, gate_up, down, store.row_of, mesh.replicated)])


def answers(runner: Runner, prompts: list[list[int]]) -> tuple[np.ndarray, float]:
    """Greedy tokens int32[B, n], and seconds of a decode step."""
    settings = [GenerationSettings(max_new_tokens=NUM_TOKENS, temperature=0.0)] * len(prompts)
    for _ in range(2):  # the first one compiles
        start = time.perf_counter()
        batch = RowBatch(runner, None, prompts, settings, 256, (), steps_per_call=16)
        for deltas in batch.steps():
            raise_errors(deltas)
        spent = time.perf_counter() - start
    return np.asarray([answer.tokens for answer in batch.answers]), spent / NUM_TOKENS


def main(_: Sequence[str]) -> None:
    """Makes the three models one after another, and compares."""
    mesh = make_mesh(_DEVICES.value)
    if mesh is None:
        raise app.UsageError("--devices must be more than one")
    device, config = choose_device("auto"), with_layers(CONFIGS[_SHAPE.value], _LAYERS.value)
    bits = _BITS.value
    packing = Packing(bits=bits, attention_bits=bits, group_size=_GROUP_SIZE.value)
    weights = random_weights(config, packing, device)
    whole = WholeExperts(weights[EXPERT_LEAVES[0]], weights[EXPERT_LEAVES[1]])
    rows: ShareRows | OwnRows
    if (experts := handed_out(_DEVICES.value, config)) is None:
        rows = ShareRows(whole, mesh.size)
    else:
        mesh = dataclasses.replace(mesh, handed_out=experts)
        rows = OwnRows(whole, experts)
    shared = split(rows, weights, mesh, config)
    dense = {name: leaf for name, leaf in shared.items() if name not in EXPERT_LEAVES}
    slots = max(1, rows.num_experts * _SLOTS.value // 8)
    memory = in_slots(rows, mesh, slots, config)
    runners = (
        Runner(config, weights, device),
        Runner(config, shared, device, mesh=mesh),
        Runner(config, dense, device, memory=memory, mesh=mesh),
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (BATCH, LENGTH)).astype(np.int32)
    logits = [runner.logits(tokens).astype(np.float64) for runner in runners]
    found = [answers(runner, tokens.tolist()) for runner in runners]
    # Of each token: where two experts are nearly tied, rounding may choose the other one.
    error = np.linalg.norm(logits[1] - logits[0], axis=-1) / np.linalg.norm(logits[0], axis=-1)
    equal = np.cumprod(found[0][0] == found[1][0], axis=1).mean()
    same = np.array_equal(logits[1], logits[2]) and np.array_equal(found[1][0], found[2][0])
    times = ", ".join(f"{1e3 * spent:.2f}" for _, spent in found)
    about = f"{_SHAPE.value}, {packing.describe()}, jax {jax.__version__}"
    print(f"{mesh.size} x {device.device_kind}, {about}")
    print(
        f"mesh beside one device: logits differ by {np.median(error):.2e} of their length, at most "
        f"by {error.max():.2e}, "
        f"{100 * equal:.0f} % of greedy tokens agree"
    )
    print(
        f"{slots} of {rows.num_experts} experts in slots: {'no' if same else 'SOME'} bit differs "
        "from all resident"
    )
    print(f"ms a step of {BATCH} tokens: {times} (one device, mesh, mesh with slots)", flush=True)
    if not same or not np.median(error) < MOST_ERROR:
        raise MoejaxError("the mesh is wrong")


if __name__ == "__main__":
    app.run(main)
