"""Mixture-of-Experts language models whose experts do not fit the accelerator, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moejax.engine import Engine as Engine
    from moejax.errors import MoejaxError as MoejaxError
    from moejax.generation import Chunk as Chunk
    from moejax.generation import Generation as Generation
    from moejax.tiering import Tiering as Tiering

__version__ = "0.1.0"

_HOMES = {
    "Chunk": "moejax.generation",
    "Engine": "moejax.engine",
    "Generation": "moejax.generation",
    "MoejaxError": "moejax.errors",
    "Tiering": "moejax.tiering",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: `--help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
