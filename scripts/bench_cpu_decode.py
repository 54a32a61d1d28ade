"""Decode speed on the CPU: moejax beside transformers' generate, on the same cores, in one run.

    python scripts/bench_cpu_decode.py

float32, batch 1, a prompt of 32 tokens, 128 new ones (greedy, end-of-sequence ignored), a cache of
2048; transformers is given its own growing cache, which is the faster one for it. TPOT is
(time of 128 tokens - time of 1 token) / 127, each a median; the two take turns. About a minute for
the demo model. Expected on two cores: at least 3 times as fast.
"""

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from moejax import Engine, results
from moejax.checkpoints import resolve_checkpoint
from moejax.models.config import ModelConfig, weight_shapes

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


def main() -> None:
    """Measures, prints the table, appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", default="demo", help="as moejax.generate takes it")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=Path("scripts/results/cpu_decode.jsonl"))
    args = parser.parse_args()

    use_few_cores()
    directory = resolve_checkpoint(args.checkpoint)
    vocab_size = transformers.AutoConfig.from_pretrained(directory).vocab_size
    prompt = np.random.default_rng(0).integers(vocab_size, size=PROMPT_TOKENS).tolist()
    ours, config = moejax_generate(directory, prompt)
    theirs = transformers_generate(directory, prompt)
    contenders = {"moejax": ours, "transformers generate": theirs}
    measured = measure(contenders, args.repeats)
    same = sum(a == b for a, b in zip(ours(NEW_TOKENS), theirs(NEW_TOKENS), strict=True))
    device = results.describe_device(jax.devices("cpu")[0])

    print(f"{args.checkpoint}, float32, batch 1, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {device}")
    print(f"{'':24}{'TPOT ms':>10}{'tokens/s':>10}{'1 token ms':>12}{'all s':>8}")
    for name, m in measured.items():
        print(
            f"{name:24}{m.tpot_ms:10.3f}{1e3 / m.tpot_ms:10.1f}"
            f"{1e3 * m.first_s:12.1f}{m.total_s:8.3f}"
        )
    moejax, baseline = measured["moejax"], measured["transformers generate"]
    bound_ms = 1e3 * weight_bytes_per_token(config) / read_bandwidth()
    decode_ratio, whole_ratio = baseline.tpot_ms / moejax.tpot_ms, baseline.total_s / moejax.total_s
    print(f"decode {decode_ratio:.2f} times as fast, the whole request {whole_ratio:.2f} times")
    print(f"{same} of {NEW_TOKENS} tokens are the same in both")
    print(
        f"weights read a token: {weight_bytes_per_token(config) / 2**20:.2f} MiB, from main memory "
        f"{bound_ms:.3f} ms: {100 * bound_ms / moejax.tpot_ms:.0f} % of that bandwidth"
    )

    def row(what: str, figure: float, unit: str, **baselines: float) -> results.ResultRow:
        return results.ResultRow(
            what=f"{what}, {args.checkpoint}, float32, batch 1, prompt 32, 128 new, cache 2048",
            figure=round(figure, 4),
            unit=unit,
            baseline={name: round(value, 4) for name, value in baselines.items()},
            device=device,
            versions=results.package_versions("jax", "torch", "transformers"),
            date=results.today(),
            command=results.command_line(),
        )

    rows = [
        row(
            "TPOT",
            moejax.tpot_ms,
            "ms",
            transformers=baseline.tpot_ms,
            weights_read=bound_ms,
        ),
        row("whole request", moejax.total_s, "s", transformers=baseline.total_s),
        row("decode speed over transformers generate", decode_ratio, "x", transformers=1.0),
    ]
    results.append_rows(args.results, rows)


if __name__ == "__main__":
    main()
