"""Peak memory of `moejax.quantize` on a random checkpoint of a few GB.

    python scripts/measure_quantize_memory.py --gb=4 --method=rtn --scratch=/tmp
    python scripts/measure_quantize_memory.py --gb=4 --method=milo --config.rank=Uniform-16

Writes a random bfloat16 Qwen3-MoE with Qwen3-30B-A3B's experts, starts the quantizer as a process
of its own, and reads that process's anonymous memory (RssAnon: the page cache is no part of it) 50
times a second. The baseline is a process that has imported the same and touched JAX. Arguments that
begin with `--config.` go to the quantizer. Linux only.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.checkpoints.save import save_hf_checkpoint
from moejax.models.config import ModelConfig, weight_shapes

_GB = flags.DEFINE_float("gb", 4.0, "size of the checkpoint")
_METHOD = flags.DEFINE_string("method", "rtn", "what is measured")
_LAYERS = flags.DEFINE_integer("layers", 8, "of the model")
_SCRATCH = flags.DEFINE_string("scratch", None, "where checkpoint and result lie for a while")

_BASELINE = "import jax, moejax.compression.pipeline; jax.numpy.ones(3).block_until_ready()"
_VOCAB_SIZE, _MODEL_DIM, _EXPERT_DIM = 65536, 2048, 768


def write_random(directory: pathlib.Path, num_bytes: float, num_layers: int) -> int:
    """Writes the checkpoint; its size."""
    rest = 2 * _VOCAB_SIZE * _MODEL_DIM + num_layers * 2 * (32 + 8) * 128 * _MODEL_DIM
    expert = 3 * _EXPERT_DIM * _MODEL_DIM
    num_experts = max(8, round((num_bytes / 2 - rest) / (num_layers * expert)))
    config = ModelConfig(
        family="qwen3_moe",
        vocab_size=_VOCAB_SIZE,
        model_dim=_MODEL_DIM,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=num_experts,
        experts_per_token=8,
        expert_dim=_EXPERT_DIM,
        mlp_dim=6144,
        moe_layers=tuple(range(num_layers)),
        norm_topk_prob=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=4096,
        tied_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        sliding_window=None,
    )
    rng = np.random.default_rng(0)
    # Normal values, drawn once and repeated from other places: drawing 2e9 takes minutes.
    pool = (0.02 * rng.standard_normal(2**24)).astype(jnp.bfloat16)
    weights = {
        leaf: np.resize(np.roll(pool, rng.integers(pool.size)), shape)
        for leaf, shape in weight_shapes(config).items()
    }
    save_hf_checkpoint(directory, config, weights, dtype=jnp.bfloat16)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def peak_anonymous_bytes(command: list[str]) -> tuple[int, float]:
    """Runs a command to its end: the largest RssAnon that was seen, and the seconds."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command)
    status = pathlib.Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text().splitlines()
        anonymous = [line.split()[1] for line in lines if line.startswith("RssAnon")]
        peak = max(peak, *(1024 * int(size) for size in anonymous), 0)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return peak, time.perf_counter() - start


def main(argv: list[str]) -> None:
    """Prints sizes, peaks and the time."""
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
        source, output = pathlib.Path(scratch, "source"), pathlib.Path(scratch, "output")
        # In a child, whose memory goes with it.
        child = os.fork()
        if not child:
            write_random(source, _GB.value * 1e9, _LAYERS.value)
            os._exit(0)
        os.waitpid(child, 0)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        baseline, _ = peak_anonymous_bytes([sys.executable, "-c", _BASELINE])
        command = [sys.executable, "-m", "moejax.quantize", f"--config.checkpoint={source}"]
        command += [f"--config.output={output}", f"--config.method={_METHOD.value}", *argv[1:]]
        peak, seconds = peak_anonymous_bytes(command)
        written = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    print(
        f"checkpoint {size / 1e9:.2f} GB, {_LAYERS.value} layers, {_METHOD.value}: peak anonymous "
        f"memory {peak / 1e9:.2f} GB, {(peak - baseline) / 1e9:.2f} GB above the baseline of "
        f"{baseline / 1e9:.2f} GB; {written / 1e9:.2f} GB written in {seconds:.0f} s"
    )


if __name__ == "__main__":
    flags.FLAGS.set_gnu_getopt()
    arguments = [arg for arg in sys.argv if not arg.startswith("--config.")]
    passed_on = [arg for arg in sys.argv if arg.startswith("--config.")]
    app.run(lambda argv: main([*argv, *passed_on]), argv=arguments)
