r"""Benchmarks a model: latencies, throughput, bytes moved, memory, share of the byte floor.

    python -m moejax.benchmark
    python -m moejax.benchmark --config.prompts=sharegpt.json --config.num_prompts=64 \
        --config.batches=1,4,16 --config.output=x.json,x.csv
    python -m moejax.benchmark --config.shape=Qwen3-30B-A3B --config.bits=4 \
        --config.budgets=12,16,24,32 --config.prompt_tokens=512 --config.skew=zipf:0.85
    python -m moejax.benchmark --config=configs/benchmark_dynaexq.py

A checkpoint routes as it does. A shape has random weights: if its experts move, decode steps take
the experts of a trace, or of a stated skew, and the output says so. A table goes to stdout,
progress to stderr. A budget that is too small is a row that names the smallest that works.
docs/benchmark.md defines each figure.
"""

from absl import flags, logging

from moejax import cli
from moejax.benchmarking.requests import read_prompt_file
from moejax.config.benchmark import BenchmarkConfig
from moejax.errors import MoejaxError
from moejax.experts.machine import raise_pinned_limit
from moejax.files.result_rows import check_rows
from moejax.files.whole import check_output

# First characters of our own files, by suffix; other files are refused.
_BEGINS = {".json": '{"benchmark":', ".csv": "what,figure,unit"}


def _define_flags(values: flags.FlagValues) -> None:
    """Defines the flags beside `--config`."""
    flags.DEFINE_boolean("stats", False, "a line of counts for each layer", flag_values=values)


def _benchmark(config: BenchmarkConfig, values: flags.FlagValues) -> None:
    """Measures, prints the table, writes the files."""
    outputs = [cli.user_path(name) for name in config.outputs()]
    for path in outputs:
        check_output(path, begins=_BEGINS.get(path.suffix, ""))
        if path.suffix == ".jsonl":
            check_rows(path)
    file = None
    if config.prompts:
        file = read_prompt_file(cli.user_path(config.prompts), config.split)
    if said := raise_pinned_limit(config.platform):
        logging.warning("%s", said)
    # JAX is imported here: --help and mistakes need not wait for it.
    from moejax.benchmarking import record, running

    outcome = running.run(config, file, record.Files(outputs, config).write)
    print("\n".join(record.lines(config, outcome, stats=values.stats)))
    if all(point.refusal for point in outcome.points):
        raise MoejaxError(outcome.points[0].refusal)


COMMAND = cli.Command(
    doc=__doc__, default=BenchmarkConfig(), define_flags=_define_flags, body=_benchmark
)

if __name__ == "__main__":
    cli.run(COMMAND)
