r"""Runs other engines and moejax at the same shape, bits and device memory; appends rows.

    python -m scripts.studies.peers.bench_peers results/ --llama_cpp=BUILD/bin \
        --gguf=LLAMA_CPP/gguf-py --llama_cpp_version=b11434 --freetoken=ENV/bin/python
    python -m scripts.studies.peers.bench_peers results/ --list
    python -m scripts.studies.peers.bench_peers results/ --only=llama --only=moejax --seconds=540

A case is one setting of one engine under one load: `one` (a prompt of 512, then 64 tokens),
`long` (prompts of 4,096 and 32,768, tokens after 8,192 and 32,768), `prompt` (one of 4,096 under
each budget, llama.cpp by several `-ub`), `batch` (1, 4, 16 and 64 sequences) or `server` (1, 4 and
16 requests at once, the same client for all). Device memory is the driver's count, above what was
in use before. A case that cannot run is a row, too, with its error.

What has a row in results/peers.jsonl is not run again. With --seconds a call begins no case that
may not end in it, and ends one that did not, which the next call begins anew. Random weights and
compiled programs stay in results/files; nothing is fetched. --shape=tiny --platform=cpu tries all.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from scripts.studies.peers import accelerate, freetoken, llama_cpp, ours
from scripts.studies.peers.run_cases import chosen, names_done, run_cases
from scripts.studies.peers.running import Case, Place, device_name

PROMPTS, TINY = (512, 4096, 32768), (32, 64, 128)  # tokens; TINY: of the shape `tiny`

_SHAPES = flags.DEFINE_multi_enum(
    "shape", ["Qwen3-30B-A3B"], sorted(llama_cpp.ON_CPU), "which shapes"
)
_LAYERS = flags.DEFINE_integer("layers", 0, "fewer layers, for all engines; 0: all")
_ONLY = flags.DEFINE_multi_string(
    "only", [], "cases whose name has one of these, those of the first one first; []: all"
)
_LLAMA = flags.DEFINE_string("llama_cpp", "", "folder of llama-bench and its sisters; '': none")
_GGUF = flags.DEFINE_string("gguf", "", "folder of llama.cpp's gguf package; '': it is installed")
_VERSION = flags.DEFINE_string("llama_cpp_version", "", "such as b11434, where it does not say")
_FREETOKEN = flags.DEFINE_string("freetoken", "", "interpreter that has freetoken; '': none")
_ACCELERATE = flags.DEFINE_bool("accelerate", False, "transformers with accelerate, too")
_TRACE = flags.DEFINE_string("trace", "", "recorded routing that ours replays beside the even one")
_SECONDS = flags.DEFINE_float("seconds", 0, "in which a call must end; 0: as long as it takes")
_PLATFORM = flags.DEFINE_enum("platform", "gpu", ["gpu", "cpu"], "of ours; cpu only tries it")
_AGAIN = flags.DEFINE_bool("again", False, "run once more what could not run")
_LIST = flags.DEFINE_bool("list", False, "say which cases there are, and run none")


def all_cases(shape: str, files: Path) -> Iterator[Case]:
    """The cases of the flags, ours last."""
    layers = _LAYERS.value
    tokens = TINY if shape == "tiny" else PROMPTS
    if _LLAMA.value:
        build = llama_cpp.Build(Path(_LLAMA.value), _GGUF.value, _VERSION.value)
        yield from llama_cpp.cases(build, shape, layers, tokens)
    if _FREETOKEN.value:
        yield from freetoken.cases(_FREETOKEN.value, shape, layers, tokens)
    if _ACCELERATE.value:
        yield from accelerate.cases(shape)
    yield from ours.cases(
        files, shape, layers, tokens, trace=_TRACE.value, platform=_PLATFORM.value
    )


def main(argv: list[str]) -> None:
    """Runs what has no row yet."""
    if len(argv) != 2:
        sys.exit("error: give one folder for the results: see scripts/studies/peers/bench_peers.py")
    folder = Path(argv[1]).absolute()
    rows = folder / "peers.jsonl"
    files = folder / "files"
    done = names_done(rows, _AGAIN.value)
    cases = [case for shape in _SHAPES.value for case in all_cases(shape, files)]
    cases = chosen(cases, _ONLY.value)
    if _LIST.value:
        for case in cases:
            state = "done" if done.issuperset(case.names) else f"{case.seconds:3.0f} s"
            print(f"{state}  {'; '.join(case.names)}")
        return
    end = time.monotonic() + (_SECONDS.value or float("inf"))
    place = Place(files=files, logs=folder / "logs", end=end)
    waiting = [case for case in cases if not done.issuperset(case.names)]
    left = run_cases(waiting, place, rows, device_name(_PLATFORM.value))
    print(json.dumps({"cases": len(cases), "left": left}))


if __name__ == "__main__":
    app.run(main)
