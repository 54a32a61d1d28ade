"""Resolves a checkpoint's name to its directory."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from moejax.checkpoints.safetensors_reader import weight_files
from moejax.demo import DEMO_DIRECTORY
from moejax.errors import MoejaxError

DEMO = "demo"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_checkpoint(name: str, *, cache_dir: Path | None = None) -> Path:
    """The directory of a checkpoint, downloaded if need be (MoejaxError if nobody has it).

    Args:
      name: "demo", a directory, or a name on the Hugging Face hub such as "Qwen/Qwen3-30B-A3B".
      cache_dir: cache of `huggingface_hub`; None: its default.
    """
    if name == DEMO:
        return DEMO_DIRECTORY
    try:
        directory = Path(name).expanduser()
    except RuntimeError as error:  # there is no such user, or nobody's home is known
        raise MoejaxError(f"no such directory: {name} ({error})") from error
    if directory.is_dir():
        return directory
    if directory.is_symlink() and not directory.exists():
        raise MoejaxError(f"{directory} is a link to {directory.readlink()}, which is not there")
    if directory.exists():
        raise MoejaxError(f"{directory} is a file; give the checkpoint's directory")
    if name.startswith(".") or not _HUB_NAME.fullmatch(name):
        raise MoejaxError(
            f"no such directory: {name}; give a checkpoint's directory, {DEMO!r}, or a name on "
            'the Hugging Face hub such as "Qwen/Qwen3-30B-A3B"'
        )
    try:
        return _cached(name, cache_dir) or _download(name, cache_dir)
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise MoejaxError(
            f"there is no directory {name} here, and the Hugging Face hub has no such names: "
            f"{reason}"
        ) from error


def _cached(name: str, cache_dir: Path | None) -> Path | None:
    """The cached snapshot if it is complete; one tool may have fetched the tokenizer alone."""
    try:
        directory = Path(
            huggingface_hub.snapshot_download(name, cache_dir=cache_dir, local_files_only=True)
        )
        weight_files(directory)
    except (LocalEntryNotFoundError, MoejaxError):
        return None
    return directory if (directory / "config.json").exists() else None


def _download(name: str, cache_dir: Path | None) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(name, cache_dir=cache_dir, allow_patterns=_FILES)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__  # it has several lines
        raise MoejaxError(
            f"there is no directory {name} here, and the Hugging Face hub does not give it: "
            f"{reason}"
        ) from error
