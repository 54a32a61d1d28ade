"""Transformers with accelerate's offload to host memory under a cap: TTFT and TPOT, for one GPU.

    python -m scripts.studies.dymoe.bench_accelerate --model=Mixtral-8x7B --gib=24
    python -m scripts.studies.dymoe.bench_accelerate --model=Qwen3-30B-A3B --gib=12 --hosting=pinned

What moejax stands beside at a budget of the same size (`moejax.benchmark --config.budgets`), all
in INT4 (`accelerate_models`), with each way to keep the weights that are offloaded:

  pageable  what accelerate does: it neither pins nor prefetches, and empties torch's cache of
            device memory after each tensor that it brings;
  pinned    the state dict that its hooks read was pinned beforehand;
  kept      pinned, and accelerate's call that empties the cache replaced by nothing.

accelerate chooses the layers that stay on the device, given 90 % of the cap, as transformers gives
it; torch keeps to the whole of it (`set_per_process_memory_fraction`, which leaves the context of
CUDA out). Weights and router are random; every token takes some A experts of each layer, and
nothing caches experts, so which ones hardly matters.
`--model=tiny --device=cpu` tries the script: there accelerate moves nothing that costs time.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import accelerate
import jax
import numpy as np
import torch
import transformers
from absl import app, flags

from moejax.files.result_rows import describe_device
from scripts.studies.dymoe.accelerate_models import (
    FORM,
    SHAPES,
    HostWeights,
    Places,
    device_map,
    empty_model,
    fill,
    int4_error,
    offload,
    place_of,
)
from scripts.studies.measuring import Report

HOSTINGS = {"pageable": "pageable", "pinned": "pinned", "kept": "pinned, cache kept"}

_MODEL = flags.DEFINE_enum("model", "Mixtral-8x7B", sorted(SHAPES), "which shape")
_HOSTING = flags.DEFINE_multi_enum("hosting", list(HOSTINGS), list(HOSTINGS), "of offloaded ones")
_GIB = flags.DEFINE_float("gib", 24, "of device memory; tiny: half of the model")
_SHARE = flags.DEFINE_float("share", 0.9, "of the cap that accelerate may fill with weights")
_PROMPT = flags.DEFINE_integer("prompt", 512, "tokens of the prompt")
_TOKENS = flags.DEFINE_integer("tokens", 8, "decode steps that are measured, after two others")
_REPEATS = flags.DEFINE_integer("repeats", 2, "prompts that are measured, after another")
_WHERE = flags.DEFINE_enum("device", "gpu", ["gpu", "cpu"], "cpu only tries the script")
_FILE = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
GIB = 2**30


class Plan(NamedTuple):
    """Where layers are under a cap."""

    places: Places
    num_layers: int
    resident: int  # layers on the device
    cap_bytes: int  # of the device


def make_plan(model: Any, cap_bytes: int, share: float) -> Plan:
    """Asks accelerate for a map of a model without weights.

    Args:
      cap_bytes: of the device; 0: half of the model.
      share: of the cap that accelerate may fill with weights.
    """
    cap_bytes = cap_bytes or sum(parameter.nbytes for parameter in model.parameters()) // 2
    places = device_map(model, int(share * cap_bytes))
    num_layers = model.config.num_hidden_layers
    resident = sum(place_of(f"model.layers.{i}", places) == 0 for i in range(num_layers))
    return Plan(places, num_layers, resident, cap_bytes)


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a step that waits for its result."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Greedy:
    """Greedy decoding with a cache that grows, as `generate` does it."""

    def __init__(self, model: Any, device: torch.device):
        self._model, self._device = model, device
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, _PROMPT.value)
        self._prompt = torch.tensor(tokens, device=device)[None]
        self._cache: Any = None
        self._last = self._prompt

    def prefill(self) -> None:
        """A new cache, the prompt, and the first token."""
        self._cache = transformers.DynamicCache(config=self._model.config)
        self._last = self._prompt
        self.decode()

    def decode(self) -> None:
        """One token, read by the host as `generate` reads it to see whether to stop."""
        out = self._model(
            input_ids=self._last, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        token = int(out.logits[0, -1].argmax())
        self._last = torch.tensor([[token]], device=self._device)


@contextlib.contextmanager
def cache_kept() -> Iterator[None]:
    """torch keeps freed device memory: accelerate's call that empties its cache does nothing."""
    module = accelerate.utils.modeling
    plain = module.clear_device_cache
    module.clear_device_cache = lambda *_, **__: None
    try:
        yield
    finally:
        module.clear_device_cache = plain


def measure(
    report: Report, label: str, plan: Plan, model: Any, host: HostWeights, device: torch.device
) -> None:
    """TTFT, TPOT and the peak of the device, as rows."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    greedy = Greedy(model, device)

    def add(what: str, step: Callable[[], Any], count: int) -> None:
        host.layer_bytes = host.other_bytes = 0
        seconds = [timed(step, device) for _ in range(count)]
        report.add(
            f"{label}, {what}", 1e3 * statistics.median(seconds), "ms",
            layers_on_device=plan.resident, layers=plan.num_layers, slowest_ms=1e3 * max(seconds),
            megabytes=(host.layer_bytes + host.other_bytes) / count / 1e6,
        )  # fmt: skip

    with torch.no_grad():
        greedy.prefill()
        add(f"prompt of {_PROMPT.value}, TTFT", greedy.prefill, _REPEATS.value)
        greedy.decode()
        greedy.decode()
        add("TPOT", greedy.decode, _TOKENS.value)
    if device.type == "cuda":
        report.add(
            f"{label}, peak of the device", torch.cuda.max_memory_allocated() / GIB, "GiB",
            reserved_gib=torch.cuda.max_memory_reserved() / GIB, cap_gib=plan.cap_bytes / GIB,
        )  # fmt: skip


def measure_all(report: Report, model: Any, plan: Plan, device: torch.device) -> None:
    """The model with each way to keep the weights of the host."""
    start = time.perf_counter()
    host = fill(model, plan.places, device)
    model = offload(model, plan.places, host, device)
    gib = sum(value.nbytes for value in host.values()) / GIB
    print(f"{gib:.1f} GiB on the host after {time.perf_counter() - start:.1f} s", flush=True)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.cap_bytes / total), device)
    pinned = False
    for hosting in (name for name in HOSTINGS if name in _HOSTING.value):
        if hosting != "pageable" and device.type == "cpu":
            continue
        if hosting != "pageable" and not pinned:
            host.pin()
            pinned = True
        label = f"transformers and accelerate, {HOSTINGS[hosting]}"
        with cache_kept() if hosting == "kept" else contextlib.nullcontext():
            report.attempt(measure, label, plan, model, host, device)


def check_int4(device: torch.device) -> None:
    """Ends the script where torch's kernels do not compute what `Int4Linear` says.

    bfloat16 weights and products are each rounded by 2^-9 of themselves at most, 2^-8 together.
    """
    for num_rows in (1, 128):
        error = int4_error(device, torch.bfloat16, num_rows)
        print(f"INT4 product of {num_rows} rows: error {error:.2g} of it", flush=True)
        if not error < 2**-8:
            raise SystemExit("the INT4 kernel's layout is not the expected one")


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of what is meant
    on_gpu = _WHERE.value == "gpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(0) if on_gpu else describe_device(jax.devices("cpu")[0])
    check_int4(device)
    config = SHAPES[_MODEL.value]
    is_tiny = _MODEL.value == "tiny"
    model = empty_model(config, torch.bfloat16, device.type)
    plan = make_plan(model, 0 if is_tiny else int(_GIB.value * GIB), _SHARE.value)
    about = (
        f"{_MODEL.value}, {plan.num_layers} layers, {FORM}, batch 1, "
        f"{'half of it' if is_tiny else f'{_GIB.value:g} GiB'}, {_SHARE.value:.0%} for weights, "
        "random router"
    )
    print(about, flush=True)
    report = Report(name, about, _FILE.value, ("torch", "transformers", "accelerate"))
    report.attempt(measure_all, model, plan, device)
    print(report.table())


if __name__ == "__main__":
    app.run(main)
