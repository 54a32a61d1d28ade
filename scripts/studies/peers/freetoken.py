"""FreeToken: its server with slots for a share of the experts, on a random checkpoint."""

import functools
from collections.abc import Iterator
from pathlib import Path

from moejax.models.shapes import CONFIGS
from scripts.studies.peers import servers
from scripts.studies.peers.running import Case, Figure, Place

NAME = "FreeToken"
FAMILY = "qwen3_moe"  # of which it has the model, in bf16 alone
RATES = (0.5, 0.25, 0.125)  # of all experts that have a slot


def cases(python: str, shape: str, layers: int, tokens: tuple[int, ...]) -> Iterator[Case]:
    """Runs of a shape; what it does not know is a case, too, and fails by its own error.

    Args:
      python: interpreter of the environment in which it is installed.
    """
    form = f"{shape}, {layers or CONFIGS[shape].num_layers} layers, bf16"
    for rate in RATES:
        how = (("offload", 0), ("hybrid", 16)) if rate == RATES[1] else (("offload", 0),)
        for backend, threads in how:
            setting = f"--moe-backend {backend} --moe-cache-rate {rate:g}"
            setting += f" --moe-cpu-threads {threads}" if threads else ""
            run = functools.partial(
                _serve, python=python, shape=shape, layers=layers, flags=tuple(setting.split()),
                tokens=tokens[0],
            )  # fmt: skip
            yield Case(NAME, f"{form}, {setting} | server", 300, run)


def checkpoint(place: Place, shape: str, layers: int, bits: int = 16) -> Path:
    """The random checkpoint, written where it is not there."""
    name = f"{shape}-{layers or CONFIGS[shape].num_layers}-{bits}bits"
    given = (f"--shape={shape}", f"--layers={layers}", f"--bits={bits}")
    return place.random_files(name, *given)


def _serve(
    place: Place, *, python: str, shape: str, layers: int, flags: tuple[str, ...], tokens: int
) -> list[Figure]:
    most = servers.SEQUENCES[-1]
    model = checkpoint(place, shape, layers)
    words = [
        python, "-m", "freetoken", "--model", str(model), "--port",
        "{port}", *flags, "--num-tokens", str(most * (tokens + 256)), "--max-running-requests",
        str(most), "--max-seq-len-override", str(tokens + 256),
    ]  # fmt: skip
    prompts = servers.Prompts(tokens, model / "tokenizer.json")  # it refuses token ids
    return servers.measure(place, words, {}, prompts)
