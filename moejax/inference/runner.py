"""Dispatches the compiled steps of one model: prefill in chunks, decode, logits."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from moejax.devices import (
    MESH_AXIS,
    REPLICATED,
    SPLIT,
    DeviceMesh,
    Place,
    plain_memory_errors,
    put,
    specs_of,
)
from moejax.experts.cache import ExpertMemory
from moejax.experts.cache_planner import CachePlanner
from moejax.experts.state import ExpertCache, compiler_options
from moejax.inference import steps
from moejax.inference.chunking import (
    CPU_CHUNK_LENGTH,
    MAX_PREFILL_LENGTH,
    MIN_KV_LENGTH,
    MIN_PREFILL_LENGTH,
    FixedSizes,
    PlannedSizes,
    kv_bucket,
    kv_buckets,
    length_bucket,
    longest_chunk,
    next_chunk,
    prefill_chunks,
    scored_columns,
    slice_tokens,
)
from moejax.inference.generation import GenerationSettings
from moejax.inference.kernel_warnings import expected_kernel, phase_warnings
from moejax.inference.recorder import Recorder
from moejax.inference.steps import Sampling, StepOutput
from moejax.models.attention import (
    cached_impl,
    choose_cached,
    choose_chunked,
    default_attention_impl,
)
from moejax.models.config import ModelConfig, Pages
from moejax.models.head_shares import HeadShares
from moejax.models.kv_cache import KVCache, empty_cache
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import ExpertImpl, default_expert_impl
from moejax.models.transformer import ChunkSpec, merge_weights, model_definition
from moejax.programs import CompiledPrograms
from moejax.weights import linear as ops
from moejax.weights.handed_out import table_of
from moejax.weights.linear import ChoiceRecord, record_choice, recorded_choices
from moejax.weights.qtensor import Fp8Tensor, QTensor, Weight
from pallas_kernels.peer_sum import mailboxes_of
from pallas_kernels.target import Choice, target_of

Put = Callable[[Any], jax.Array]  # an array of the host to the device
_WHOLE: Any = REPLICATED  # in trees of specs, in the place of arrays


@dataclasses.dataclass
class Session:
    """A batch in flight: device state, and what the host knows without a read."""

    state: steps.DecodeState
    sampling: Sampling
    eos_ids: jax.Array  # int32[B, n]
    all_greedy: bool
    next_position: int  # largest position that the next step writes
    emitted: StepOutput  # of the last call, at first int32[B, 1]; not waited for
    top_logprobs: int = 0  # see `steps.StepProgram`
    failures_before: int = 0  # see `ExpertMemory.failure_count`
    penalizes: bool = True  # False: the next call leaves `state.seen` as it is
    sizes: FixedSizes | None = None  # of the programs of a running batch; None: of the calls
    given: Any = None  # `sampling` and `eos_ids` on the host, of a running batch


def _seen_tokens(prompts: list[list[int]], config: ModelConfig, put: Put) -> jax.Array:
    """bool[B, V], the tokens of each prompt, for the repetition penalty."""
    seen = np.zeros((len(prompts), config.vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return put(seen)


def _sampling_of(rows: Sequence[GenerationSettings]) -> Sampling:
    """Converts the settings of every sequence to arrays of the host."""
    columns: dict[str, Any] = {}
    for name in Sampling._fields:
        dtype = np.int32 if name == "top_k" else np.float32
        columns[name] = np.asarray([getattr(row, name) for row in rows], dtype)
    return Sampling(**columns)


def _ends_of(rows: Sequence[GenerationSettings], eos_ids: tuple[int, ...]) -> np.ndarray:
    """int32[B, n], tokens that end each row."""
    never = (-1,) * max(1, len(eos_ids))
    return np.asarray([(not row.ignore_eos and eos_ids) or never for row in rows], np.int32)


State = TypeVar("State")
_WindowChunk = tuple[int, int, tuple[Any, ...], steps.TokenChunk]  # start, size, static operands

# Programs in which GPUs wait for one another start in one order on all of them, whatever threads
# and engines they are of.
_in_one_order = threading.Lock()


class Runner:
    """A model's weights on a device, and the programs that run them.

    Attributes:
      config: the model's shape, with the heads that a device has.
      weights: flat dict of layer-stacked leaves, plain or packed, on `device`.
      device: where it runs; on a mesh the first of its devices.
      mesh: the devices that have a share of every expert each, or experts of their own; None:
        there is one device.
      place: where operands of the steps go.
      dtype: of the activations and the cache; that of the norms, which are never packed.
      kernels: which may serve products with packed weights.
      experts_used: which forms ran the experts so far.
      products: kernel choices of the programs so far, by phase ("prefill", "decode") and part.
      planned: sizes of calls, where limits of the device's memory hold them.
      one_stream: whether given tokens (`score`, `logits`, `scan_windows`) are read one sequence at
        a time, and a policy's transfers finish before the next chunk.
      programs: what was compiled, and how long that took.
      short_chunk: positions of the chunks of short prompts; see `prefill_chunks`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: steps.Weights,
        device: jax.Device,
        *,
        kernels: ops.Kernels | None = None,
        memory: ExpertMemory | None = None,
        mesh: DeviceMesh | None = None,
    ):
        """Compiles nothing yet.

        Args:
          mesh: devices that run the steps together, `device` the first; None: it alone.
        """
        by_heads = mesh is not None and mesh.splits_heads
        if mesh is not None and by_heads:
            config = HeadShares(config, mesh.size).own
        self.config = config
        self.weights = weights
        self.device = device
        is_cpu = device.platform == "cpu"
        self.short_chunk = CPU_CHUNK_LENGTH if is_cpu else 0
        self._chooses_kv_length = is_cpu
        self._whole_calls = device.platform == "gpu"  # `fixed_trip_count` of `steps.decode`
        pools = memory.spec.tiers if memory and device.platform == "gpu" else ()
        options = [compiler_options(pools, is_prefill) for is_prefill in (True, False)]
        self.mesh = mesh
        self.place: Place = device if mesh is None else mesh.replicated
        self._own_experts: jax.Array | None = None
        if mesh is not None and mesh.handed_out is not None:
            tables = table_of(mesh.handed_out, config.num_experts)
            self._own_experts = jax.device_put(tables.reshape(-1, *tables.shape[2:]), mesh.split())
        self._mailboxes = None if mesh is None else mailboxes_of(mesh.mesh)
        if self._mailboxes is not None:
            self.weights = {**weights, "peers": self._mailboxes.peers}
        self.programs = CompiledPrograms(lambda function: options[function is steps.decode], mesh)
        self.kernels = kernels or ops.Kernels(target_of(device))
        definition = model_definition(
            config, self.kernels, holds_experts=memory is None,
            share_axis=MESH_AXIS if mesh else "", by_heads=by_heads,
            has_mailboxes=self._mailboxes is not None,
        )  # fmt: skip
        kept: Any = SPLIT if by_heads else REPLICATED
        self._cache_specs = KVCache(kept, kept, _WHOLE, _WHOLE, _WHOLE)
        self._program = steps.StepProgram(definition, memory.spec if memory else None)
        self._recorder: Recorder | None = None
        self.memory, self.planned, self.one_stream = memory, PlannedSizes(), False
        norm = weights["final_norm"]
        assert not isinstance(norm, QTensor | Fp8Tensor)
        self.dtype = norm.dtype
        self.experts_used: set[ExpertImpl] = set()
        self._attention = default_attention_impl(config, self.dtype, device.platform)
        target = target_of(device)
        self._cached = choose_cached(config, self.dtype, target)
        self._chunked = choose_chunked(config, self.dtype, target)
        self._stored = dict(weights) | (memory.stacks() if memory else {})
        self._experts = [self._stored[name] for name in EXPERT_LEAVES if name in self._stored]
        self._tiers = [[*tier.stacks().values()] for tier in (memory.tiers if memory else ())]
        self._forms: dict[int, tuple[ExpertImpl, tuple[ExpertImpl, ...]]] = {}
        self.products: dict[str, ChoiceRecord] = {}
        self._warned: set[str] = set()
        self._warn()

    def kernel_choices(self, num_tokens: int, num_sequences: int) -> ChoiceRecord:
        """Kernel choices of a call of this size, by part: it is traced, and nothing runs.

        Rows of one token each are a decode step, others a prompt's first chunk; with the head.
        """
        self.programs.check_open()
        batch, length = num_sequences, num_tokens // num_sequences
        if length == 1:
            phase, cache_length, spec = "decode", MIN_KV_LENGTH, self._decode_spec(batch)
        else:
            phase, cache_length = "prefill", length
            spec = self._chunk_spec(batch, 0, length, length, is_first=True)

        def call(inputs: steps.StepInputs, experts: ExpertCache | None) -> jax.Array:
            model = merge_weights(self._program.definition, inputs.weights)
            tokens = jnp.zeros((batch, length), jnp.int32)
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
            cache = empty_cache(self.config, batch, cache_length, self.dtype)
            found = steps.run_layers(
                self._program, spec, model, cache, experts, inputs, tokens, positions, tokens == 0,
                jnp.full(batch, length, jnp.int32),
            )  # fmt: skip
            return model.project_to_vocab(found.output[:, -1])

        experts, rows = (self.memory.pool, self.memory.store) if self.memory else (None, None)
        operands = steps.StepInputs(self.weights, rows, self._own_experts), experts
        traced = call if self.mesh is None else self.mesh.map(call, operands, REPLICATED)
        with recorded_choices() as found:
            jax.eval_shape(traced, *operands)
        return self._attention_choices(phase) | found

    def _attention_choices(self, phase: str) -> ChoiceRecord:
        """Choices made with the runner; norms and cache writes by XLA come with attention by it."""
        made = {"attention": Choice(self._attention, {}), "attention to the cache": self._chunked}
        if phase == "decode":
            made = {"attention": self._cached}
            if cached_impl(self._cached) == "xla":
                made["norms and writes"] = self._cached
        with recorded_choices() as found:
            for name, choice in made.items():
                record_choice(name, choice, str(self.dtype))
        return found

    def _kernel_warnings(self) -> list[str]:
        """Warnings, one per part whose newest program runs it without its kernel."""
        expected = expected_kernel(self.kernels.target)
        lines = []
        for phase, found in self.products.items():
            lines += phase_warnings(phase, found, expected)
        if expected and self.memory:
            planner = CachePlanner(self.memory.spec.tiers, self.kernels.target)
            if reason := planner.refusal(self.config.experts_per_token):
                lines.append(f"decode: experts are found and placed without their kernel: {reason}")
        return lines

    def _record_choices(self, phase: str, found: ChoiceRecord) -> None:
        """Keeps the choices of a program that was just traced; logs warnings, each once."""
        if phase not in self.products:
            self.products[phase] = self._attention_choices(phase)
        self.products[phase].update(found)
        self._warn()

    def _warn(self) -> None:
        for line in self._kernel_warnings():
            if line not in self._warned:
                self._warned.add(line)
                logging.warning("%s", line)

    def prefill(
        self,
        prompts: list[list[int]],
        cache_length: int,
        settings: Sequence[GenerationSettings],  # of each prompt, with an integer seed
        eos_ids: tuple[int, ...],
        top_logprobs: int = 0,
    ) -> Session:
        """Runs prompts and chooses first tokens; does not wait."""
        batch, lengths, failures = len(prompts), [*map(len, prompts)], self._failure_count()
        state, keys = self._fresh([row.seeds(1)[0] for row in settings], cache_length)
        device_lengths = self._put(np.asarray(lengths, np.int32))
        for start, size in self.chunks(batch, max(lengths), cache_length, self.short_chunk):
            is_first = start == 0 and size != self.short_chunk
            spec = self._chunk_spec(batch, start, size, cache_length, is_first)
            chunk = self._chunk(slice_tokens(prompts, start, size), start, device_lengths)
            num_tokens = _num_between(lengths, start, size)
            state, _ = self._step(
                failures, num_tokens, steps.prefill_chunk, (self._program, spec), state, chunk
            )
        all_greedy = all(row.temperature == 0 for row in settings)
        penalizes = any(row.repetition_penalty != 1 for row in settings)
        seen = _seen_tokens(prompts, self.config, self._put) if penalizes else None
        sampling, eos_by_row = self._put((_sampling_of(settings), _ends_of(settings, eos_ids)))
        program = self._program._replace(top_logprobs=top_logprobs)
        decoding, emitted = self._call(
            steps.first_token, (program, all_greedy), (state.cache, keys, seen), self.weights,
            state.last_hidden, device_lengths, sampling, eos_by_row,
            results=(self._decode_specs, REPLICATED),
        )  # fmt: skip
        return Session(
            decoding, sampling, eos_by_row, all_greedy, max(lengths), emitted, top_logprobs,
            failures,
        )  # fmt: skip

    def open_lanes(
        self, num_lanes: int, pages: Pages, sizes: FixedSizes, eos_ids: tuple[int, ...]
    ) -> Session:
        """A running batch without rows."""
        cache_length = sizes.kv_lengths[-1]
        self.planned.check(num_lanes, cache_length, pages)
        static = (self.config, cache_length, pages, self.dtype)
        seeds = self._put(np.zeros(num_lanes, np.uint32))
        state = self._call(steps.empty_lanes, static, (), seeds, results=self._decode_specs)
        none = steps.StepOutput(self._put(np.zeros((num_lanes, 0), np.int32)), None)
        rests = [GenerationSettings()] * num_lanes
        given = _sampling_of(rests), _ends_of(rests, eos_ids)
        sampling, ends = self._put(given)
        return Session(
            state, sampling, ends, True, 0, none, failures_before=self._failure_count(),
            sizes=sizes, given=given,
        )  # fmt: skip

    def set_rows(
        self, session: Session, rows: Sequence[GenerationSettings], eos_ids: tuple[int, ...]
    ) -> None:
        """Sets the settings of all lanes for the next calls; `eos_ids` end those that heed them."""
        given = _sampling_of(rows), _ends_of(rows, eos_ids)
        session.sampling, session.eos_ids = jax.tree.map(
            lambda new, old, held: held if np.array_equal(new, old) else self._put(new),
            given, session.given, (session.sampling, session.eos_ids),
        )  # fmt: skip
        session.given = given

    def run_prompt_chunk(
        self, session: Session, lane: int, source: Sequence[int], pages: Sequence[int],
        prompt: Sequence[int], start: int, size: int, seed: int, limit: int,
    ) -> None:  # fmt: skip
        """Dispatches `steps.prompt_chunk`: tokens `start`..`start + size` of a prompt.

        A prompt of no tokens in no pages runs nothing: the program is compiled.
        """
        assert session.sizes is not None
        if self._recorder is not None:
            raise ValueError("routing is recorded of batches whose rows begin together")
        cache_length, table = session.state.cache.length, session.state.cache.table
        assert table is not None
        seen = prompt if session.penalizes else []  # else the program does not read it
        numbers = [start, len(prompt), lane, limit, np.uint32(seed).view(np.int32)]
        packed = [
            np.asarray(numbers, np.int32), *slice_tokens([source, pages], 0, table.shape[1]),
            *slice_tokens([seen], 0, cache_length, self.config.vocab_size),
            *slice_tokens([prompt], start, size),
        ]  # fmt: skip
        self._row_step(
            session, size, steps.prompt_chunk,
            self._chunk_spec(1, start, size, cache_length, False, session.sizes),
            (session.all_greedy, session.sizes.spare),
            self._put(np.concatenate(packed)),
            session.sampling, session.eos_ids,
        )  # fmt: skip

    def _row_step(
        self, session: Session, num_tokens: int, function: Any, spec: ChunkSpec,
        static: tuple[Any, ...], *operands: Any,
    ) -> None:  # fmt: skip
        """Runs a step on a session's rows; `static`: its own static operands."""
        program = self._program._replace(top_logprobs=session.top_logprobs)
        state, seen = session.state, session.state.seen
        if not session.penalizes:
            state = state._replace(seen=None)
        state, session.emitted = self._step(
            session.failures_before, num_tokens, function, (program, spec, *static), state,
            *operands,
        )  # fmt: skip
        session.state = state if session.penalizes else state._replace(seen=seen)

    def not_finite(self) -> str:
        """Error for logits that name no token; resets a policy that saw them."""
        if self.memory is not None:
            self.memory.reset()
        return (
            "the model's logits are NaN or infinite, so there is no next token: its "
            f"weights hold such values or are too large, or {self.dtype} is too small for it (try "
            "float32)"
        )

    def end_rows(self, session: Session, ended: np.ndarray) -> None:
        """Ends the rows of bool[B] from the next call on."""
        session.state = self._call(
            steps.end_rows, (), (session.state,), self._put(ended), results=self._decode_specs
        )

    def clear_pages(self, session: Session, pages: Sequence[int]) -> None:
        """Fills pages with zeros before what is dispatched next."""
        table = session.state.cache.table
        assert table is not None
        numbers = np.zeros(table.shape[1], np.int32)
        numbers[: len(pages)] = pages
        session.state = self._call(
            steps.clear_pages, (), (session.state,), self._put(numbers), results=self._decode_specs
        )

    def decode(
        self, session: Session, num_steps: int, buffer_length: int, whole: bool = True
    ) -> jax.Array:
        """Dispatches decode steps (see `steps.decode`); int32[B, buffer_length], not waited for."""
        batch, cache_length = session.state.cache.batch_size, session.state.cache.length
        spec = self._decode_spec(batch)._replace(
            kv_length=self.kv_length(
                session.next_position + num_steps, cache_length, session.sizes
            ),
            kv_lengths=self._kv_lengths(cache_length),
        )
        self._row_step(
            session, batch * num_steps, steps.decode, spec,
            (session.all_greedy, buffer_length, self._whole_calls and whole), session.sampling,
            session.eos_ids, self._put(np.int32(num_steps)),
        )  # fmt: skip
        session.next_position += num_steps
        return session.emitted.tokens

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """int32[B, T] to float32[B, T, V] on the host, a chunk at a time."""
        batch, length = tokens.shape
        if self.one_stream and batch > 1:
            return np.concatenate([self.logits(row[None]) for row in tokens])
        failures, cache, chunks = self._begin_windows(tokens, np.full(batch, length))
        logits = []
        for start, size, static, chunk in chunks:
            cache, out = self._step(
                failures, batch * size, steps.chunk_logits, static, cache, chunk
            )
            with self.reading(failures):
                logits.append(np.asarray(out)[:, : length - start])
        return np.concatenate(logits, axis=1)

    def score(self, tokens: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Negative log-likelihood of what follows each input, summed; see `Engine.score`."""
        batch = len(tokens)
        if self.one_stream and batch > 1:
            rows = (slice(i, i + 1) for i in range(batch))
            return np.concatenate([self.score(tokens[i], lengths[i], targets[i]) for i in rows])
        failures, cache, chunks = self._begin_windows(tokens, lengths)
        parts = []
        for start, size, static, chunk in chunks:
            wanted = slice_tokens(targets, start, size, -1)
            places = scored_columns(wanted)
            cache, nats = self._step(
                failures, _num_between(lengths, start, size), steps.score_chunk, static, cache,
                chunk, self._put(places), self._put(wanted[:, places]),
            )  # fmt: skip
            parts.append(nats)
        with self.reading(failures):
            return np.sum([np.zeros(batch), *(np.asarray(nats, np.float64) for nats in parts)], 0)

    def scan_windows(
        self, function: Any, carried: Any, tokens: np.ndarray, lengths: np.ndarray,
        then: Any = None,
    ) -> Any:  # fmt: skip
        """Runs windows int32[B, T], padded at the end, through a step with a carry.

        `function`: as `steps.chunk_logits`, with (cache, `carried`) as its state. With `then` that
        is (cache, None), and after each chunk a second program, `then(definition, carried, weights,
        output, start)`, takes the step's output and the donated carry and gives the next carry: its
        shapes then compile no layer.
        Under `one_stream` windows run one at a time: the carry has no axis of several. The call
        waits for the end, so that a disk failure in the last step is reported.
        """
        if self.one_stream and len(tokens) > 1:
            for row, own_length in zip(tokens, lengths, strict=True):
                carried = self.scan_windows(function, carried, row[None], own_length[None], then)
            return carried
        failures, cache, chunks = self._begin_windows(tokens, lengths)
        for start, size, static, chunk in chunks:
            num_tokens = _num_between(lengths, start, size)
            state = cache, (None if then else carried)
            (cache, own), output = self._step(failures, num_tokens, function, static, state, chunk)
            if then:
                definition = (self._program.definition,)
                own = self._call(then, definition, (carried,), self.weights, output, chunk.start)
            carried = own
            del output  # else it would be there while the next chunk runs
        with self.reading(failures):
            return jax.block_until_ready(carried)

    def expert_impl(self, num_tokens: int, experts: Sequence[Weight] | None = None) -> ExpertImpl:
        """Form that runs experts of so many tokens; None: the model's, first tier."""
        experts = self._experts if experts is None else experts
        return default_expert_impl(
            num_tokens, self.config, self.dtype, self.device.platform, experts, self.kernels,
            pooled=self.memory is not None,
        )  # fmt: skip

    def _expert_impls(self, num_tokens: int) -> tuple[ExpertImpl, tuple[ExpertImpl, ...]]:
        """Forms that run the experts of so many tokens, and of each tier; () without tiers."""
        if num_tokens not in self._forms:
            tiers = tuple(self.expert_impl(num_tokens, stacks) for stacks in self._tiers)
            self._forms[num_tokens] = self.expert_impl(num_tokens), tiers
        return self._forms[num_tokens]

    def _read(
        self, tokens: np.ndarray, lengths: np.ndarray, failures: int, cache_length: int
    ) -> Iterator[_WindowChunk]:
        """Yields chunks of given tokens; a policy's transfers finish before each chunk.

        None is longer than `MAX_PREFILL_LENGTH`, since each token has logits of its own.
        """
        memory, (batch, length) = self.memory, tokens.shape
        length = int(lengths[0]) if self.one_stream else length
        device_lengths = self._put(np.asarray(lengths, np.int32))
        longest = min(self.longest_chunk(batch, cache_length), MAX_PREFILL_LENGTH)
        chunks, start = prefill_chunks(length, cache_length, longest), 0
        while start < length:
            if self.one_stream and memory is not None and memory.moves_experts:
                rests = memory.catch_up(failures) or MIN_PREFILL_LENGTH  # as often as decode asks
                size = next_chunk(length - start, cache_length - start, min(rests, longest))
            else:
                _, size = next(chunks)
            static = self._program, self._chunk_spec(batch, start, size, cache_length)
            chunk = self._chunk(slice_tokens(tokens, start, size), start, device_lengths)
            yield start, size, static, chunk
            start += size

    def chunks(
        self, batch: int, length: int, cache_length: int, short: int = 0
    ) -> Iterator[tuple[int, int]]:
        """(start, size) of chunks of `length` positions; `short` is of `prefill_chunks`."""
        longest = self.longest_chunk(batch, cache_length)
        return prefill_chunks(length, cache_length, longest, short)

    def longest_chunk(self, batch: int, cache_length: int) -> int:
        """Positions of a prefill chunk of so many sequences, a power of two."""
        return longest_chunk(
            self.config, batch, cache_length, self.planned, cached_impl(self._chunked) == "xla"
        )

    def kv_length(self, length: int, cache_length: int, sizes: FixedSizes | None = None) -> int:
        """Slots that attention may look at, to see `length` of them, of `sizes` if those are given.

        On a CPU all: a program chooses among `chunking.kv_buckets` itself, since compiling one for
        each takes seconds.
        """
        if self._chooses_kv_length:
            return cache_length
        if sizes:
            return sizes.kv_length(length)
        return kv_bucket(length, cache_length)

    def _kv_lengths(self, cache_length: int) -> tuple[int, ...]:
        return kv_buckets(cache_length) if self._chooses_kv_length else ()

    def _fresh(self, seeds: list[int], cache_length: int) -> tuple[steps.PrefillState, jax.Array]:
        self.planned.check(len(seeds), cache_length)
        if self._recorder is not None:
            self._recorder.begin(len(seeds))
        static = (self.config, cache_length, self.dtype)
        results = steps.PrefillState(self._cache_specs, _WHOLE), REPLICATED
        return self._call(
            steps.init_batch, static, (), self._put(np.asarray(seeds, np.uint32)), results=results
        )

    @property
    def _decode_specs(self) -> steps.DecodeState:
        return steps.DecodeState(self._cache_specs, *[_WHOLE] * 6)

    def _failure_count(self) -> int:
        return self.memory.failure_count() if self.memory else 0

    def _begin_windows(
        self, tokens: np.ndarray, lengths: np.ndarray
    ) -> tuple[int, KVCache, Iterator[_WindowChunk]]:
        """A session of its own for windows int32[B, T]: its failures so far, cache and chunks."""
        batch, length = tokens.shape
        limit = max(length, self.planned.context or self.config.context_limit)
        cache_length = length_bucket(length, MIN_PREFILL_LENGTH, limit)
        state, _ = self._fresh([0] * batch, cache_length)
        failures = self._failure_count()
        return failures, state.cache, self._read(tokens, lengths, failures, cache_length)

    def _step(
        self, failures: int, num_tokens: int, function: Callable[..., steps.StepResult[State]],
        static: tuple[Any, ...], state: State, *operands: Any,
    ) -> tuple[State, Any]:  # fmt: skip
        """Runs a step through the layers on its state, donated; returns state and output."""
        self.programs.check_open()
        self.experts_used.add(static[1].experts)
        memory = self.memory
        with memory.step(failures, max(1, num_tokens)) if memory else contextlib.nullcontext():
            experts, rows = (memory.pool, memory.store) if memory else (None, None)
            inputs = steps.StepInputs(self.weights, rows, self._own_experts)
            results: Any = REPLICATED
            if self.mesh is not None:
                results = steps.StepResult(specs_of(state), specs_of(experts), _WHOLE, _WHOLE)
            found = self._call(
                function, static, (state, experts), inputs, *operands, results=results
            )
            if memory:
                memory.pool = found.experts
        if self._recorder is not None and found.recorded is not None:
            self._recorder.add(found.recorded, is_decode=function is steps.decode)
        return found.state, found.output

    @contextlib.contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """Records routing with a recorder inside this context, by other programs."""
        plain = self._program
        self._program, self._recorder = plain._replace(record=recorder.spec), recorder
        try:
            yield
        finally:
            self._program, self._recorder = plain, None

    @contextlib.contextmanager
    def reading(self, failures: int) -> Iterator[None]:
        """Context for reading results of steps; `failures`: see `ExpertMemory.failure_count`."""
        memory = self.memory
        with (
            plain_memory_errors(self.device, waits=self._mailboxes is not None),
            memory.reading(failures) if memory else contextlib.nullcontext(),
        ):
            yield

    def _call(
        self, function: Any, static: tuple[Any, ...], donated: tuple[Any, ...], *arguments: Any,
        results: Any = REPLICATED,
    ) -> Any:  # fmt: skip
        arguments = (*donated, *arguments)
        waits = self._mailboxes is not None
        with plain_memory_errors(self.device, waits=waits):
            with recorded_choices() as found:  # empty unless the program is traced now
                program = self.programs.get(
                    function, static, arguments, num_donated=len(donated), results=results
                )
            if found:
                self._record_choices("decode" if function is steps.decode else "prefill", found)
            with _in_one_order if waits else contextlib.nullcontext():
                return program(*arguments)

    def _chunk_spec(
        self, batch: int, start: int, size: int, cache_length: int, is_first: bool | None = None,
        sizes: FixedSizes | None = None,
    ) -> ChunkSpec:  # fmt: skip
        """`is_first`: whether it attends to itself alone; None: where it starts at 0.

        Without cuDNN the kernel attends among the tokens of a first chunk too, by the cache.
        """
        # One token would run as a decode step does, which observes no attention.
        cached = "xla" if size == 1 else cached_impl(self._chunked)
        is_first = start == 0 if is_first is None else is_first
        is_first = is_first and (self._attention, cached) != ("xla", "kernel")
        experts, tiers = self._expert_impls(batch * size)
        return ChunkSpec(
            kv_length=0 if is_first else self.kv_length(start + size, cache_length, sizes),
            is_first=is_first, experts=experts, attention=self._attention, cached=cached,
            tiers=tiers, kv_lengths=() if is_first else self._kv_lengths(cache_length),
        )  # fmt: skip

    def _decode_spec(self, batch: int) -> ChunkSpec:
        """A decode step's, up to the slots that it reads."""
        experts, tiers = self._expert_impls(batch)
        return ChunkSpec(
            kv_length=MIN_KV_LENGTH, is_first=False, experts=experts, attention=self._attention,
            cached=cached_impl(self._cached), tiers=tiers,
        )  # fmt: skip

    def _chunk(self, tokens: np.ndarray, start: int, lengths: jax.Array) -> steps.TokenChunk:
        return steps.TokenChunk(self._put(tokens), self._put(np.int32(start)), lengths)

    def _put(self, arrays: Any) -> Any:
        return put(arrays, self.place)


def _num_between(lengths: Sequence[int] | np.ndarray, start: int, size: int) -> int:
    """Counts tokens of all sequences at positions `start`..`start + size`."""
    return int(np.clip(np.asarray(lengths) - start, 0, size).sum())
