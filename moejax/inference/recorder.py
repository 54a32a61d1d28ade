"""Records routing inside the compiled steps, then writes it from the device to a trace.

A recording step has one more output; a step that does not record is unchanged.
"""

import collections
import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.experts.cached_experts import initial_importance, token_importance
from moejax.experts.tiering import STORED
from moejax.files import result_rows as results
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import Experts, MoeInputs, Routing, SparseMoe, prefetch_scores
from moejax.routing.trace import DECODE, PREFILL, STEPS_PER_CALL, TIERS, TraceWriter, id_dtype
from moejax.weights.linear import Index

_WAITING = 2  # calls whose records are left on the device, so that writing waits for no step


class RecordSpec(NamedTuple):
    """Parts of a trace beside ids and weights; static.

    foreseen: P, experts of the next layer that a layer predicts, with their probabilities.
    probabilities: whether the full softmax is recorded.
    importance: whether the attention is that tokens of prompts receive (DyMoE eq. 1), of the
      queries of their own chunk, as policies see it: layers without attention have that of the last
      one before them that attends, or 1 before the first; 0 of decoded tokens.
    """

    foreseen: int = 0
    probabilities: bool = False
    importance: bool = False


class _LayerRecord(NamedTuple):
    """Routing of N tokens by one layer [N, ...], of M stacked [M, N, ...]; see `routing.trace`."""

    ids: jax.Array
    weights: jax.Array
    predicted_ids: jax.Array | None  # after the last layer, of no meaning
    predicted_probabilities: jax.Array | None
    probabilities: jax.Array | None
    importance: jax.Array | None


class Recorded(NamedTuple):
    """Routing of the tokens [B, T] of a call."""

    position: jax.Array  # int32[B, T]
    active: jax.Array  # bool[B, T]
    layers: _LayerRecord  # [B, T, M, ...]


class _RecordingCarry(NamedTuple):
    """Carry of what runs the experts, and float32[N], if some layers have no importance."""

    inner: Any
    importance: jax.Array | None


class RecordingExperts(Experts):
    """Runs a step's experts as usual, and records the routing."""

    def __init__(
        self, spec: RecordSpec, config: ModelConfig, inner: Experts, num_prefilled: int | None
    ):
        """Prepares one trace.

        Args:
          inner: runs the experts.
          num_prefilled: tokens of a step of prompts, padding too; None in a step of decode.
        """
        self._spec, self._config, self._inner = spec, config, inner
        self._num_prefilled = num_prefilled
        self._weighs = spec.importance and num_prefilled is not None
        self.layers_per_iteration = inner.layers_per_iteration
        self.observes_attention = inner.observes_attention or self._weighs

    def init(self) -> _RecordingCarry:
        """Makes the first carry, as `Experts.init`."""
        importance = None
        if self._weighs and self._num_prefilled is not None:
            importance = initial_importance(self._config, self._num_prefilled)
        return _RecordingCarry(self._inner.init(), importance)

    def route(
        self, carry: _RecordingCarry, moe: SparseMoe, layer: Index, x: jax.Array, *,
        is_ahead: bool = False,
    ) -> Routing:  # fmt: skip
        """Routes tokens, as `Experts.route`."""
        return self._inner.route(carry.inner, moe, layer, x, is_ahead=is_ahead)

    def __call__(
        self, carry: _RecordingCarry, inputs: MoeInputs
    ) -> tuple[jax.Array, _RecordingCarry, _LayerRecord]:
        """Runs a layer's experts, as `Experts`."""
        importance = carry.importance
        if self._weighs and inputs.attended is not None:
            importance = token_importance(inputs.attended, self._config)
        record = self._record(inputs, importance)
        kept = None if carry.importance is None else importance
        out, inner, _ = self._inner(carry.inner, inputs)
        return out, _RecordingCarry(inner, kept), record

    def _record(self, inputs: MoeInputs, importance: jax.Array | None) -> _LayerRecord:
        routing, next_routing = inputs.routing, inputs.next_routing
        spec, (num_tokens, num_experts) = self._spec, routing.probabilities.shape
        kind, ids, chances = id_dtype(num_experts), None, None
        if spec.foreseen:
            limit = min(spec.foreseen, num_experts)
            chances, ids = jnp.zeros((num_tokens, limit)), jnp.zeros((num_tokens, limit), jnp.int32)
            if next_routing is not None:
                chances, ids = jax.lax.top_k(prefetch_scores(next_routing(), self._config), limit)
            chances, ids = chances.astype(jnp.float16), ids.astype(kind)
        if spec.importance:
            importance = jnp.zeros(num_tokens) if importance is None else importance
            importance = importance.astype(jnp.float16)
        return _LayerRecord(
            ids=routing.ids.astype(kind),
            weights=routing.weights.astype(jnp.float16),
            predicted_ids=ids,
            predicted_probabilities=chances,
            probabilities=routing.probabilities.astype(jnp.float16) if spec.probabilities else None,
            importance=importance,
        )


def recorded_of(layers: _LayerRecord, positions: jax.Array, mask: jax.Array) -> Recorded:
    """The record of a call for tokens int32[B, T] and bool[B, T].

    Args:
      layers: of all layers, [M, N, ...].
    """

    def shaped(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, 1).reshape(*positions.shape, len(array), *array.shape[2:])

    predicted = (layers.predicted_ids, layers.predicted_probabilities)
    predicted_ids, chances = jax.tree.map(lambda array: array[:-1], predicted)
    layers = layers._replace(predicted_ids=predicted_ids, predicted_probabilities=chances)
    return Recorded(positions, mask, jax.tree.map(shaped, layers))


class Recorder:
    """Passes recorded steps to a writer, in the order of the calls."""

    def __init__(self, spec: RecordSpec, writer: TraceWriter):
        self.spec = spec  # parts that steps record
        self._writer = writer
        self._waiting: collections.deque[tuple[Recorded, bool, int]] = collections.deque()
        self._num_steps = self._first_sequence = self._next_sequence = self._steps_per_call = 0

    def begin(self, batch: int) -> None:
        """Begins `batch` new sequences, to which the following calls belong."""
        self._first_sequence = self._next_sequence
        self._next_sequence += batch

    def add(self, recorded: Recorded, *, is_decode: bool) -> None:
        """Adds a call; when it decodes, each token of a sequence is a step of its own."""
        self._waiting.append((recorded, is_decode, self._first_sequence))
        while len(self._waiting) > _WAITING:
            self._write()

    def _finish(self) -> None:
        """Writes everything that waits; call it before closing the writer."""
        while self._waiting:
            self._write()
        if self._steps_per_call:
            self._writer.facts[STEPS_PER_CALL] = str(self._steps_per_call)

    def _write(self) -> None:
        recorded, is_decode, first_sequence = self._waiting.popleft()
        fields = {"position": recorded.position, **recorded.layers._asdict()}
        host = {name: np.asarray(array) for name, array in fields.items() if array is not None}
        active = np.asarray(recorded.active)
        batch, length = active.shape
        if is_decode:
            self._steps_per_call = max(self._steps_per_call, length)
        sequences = np.broadcast_to(first_sequence + np.arange(batch)[:, None], active.shape)
        steps = np.broadcast_to(np.arange(length) * is_decode, active.shape)
        # Step by step, then sequence by sequence.
        order = (lambda a: a.swapaxes(0, 1)) if is_decode else (lambda a: a)
        chosen = order(active)
        rows = {name: order(array)[chosen] for name, array in host.items()}
        ran = order(steps)[chosen]
        if not len(ran):
            return
        self._writer.append(
            step=self._num_steps + ran,
            sequence=order(sequences)[chosen],
            phase=np.full(len(ran), DECODE if is_decode else PREFILL),
            **rows,
        )
        self._num_steps += int(ran.max()) + 1


def facts(model: str, text: str = "") -> dict[str, str]:
    """Facts of a trace recorded now: model, text, date, versions, command."""
    versions = results.package_versions("moejax", "jax")
    return {
        "model": model,
        "text": text,
        "date": results.today(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": results.command_line(),
    }


def _stored_forms(runner: Any) -> str:
    """Stored forms of a runner's experts and the bytes of one, as a trace names them."""
    memory = runner.memory
    if memory is None:
        names: Sequence[str] = (STORED,)
        leaves = [runner.weights[name] for name in EXPERT_LEAVES]
        sizes = [sum(leaf.nbytes for leaf in leaves) // math.prod(leaves[0].shape[:2])]
    else:
        names = memory.spec.names
        sizes = [tier.ledger.expert_bytes for tier in memory.tiers]
    return ", ".join(f"{name}={nbytes}" for name, nbytes in zip(names, sizes, strict=True))


@contextlib.contextmanager
def recording(
    runner: Any, path: Path, spec: RecordSpec, about: dict[str, str] | None = None
) -> Iterator[None]:
    """Records the routing of a `moejax.inference.runner.Runner`'s calls to `path`.

    If anything fails there is no file. Steps recorded before the context are not in it.

    Args:
      spec: parts to record beside ids and weights.
      about: `facts`, for the file's metadata.

    Raises:
      MoejaxError: the model has no sparse layer, the path is not usable, or nothing ran.
    """
    config = runner.config
    if not config.moe_layers:
        raise MoejaxError("there is no routing to record: the model has no sparse layer")
    about = {TIERS: _stored_forms(runner)} | (about or {})
    with TraceWriter(path, config.num_experts, about) as writer:
        recorder = Recorder(spec, writer)
        with runner.recorded_by(recorder):
            yield
            recorder._finish()
