"""Decode with experts in host memory: real shapes, random weights, routing replayed from a trace.

    python -m scripts.bench_memory_gpu --model=Qwen3-30B-A3B --slots=8 --slots=24 --slots=48
    python -m scripts.bench_memory_gpu --model=Mixtral-8x7B --slots=0 --slots=2 --slots=3 --slots=6

For each number of slots a layer: TPOT, tokens/s, the hit rate of the ledger beside the trace's own,
bytes that crossed the link a token, the link's rate if nothing else took time, and what a resident
model takes. Slots of 0 load on demand. Qwen3's trace is synthetic, with LRU hit rates of 37, 74, 89
and 96 % at 8, 24, 48 and 80 slots; other shapes take a flat one. `--model=tiny --device=cpu` tries
the script.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.generation import GenerationSettings
from moejax.memory.expert_memory import ExpertMemory
from moejax.memory.pooled import PoolSpec
from moejax.memory.residency import CacheSpec
from moejax.models.config import ModelConfig
from moejax.qtensor import Weight
from moejax.runner import Runner
from moejax.served import EXPERT_LEAVES
from scripts.bench_model_gpu import CONFIGS
from scripts.bench_report import Report
from scripts.model_weights import Packing, random_weights
from scripts.synthetic_traces import QWEN3_HIT_RATES, lru_hit_rate, lru_trace

_MODEL = flags.DEFINE_enum("model", "Qwen3-30B-A3B", sorted(CONFIGS), "which shape")
_DEPTH = flags.DEFINE_integer("depth", 0, "fewer layers than the real ones; 0: all")
_WIDTH = flags.DEFINE_enum("expert_bits", "4", ["2", "3", "4", "8", "16"], "of experts, attention")
_SLOTS = flags.DEFINE_multi_integer("slots", [8, 24, 48, 80], "of a layer, each a measurement")
_TRANSIENT = flags.DEFINE_integer("transient", 0, "slots of all layers; 0: experts of a token")
_AHEAD = flags.DEFINE_integer("prefetch", 0, "experts of the next layer that are brought ahead")
_STEPS = flags.DEFINE_integer("steps", 64, "decode steps a measurement, after as many others")
_PER_CALL = flags.DEFINE_integer("per_call", 8, "decode steps of a call")
_WHERE = flags.DEFINE_string("device", "gpu", "gpu; cpu only tries the script")
_FILE = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
_PROGRAMS = flags.DEFINE_string("programs", "", "persistent compilation cache")
PROMPT, CONTEXT = 16, 1024


def host_rows(weight: Weight, device: jax.Device) -> Weight:
    """[M, E, ...] as rows [M E, ...] in pinned host memory; on a CPU as they are."""

    def rows(leaf: jax.Array) -> jax.Array:
        flat = leaf.reshape(-1, *leaf.shape[2:])
        if device.platform == "cpu":
            return flat
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        return jax.device_put(flat, pinned)

    return jax.tree.map(rows, weight)


def tpot(runner: Runner, config: ModelConfig) -> float:
    """Seconds a step, the median of calls after as many that warm the cache up."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, PROMPT).tolist()
    session = runner.prefill([prompt], CONTEXT, GenerationSettings.of(max_new_tokens=1), ())
    calls, per_call = _STEPS.value // _PER_CALL.value, _PER_CALL.value
    times = []
    for number in range(2 * calls):
        if number == calls and runner.memory is not None:
            runner.memory.settle()
            runner.memory.ledger = dataclasses.replace(
                runner.memory.ledger, layers=[], gate_mass={}
            )
        start = time.perf_counter()
        jax.block_until_ready(runner.decode(session, per_call, per_call))
        times.append((time.perf_counter() - start) / per_call)
    return statistics.median(times[calls:])


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    device = choose_device(_WHERE.value)
    enable_compilation_cache(_PROGRAMS.value)
    config = CONFIGS[_MODEL.value]
    if _DEPTH.value:
        config = dataclasses.replace(
            config, num_layers=_DEPTH.value, moe_layers=tuple(range(_DEPTH.value))
        )
    bits = int(_WIDTH.value)
    packing = Packing(bits=bits, attention_bits=bits)
    weights = random_weights(config, packing, device)
    about = f"{_MODEL.value}, {config.num_layers} layers, {packing.describe()}"
    report = Report(device, about, _FILE.value)
    resident = tpot(Runner(config, weights, device), config)
    report.add("all resident, TPOT", 1e3 * resident, "ms")
    start = time.perf_counter()
    rows = [host_rows(weights.pop(name), device) for name in EXPERT_LEAVES]
    jax.block_until_ready(rows)
    print(f"experts to host memory: {time.perf_counter() - start:.1f} s", flush=True)
    num_layers, num_experts = len(config.moe_layers), config.num_experts
    rates = QWEN3_HIT_RATES if num_experts == 128 else {}
    trace = lru_trace(
        rates, num_steps=4 * _STEPS.value, num_layers=num_layers, num_experts=num_experts,
        width=config.experts_per_token,
    )  # fmt: skip
    row_of = np.arange(num_layers * num_experts).reshape(num_layers, num_experts)
    for slots in _SLOTS.value:
        transient = _TRANSIENT.value or config.experts_per_token
        cache = CacheSpec(
            num_layers=num_layers, num_experts=num_experts, slots=slots, transient=transient
        )
        spec = PoolSpec(cache, min(_AHEAD.value, slots))
        memory = ExpertMemory.of_rows(spec, rows[0], rows[1], row_of, device)
        memory.store = dataclasses.replace(
            memory.store, replay=jax.device_put(jnp.asarray(trace), device)
        )
        seconds = tpot(Runner(config, weights, device, memory=memory), config)
        ledger, label = memory.settle(), f"{slots} slots of {num_experts}, ahead {spec.prefetch}"
        moved = ledger.link_bytes / _STEPS.value
        report.add(
            f"{label}, TPOT", 1e3 * seconds, "ms", resident_ms=1e3 * resident,
            hit_rate=ledger.hit_rate, trace_hit_rate=lru_hit_rate(trace, slots, num_experts),
            megabytes_a_token=moved / 1e6, link_gib_per_s=moved / seconds / 2**30,
            tokens_per_s=1 / seconds,
        )  # fmt: skip
        del memory


if __name__ == "__main__":
    app.run(main)
