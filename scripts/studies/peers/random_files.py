"""Writes random weights in a real shape: a GGUF file or a Hugging Face checkpoint.

    python -m scripts.studies.peers.random_files --shape=Qwen3-30B-A3B --out=qwen3.gguf
    python -m scripts.studies.peers.random_files --shape=Qwen3-30B-A3B --out=qwen3   # a folder

    python -m scripts.studies.peers.random_files --shape=Qwen3-30B-A3B --bits=4 --out=qwen3-int4

Of Qwen3-30B-A3B the first has 17 GB and takes some seconds, the second 57 GiB and some minutes, the
third, which `moejax.serve` reads, 17 GiB.
GGUF needs the gguf package: `pip install gguf`, or --gguf=LLAMA_CPP/gguf-py.
"""

import math
import shutil
import sys
from pathlib import Path

from absl import app, flags

from moejax.errors import MoejaxError
from moejax.models.config import weight_shapes
from moejax.models.shapes import CONFIGS, with_layers
from scripts.studies.peers import random_checkpoint, random_gguf

_SHAPE = flags.DEFINE_enum("shape", "Qwen3-30B-A3B", sorted(CONFIGS), "a shape of moejax")
_LAYERS = flags.DEFINE_integer("layers", 0, "fewer layers; 0: all")
_OUT = flags.DEFINE_string("out", None, "a name that ends with .gguf, or a folder", required=True)
_BITS = flags.DEFINE_enum("bits", "16", ["4", "16"], "of a checkpoint's experts and attention")
_GGUF = flags.DEFINE_string("gguf", "", "folder of the gguf package where it is not installed")


def check_room(path: Path, nbytes: int) -> None:
    """Refuses to write more than there is room for.

    Raises:
      MoejaxError: too little is free where the file goes.
    """
    free = shutil.disk_usage(path.parent).free
    if nbytes > free:
        said = f"{nbytes / 2**30:.1f} GiB, and its disk has {free / 2**30:.1f} GiB free"
        raise MoejaxError(f"{path.name} takes {said}: give another folder, or fewer layers")


def main(argv: list[str]) -> None:
    """Writes one."""
    del argv
    path = Path(_OUT.value)
    try:
        config = with_layers(CONFIGS[_SHAPE.value], _LAYERS.value)
        if path.suffix == ".gguf":
            gguf = random_gguf.load_gguf(_GGUF.value)
            sizes = (random_gguf.nbytes_of(one, gguf) for one in random_gguf.tensors(config))
            check_room(path, sum(sizes))
            random_gguf.write(config, path, gguf)
        else:
            bits = int(_BITS.value)
            params = sum(map(math.prod, weight_shapes(config).values()))
            check_room(path, params * (bits + 1) // 8)  # with scales, or a little more
            random_checkpoint.write(config, path, bits)
    except MoejaxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
