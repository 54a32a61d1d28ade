"""Gate mass that buddies replace in prompts, as printed, and where fetched experts are kept.

python -m scripts.studies.buddymoe.prompts --lists=buddies.safetensors --text=FILE --output=x.jsonl
"""

from itertools import product
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from moejax import Engine
from moejax.experts.tiering import Tiering
from moejax.text.corpus import read_text
from scripts.studies.measuring import Report

_LISTS = flags.DEFINE_string("lists", None, "profile of other text", required=True)
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text of the prompts, plain or .xz", required=True)
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")


def main(argv: list[str]) -> None:
    """Measures every setting, of the demo model on a CPU."""
    del argv
    report = Report(jax.devices("cpu")[0], "rho 3, 8 prompts", _OUTPUT.value)
    for slots, length, kept in product((8, 16, 24), (16, 64, 512), ("", ", fetched kept")):
        how = {"lists": _LISTS.value, "rho": 3, "background_bytes": 0.0, "keep_fetched": bool(kept)}
        policy = Tiering(policy="buddymoe", settings=how, slots=(slots,))
        engine = Engine.from_pretrained("demo", platform="cpu", context=600, policy=policy)
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(read_text(Path(_TEXT.value)))
        for start in range(0, len(ids) - length, len(ids) // 8):
            engine.generate([ids[start : start + length]], max_new_tokens=1)
        ledger = engine.ledger
        assert ledger is not None
        *_, replaced, total = np.sum(np.asarray(ledger.gate), axis=0)
        report.add(f"prompts | {length} tokens, {slots} slots{kept} | gate mass replaced",
                   100 * float(replaced / total), "%", fetched=ledger.total("misses"))  # fmt: skip


if __name__ == "__main__":
    app.run(main)
