"""Training's log: JSON objects, one a line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class JsonLog:
    """Appends JSON objects to a file, one a line, and shows them."""

    def __init__(self, path: Path):
        self._file = path.open("a")

    def write(self, **fields: Any) -> None:
        """Writes one line."""
        line = json.dumps(fields)
        self._file.write(line + "\n")
        self._file.flush()
        print(line, flush=True)


def mean_metrics(rows: Sequence[NamedTuple]) -> dict[str, float]:
    """Means over steps, on the host."""
    stacked = jax.device_get(jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves)), *rows))
    return {name: round(float(value), 5) for name, value in stacked._asdict().items()}
