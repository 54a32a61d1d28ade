"""Quantizes a checkpoint to a new directory.

    python -m moejax.quantize --config.checkpoint=demo --config.output=demo-milo
    python -m moejax.quantize --config=configs/quantize_mixtral_8x7b.py --config.output=mixtral-milo
    python -m moejax.quantize --config.output=x --config.rules="head, embed: method=rtn bits=8"

The output is a directory that `moejax.generate`, `moejax.evaluate` and `Engine.from_pretrained`
take. Killed at any moment and started again with equal settings, the command resumes where it
stopped. A bar with the time left goes to stderr, the report to stdout.
"""

from typing import TYPE_CHECKING

from absl import flags

from moejax import cli
from moejax.config.commands import CODE_BITS, FACTOR_BITS, RANK_DIVISOR, QuantizeConfig
from moejax.errors import MoejaxError
from moejax.text.corpus import read_text

if TYPE_CHECKING:  # it imports JAX
    from moejax.quantization.pipeline.run import Outcome


def _quantize(config: QuantizeConfig, values: flags.FlagValues) -> None:
    """Quantizes the checkpoint and prints the report."""
    del values
    outcome = run(config)
    from moejax.quantization.pipeline.report import report_lines

    for line in report_lines(outcome):
        print(line)


def run(config: QuantizeConfig, *, progress: bool = True) -> "Outcome":
    """Quantizes a checkpoint from Python, like the command.

    Raises:
      MoejaxError: as `quantize_checkpoint`, or a field of the configuration is not allowed.
    """
    config.check()
    # Importing these imports JAX, which --help and mistakes need not wait for.
    from moejax.checkpoints import resolve_checkpoint
    from moejax.devices import choose_device, enable_compilation_cache
    from moejax.quantization.pipeline.recipe import (
        FORMATS,
        Recipe,
        Scheme,
        parse_planes,
        parse_rules,
    )
    from moejax.quantization.pipeline.run import Job, quantize_checkpoint

    if not config.output:
        raise MoejaxError("output='' must be a directory: give --config.output=DIR")
    if config.format not in FORMATS:
        raise MoejaxError(f"format={config.format!r} is none of {', '.join(FORMATS)}")
    planes = parse_planes(config.planes) if config.planes else ()
    default = Scheme(
        method=config.method,
        bits=planes[-1] if planes else _given(config.bits, CODE_BITS),
        group_size=config.group_size,
        zero_kind=config.zero_kind,
        scale_dtype=config.scale_dtype,
        factor_bits=_given(config.factor_bits, FACTOR_BITS),
        act_order=config.act_order,
        planes=planes,
        plane_weight=config.plane_weight,
        rank_divisor=_given(config.rank_divisor, RANK_DIVISOR),
    )
    recipe = Recipe(default=default, rules=parse_rules(config.rules), format=config.format)
    device = choose_device(config.platform)
    enable_compilation_cache(config.compilation_cache)
    job = Job(
        source=resolve_checkpoint(config.checkpoint),
        output=cli.user_path(config.output),
        recipe=recipe,
        rank_policy=config.rank,
        passes=config.passes,
        calibration_text=_read_text(config.calibration),
        calibration_samples=config.calibration_samples,
        calibration_length=config.calibration_length,
        device=device,
        progress=progress,
    )
    return quantize_checkpoint(job)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _read_text(name: str) -> str | None:
    """Reads a UTF-8 file, plain or packed; None for the text that ships."""
    return None if name == "default" else read_text(cli.user_path(name))


COMMAND = cli.Command(
    doc=__doc__,
    default=QuantizeConfig(),
    body=_quantize,
    resumes=lambda config: bool(config.output),
)

if __name__ == "__main__":
    cli.run(COMMAND)
