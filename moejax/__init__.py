"""Mixture-of-Experts language models whose experts do not fit the accelerator, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moejax.engine import Engine as Engine
    from moejax.errors import MoejaxError as MoejaxError
    from moejax.experts.tiering import Tiering as Tiering
    from moejax.inference.generation import Chunk as Chunk
    from moejax.inference.generation import Generation as Generation

__version__ = "0.1.0"

_HOMES = {
    "Chunk": "moejax.inference.generation",
    "Engine": "moejax.engine",
    "Generation": "moejax.inference.generation",
    "MoejaxError": "moejax.errors",
    "Tiering": "moejax.experts.tiering",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when first used: `--help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
