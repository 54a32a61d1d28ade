"""What buddies replace in prompts, as printed and but for experts that a chunk fetches anyway.

    python -m scripts.studies.buddymoe.prompts --lists=buddies.safetensors --text=FILE \
        --output=rows.jsonl

The demo model on a CPU, experts in slots and host memory; rho 3, no background transfers.
"""

import itertools
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from moejax import Engine
from moejax.experts.tiering import Tiering
from moejax.text.corpus import unpacked
from scripts.studies.measuring import Report

SLOTS, LENGTHS = (8, 16, 24), (16, 64, 512)  # of 32 experts; tokens
NUM_PROMPTS = 8

_LISTS = flags.DEFINE_string("lists", None, "profile of other text", required=True)
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text of the prompts, plain or .xz", required=True)
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")


def counts_of(engine: Engine) -> np.ndarray:
    """Experts needed and fetched so far, and gate mass: in the tier, skipped, replaced, all."""
    ledger = engine.ledger
    assert ledger is not None
    mass = np.sum(np.asarray(ledger.gate), axis=0)
    return np.array([ledger.total("needed"), ledger.total("misses"), *mass])


def main(argv: list[str]) -> None:
    """Measures every setting."""
    del argv
    report = Report(jax.devices("cpu")[0], "", _OUTPUT.value)
    for slots, keeps in itertools.product(SLOTS, (False, True)):
        settings = {
            "lists": _LISTS.value, "rho": 3, "background_bytes": 0.0, "keep_fetched": keeps
        }  # fmt: skip
        policy = Tiering(policy="buddymoe", settings=settings, slots=(slots,))
        engine = Engine.from_pretrained(
            "demo", platform="cpu", context=600, policy=policy, progress=False
        )
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(unpacked(Path(_TEXT.value)).decode())
        for length in LENGTHS:
            before = counts_of(engine)
            for i in range(NUM_PROMPTS):
                start = i * len(ids) // NUM_PROMPTS
                engine.generate([ids[start : start + length]], max_new_tokens=1)
            needed, fetched, *_, replaced, total = counts_of(engine) - before
            report.add(
                f"prompts | {length} tokens, {slots} slots | gate mass replaced"
                f"{', but for fetched experts' if keeps else ''}",
                100 * replaced / total, "%", prompts=NUM_PROMPTS, needed=int(needed),
                fetched=int(fetched),
            )  # fmt: skip


if __name__ == "__main__":
    app.run(main)
