"""What `--config.policy.name=auto` takes: the table that `moejax.policies.auto` reads, by sweeps.

    python -m moejax.generate --prompt="..." --config.temperature=1 --config.max_new_tokens=1500 \
        --config.context=2048 --config.record_trace=demo.trace --config.record_probabilities=True \
        --config.record_foreseen=32
    python -m scripts.recommend_defaults --trace=demo.trace --out=moejax/policies/auto_table.json

The demo model is of the family qwen3_moe, and its trace stands for it; with groups of its experts
as one expert each it has the shape of Mixtral's layers. Bytes of experts are those of the real
models in groups of 64. For each family and share of the experts that fit in INT4: the fastest
candidate of `moejax.simulation.recommending` at the floor of fidelity, and the fastest of each
other kind. `link_ms` is a token's time on the link, of the trace's own layers: a model of more
layers takes more, and the steps themselves, alike for all, come on top. What counts is who is
first; at 12 GiB/s (2026-11-22) that was the same.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags

from moejax.benchmarking.synthetic_traces import grouped_trace
from moejax.policies.auto import FLOOR
from moejax.results import command_line, today
from moejax.simulation.costs import GIB, Machine
from moejax.simulation.recommending import candidates, recommend, replayed
from moejax.simulation.sweeping import Tiers
from moejax.traces import Trace, read_trace

_TRACE = flags.DEFINE_string("trace", None, "of the demo model, with decoded tokens", required=True)
_OUT = flags.DEFINE_string("out", None, "the table", required=True)

SHARES = (0.25, 0.5, 0.75)  # of the experts, in INT4 slots
LINK = 50.0  # GiB/s
# Bytes of an expert in INT4 and INT2.
REAL = {
    "qwen3_moe": (2_654_208, 1_474_560),
    "mixtral": (99_090_432, 55_050_240),
}
NAMES = ("int4", "int2")


def rows_of(family: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """Of the table."""
    high, low = REAL[family]
    tiers = Tiers(names=NAMES, expert_bytes=(high, low))
    for share in SHARES:
        room = share * trace.num_experts * trace.num_layers * high / GIB + 1e-9
        chosen = list(candidates(trace, tiers, room))
        swept = replayed(trace, chosen, None)
        found = recommend(chosen, swept, Machine(base_ms=0, link_gib_per_s=LINK), FLOOR)
        settings = dict(found.candidate.setting)
        slots = settings.pop("slots")
        yield {
            "num_experts": trace.num_experts,
            "width": trace.width,
            "share": share,
            "policy": found.candidate.policy,
            "tiers": list(found.candidate.tiers.names),
            "slots": slots,
            "settings": settings,
            "link_ms": {kind: round(ms, 3) for kind, ms in found.best.items()},
        }


def main(argv: list[str]) -> None:
    """Writes the table and prints its rows."""
    del argv
    own = read_trace(Path(_TRACE.value))
    traces = {"qwen3_moe": own, "mixtral": grouped_trace(own, 8, 2)}
    rows = [row for family, trace in traces.items() for row in rows_of(family, trace)]
    for row in rows:
        print(row)
    table = {
        "source": command_line(),
        "date": today(),
        "floor": FLOOR,
        "link_gib_per_s": LINK,
        "rows": rows,
    }
    Path(_OUT.value).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
