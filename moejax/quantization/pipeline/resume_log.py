"""Resume log of an output directory, so that a killed run resumes where it stopped.

    OUTPUT/.quantizing/run.json            what is being made, of what, with which versions
    OUTPUT/.quantizing/NOTE.json           what was found before the first layer, such as ranks
    OUTPUT/.quantizing/shard-00003.json    of a shard that is whole: its file's digest, its tensors

A shard counts as done once its note exists, which is written after the shard itself. The folder is
removed once config.json, written last, exists.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.checkpoints.formats.manifest import MANIFEST_FILE
from moejax.errors import MoejaxError
from moejax.files.whole import PARTIAL, file_digest, write_json
from moejax.models.hf.config import read_json
from moejax.quantization.pipeline.manifest import CONFIG_FILE, RESUME

WORK_FOLDER = ".quantizing"
_RUN_FILE = "run.json"
_MEND = "give a new directory as output"


class ResumeLog:
    """Finished work in an output directory.

    Attributes:
      directory: the output.
      identity: settings and source by name; equal for runs whose results are equal.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        self.directory = directory
        self.identity = dict(identity)
        self._work = directory / WORK_FOLDER

    def is_finished(self) -> bool:
        """Whether the directory holds the whole result of this run.

        Raises MoejaxError where it is another run's, or a file of it has changed.
        """
        config = self.directory / CONFIG_FILE
        if not config.exists():
            return False
        manifest_file = self.directory / MANIFEST_FILE
        if not manifest_file.exists():
            raise MoejaxError(f"{self.directory} holds another model; {_MEND}")
        manifest = read_json(manifest_file)
        # Versions are of no account once the result is there.
        made_of = manifest.get("made_of")
        wanted = {name: value for name, value in self.identity.items() if name != "versions"}
        self._check_identity(made_of if isinstance(made_of, dict) else {}, wanted, "a model")
        files = manifest.get("files")
        for name, entry in (files if isinstance(files, dict) else {}).items():
            path = self.directory / name
            if not path.exists() or path.stat().st_size != entry["size"]:
                raise MoejaxError(f"{path} was removed or changed after it was made; {_MEND}")
        shutil.rmtree(self._work, ignore_errors=True)
        return True

    @contextlib.contextmanager
    def opened(self, own_files: Sequence[str]) -> Iterator[None]:
        """Locks the directory for this process; makes it and removes rests of a killed run.

        MoejaxError if it holds other files than `own_files`, or another process works in it.
        """
        run_file = self._work / _RUN_FILE
        try:
            names = {path.name for path in self.directory.iterdir()}
        except FileNotFoundError:
            names = set()
        except NotADirectoryError as error:
            raise MoejaxError(f"output {self.directory} is a file; give a directory") from error
        known = {WORK_FOLDER}
        if run_file.exists():
            self._check_identity(read_json(run_file), self.identity, "an unfinished run")
            known |= {*own_files, *(name + PARTIAL for name in own_files)}
        if foreign := sorted(names - known):
            rest = ", ..." if len(foreign) > 3 else ""
            raise MoejaxError(
                f"output {self.directory} holds other files ({', '.join(foreign[:3])}{rest}); "
                "give an empty or a new directory"
            )
        self._work.mkdir(parents=True, exist_ok=True)
        with self._locked():
            for path in (*self.directory.glob("*" + PARTIAL), *self._work.glob("*" + PARTIAL)):
                path.unlink()
            if not run_file.exists():
                write_json(run_file, self.identity, RESUME)
            yield

    def note(self, name: str) -> dict[str, Any] | None:
        """Returns the note of a name; None if it is missing."""
        path = self._work / f"{name}.json"
        return read_json(path) if path.exists() else None

    def keep(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a note for later runs; returns it as a later run reads it."""
        write_json(self._work / f"{name}.json", fields, RESUME)
        return read_json(self._work / f"{name}.json")

    def done_shards(self, files: Sequence[str]) -> list[dict[str, Any]]:
        """Notes of finished shards, up to the first missing one."""
        notes: list[dict[str, Any]] = []
        for i, file in enumerate(files):
            note, path = self.note(_shard_note(i)), self.directory / file
            if note is None or not path.exists():
                break
            if list(file_digest(path)) != [note["size"], note["sha256"]]:
                break
            notes.append(note)
        return notes

    def keep_shard(self, i: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Marks shard `i`, whose file is whole, as done."""
        return self.keep(_shard_note(i), fields)

    def close(self) -> None:
        """Removes the notes; the directory is finished."""
        shutil.rmtree(self._work)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks out other processes; the lock ends with the process."""
        handle = os.open(self._work, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise MoejaxError(f"another process is writing {self.directory}") from error
        try:
            yield
        finally:
            os.close(handle)

    def _check_identity(
        self, found: Mapping[str, Any], wanted: Mapping[str, Any], what: str
    ) -> None:
        """Raises MoejaxError naming the first difference of two runs."""
        # This run's identity, as JSON stores it.
        wanted = json.loads(json.dumps(wanted))
        for name in (*wanted, *found):
            if found.get(name) != wanted.get(name):
                said = (
                    "of another source checkpoint"
                    if name == "source"
                    else f"with {name}={found.get(name)}, not {wanted.get(name)}"
                )
                raise MoejaxError(f"output {self.directory} holds {what} {said}; {_MEND}")


def _shard_note(i: int) -> str:
    return f"shard-{i + 1:05}"
