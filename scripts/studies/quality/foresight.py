"""Section `foresight` of `policies.py`: which promotions DynaExq saw coming.

Whenever the hot set is chosen, the policy names experts of each layer that may be hot the next time
(`moejax.policies.foresight`). A figure is the share of the experts that the next choice promotes
that had been named, by the policy's own functions over the routing of a text. "chance" is what
names drawn at random would find.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.inference.recorder import RecordSpec, recording
from moejax.inference.runner import Runner
from moejax.policies.base import Observation, PolicySpec
from moejax.policies.dynaexq import DynaExq
from moejax.routing.trace import Trace, read_trace
from scripts.studies.quality.bench import Model, Windows
from scripts.studies.quality.sections import SEGMENTS, Bench, Point, profiled

NAMED = (2, 4, 8)  # experts of a layer
N_HOT, PERIODS = 8, (256, 512)
WINDOWS = 40  # of each domain
UNIT = "% of promotions"


def foresight(bench: Bench) -> Iterator[Point]:
    """A text that goes from prose to code to maths, and one that mixes them window by window."""
    links = profiled(bench, bench.calibration, outputs=False).links
    parts = [bench.texts.domain(name, WINDOWS).tokens for name in SEGMENTS]
    texts = {
        "one domain after the other": np.concatenate(parts),
        "a domain a window": np.stack(parts, axis=1).reshape(-1, parts[0].shape[1]),
    }
    for text, tokens in texts.items():
        trace = _routing(bench.model, Windows(text, tokens, ()))
        for period in PERIODS:
            for by in ("scores", "links"):
                policy = DynaExq(
                    period=period, n_hot=N_HOT, foresight=max(NAMED), foresee_by=by, links=links
                )
                found, chance, promotions = _seen(bench.model, policy, trace, period)
                for named in NAMED:
                    more = {"chance": 100 * chance[named], "promotions": promotions}
                    share = 100 * found[named]
                    yield Point("foresight", text, f"{by}, T {period}", named, share, more, UNIT)


def _routing(model: Model, windows: Windows) -> Trace:
    """Routing of all tokens, window after window."""
    runner = Runner(model.config, model.weights, model.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with recording(runner, path, RecordSpec(probabilities=True)):
            for row in windows.tokens:
                runner.score(row[None, :-1], np.array([len(row) - 1], np.int32), row[None, 1:])
        return read_trace(path)


def _seen(
    model: Model, policy: DynaExq, trace: Trace, period: int
) -> tuple[dict[int, float], dict[int, float], int]:
    """Shares of the promotions that were named, and by chance; how many there were."""
    config, experts = model.config, model.config.num_experts
    spec = PolicySpec(
        num_layers=model.num_layers, num_experts=experts, width=config.experts_per_token,
        tiers=("high", "low"), expert_bytes=(2, 1), slots=(N_HOT, experts),
    )  # fmt: skip

    @jax.jit
    def update(state: Any, resident: jax.Array, seen: dict[str, jax.Array]) -> Any:
        for layer in range(model.num_layers):
            observation = Observation(
                layer=jnp.int32(layer), active=jnp.ones(period, bool), resident=resident[layer],
                is_prefill=True, **{name: array[:, layer] for name, array in seen.items()},
            )  # fmt: skip
            _, state = policy.decide(state, observation)
        _, state = policy.transfers(state, resident)
        return state, policy.disk_prefetch(state, resident)

    state, named, hot = policy.init(spec), np.zeros((0, 3), int), None
    found, chance, promotions = dict.fromkeys(NAMED, 0.0), dict.fromkeys(NAMED, 0.0), 0
    for first in range(0, len(trace) - period + 1, period):
        part = slice(first, first + period)
        seen = {"ids": trace.ids[part], "weights": trace.weights[part],
                "probabilities": trace.probabilities[part]}  # type: ignore[index]  # fmt: skip
        seen = {n: jnp.asarray(a, "int32" if n == "ids" else "float32") for n, a in seen.items()}
        before = np.zeros((model.num_layers, experts), bool) if hot is None else hot
        resident = jnp.asarray(np.stack([before, np.ones_like(before)], axis=1))
        state, asked = update(state, resident, seen)
        now = np.asarray(state.high)
        if hot is not None:
            new = now & ~hot
            promotions += int(new.sum())
            for count in NAMED:
                rows = named[: count * model.num_layers]
                rows = rows[rows[:, 0] >= 0]
                found[count] += new[rows[:, 0], rows[:, 1]].sum()
                chance[count] += new.sum() * min(1.0, count / (experts - N_HOT))
        named, hot = np.stack([np.asarray(field) for field in asked], axis=1), now
    return (
        {count: n / promotions for count, n in found.items()},
        {count: n / promotions for count, n in chance.items()},
        promotions,
    )
