"""Which device runs, and where compiled programs are kept."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from moejax.errors import MoejaxError

PLATFORMS = ("auto", "cpu", "gpu")


def choose_device(platform: str) -> jax.Device:
    """The first device of `platform`; "auto" is JAX's default device.

    Raises:
      MoejaxError: an unknown platform, or one that JAX does not see.
    """
    if platform not in PLATFORMS:
        raise MoejaxError(f"platform {platform!r} is none of {', '.join(PLATFORMS)}")
    if platform == "auto":
        return jax.devices()[0]
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        seen = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise MoejaxError(
            f"platform 'gpu' was asked for but JAX sees only {seen}; on an NVIDIA machine install "
            f"moejax[cuda13] (or [cuda12]), or use platform 'cpu'"
        ) from error


@contextlib.contextmanager
def plain_memory_errors(device: jax.Device) -> Iterator[None]:
    """Turns the runtime's out-of-memory error into one line.

    Raises:
      MoejaxError: the device ran out of memory inside the block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        raise MoejaxError(
            f"{device} is out of memory ({reason}): take a shorter context, fewer prompts at once, "
            f"a smaller dtype or a smaller model"
        ) from error


def default_compilation_cache() -> Path:
    """$XDG_CACHE_HOME/moejax/xla, in the home directory without it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moejax" / "xla"


def enable_compilation_cache(directory: str) -> Path | None:
    """Keeps compiled programs on disk, so that the next process starts in seconds.

    Args:
      directory: where; "auto" is `default_compilation_cache()`, "" is off. A place that the
        process had already set wins over "auto".

    Returns:
      The directory, or None when it is off.

    Raises:
      MoejaxError: the directory cannot be written.
    """
    if not directory:
        return None
    if directory == "auto":
        directory = jax.config.values["jax_compilation_cache_dir"] or str(
            default_compilation_cache()
        )
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoejaxError(
            f"the compilation cache {path} cannot be made ({error.strerror}); name a directory "
            f'that can be written in compilation_cache, or "" for none'
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path
