"""A folder in which the documents' commands run: the files that they name, and small settings.

A name of the documents (`DIR`, `x.trace`, ...) is made when a command first wants it.
What stands for a large model is the demo; runs are shortened by flags behind a command's own.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moejax import cli
from moejax.config.options import options
from moejax.demo import DEMO_DIRECTORY
from scripts.documents import dry
from scripts.documents.commands import ROOT, Command

# Behind a command's own flags, so these win.
SHORTER = {
    "moejax.generate": ["--config.max_new_tokens=6"],
    "moejax.evaluate": [
        "--config.window=64", "--config.stride=64", "--config.max_tokens=128",
        "--config.batch_size=2", "--config.fidelity_share=0",
    ],
    "moejax.benchmark": [
        "--config.prompt_tokens=12", "--config.new_tokens=4", "--config.runs=1",
        "--config.steps_per_call=2", "--config.num_prompts=2", "--config.batches=(1,)",
    ],
    "moejax.profile_experts": [
        "--config.max_tokens=128", "--config.window=64", "--config.batch_size=2",
    ],
}  # fmt: skip
_SHAREGPT = json.dumps([{"conversations": [{"from": "human", "value": "Hello there"}]}] * 4)


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A folder; commands run in it, one after the other, in this process where they can."""

    folder: Path

    def __post_init__(self) -> None:
        for name in ("configs", "scripts", "moejax", "pallas_kernels", "README.md"):
            (self.folder / name).symlink_to(ROOT / name)

    def run(self, command: Command, *, shorter: bool = True) -> None:
        """Runs a command.

        Raises:
          ValueError: it fails, or is of a kind that cannot be run.
        """
        if command.is_program:
            self._execute(command)
            return
        for words in command.parts:
            if words[0] == "echo":  # echo TEXT > FILE
                (self.folder / words[3]).write_text(f"{words[1]}\n", encoding="utf-8")
                continue
            self._make(words)
            found = dry.module_of(words)
            if found is None or not found[0].startswith(("moejax.", "scripts.")):
                raise ValueError(f"{words[0]} cannot be run here: mark it")
            module, arguments = found
            self._run(module, arguments, shorter=shorter)

    def _execute(self, command: Command) -> None:
        """A program of a page, alone in its names."""
        try:
            exec(compile(command.text, command.place, "exec"), {"__name__": "__main__"})
        except Exception as error:  # whatever a program raises, it is the page that is wrong
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _run(self, module: str, arguments: list[str], *, shorter: bool) -> None:
        main = dry.main_of(module)
        if main is None:
            self._start(module, arguments)
            return
        names = {option.name for option in options(main.default)}
        if "compilation_cache" in names:
            arguments = [*arguments, f"--config.compilation_cache={self._programs}"]
        if shorter:
            arguments = [*arguments, *SHORTER.get(module, ())]
        status = cli.exit_status(main, [module, *arguments])
        if status:
            raise ValueError(f"exit status {status}")

    def _start(self, module: str, arguments: list[str]) -> None:
        """A script, in a process of its own: absl's flags are of a process."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder, check=False, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        if done.returncode:
            raise ValueError(f"exit status {done.returncode}: {done.stderr.strip()[-600:]}")

    @property
    def _programs(self) -> Path:
        """Where compiled programs are kept."""
        kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
        return Path(kept) if kept else self.folder / "programs"

    def _make(self, words: Sequence[str]) -> None:
        """Makes what a command reads and is not there; removes the folder that it is to write."""
        text = " ".join(word for word in words if not word.startswith("--config.output="))
        for output in re.findall(r"--config\.output=(\S+)", " ".join(words)):
            if (dry.module_of(words) or ("",))[0] == "moejax.quantize":
                _remove(self.folder / output)
        for name, make in _MAKERS:
            for found in re.findall(rf"(?<![\w/.-]){name}(?![\w.-])", text):
                path = self.folder / found
                # What a command records is of its own making.
                if f"record_trace={found}" in text or path.exists():
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                make(self, path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _quantized(space: Workspace, path: Path) -> None:
    space._run(
        "moejax.quantize",
        [f"--config.output={path}", "--config.method=rtn", "--config.bits=4"],
        shorter=True,
    )


def _trace(space: Workspace, path: Path) -> None:
    space._run("moejax.generate", ["--prompt=Hello", f"--config.record_trace={path}"], shorter=True)


def _buddies(space: Workspace, path: Path) -> None:
    given = [f"--config.output={path}", "--config.outputs=True"]
    space._run("moejax.profile_experts", given, shorter=True)


_Maker = Callable[[Workspace, Path], object]
_MAKERS: list[tuple[str, _Maker]] = [
    # The demo under another name, copied: profiles are written beside a checkpoint.
    (
        r"DIR(?:-\w+)?|path/to/hugging_face_directory",
        lambda _, path: shutil.copytree(DEMO_DIRECTORY, path),
    ),
    (r"demo-(?:milo|int4)", _quantized),
    (r"ShareGPT_V3\.json|sharegpt\.json", lambda _, path: path.write_text(_SHAREGPT, "utf-8")),
    (r"x\.trace", _trace),
    (r"buddies\.safetensors", _buddies),
]
