"""Measures a configuration: every batch under every budget."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.benchmarking import figures, requests
from moejax.benchmarking.bandwidth import Bandwidth, bandwidth_of
from moejax.benchmarking.expected_kernels import refuse_dequantized
from moejax.benchmarking.figures import Figures
from moejax.benchmarking.measuring import Bench, Measurement
from moejax.benchmarking.models import CheckpointModels, Models, models_of
from moejax.benchmarking.requests import PromptFile, TokenizedPrompts
from moejax.config.benchmark import PROMPT_TOKENS, BenchmarkConfig
from moejax.config.options import options
from moejax.devices import plain_memory_errors
from moejax.engine import STEPS_PER_CALL
from moejax.errors import MoejaxError, print_stderr
from moejax.evaluation import fidelity
from moejax.experts.bits import bits_of
from moejax.experts.budget import BudgetError
from moejax.inference import report
from moejax.inference.chunking import MIN_KV_LENGTH, length_bucket
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.quantization.pipeline.calibration import shipped_text

NO_MEMORY = "is out of memory"  # of `devices.plain_memory_errors`


@dataclasses.dataclass(frozen=True)
class Point:
    """One batch size under one budget."""

    batch: int  # sequences at once
    gib: float  # limit of the device; 0: none
    refusal: str = ""  # why it could not run; "" where it did
    figures: Figures = dataclasses.field(default_factory=dict)  # by name; {} where it was refused
    requests: str = ""  # what was asked, for people
    context: int = 0  # slots of the KV cache
    routing: str = ""  # where the experts of decode steps are from
    placement: tuple[str, ...] = ()  # where the experts are, lines
    # the device's peak is that of an earlier measurement: this one's is not above
    peak_is_older: bool = False
    measured: Measurement | None = None  # the runs; None where it was refused
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)  # what served each product
    # what `fidelity` compares with the exact model; None once it is, or for nothing
    predicted: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Such as "batch 4, 12 GiB"."""
        return f"batch {self.batch}" + (f", {self.gib:g} GiB" if self.gib else "")


@dataclasses.dataclass(frozen=True)
class BenchmarkResult:
    """All that was measured of a model, in the order of `BenchmarkConfig.points`."""

    points: list[Point]
    about: str  # the model
    device: Any
    bandwidth: Bandwidth
    steps_per_call: int


def run(
    config: BenchmarkConfig, file: PromptFile | None, known: Callable[[BenchmarkResult], None]
) -> BenchmarkResult:
    """Measures all points; what a budget or the device refuses is a point that says so.

    Args:
      file: of prompts; None: prompts of a length.
      known: told all points so far after each.
    """
    models = models_of(config)
    bandwidth = bandwidth_of(models.device)
    per_call = config.steps_per_call or STEPS_PER_CALL
    asked = {batch: _requests(config, models, file, batch) for batch in config.batches}
    if config.fidelity_share:
        for of in asked.values():
            fidelity.sample_prompts(
                of.prompts, config.fidelity_share
            )  # an error comes before the runs
    points: list[Point] = []
    about = models.about + _settings_text(config)
    outcome = BenchmarkResult(points, about, models.device, bandwidth, per_call)
    for batch, gib in config.points():
        print_stderr(f"measuring batch {batch}, {gib or 'no'} GiB")
        try:
            points.append(_measured(config, models, asked[batch], batch, gib, bandwidth, per_call))
        except MoejaxError as error:
            if not isinstance(error, BudgetError) and NO_MEMORY not in str(error):
                raise
            points.append(Point(batch, gib, refusal=str(error)))
        gc.collect()  # engines hold themselves: what they had on the device goes now
        known(outcome)
    if isinstance(models, CheckpointModels) and config.fidelity_share:
        _compare(config, models, asked, outcome)
        known(outcome)
    return outcome


def _settings_text(config: BenchmarkConfig) -> str:
    """Describes settings of policy and memory that are not the defaults.

    Such as ", policy dymoe (int4/int2, retention=0.75), memory slots=24". Budgets, paths, and what
    a shape's routing says are left out.
    """
    found, policy = "", config.policy
    if policy.name:
        tiers = "/".join(tier.partition("=")[0] for tier in policy.tiers)
        slots = f"slots {'/'.join(policy.slots)}" if policy.slots else ""
        planes = f"planes {config.planes}" if config.planes else ""
        parts = (tiers, planes, slots, policy.settings, "emulated" * policy.emulate)
        said = ", ".join(filter(None, parts))
        found = f", policy {policy.name}" + (f" ({said})" if said else "")
    left_out = ("device_gib", "disk_path", *(["host_gib"] if config.shape else []))
    pairs = zip(options(config.memory), options(type(config.memory)()), strict=True)
    changed = [
        f"{own.name}={own.default}"
        for own, default in pairs
        if own.default != default.default and own.name not in left_out
    ]
    return found + (f", memory {', '.join(changed)}" if changed else "")


def _compare(
    config: BenchmarkConfig,
    models: CheckpointModels,
    asked: dict[int, TokenizedPrompts],
    outcome: BenchmarkResult,
) -> None:
    """Adds the KL of the exact model: last, so that the exact model is in no peak of memory."""
    contexts = [point.context for point in outcome.points if point.predicted is not None]
    if not contexts:
        return
    exact: dict[int, np.ndarray] = {}
    try:
        with models.exact(max(contexts)) as engine:
            for batch, requests_ in asked.items():
                samples = fidelity.sample_prompts(requests_.prompts, config.fidelity_share)
                exact[batch] = fidelity.predictions_of(engine._runner.logits, samples)
    except MoejaxError as error:
        _print_unmeasured(error)
    for place, point in enumerate(outcome.points):
        if point.predicted is not None and point.batch in exact:
            found = _fidelity_figures(exact[point.batch], point.predicted)
            point = dataclasses.replace(point, figures=point.figures | found)
        outcome.points[place] = dataclasses.replace(point, predicted=None)


def _requests(
    config: BenchmarkConfig, models: Models, file: PromptFile | None, batch: int
) -> TokenizedPrompts:
    """Requests in batches of so many."""
    room = (config.context or models.config.context_limit) - config.new_tokens
    length = config.prompt_tokens or PROMPT_TOKENS
    if room < 1 or (file is None and length > room):
        raise MoejaxError(
            f"{length} prompt tokens and new_tokens={config.new_tokens} do not fit a context of "
            f"{config.context or models.config.context_limit}"
        )
    if file is not None:
        if models.tokenizer is None:
            raise MoejaxError(f"{models.about} has no tokenizer.json for prompts")
        longest = min(config.prompt_tokens or room, room)
        return requests.of_file(
            file, models.tokenizer, num_prompts=config.num_prompts, longest=longest
        )
    count = config.num_prompts or batch
    if models.tokenizer is None:
        return requests.at_random(
            models.config.vocab_size, num_prompts=count, length=length, seed=config.seed
        )
    return requests.of_text(
        shipped_text(), models.tokenizer, num_prompts=count, length=length,
        name="the calibration text that ships",
    )  # fmt: skip


def _measured(
    config: BenchmarkConfig, models: Models, asked: TokenizedPrompts, batch: int, gib: float,
    bandwidth: Bandwidth, per_call: int,
) -> Point:  # fmt: skip
    longest = max(map(len, asked.prompts))
    limit = models.config.context_limit
    context = config.context or length_bucket(longest + config.new_tokens, MIN_KV_LENGTH, limit)
    before = report.device_peak_bytes(models.device)
    loaded = models.load(batch, gib, context)
    try:
        refuse_dequantized(loaded.runner, batch, prompt=longest, context=context)
        with plain_memory_errors(models.device):
            bench = Bench(
                loaded.runner, context=context, steps_per_call=per_call,
                settings=GenerationSettings.of(max_new_tokens=config.new_tokens),
                eos_ids=() if config.ignore_eos else models.eos_ids,
            )  # fmt: skip
            measured = bench.measure(
                asked.batches(batch), runs=config.runs, count=config.count_experts
            )
        runner = loaded.runner
        bits = bits_of(models.config, runner.weights, runner.memory)
        peak = report.device_peak_bytes(models.device)
        found = figures.of_times(measured) | figures.of_ledgers(measured)
        found |= figures.of_floor(measured, runner, bandwidth)
        found |= figures.of_cost(
            measured, load_s=loaded.load_s, device_peak=peak, host_peak=report.host_peak_bytes()
        )
        found |= figures.of_bits(bits)
        if loaded.budget is not None:
            planned = loaded.budget.total_device / 2**30
            found["planned device memory"] = figures.Figure(planned, "GiB")
            first = loaded.budget.tiers[0]
            share = 100 * first.slots / first.num_experts
            found["experts in slots"] = figures.Figure(share, "% of a layer's")
        return Point(
            batch, gib, figures=found, context=context, routing=loaded.routing,
            requests=asked.about + (f", {asked.num_cut} of them cut" if asked.num_cut else ""),
            placement=(f"weights: {bits.describe()}", *report.placement(loaded.budget)),
            peak_is_older=peak is not None and peak == before,
            measured=measured,
            kernels={
                f"{phase} {name}": of.describe()
                for phase, products in runner.products.items()
                for name, of in products.items()
            },
            predicted=_predicted(config, models, runner, asked) if config.fidelity_share else None,
        )  # fmt: skip
    finally:
        loaded.close()


def _predicted(
    config: BenchmarkConfig, models: Models, runner: Runner, asked: TokenizedPrompts
) -> np.ndarray | None:
    """Predictions that `fidelity` compares; None where there is no room for them."""
    samples = fidelity.sample_prompts(asked.prompts, config.fidelity_share)
    try:
        with plain_memory_errors(models.device):
            return fidelity.predictions_of(runner.logits, samples)
    except MoejaxError as error:
        _print_unmeasured(error)
        return None


def _fidelity_figures(exact: np.ndarray, policy: np.ndarray) -> Figures:
    """Compares the predictions of both models on the same samples."""
    found = fidelity.compare(exact.astype(np.float64), policy.astype(np.float64))
    return {
        "KL of the exact model": figures.Figure(found.mean_kl, "nats a token"),
        "largest KL of the exact model": figures.Figure(found.largest_kl, "nats"),
        "same likeliest token": figures.Figure(
            100 * found.same_choice, f"% of {found.num_tokens} tokens"
        ),
    }


def _print_unmeasured(error: MoejaxError) -> None:
    """Reports on stderr; the times stand without it."""
    print_stderr(f"the KL of the exact model was not measured: {error}")
