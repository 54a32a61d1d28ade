"""Records routing inside the compiled steps, then writes it from the device to a trace.

A recording step has one more output; a step that does not record is unchanged.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.experts.tiering import STORED
from moejax.files import result_rows as results
from moejax.files.termination import delete_on_sigterm
from moejax.models.attention import AttentionObserver
from moejax.models.config import ModelConfig
from moejax.models.kernel_choice import EXPERT_LEAVES
from moejax.models.moe import ExpertImpl
from moejax.models.routing import Routing, prefetch_scores
from moejax.models.run_experts import HearsRouters, LoopedExperts, RunExperts
from moejax.models.transformer import Transformer
from moejax.policies.attention_importance import attention_received
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


class Recorded(NamedTuple):
    """Routing of the tokens [B, T] of a call; see `moejax.routing.trace`, M is axis 2."""

    position: jax.Array  # int32[B, T]
    active: jax.Array  # bool[B, T]
    ids: jax.Array
    weights: jax.Array
    predicted_ids: jax.Array | None
    predicted_probabilities: jax.Array | None
    probabilities: jax.Array | None
    importance: jax.Array | None

    def at_position(self, whole: "Recorded", index: jax.Array) -> "Recorded":
        """Writes these tokens, one per sequence, at position `index` of `whole`."""
        return jax.tree.map(lambda all_, one: all_.at[:, index].set(one[:, 0]), whole, self)


def empty_record(spec: RecordSpec, config: ModelConfig, batch: int, length: int) -> Recorded:
    """Empty record of tokens [batch, length], none active."""
    num_layers, width = len(config.moe_layers), config.experts_per_token

    def zeros(dtype: Any, *shape: int) -> jax.Array:
        return jnp.zeros((batch, length, *shape), dtype)

    kind = id_dtype(config.num_experts)
    foreseen = (num_layers - 1, min(spec.foreseen, config.num_experts))
    return Recorded(
        position=zeros(jnp.int32),
        active=zeros(bool),
        ids=zeros(kind, num_layers, width),
        weights=zeros(jnp.float16, num_layers, width),
        predicted_ids=zeros(kind, *foreseen) if spec.foreseen else None,
        predicted_probabilities=zeros(jnp.float16, *foreseen) if spec.foreseen else None,
        probabilities=(
            zeros(jnp.float16, num_layers, config.num_experts) if spec.probabilities else None
        ),
        importance=zeros(jnp.float16, num_layers) if spec.importance else None,
    )


class _LayerRecord(NamedTuple):
    """Fields of `Recorded` of N tokens and some layers: [N, layers, ...]."""

    ids: jax.Array
    weights: jax.Array
    predicted_ids: jax.Array | None
    predicted_probabilities: jax.Array | None
    probabilities: jax.Array | None
    importance: jax.Array | None


class RecordingExperts:
    """Runs a step's experts as usual, and keeps the routing."""

    def __init__(
        self, spec: RecordSpec, model: Transformer, impl: ExpertImpl, run: RunExperts | None
    ):
        """Prepares one trace.

        Args:
          spec: what is kept.
          run: runs experts that it does not hold.
        """
        self._spec, self._model, self._impl, self._run = spec, model, impl, run
        self._routings: list[Routing] = []
        self._foreseen: list[tuple[jax.Array, jax.Array]] = []
        self._importance: list[jax.Array] = []
        self._received: jax.Array | None = None  # by the tokens of the layer that comes next
        self._looped: _LayerRecord | None = None

    def heard(self, layer: Index, logits: jax.Array, *, is_ahead: bool) -> jax.Array:
        """See `models.run_experts.HearsRouters`."""
        run: object = self._run
        return (
            run.heard(layer, logits, is_ahead=is_ahead) if isinstance(run, HearsRouters) else logits
        )

    def watching(
        self, watch: AttentionObserver | None, num_tokens: int
    ) -> AttentionObserver | None:
        """Observes the attention of a prompt's chunk, and passes it to another observer.

        Args:
          watch: the other observer; None for none.
          num_tokens: N of the chunk, padding too.
        """
        if not self._spec.importance:
            return watch
        config = self._model.config
        if config.delta_net is not None:  # nobody has attended yet: all are alike
            self._received = jnp.ones(num_tokens, jnp.float32)

        def both(
            layer: Index,
            q: jax.Array,
            keys: jax.Array,
            positions: jax.Array,
            token_mask: jax.Array,
        ) -> None:
            if watch is not None:
                watch(layer, q, keys, positions, token_mask)
            window, scale = config.sliding_window, config.score_scale
            received = attention_received(
                q, keys, positions, token_mask, sliding_window=window, scale=scale
            )
            places = jnp.minimum(positions, received.shape[1] - 1)
            self._received = jnp.take_along_axis(received, places, axis=1).reshape(-1)

        return both

    def __call__(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """See `moejax.models.run_experts.RunExperts`."""
        self._routings.append(routing)
        if self._spec.importance:
            none = jnp.zeros(len(routing.ids), jnp.float32)
            self._importance.append(none if self._received is None else self._received)
        if self._spec.foreseen and ahead is not None:
            limit = min(self._spec.foreseen, routing.probabilities.shape[1])
            scores = prefetch_scores(ahead(), self._model.config)
            self._foreseen.append(jax.lax.top_k(scores, limit))
        if self._run is not None:
            return self._run(layer, x, routing, token_mask, ahead)
        return self._model.moe(x, layer, token_mask, self._impl)[0]

    def recorded(self, positions: jax.Array, mask: jax.Array) -> Recorded:
        """Routing of all layers, which have run, for int32[B, T] and bool[B, T]."""
        of_layers = [
            layers for layers in (self._looped, self._stack_layers()) if layers is not None
        ]
        said = of_layers[0]
        if len(of_layers) > 1:
            said = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *of_layers)
        if said.predicted_ids is not None:  # in a loop the last layer foresees too
            rest = len(self._model.config.moe_layers) - 1
            assert said.predicted_probabilities is not None
            said = said._replace(
                predicted_ids=said.predicted_ids[:, :rest],
                predicted_probabilities=said.predicted_probabilities[:, :rest],
            )
        shaped = jax.tree.map(lambda a: a.reshape(*positions.shape, *a.shape[1:]), said)
        return Recorded(position=positions, active=mask, **shaped._asdict())

    def _stack_layers(self) -> "_LayerRecord | None":
        """Stacks the routing of the layers since `resume`; None if there were none."""
        if not self._routings:
            return None
        spec, num_experts = self._spec, self._model.config.num_experts
        kind = id_dtype(num_experts)

        def stacked(arrays: list[jax.Array], dtype: Any) -> jax.Array:
            return jnp.stack(arrays, axis=1).astype(dtype)

        predicted: Any = (None, None)
        if spec.foreseen and self._foreseen:
            predicted = (
                stacked([i for _, i in self._foreseen], kind),
                stacked([p for p, _ in self._foreseen], jnp.float16),
            )
        elif spec.foreseen:  # the last layer alone
            shape = (len(self._routings[0].ids), 0, min(spec.foreseen, num_experts))
            predicted = jnp.zeros(shape, kind), jnp.zeros(shape, jnp.float16)
        probabilities = None
        if spec.probabilities:
            probabilities = stacked([r.probabilities for r in self._routings], jnp.float16)
        return _LayerRecord(
            ids=stacked([r.ids for r in self._routings], kind),
            weights=stacked([r.weights for r in self._routings], jnp.float16),
            predicted_ids=predicted[0],
            predicted_probabilities=predicted[1],
            probabilities=probabilities,
            importance=stacked(self._importance, jnp.float16) if spec.importance else None,
        )


class LoopedRecording(RecordingExperts):
    """Records in a loop over layers, for experts that can run in one."""

    def __init__(
        self, spec: RecordSpec, model: Transformer, impl: ExpertImpl, run: LoopedExperts | None
    ):
        super().__init__(spec, model, impl, run)
        self._loop = run

    @property
    def num_turns(self) -> int:
        """See `moejax.models.run_experts.LoopedExperts`."""
        return 1 if self._loop is None else self._loop.num_turns

    @property
    def state(self) -> tuple[Any, jax.Array | None]:
        """Carry of what runs the experts; and the importance, if some layers have none."""
        carries = self._spec.importance and self._model.config.delta_net is not None
        of_run = None if self._loop is None else self._loop.state
        return of_run, self._received if carries else None

    def resume(self, state: tuple[Any, jax.Array | None]) -> None:
        """See `moejax.models.run_experts.LoopedExperts`."""
        self._routings, self._foreseen, self._importance = [], [], []
        of_run, self._received = state
        if self._loop is not None:
            self._loop.resume(of_run)

    def kept(self) -> Any:
        """See `LoopedExperts`: the record, and the scan outputs of what runs the experts."""
        mine = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), self._stack_layers())
        return mine, None if self._loop is None else self._loop.kept()

    def keep(self, kept: Any) -> None:
        """See `moejax.models.run_experts.LoopedExperts`."""
        mine, of_run = kept
        self._looped = jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), mine)
        if self._loop is not None:
            self._loop.keep(of_run)


def recording_experts(
    spec: RecordSpec, model: Transformer, impl: ExpertImpl, run: RunExperts | None
) -> RecordingExperts:
    """Makes a step's recorder: a looped one if the experts can run in a loop."""
    if run is None or isinstance(run, LoopedExperts):
        return LoopedRecording(spec, model, impl, run)
    return RecordingExperts(spec, model, impl, run)


class Recorder:
    """Passes recorded steps to a writer, in the order of the calls."""

    def __init__(self, spec: RecordSpec, writer: TraceWriter):
        self.spec = spec  # parts that steps record
        self._writer = writer
        self._waiting: collections.deque[tuple[Recorded, bool, int]] = collections.deque()
        self._num_steps = self._first_sequence = self._next_sequence = self._steps_per_call = 0

    def begin(self, batch: int) -> None:
        """Begins `batch` new sequences, to which the following calls belong."""
        self._first_sequence, self._next_sequence = (
            self._next_sequence,
            self._next_sequence + batch,
        )

    def add(self, recorded: Recorded, *, is_decode: bool) -> None:
        """Adds a call; when it decodes, each token of a sequence is a step of its own."""
        self._waiting.append((recorded, is_decode, self._first_sequence))
        while len(self._waiting) > _WAITING:
            self._write()

    def finish(self) -> None:
        """Writes everything that waits; call it before closing the writer."""
        while self._waiting:
            self._write()
        if self._steps_per_call:
            self._writer.facts[STEPS_PER_CALL] = str(self._steps_per_call)

    def _write(self) -> None:
        recorded, is_decode, first_sequence = self._waiting.popleft()
        host = {
            name: np.asarray(array)
            for name, array in recorded._asdict().items()
            if array is not None
        }
        active = host.pop("active")
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


def stored_forms(runner: Any) -> str:
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
    about = {TIERS: stored_forms(runner)} | (about or {})
    writer = TraceWriter(path, config.num_experts, about)
    with writer, delete_on_sigterm(writer.folder):
        recorder = Recorder(spec, writer)
        with runner.recorded_by(recorder):
            yield
            recorder.finish()
