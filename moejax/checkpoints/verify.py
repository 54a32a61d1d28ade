"""Compares a checkpoint's files with their checksums."""

import re
from pathlib import Path

from moejax.checkpoints.formats.manifest import check_files, read_files
from moejax.checkpoints.orbax_directory import is_orbax_directory
from moejax.checkpoints.resolve import resolve_checkpoint
from moejax.checkpoints.safetensors_reader import read_array, stored_tensors, weight_files
from moejax.errors import MoejaxError
from moejax.files.whole import file_digest

_SHA256 = re.compile("[0-9a-f]{64}")


def verify_checkpoint(name: str) -> str:
    """Reads every weight file and compares it with a SHA-256 or with checksums, if there are any.

    A SHA-256 is looked for in quantization.json, then in the names of the hub's cache, which keeps
    a large file under its own; checksums are those of `moejax.files.checksums`. Returns a line that
    says which of them there were; raises MoejaxError where a file is not what was written.
    """
    directory = resolve_checkpoint(name)
    if is_orbax_directory(directory):
        return f"not verified: {directory} is an Orbax directory, of which nobody wrote checksums"
    if (manifest := read_files(directory)) is not None:
        check_files(manifest, checksums=True)
        return f"verified {name}: {len(manifest.files)} files by SHA-256 of {manifest.path.name}"
    files = weight_files(directory)
    blobs = {path: target for path in files if (target := _blob(path)) is not None}
    if len(blobs) == len(files):
        for path, blob in blobs.items():
            if file_digest(path).sha256 != blob.name:
                raise MoejaxError(
                    f"{path} is not what the hub holds (its SHA-256 is not {blob.name}); delete "
                    "it and download it again"
                )
        return f"verified {name}: {len(files)} files by the SHA-256 that the hub's cache names"
    tensors = stored_tensors(directory).values()
    checked = [tensor for tensor in tensors if tensor.checksum is not None]
    for tensor in checked:
        read_array(tensor)
    if not checked:
        return (
            f"not verified: nothing says what the files of {name} should hold, as there is no "
            "quantization.json, they have no checksums and lie in no cache of the hub"
        )
    without = len(tensors) - len(checked)
    rest = f"; not verified: {without} tensors, which have none" if without else ""
    return f"verified {name}: {len(checked)} tensors by the checksums in their files{rest}"


def _blob(path: Path) -> Path | None:
    """The file of the hub's cache that a path leads to, where its name is a SHA-256."""
    target = path.resolve()
    is_blob = path.is_symlink() and target.parent.name == "blobs"
    return target if is_blob and _SHA256.fullmatch(target.name) else None
