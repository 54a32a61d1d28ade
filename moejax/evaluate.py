"""Perplexity of a text, and under a policy the distance to the exact model.

    python -m moejax.evaluate   # hub: the test rows of WikiText-2
    python -m moejax.evaluate --config=configs/evaluate_wikitext2_2048_512.py
    python -m moejax.evaluate --config.checkpoint=DIR --config.output=x.json
    python -m moejax.evaluate --config.policy.name=dymoe --config.policy.tiers=int4,int2

`--config.text=FILE` takes a text of one's own. Lines with the result go to stdout, a progress bar
to stderr, everything that is needed to measure it again to the JSON file. Figures of different
windows, strides, texts or tokenizers are not to be compared: the protocol stands in the lines and
in the file.

The nats of each window go to a file beside the output as they come: a run that was interrupted and
is started again goes on where it was. Perplexity under a policy begins anew, since the policy's
state goes from window to window. Tasks such as ARC, MMLU and GSM8K run by `moejax.lm_eval`:
docs/evaluation.md has a command for each.
"""

from absl import flags

from moejax import cli
from moejax.config.commands import EvaluateConfig
from moejax.evaluation.answers import beside, is_unfinished
from moejax.loading import check_recorded
from moejax.text.corpus import load_text


def _evaluate(config: EvaluateConfig, values: flags.FlagValues) -> None:
    """Measures, prints lines, writes the JSON file."""
    del values
    output = cli.user_path(config.output) if config.output else None
    check_recorded(config)
    text = load_text(str(cli.user_path(config.text)), config.join)
    # JAX is imported here: --help and mistakes need not wait for it.
    from moejax.evaluation import perplexity_run

    perplexity_run.run(config, text, output)


def _resumes(config: EvaluateConfig) -> bool:
    """Whether an interrupted run has kept windows, and the next one resumes from them."""
    if not config.output or config.begins_anew():
        return False
    return is_unfinished(beside(cli.user_path(config.output)))


COMMAND = cli.Command(
    doc=__doc__,
    default=EvaluateConfig(),
    body=_evaluate,
    resumes=_resumes,
)

if __name__ == "__main__":
    cli.run(COMMAND)
