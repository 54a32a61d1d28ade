"""EleutherAI's lm_eval with moejax among its models; the arguments are lm_eval's own.

    python -m moejax.lm_eval --model moejax --model_args pretrained=DIR --tasks arc_easy
    python -m moejax.lm_eval --model moejax --model_args pretrained=demo --tasks mmlu,gsm8k \
        --data FOLDER

`--data FOLDER` reads the tasks' data from JSON Lines files in a folder instead of the Hugging Face
hub; `moejax.evaluation.local_data` says how the files are named. `moejax.evaluation.lm_eval_model`
says what `--model_args` may hold. lm_eval finds models in its own registry only: this command adds
moejax to it, then runs lm_eval's command line.
"""

import argparse
import contextlib
import importlib
import sys

from moejax import cli
from moejax.errors import MoejaxError


def main(argv: list[str] | None = None) -> None:
    """Registers the model and runs lm_eval's command line; our errors are one line on stderr."""
    if argv is not None:
        sys.argv[:] = argv
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--data")
    ours, arguments = own.parse_known_args(sys.argv[1:])
    try:
        importlib.import_module("moejax.evaluation.lm_eval_model")
        command_line = importlib.import_module("lm_eval.__main__")
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: lm_eval is not installed ({error}): pip install '.[evaluation]' in a clone of "
            "this repository"
        )
    is_run = any(word.startswith("--model") for word in arguments)
    if is_run and not any(word.startswith(("--device", "--config")) for word in arguments):
        arguments += ["--device", "auto"]  # lm_eval's own default is cuda:0
    sys.argv[1:] = arguments
    try:
        with _data_of(ours.data, arguments):
            command_line.cli_evaluate()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        cli.end_at_once(130)
    except MoejaxError as error:  # model arguments, a checkpoint, limits, requests, data files
        sys.exit(f"error: {' '.join(str(error).split())}")
    except (ConnectionError, FileNotFoundError) as error:
        said = " ".join(str(error).split())
        sys.exit(
            f"error: {said} (lm_eval fetches data sets, and metrics such as "
            "HumanEval's code_eval, from the hub: run it once with a network, or name local data "
            "with --data FOLDER)"
        )


def _data_of(folder: str | None, arguments: list[str]) -> contextlib.AbstractContextManager[None]:
    """Makes tasks read the folder; with None they read the Hub."""
    if folder is None:
        return contextlib.nullcontext()
    from moejax.evaluation.local_data import LocalData, in_place_of_the_hub

    of_lm_eval = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_lm_eval.add_argument("--num_fewshot", "-f", type=int)
    given, _ = of_lm_eval.parse_known_args(arguments)
    return in_place_of_the_hub(LocalData(cli.user_path(folder), given.num_fewshot))


if __name__ == "__main__":
    main()
