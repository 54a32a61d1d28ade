"""Times the kernels of one batch of a benchmark: where a prompt's and a token's time goes.

    python -m scripts.studies.speed.kernel_times --config.shape=Qwen3-30B-A3B --config.layers=8 \
        --config.bits=4 --config.attention_bits=4 --config.prompt_tokens=8192 --config.new_tokens=17

Flags are those of `moejax.benchmark`. After each measurement one more batch runs under JAX's
profiler; for each stream of the first GPU come its kernels by the time that they took, and the
time in which none ran.
"""

import collections
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from moejax import benchmark, cli
from moejax.benchmarking.measuring import Bench, Measurement, Prompts

SHOWN = 26  # kernels of a stream
_NUMBERS = re.compile(r"[._]\d+")  # of XLA's names


def lines_of(events: Sequence[Any]) -> list[str]:
    """Lines of a stream's events: all of them, then by name."""
    total: dict[str, list[float]] = collections.defaultdict(list)
    idle, last = 0.0, None
    for event in sorted(events, key=lambda event: event.start_ns):
        total[_NUMBERS.sub("", event.name)].append(event.duration_ns / 1e3)
        idle += max(0.0, event.start_ns - last) if last is not None else 0.0
        last = max(last or 0.0, event.start_ns + event.duration_ns)
    by_time = sorted(total.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    busy = sum(map(sum, total.values()))
    return [f"{busy / 1e3:9.3f} ms in {len(events)} kernels, {idle / 1e6:.3f} ms in none"] + [
        f"{sum(each) / 1e3:9.3f} ms {len(each):6} x {sum(each) / len(each):8.1f} us  {name[:80]}"
        for name, each in by_time
    ]


def main() -> None:
    """Runs `moejax.benchmark`, and profiles a batch after each measurement."""
    measure = Bench.measure

    def profiled(bench: Bench, batches: Sequence[Prompts], **how: Any) -> Measurement:
        found = measure(bench, batches, **how)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                bench._batch(batches[0])
            [path] = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(path)).planes
        print(f"{len(batches[0])} prompts of {len(batches[0][0])} tokens")
        for plane in planes:
            for stream in plane.lines if plane.name.startswith("/device:GPU:0") else ():
                if events := [*stream.events]:
                    print("\n".join([f" {stream.name}", *lines_of(events)]), flush=True)
        return found

    with mock.patch.object(Bench, "measure", profiled):
        cli.run(benchmark.COMMAND)


if __name__ == "__main__":
    main()
