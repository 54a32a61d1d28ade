"""Times loading a Hugging Face directory against restoring the same weights from Orbax.

    python scripts/bench_load.py --checkpoint=demo
    python scripts/bench_load.py --random_gib=2 --dtype=bfloat16

The files are read once before, so the page cache is warm. The default for `--dtype` is "auto":
float32 on a CPU, the file's own elsewhere. Needs the space of the loaded form in `--scratch`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from moejax.checkpoints import load_orbax, open_checkpoint, save_hf_checkpoint, save_orbax
from moejax.models.config import ModelConfig, weight_shapes

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "directory or name")
_RANDOM_GIB = flags.DEFINE_float("random_gib", None, "a random bfloat16 model of this size instead")
_DTYPE = flags.DEFINE_string("dtype", "auto", "float32, bfloat16, float16 or auto")
_REPEATS = flags.DEFINE_integer("repeats", 3, "the median of these is printed")
_SCRATCH = flags.DEFINE_string("scratch", None, "where the Orbax directory is written for a while")


def write_random(directory: Path, gib: float) -> None:
    """A Qwen3-MoE of about `gib` GiB in bfloat16, with Qwen3-30B-A3B's experts."""
    expert_bytes = 3 * 768 * 2048 * 2
    config = ModelConfig(
        family="qwen3_moe",
        vocab_size=32768,
        model_dim=2048,
        num_layers=4,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=max(8, round(gib * 2**30 / expert_bytes / 4)),
        experts_per_token=8,
        expert_dim=768,
        mlp_dim=6144,
        moe_layers=(0, 1, 2, 3),
        norm_topk_prob=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=4096,
        tied_embeddings=True,
        qk_norm=True,
        attention_bias=False,
        sliding_window=None,
    )
    # Random bits, so that Orbax's compression finds what it finds in trained weights: little.
    rng = np.random.default_rng(0)
    weights = {
        leaf: rng.integers(0x3C00, 0x3F80, shape, np.uint16).view(jnp.bfloat16)
        for leaf, shape in weight_shapes(config).items()
    }
    save_hf_checkpoint(directory, config, weights, dtype=jnp.bfloat16)


def median_seconds(action: Callable[[], object]) -> float:
    """Median time of an action whose result is waited for, after one run to warm up."""
    seconds = []
    for _ in range(_REPEATS.value + 1):
        start = time.perf_counter()
        jax.block_until_ready(action())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main(argv: list[str]) -> None:
    """Prints one line for each way."""
    del argv
    logging.set_verbosity(logging.WARNING)  # Orbax reports every step
    device = jax.devices()[0]
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
        name = _CHECKPOINT.value
        if _RANDOM_GIB.value:
            name = str(Path(scratch) / "random")
            write_random(Path(name), _RANDOM_GIB.value)
        checkpoint = open_checkpoint(name)

        def load() -> dict[str, jax.Array]:
            return checkpoint.load(dtype=_DTYPE.value, device=device, progress=False)

        weights = load()
        gib = sum(weight.nbytes for weight in weights.values()) / 2**30
        orbax = Path(scratch) / "orbax"
        start = time.perf_counter()
        save_orbax(orbax, checkpoint.config, weights)
        save_seconds = time.perf_counter() - start
        dtype = weights["embed"].dtype
        del weights
        print(f"{name}: {gib:.3f} GiB as {dtype} on {device.device_kind}, JAX {jax.__version__}")
        for way, seconds in (
            ("Hugging Face load", median_seconds(load)),
            ("Orbax restore", median_seconds(lambda: load_orbax(orbax, device=device)[1])),
            ("Orbax save (once)", save_seconds),
        ):
            print(f"{way:<18} {seconds:8.3f} s {gib / seconds:8.2f} GiB/s")


if __name__ == "__main__":
    app.run(main)
