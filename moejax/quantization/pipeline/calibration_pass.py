"""Calibration pass: text through the layers while they are quantized.

Each layer's input comes from the quantized layers before it, as in GPTQ's code. After a kill the
text passes through the finished layers, read back from their files, which gives equal bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.safetensors_reader import read_matrix
from moejax.devices import plain_memory_errors
from moejax.models.config import leaf_dtype, weight_shapes
from moejax.quantization.pipeline.forward import CapturedLayer, LayerRun
from moejax.quantization.pipeline.inventory import Entry, Inventory, Shard
from moejax.quantization.pipeline.progress import Meter
from moejax.quantization.pipeline.quantizers import Calibration
from moejax.weights.qtensor import QTensor

# Share of the router's assignments in its layer that an expert got, by (layer, expert).
Frequencies = Mapping[tuple[int | None, int | None], float]
# Of experts, held at a time: on a host, and on an accelerator, where nothing else is to be held.
_HOST_HESSIAN_BYTES, _DEVICE_HESSIAN_BYTES = 512 * 2**20, 4 * 2**30


class CalibrationRun:
    """Hidden states of the text, int32[S, T], before the next layer.

    The layers run in float32 on a CPU and in bfloat16 elsewhere.
    """

    def __init__(
        self, inventory: Inventory, tokens: np.ndarray, *, device: jax.Device, meter: Meter
    ) -> None:
        self._inventory, self._device, self._meter = inventory, device, meter
        on_host = device.platform == "cpu"
        self._dtype = np.dtype(jnp.float32 if on_host else jnp.bfloat16)
        embed = next(entry for entry in inventory.entries if entry.kind == "embed")
        self._run = LayerRun(
            inventory.config,
            tokens,
            read_matrix(embed.source).astype(self._dtype),
            dtype=self._dtype,
            device=device,
            hessian_bytes=_HOST_HESSIAN_BYTES if on_host else _DEVICE_HESSIAN_BYTES,
        )

    def capture(self, shard: Shard) -> CapturedLayer:
        """Captures the inputs of the next layer's matrices, without advancing."""
        with self._meter.phase("calibrate"), plain_memory_errors(self._device):
            return self._run.capture(self._layer_weights(shard, {}))

    def calibrate(self, captured: CapturedLayer, entries: Sequence[Entry]) -> Calibration:
        """Computes Hessians and token counts of a layer's matrices, in their order."""
        with self._meter.phase("calibrate"):
            found = [captured.hessian(entry.leaf, entry.expert) for entry in entries]
            hessians = jnp.stack([hessian.mean for hessian in found])
        return Calibration(hessians, jnp.asarray([h.num_tokens for h in found], jnp.int32))

    def advance(self, shard: Shard, matrices: Mapping[str, QTensor]) -> None:
        """Runs the text through the next layer, with `matrices` by name in place of plain ones."""
        with self._meter.phase("calibrate"), plain_memory_errors(self._device):
            self._run.advance(self._layer_weights(shard, matrices))

    def _layer_weights(
        self, shard: Shard, matrices: Mapping[str, QTensor]
    ) -> dict[str, np.ndarray]:
        """Leaves of one layer, without the layer axis."""
        shapes = weight_shapes(self._inventory.config)
        leaves: dict[str, np.ndarray] = {}
        for entry in shard.entries:
            if entry.leaf not in leaves:
                dtype = leaf_dtype(entry.leaf, self._dtype)
                leaves[entry.leaf] = np.empty(shapes[entry.leaf][1:], dtype)
            leaf = leaves[entry.leaf]
            part = leaf if entry.expert is None else leaf[entry.expert]
            rows = part[entry.start : entry.start + entry.shape[0]]
            if entry.leaf == "moe.gate_up_bias":  # gates and ups by turns
                rows = rows.reshape(len(rows), 2, -1).swapaxes(1, 2)
            if entry.name in matrices:
                placed = jax.device_put(matrices[entry.name], self._device)
                rows[...] = np.asarray(_dequantized(placed))
            else:
                rows[...] = entry.read().reshape(rows.shape)
        return leaves


def router_frequencies(inventory: Inventory, run: CalibrationRun) -> Frequencies:
    """Share of its layer's assignments per expert, by (layer, expert); runs the text to the end."""
    found: dict[tuple[int | None, int | None], float] = {}
    for shard in inventory.shards:
        if shard.layer is None:
            continue
        counts: Any = run.capture(shard).expert_tokens
        if counts is not None:
            shares = np.asarray(counts, np.float64) / max(1, int(np.sum(counts)))
            found |= {(shard.layer, i): float(share) for i, share in enumerate(shares)}
        run.advance(shard, {})
    return found


_dequantized = jax.jit(lambda matrix: matrix.dequantize())
