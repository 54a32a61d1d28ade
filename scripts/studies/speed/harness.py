"""Experts of random weights under policies: memories, workloads, timed steps, rows.

What the sections of `bench_policies.py` share.
"""

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.benchmarking.expected_kernels import refuse_dequantized
from moejax.benchmarking.random_weights import Packing
from moejax.benchmarking.routing import EXPONENTS, Workload, make_workload, of_trace
from moejax.benchmarking.shape_memory import (
    ShapeMemories,
    TierPlan,
    release,
    replay,
    tier_name,
)
from moejax.experts.budget import (
    BOTH,
    Budget,
    BudgetError,
    Limits,
    PolicyDemands,
    RunSizes,
    TierSize,
    make_budget,
)
from moejax.experts.cache import ExpertMemory
from moejax.experts.ledger import Ledger
from moejax.experts.load import plan_tiers
from moejax.inference.chunking import planned_chunk
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner, Session
from moejax.models.attention import copies_cache, stores_scores
from moejax.models.config import ModelConfig
from moejax.policies.base import AnyPolicy
from moejax.policies.buddy_lists import BuddyLists, buddy_lists, conditional_coactivation
from moejax.routing.trace import read_trace
from pallas_kernels.target import target_of
from scripts.studies.measuring import Report

# Of BuddyMoE's lists, the longest that a layer of 32 experts can have.
CFT_ALPHA, MOST_BUDDIES, SMOOTHING = 0.95, 31, 1.0
RECALL = 0.85  # of look-ahead in a replayed trace, as in made-up routing
PRIMING_CALLS = 2
ONE_TOKEN = GenerationSettings.of(max_new_tokens=1)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
      context: slots of the KV cache.
      prompt: tokens of the prompt.
      steps: decode steps of a measurement, after as many others.
      per_call: decode steps of a call.
    """

    context: int
    prompt: int
    steps: int
    per_call: int

    @property
    def num_replayed(self) -> int:
        """Steps of a workload: those of a measurement, and of the calls around it."""
        return 2 * self.steps + 4 * self.per_call

    @property
    def position(self) -> int:
        """Where decoding begins if there was no prompt."""
        return max(1, min(self.prompt, self.context - self.num_replayed))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Decoding on a workload.

    Attributes:
      ttft: seconds of a prompt; 0: not measured.
      tpot: seconds of a step, the mean: what promotions take is in some of the calls.
      median: seconds of a step.
      facts: of the ledger, see `facts_of`.
    """

    ttft: float
    tpot: float
    median: float
    facts: dict[str, float]


class Lab(ShapeMemories):
    """A shape with random dense weights on the device: bf16, or attention in fewer bits."""

    def __init__(
        self, config: ModelConfig, shape: str, device: jax.Device, sizes: Sizes,
        host_gib: float = 0, attention_bits: int = 16,
    ):  # fmt: skip
        """Makes the dense weights.

        Args:
          config: of the model.
          shape: its name.
          device: where it runs.
          sizes: how much is run; may be changed between sections.
          host_gib: of a precision's rows, which experts share where they are more; 0: no limit.
        """
        packing = Packing(bits=4, attention_bits=attention_bits)
        super().__init__(config, packing, device, host_gib)
        self.shape, self.sizes = shape, sizes

    def budget(
        self, bits: Sequence[int], gib: float, *, prefetch: int = 0, bulk: int = 0,
        slots: Sequence[int] = (), prefetch_in: str = BOTH,
    ) -> Budget:  # fmt: skip
        """Plans so many GiB for tiers of these precisions, as `moejax.experts` does."""
        limits = Limits(device_gib=gib, prefetch_in=prefetch_in)
        policy = PolicyDemands(slots=slots, prefetch=prefetch, bulk=bulk)
        return make_budget(self._run_sizes(), self._tier_sizes(bits), limits, policy)

    def by_planes(
        self, policy: AnyPolicy, gib: float, prefetch_in: str = BOTH
    ) -> tuple[Budget, list[TierPlan]]:
        """Plans INT4 and INT2 as bit planes of one copy, or as copies where planes do not fit."""
        bits, limits = (4, 2), Limits(device_gib=gib, prefetch_in=prefetch_in)
        sizes = self._tier_sizes(bits)
        budget, refines = plan_tiers(policy, self._run_sizes(), sizes, (), limits, bits)
        parts = zip(bits, budget.tiers, refines, strict=True)
        return budget, [self.plan_of(b, part, refines=2 * plane) for b, part, plane in parts]

    def _tier_sizes(self, bits: Sequence[int]) -> list[TierSize]:
        return [TierSize(name=tier_name(b), expert_nbytes=self.expert_nbytes(b)) for b in bits]

    def _run_sizes(self) -> RunSizes:
        config, context = self.config, self.sizes.context
        sizes = (2, target_of(self.device))  # bytes of a number
        return RunSizes(
            config=config, weights_nbytes={n: leaf.nbytes for n, leaf in self.dense.items()},
            batch=1, context=context, chunk=planned_chunk(config, 1, context, *sizes),
            platform=self.device.platform, stores_scores=stores_scores(config, *sizes),
            copies_cache=copies_cache(config, *sizes),
        )  # fmt: skip

    def split(self, bits: Sequence[int], gib: float, how: str, **more: Any) -> Budget:
        """The budget of two tiers whose slots are shared out by a rule, or as they say.

        Args:
          bits: of the tiers.
          gib: of device memory.
          how: "rule", as `make_budget` does it; "high": the first tier has as many slots as
            there is room for, the second one what is left; or the numbers, as "4,0".
          **more: as of `budget`.
        """
        if len(bits) == 1 or how == "rule":
            return self.budget(bits, gib, **more)
        if how != "high":
            return self.budget(bits, gib, slots=[int(number) for number in how.split(",")], **more)
        found, all_slots = None, range(1, self.config.num_experts + 1)
        with contextlib.suppress(BudgetError):
            for high in all_slots:
                found = self.budget(bits, gib, slots=(high, 0), **more)
        if found is None:
            raise BudgetError(f"{gib:g} GiB hold no expert of high precision")
        with contextlib.suppress(BudgetError):
            for low in all_slots:
                found = self.budget(bits, gib, slots=(found.tiers[0].slots, low), **more)
        return found

    def runner(self, memory: ExpertMemory | None, weights: Any = None) -> Runner:
        """A runner of the dense weights, or of others."""
        on_host = memory is not None and self._run_sizes().embeddings_nbytes > 0
        self.place_embeddings(on_host=on_host)
        weights = self.dense if weights is None else weights
        return Runner(self.config, weights, self.device, memory=memory)

    def timed(
        self, runner: Runner, workload: Workload, batch: int = 1, *, ttft: bool = False
    ) -> Measured:
        """Times decoding on a workload, from its first step on if no prompts run before.

        Raises:
          MoejaxError: packed products would run on no kernel.
          RuntimeError: a program was compiled in the timed steps.
        """
        sizes, memory = self.sizes, runner.memory
        if memory is not None:
            replay(memory, workload, batch)
        prompt = sizes.prompt if ttft else 0
        refuse_dequantized(runner, batch, prompt=prompt, context=sizes.context)
        first = 0.0
        if ttft:
            self._prefill(runner, batch, 1)  # compiles, while the device works
            first = min(self._prefill(runner, batch, seed)[1] for seed in (2, 3))
            session = self._prefill(runner, batch, 4)[0]
        else:
            session = _session_without_prefill(runner, batch, sizes)
        num_calls = sizes.steps // sizes.per_call
        for _ in range(num_calls):
            jax.block_until_ready(
                (runner.decode(session, sizes.per_call, sizes.per_call), session.state)
            )
        _forget_counts(memory)
        replaced, num_programs = _replaced(memory), runner.programs.num_traces
        calls = _pipelined(runner, session, sizes.per_call, num_calls) / sizes.per_call
        if runner.programs.num_traces != num_programs:  # attention's length passed a power of two
            raise RuntimeError(
                "a program was compiled in the timed steps: change --prompt or --steps"
            )
        facts: dict[str, float] = {}
        if memory is not None:
            memory.read_counters()
            steps = (num_calls + PRIMING_CALLS) * sizes.per_call
            facts = facts_of(memory.ledger, steps)
            if replaced is not None:
                width, layers = self.config.experts_per_token, self.num_layers
                more = (_replaced(memory) or 0.0) - replaced
                facts["replaced_share"] = more / (steps * batch * width * layers)
        return Measured(first, float(calls.mean()), float(np.median(calls)), facts)

    def _prefill(self, runner: Runner, batch: int, seed: int) -> tuple[Session, float]:
        """A session and its seconds, without those of compiling."""
        rng = np.random.default_rng(seed)
        prompts = rng.integers(0, self.config.vocab_size, (batch, self.sizes.prompt)).tolist()
        start, compiled = time.perf_counter(), runner.programs.seconds
        session = runner.prefill(prompts, self.sizes.context, ONE_TOKEN, ())
        jax.block_until_ready((session.first_tokens, session.state))
        spent = time.perf_counter() - start
        return session, spent - (runner.programs.seconds - compiled)


def _session_without_prefill(runner: Runner, batch: int, sizes: Sizes) -> Session:
    """A session whose cache holds random keys and values: no prefill is compiled or run."""
    prompts = [[0] * sizes.position] * batch
    session = runner.prefill(prompts, sizes.context, ONE_TOKEN, (), runs_prompts=False)
    leaves, tree = jax.tree.flatten(session.state.cache)
    draw = jax.jit(
        lambda key, like: jax.random.normal(key, like.shape, like.dtype), donate_argnums=1
    )
    drawn = [draw(jax.random.key(i, impl="rbg"), leaf) for i, leaf in enumerate(leaves)]
    cache = jax.block_until_ready(jax.tree.unflatten(tree, drawn))
    session.state = dataclasses.replace(session.state, cache=cache)
    return session


def _pipelined(runner: Runner, session: Session, per_call: int, num_calls: int) -> np.ndarray:
    """float64[calls]: seconds between the ends of two calls, the next dispatched before the wait.

    `PRIMING_CALLS` more than are timed run before.
    """
    times = []
    waiting = runner.decode(session, per_call, per_call)
    jax.block_until_ready(waiting)
    ended = time.perf_counter()
    waiting = runner.decode(session, per_call, per_call)
    for _ in range(num_calls):
        following = runner.decode(session, per_call, per_call)
        jax.block_until_ready(waiting)
        now = time.perf_counter()
        times.append(now - ended)
        waiting, ended = following, now
    jax.block_until_ready((waiting, session.state))
    return np.asarray(times)


def _forget_counts(memory: ExpertMemory | None) -> None:
    """Ends what goes on between steps, and begins to count anew."""
    if memory is None:
        return
    memory.read_counters()
    memory.ledger.gate = None
    for tier in memory.tiers:
        tier.ledger.layers, tier.ledger.gate_mass = [], 0.0


def _replaced(memory: ExpertMemory | None) -> float | None:
    """Pairs that BuddyMoE has replaced so far; None under others."""
    found = None if memory is None else getattr(memory.pool.state, "replaced", None)
    return None if found is None else float(np.asarray(found).sum())


def facts_of(ledger: Ledger, steps: int) -> dict[str, float]:
    """Hit rate and MB a step over the link; of tiers also the share of experts and of gate mass.

    Where tiers share slots the shares of experts are of planes: both have those of high precision.
    """
    facts = {"hit_rate": ledger.hit_rate, "megabytes_a_step": ledger.link_bytes / steps / 1e6}
    for name in ("misses", "prefetched", "bulk"):
        facts[f"{name}_a_step"] = ledger.total(name) / steps
    if ledger.gate is not None:
        needed = ledger.total("needed")
        facts |= {f"gate_{name}": share for name, share in ledger.shares.items()}
        for name, tier in ledger.tiers.items():
            facts[f"experts_{name}"] = tier.total("needed") / max(1, needed)
    return facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of sections; those of the command line are described there.

    Attributes:
      planes: high precision is the low one and a plane that refines it.
      n_hot: experts of a layer in DynaExq's high precision.
      period: T of DynaExq, in steps: of the tokens of a batch.
      requests: demotions and promotions that DynaExq asks a call.
      shift_every: steps between the shifts of a layer.
      shift_share: of the experts that exchange ranks in a shift.
      traces: recorded, whose routing is replayed in place of made-up one; a workload that shifts
        has all of them in turn, another one the first.
    """

    batches: Sequence[int] = ()
    tiers: Sequence[int] = (16, 4)
    gibs: Sequence[float] = ()
    cache_rates: Sequence[float] = ()
    planes: bool = False
    n_hot: int = 32
    period: int = 64
    bulk: int = 32
    requests: int = 16
    shift_every: int = 256
    shift_share: float = 0.25
    exponent: float | None = None
    traces: Sequence[Path] = ()
    split: str = "high"
    ttft: bool = True
    only: Sequence[str] = ()


class Run:
    """A section that runs."""

    def __init__(self, lab: Lab, report: Report, options: Options):
        self.lab, self.report, self.options = lab, report, options
        self.failed: list[str] = []
        self._workloads: dict[tuple[int, bool], Workload] = {}

    def workload(self, batch: int = 1, *, shifts: bool = False) -> Workload:
        """Workload of so many sequences; made once. Rows from then on say what it is."""
        key = (batch, shifts)
        if key not in self._workloads and self.options.traces:
            self._workloads[key] = self._of_traces(batch, shifts=shifts)
        if key not in self._workloads:
            o, exponent = self.options, self.options.exponent
            if exponent is None:
                exponent = EXPONENTS.get(self.lab.shape, 0.0)
            made = make_workload(
                self.lab.config, num_steps=self.lab.sizes.num_replayed, batch=batch,
                exponent=exponent, shift_every=o.shift_every if shifts else 0,
                shift_share=o.shift_share,
            )  # fmt: skip
            print(f"workload of batch {batch}: skew {exponent:g}, {made.num_shifts} shifts, "
                  f"{made.distinct:.3g} experts of a layer a step", flush=True)  # fmt: skip
            popularity = f"popularity of rank r as r^-{exponent:g}" if exponent else "even"
            self._workloads[key] = dataclasses.replace(made, about=f"made up, {popularity}")
        self.report.beside_all["routing"] = self._workloads[key].about
        return self._workloads[key]

    def _of_traces(self, batch: int, *, shifts: bool) -> Workload:
        paths = list(self.options.traces) if shifts else [self.options.traces[0]]
        works = [
            of_trace(
                self.lab.config, read_trace(path), batch, recall=RECALL, seed=0, name=path.name
            )
            for path in paths
        ]
        if len(works) == 1:
            return works[0]
        joined = {
            name: np.concatenate([getattr(work, name) for work in works])
            for name in ("ids", "probabilities", "predicted")
        }
        about = f"{'; then '.join(work.about for work in works)}"
        return Workload(**joined, num_shifts=len(works) - 1, about=about)

    def buddies(
        self, workload: Workload, alpha: float = CFT_ALPHA, most: int = MOST_BUDDIES
    ) -> BuddyLists:
        """Lists by a workload's own co-activations."""
        shares = conditional_coactivation(workload.coactivations(), SMOOTHING)
        return buddy_lists(shares, alpha, most)

    def attempt(self, what: str, part: Callable[[], Any]) -> Any:
        """The part's value; None where it failed, or is not asked for."""
        if self.options.only and not any(word in what for word in self.options.only):
            return None
        start = time.perf_counter()
        try:
            return part()
        except Exception as error:
            traceback.print_exc()
            print(f"  FAILED {what}: {error!s:.300}", flush=True)
            self.failed.append(what)
            return None
        finally:
            print(f"  ({what}: {time.perf_counter() - start:.1f} s)", flush=True)

    def measured(
        self, what: str, make: Callable[[], ExpertMemory], workload: Workload, batch: int = 1,
        *, ttft: bool = False,
    ) -> Measured | None:  # fmt: skip
        """Measures a memory that is made for it and released; see `Lab.timed` and `attempt`."""

        def part() -> Measured:
            with released(make()) as memory:
                return self.lab.timed(self.lab.runner(memory), workload, batch, ttft=ttft)

        return self.attempt(what, part)

    def tpot(self, what: str, found: Measured, batch: int = 1, **baseline: float) -> None:
        """The row of a decode loop."""
        self.report.add(
            f"{what}, TPOT", 1e3 * found.tpot, "ms", tokens_per_s=batch / found.tpot, **baseline,
            median_ms=1e3 * found.median, **found.facts,
        )  # fmt: skip
        if found.ttft:
            self.report.add(f"{what}, TTFT", 1e3 * found.ttft, "ms")

    def peak(self, what: str, planned: int, gib: float) -> None:
        """The device's peak so far, beside the plan; nothing on a CPU."""
        stats = self.lab.device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            self.report.add(
                f"{what}, peak of the device so far", stats["peak_bytes_in_use"] / 2**30, "GiB",
                planned_gib=planned / 2**30, limit_gib=gib,
                allocator_gib=stats.get("bytes_limit", 0) / 2**30,
            )  # fmt: skip


@contextlib.contextmanager
def released(memory: ExpertMemory) -> Iterator[ExpertMemory]:
    """Gives back what a memory has on the device where the block ends."""
    try:
        yield memory
    finally:
        release(memory)
