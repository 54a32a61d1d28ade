"""Profiles a model on a text: buddy lists of similar experts for `moejax.policies.buddymoe`.

    python -m moejax.profile_experts
    python -m moejax.profile_experts --config.checkpoint=DIR --config.source=outputs
    python -m moejax.profile_experts --config.checkpoint=DIR --config.tiers=int4,int2
    python -m moejax.profile_experts --config.checkpoint=DIR --config.output=elsewhere.safetensors

Counts over the text which experts the routers choose, alone and together, and writes the lists
(BuddyMoE eq. 4 to 6) beside the checkpoint, with all that is needed to make them again. With tiers
it measures too what each loses of each expert's output, from which `moejax.generate --stats`
estimates the error of every layer. Use a text
of the domain to be served (`--config.text=FILE`; one ships), and not one that is evaluated on. One
line with the result goes to stdout, a progress bar to stderr.
"""

import contextlib
import dataclasses
from typing import Any, cast

import numpy as np
import tqdm
from absl import flags

from moejax import cli
from moejax.config.profile import ProfileConfig
from moejax.errors import MoejaxError
from moejax.policies.buddy_lists import Source
from moejax.text.corpus import Text, beginning, encode, load_text

WINDOW = 2048


def _profile_experts(config: ProfileConfig, values: flags.FlagValues) -> None:
    """Profiles, writes the file, prints a line."""
    del values
    text = _text(config)

    import jax

    from moejax.checkpoints import open_checkpoint, resolve_checkpoint
    from moejax.engine import Engine
    from moejax.evaluation.expert_errors import load_tiers, measure_errors, measured_tiers
    from moejax.evaluation.expert_profile import Counting, profile, provenance
    from moejax.inference.runner import Runner
    from moejax.routing import profile_file as buddies

    directory = resolve_checkpoint(config.checkpoint)
    output = cli.user_path(config.output) if config.output else directory / buddies.FILE_NAME
    buddies.check_place(output)
    # Float32 is float32 on every device: a rounded router chooses other experts.
    with jax.default_matmul_precision("highest"):
        engine = Engine.from_pretrained(
            directory,
            dtype=config.dtype,
            platform=config.platform,
            compilation_cache=config.compilation_cache,
            generation_config=False,
            read_bits=config.read_bits,
        )
        window = config.window or min(WINDOW, engine.config.context_limit)
        if window > engine.config.context_limit:
            longest = engine.config.context_limit
            raise MoejaxError(f"window={window} is beyond the model's context of {longest}")
        if engine.tokenizer is None:
            raise MoejaxError(
                f"{config.checkpoint} has no tokenizer.json: add the original model's"
            )
        stream = encode(engine.tokenizer, directory, text, special=config.add_special_tokens)
        if config.max_tokens and len(stream.ids) > config.max_tokens:
            stream, text = beginning(engine.tokenizer, stream, text, config.max_tokens)
        tiering = config.tiering()
        counting = Counting(
            config.warmup,
            config.warmup_weight,
            config.temperature,
            config.outputs or config.source == "outputs",
        )
        runner = Runner(engine.config, engine.weights, engine.device)
        tiers = None
        if tiering is not None:  # what is wrong with a tier is said before the text is read
            own = open_checkpoint(str(directory), config.read_bits)
            tiers = load_tiers(own, tiering, engine.weights, engine.device)
        with _bar("profiling", len(stream.ids) - 1) as bar:
            activity = profile(
                runner,
                np.asarray(stream.ids),
                window,
                config.batch_size,
                counting,
                lambda n: bar.update(n),
            )
        found = buddies.profile_of(
            activity,
            provenance(config.checkpoint, directory, engine, text, stream)
            | {"window": window, "counting": dataclasses.asdict(counting)}
            | {"read_bits": config.read_bits}
            | {"measured": measured_tiers(tiering)},
            source=cast(Source, config.source),
            smoothing=config.smoothing,
            alpha=config.alphas(len(engine.config.moe_layers)),
            max_buddies=config.max_buddies,
            percentile=config.percentile,
        )
        if tiers is not None:
            with _bar("measuring tiers", len(stream.ids) - 1) as bar:
                errors = measure_errors(
                    runner, tiers, found.lists.ids[:, :, 0], np.asarray(stream.ids), window,
                    config.batch_size, lambda n: bar.update(n),
                )  # fmt: skip
            found = dataclasses.replace(found, errors=errors)
    buddies.save_buddies(output, found)
    print(buddies.summary(found, output))


def _bar(what: str, total: int) -> contextlib.closing[Any]:
    return contextlib.closing(tqdm.tqdm(total=total, desc=what, unit="tok"))


def _text(config: ProfileConfig) -> Text:
    if config.text != "default":
        return load_text(str(cli.user_path(config.text)), config.join)
    from moejax.quantization.pipeline.calibration import shipped_text

    return Text(shipped_text(), "the calibration text that ships")


COMMAND = cli.Command(doc=__doc__, default=ProfileConfig(), body=_profile_experts)

if __name__ == "__main__":
    cli.run(COMMAND)
