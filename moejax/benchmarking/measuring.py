"""Runs batches of requests and times them; what moved for prompts and for answers, apart."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from moejax.devices import REPLICATED, specs_of
from moejax.experts.ledger import Ledger, TierLedger
from moejax.inference import steps
from moejax.inference.batch import RowBatch, raise_errors
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner, Session
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.moe import ResidentExperts, Routing
from moejax.models.transformer import ChunkSpec, merge_weights
from moejax.weights.handed_out import OwnExperts

Prompts = list[list[int]]


@dataclasses.dataclass(frozen=True)
class BatchTimes:
    """One batch in one run; compiling is in none of the times."""

    prompt_tokens: list[int]  # of each request
    new_tokens: list[int]
    ttft_s: float  # until the first tokens of all were on the host
    # (seconds, decode steps) between the ends of calls that decode, of those in which some answer
    # went on to the last step
    calls: list[tuple[float, int]]
    ended_s: float = 0.0  # of the others: their later steps are for nobody

    @property
    def decode_s(self) -> float:
        """Seconds of decode, over the calls that are counted."""
        return sum(seconds for seconds, _ in self.calls)

    @property
    def until_end_s(self) -> float:
        """From the first token to the last, and to the end of its call."""
        return self.decode_s + self.ended_s

    @property
    def steps(self) -> int:
        """Decode steps of those calls."""
        return sum(steps for _, steps in self.calls)

    @property
    def num_decoded(self) -> int:
        """Tokens after each request's first."""
        return sum(self.new_tokens) - len(self.new_tokens)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """All runs."""

    runs: list[list[BatchTimes]]  # of each its batches
    wall_s: list[float]  # of each run, by the clock, compiling included
    # of "prefill" and "decode" over all runs; {} where all experts are on the device
    ledgers: dict[str, Ledger]
    distinct: float | None  # experts that a layer's step of decode reads, the mean; None: not known
    warmup_s: float  # of the run before, compiling left out
    compile_s: float  # of all programs; `late_compile_s` of it inside the runs that count
    late_compile_s: float


class Bench:
    """A model and how it is asked."""

    def __init__(
        self, runner: Runner, *, context: int, settings: GenerationSettings,
        eos_ids: tuple[int, ...], steps_per_call: int,
    ):  # fmt: skip
        """Runs nothing yet."""
        self.runner, self.context, self.settings = runner, context, settings
        self._eos_ids, self._per_call = eos_ids, steps_per_call
        self._ledgers: dict[str, Ledger] = {}

    def measure(self, batches: Sequence[Prompts], *, runs: int, count: bool) -> Measurement:
        """Runs all batches once to warm up, and then several times.

        With `count` one more program counts a whole model's distinct experts.
        """
        programs = self.runner.programs
        compiled, start = programs.seconds, time.perf_counter()
        for batch in batches:
            self._batch(batch)
        warmup_s = time.perf_counter() - start - (programs.seconds - compiled)
        distinct = self._distinct(batches[0], count) if self.runner.memory is None else None
        if self.runner.memory is not None:
            self.runner.memory.read_counters()  # what warming up moved counts for nothing
            tiers = self.runner.memory.ledger.tiers
            self._ledgers = {
                phase: Ledger({n: TierLedger(t.expert_bytes, t.refines) for n, t in tiers.items()})
                for phase in ("prefill", "decode")
            }
        early, found, walls = programs.seconds, [], []
        for _ in range(runs):
            start = time.perf_counter()
            found.append([self._batch(batch) for batch in batches])
            walls.append(time.perf_counter() - start)
        self._join_phases()
        return Measurement(
            found, walls, self._ledgers, distinct, warmup_s, programs.seconds - compiled,
            programs.seconds - early,
        )  # fmt: skip

    def _batch(self, prompts: Prompts) -> BatchTimes:
        """One batch, as `Engine.generate` runs it, but for the text."""
        runner, settings = self.runner, self.settings
        most = settings.max_new_tokens
        batch = RowBatch(
            runner, None, prompts, settings.by_prompt(len(prompts)), self.context,
            self._eos_ids, steps_per_call=self._per_call,
        )  # fmt: skip
        run = batch.steps()
        with self._phase("prefill"):
            clock = _Clock(runner)
            raise_errors(next(run))
            ttft_s = clock.lap()
        calls: list[tuple[float, int]] = []
        decoded, ended_s = 0, 0.0
        with self._phase("decode"):
            clock = _Clock(runner)
            for deltas in run:
                raise_errors(deltas)
                num_decoded = batch.timing.num_decoded
                asked, steps = min(self._per_call, most - 1 - decoded), num_decoded - decoded
                decoded, seconds = num_decoded, clock.lap()
                if steps >= asked:
                    calls.append((seconds, steps))
                else:  # all answers ended in it: it took the time of more steps than have tokens
                    ended_s += seconds
        new_tokens = [len(answer.tokens) for answer in batch.answers]
        lengths = [len(prompt) for prompt in prompts]
        return BatchTimes(lengths, new_tokens, ttft_s, calls, ended_s)

    def _join_phases(self) -> None:
        """Leaves out of both ledgers what is of the whole time, or of both phases together."""
        asked = [ledger.asked for ledger in self._ledgers.values()]
        for ledger in self._ledgers.values():
            for tier in ledger.tiers.values():
                tier.bulk_requests = {}
        if any(count is not None for count in asked):  # prompts alone may be too short for it
            self._ledgers["prefill"].asked = None
            self._ledgers["decode"].asked = sum(filter(None, asked))

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Counts what moves inside on the phase's ledger, read outside the times."""
        memory = self.runner.memory
        if memory is None or not self._ledgers:
            yield
            return
        ledger = memory.ledger = self._ledgers[name]
        for tier, own in zip(memory.tiers, ledger.tiers.values(), strict=True):
            tier.ledger = own
        yield
        memory.read_counters()

    def _distinct(self, prompts: Prompts, count: bool) -> float:
        """Experts of a layer that a step of a whole model reads: counted in one, or expected."""
        runner, config, batch = self.runner, self.runner.config, len(prompts)
        if batch == 1 or not config.moe_layers:
            return config.experts_per_token
        if not count:
            missed = (1 - config.experts_per_token / config.num_experts) ** batch
            return config.num_experts * (1 - missed)
        session = runner.prefill(prompts, self.context, self.settings.by_prompt(batch), ())
        spec = ChunkSpec(
            kv_length=runner.kv_length(session.next_position + 1, self.context), is_first=False,
            experts=runner.expert_impl(batch), attention="xla",
        )  # fmt: skip
        return _distinct_experts(runner, session, spec)


class _Clock:
    """Seconds between laps, compiling left out."""

    def __init__(self, runner: Runner):
        self._programs = runner.programs
        self._since = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._programs.seconds

    def lap(self) -> float:
        """Since the last lap."""
        before, self._since = self._since, self._now()
        return self._since - before


def floor_bytes(
    config: ModelConfig,
    weights_nbytes: Mapping[str, int],  # of its leaves on a device, those of experts or not
    *,
    experts_nbytes: float,  # of the distinct experts that the step's tokens chose, over all layers
    positions: float,  # of the cache that are read, summed over the sequences
    itemsize: int,  # bytes of a number of the cache
    batch: int,  # sequences, each of which has states
) -> float:
    """Least bytes that a device reads in a decode step: dense leaves, chosen experts, the cache.

    Codes, scales and zeros count; of embeddings that are not the head, nothing does. States of
    layers without attention are read and written.
    """
    dense = sum(
        nbytes
        for name, nbytes in weights_nbytes.items()
        if name not in EXPERT_LEAVES and (name != "embed" or config.tied_embeddings)
    )
    a_position = config.cached_values * itemsize
    wide, plain = config.state_values
    states = 2 * batch * (4 * wide + plain * itemsize)
    return dense + experts_nbytes + a_position * positions + states


def _distinct_experts(runner: Runner, session: Session, spec: ChunkSpec) -> float:
    """Experts of a layer that one decode step of a session reads, the mean over layers.

    The routing of the next step is counted on the device. The session, after a prefill or some
    steps, is used up: its cache is donated.
    """
    definition = runner._program.definition

    def count(
        state: steps.DecodeState, weights: steps.Weights, own: jax.Array | None
    ) -> tuple[steps.DecodeState, jax.Array]:
        model = merge_weights(definition, weights)
        num_experts = runner.config.num_experts

        def num_chosen(x: jax.Array, routing: Routing) -> jax.Array:
            return jnp.sum(jnp.zeros(num_experts, jnp.int32).at[routing.ids.reshape(-1)].max(1))

        cache, _, _, counts = model(
            state.tokens[:, None], state.positions[:, None], ~state.done[:, None], state.cache,
            spec,
            ResidentExperts(
                model.moe, spec.experts, num_chosen, None if own is None else OwnExperts(own)
            ),
        )  # fmt: skip
        mean = jnp.mean(counts.astype(jnp.float32))
        return state._replace(cache=cache), mean

    operands = session.state, runner.weights, runner._own_experts
    program = count
    if runner.mesh is not None:
        program = runner.mesh.map(count, operands, (specs_of(session.state), REPLICATED))
    _, mean = jax.jit(program, donate_argnums=0)(*operands)
    return float(mean)
