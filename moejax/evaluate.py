r"""What a model is worth: its perplexity on a text, or how well it answers.

    python -m moejax.evaluate --config.text=wiki.test.raw --config.join=wikitext
    python -m moejax.evaluate --config=configs/evaluate_wikitext2_2048_512.py
    python -m moejax.evaluate --config.checkpoint=DIR --config.text=mine.txt --config.output=x.json
    python -m moejax.evaluate --config.policy.name=dymoe --config.policy.tiers=int4,int2
    python -m moejax.evaluate --config.task=arc_easy --config.data=arc_easy.test.jsonl.xz
    python -m moejax.evaluate --config.task=mmlu --config.data=mmlu.test.jsonl --config.fewshot=5 \
        --config.fewshot_data=mmlu.dev.jsonl --config.limit=500 --config.output=mmlu.json

Lines with the result go to stdout, a progress bar to stderr, everything that is needed to measure
it again to the JSON file. Figures of different windows, strides, texts, tokenizers, wordings or
examples are not to be compared: the protocol stands in the lines and in the file.

Answers, of perplexity the nats of each window, go to a file beside the output as they come: a run
that was interrupted and is started again goes on where it was. Perplexity under a policy begins
anew, since the policy's state goes from window to window. docs/evaluation.md has a command for each
benchmark.
"""

from absl import flags

from moejax import cli, report
from moejax.config import PERPLEXITY, EvaluateConfig
from moejax.evaluation.rows import read_rows
from moejax.evaluation.texts import load_text


def define_flags(values: flags.FlagValues) -> None:
    """No flags beside `--config`."""
    del values


def evaluate(config: EvaluateConfig, values: flags.FlagValues) -> None:
    """Measures, prints lines, writes the JSON file."""
    del values
    output = cli.user_path(config.output) if config.output else None
    report.check_recorded(config)
    if config.task == PERPLEXITY:
        text = load_text(str(cli.user_path(config.text)), config.join)
        # JAX is imported here: --help and mistakes need not wait for it.
        from moejax.evaluation import perplexity_run

        perplexity_run.run(config, text, output)
        return
    data = read_rows(cli.user_path(config.data))
    shots = read_rows(cli.user_path(config.fewshot_data)) if config.fewshot_data else None
    from moejax.evaluation import task_run

    task_run.run(config, data, shots, output)


def resumes(config: EvaluateConfig) -> bool:
    """Whether a run keeps what it measured so far, and the next one goes on from there."""
    return bool(config.output) and not (config.task == PERPLEXITY and config.policy.name)


COMMAND = cli.Command(
    doc=__doc__,
    default=EvaluateConfig(),
    define_flags=define_flags,
    body=evaluate,
    resumes=resumes,
)

if __name__ == "__main__":
    cli.run(COMMAND)
