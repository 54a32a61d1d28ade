"""Decode speed on the CPU: moejax beside transformers' generate, on the same cores, in one run.

    python -m scripts.studies.speed.bench_cpu_decode

float32, batch 1, a prompt of 32 tokens, 128 new ones (greedy, end-of-sequence ignored), a cache of
2048; transformers is given its own growing cache, which is the faster one for it. TPOT is
(time of 128 tokens - time of 1 token) / 127, each a median; the two take turns. About a minute for
the demo model. Expected on two cores: at least 3 times as fast.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import app, flags

from moejax import Engine
from moejax.checkpoints import resolve_checkpoint
from moejax.files import result_rows as results
from moejax.models.config import ModelConfig, weight_shapes

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "as moejax.generate takes it")
_REPEATS = flags.DEFINE_integer("repeats", 7, "the medians of these are printed")
_RESULTS = flags.DEFINE_string("results", "scripts/studies/speed/cpu_decode.jsonl", "rows go here")

NUM_CORES = 2
PROMPT_TOKENS, NEW_TOKENS, CACHE_LENGTH = 32, 128, 2048

Generate = Callable[[int], list[int]]  # the new tokens, this many


@dataclasses.dataclass(frozen=True)
class Measured:
    """Medians over the repeats of one contender."""

    total_s: float  # prefill and NEW_TOKENS
    first_s: float  # prefill and one token

    @property
    def tpot_ms(self) -> float:
        """Of each token after the first."""
        return 1e3 * (self.total_s - self.first_s) / (NEW_TOKENS - 1)


def use_few_cores() -> None:
    """Leaves this process NUM_CORES cores, before JAX and torch size their pools by them."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    torch.set_num_threads(NUM_CORES)


def moejax_generate(directory: Path, prompt: list[int]) -> tuple[Generate, ModelConfig]:
    """Our contender, and the shape of the model."""
    engine = Engine.from_pretrained(
        directory, dtype="float32", platform="cpu", context=CACHE_LENGTH, progress=False
    )

    def generate(num_tokens: int) -> list[int]:
        [answer] = engine.generate([prompt], max_new_tokens=num_tokens, ignore_eos=True)
        return answer.tokens

    return generate, engine.config


def transformers_generate(directory: Path, prompt: list[int]) -> Generate:
    """Hugging Face's contender, with its own choice of attention and of experts."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    # Otherwise the checkpoint's own eos would fill in for the None below.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    prompt_ids = torch.tensor([prompt])

    def generate(num_tokens: int) -> list[int]:
        with torch.inference_mode():
            ids = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=False,
                max_new_tokens=num_tokens,
            )
        return ids[0, len(prompt) :].tolist()

    return generate


def measure(contenders: dict[str, Generate], repeats: int) -> dict[str, Measured]:
    """Times all contenders in turn, after one warm-up of each."""
    times: dict[tuple[str, int], list[float]] = {}
    for i in range(repeats + 1):
        for name, generate in contenders.items():
            for num_tokens in (1, NEW_TOKENS):
                start = time.perf_counter()
                tokens = generate(num_tokens)
                elapsed = time.perf_counter() - start
                assert len(tokens) == num_tokens, f"{name} stopped at {len(tokens)} tokens"
                if i:
                    times.setdefault((name, num_tokens), []).append(elapsed)
    return {
        name: Measured(
            statistics.median(times[name, NEW_TOKENS]), statistics.median(times[name, 1])
        )
        for name in contenders
    }


def weight_bytes_per_token(config: ModelConfig) -> int:
    """float32 bytes of the weights that one decode step must read: A of E experts, one embedding.

    A tied embedding is read whole, as the head.
    """
    count = 0.0
    for name, shape in weight_shapes(config).items():
        share = 1.0
        if name in ("moe.gate_up", "moe.down"):
            share = config.experts_per_token / config.num_experts
        elif name == "embed" and not config.tied_embeddings:
            share = 1 / config.vocab_size
        count += share * math.prod(shape)
    return round(4 * count)


def read_bandwidth() -> float:
    """Bytes a second of summing an array of 512 MiB, larger than any cache: the upper bound."""
    array = jnp.ones(2**27, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return array.nbytes / statistics.median(times)


def table(measured: dict[str, Measured]) -> str:
    """One line a contender."""
    lines = [f"{'':24}{'TPOT ms':>10}{'tokens/s':>10}{'1 token ms':>12}{'all s':>8}"]
    lines += [
        f"{name:24}{m.tpot_ms:10.3f}{1e3 / m.tpot_ms:10.1f}{1e3 * m.first_s:12.1f}{m.total_s:8.3f}"
        for name, m in measured.items()
    ]
    return "\n".join(lines)


def result_rows(
    ours: Measured, theirs: Measured, bound_ms: float, device: str
) -> list[results.ResultRow]:
    """What this run found, to be kept."""
    setting = f"{_CHECKPOINT.value}, float32, batch 1, prompt {PROMPT_TOKENS}, {NEW_TOKENS} new"

    def row(what: str, figure: float, unit: str, **baseline: float) -> results.ResultRow:
        return results.ResultRow(
            what=f"{what}, {setting}, cache {CACHE_LENGTH}",
            figure=round(figure, 4),
            unit=unit,
            baseline={name: round(value, 4) for name, value in baseline.items()},
            device=device,
            versions=results.package_versions("jax", "torch", "transformers"),
            date=results.today(),
            command=results.command_line(),
        )

    return [
        row("TPOT", ours.tpot_ms, "ms", transformers=theirs.tpot_ms, weights_read=bound_ms),
        row("whole request", ours.total_s, "s", transformers=theirs.total_s),
        row("decode speed", theirs.tpot_ms / ours.tpot_ms, "x", transformers=1.0),
    ]


def main(argv: Sequence[str]) -> None:
    """Measures, prints the table, appends the rows."""
    del argv
    use_few_cores()
    directory = resolve_checkpoint(_CHECKPOINT.value)
    vocab_size = transformers.AutoConfig.from_pretrained(directory).vocab_size
    prompt = np.random.default_rng(0).integers(vocab_size, size=PROMPT_TOKENS).tolist()
    our_generate, config = moejax_generate(directory, prompt)
    their_generate = transformers_generate(directory, prompt)
    measured = measure(
        {"moejax": our_generate, "transformers generate": their_generate}, _REPEATS.value
    )
    ours, theirs = measured.values()
    answers = our_generate(NEW_TOKENS), their_generate(NEW_TOKENS)
    num_same = sum(a == b for a, b in zip(*answers, strict=True))
    num_bytes = weight_bytes_per_token(config)
    bound_ms = 1e3 * num_bytes / read_bandwidth()
    device = results.describe_device(jax.devices("cpu")[0])

    print(f"{_CHECKPOINT.value}, float32, batch 1, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {device}")
    print(table(measured))
    print(
        f"decode {theirs.tpot_ms / ours.tpot_ms:.2f} times as fast, the whole request "
        f"{theirs.total_s / ours.total_s:.2f} times; {num_same} of {NEW_TOKENS} tokens are the same"
    )
    print(
        f"weights read a token: {num_bytes / 2**20:.2f} MiB, from main memory {bound_ms:.3f} ms: "
        f"{100 * bound_ms / ours.tpot_ms:.0f} % of that bandwidth"
    )
    results.append_rows(Path(_RESULTS.value), result_rows(ours, theirs, bound_ms, device))


if __name__ == "__main__":
    app.run(main)
