"""EleutherAI's lm_eval with moejax among its models; the arguments are lm_eval's own.

    python -m moejax.lm_eval --model moejax --model_args pretrained=DIR --tasks arc_easy

`moejax.evaluation.lm_eval_model` says what `--model_args` may hold. lm_eval finds models in its
registry only, and has no way of its own to hear of another package's: this adds ours, and hands
over.
"""

import importlib
import sys

from moejax.errors import MoejaxError


def main(argv: list[str] | None = None) -> None:
    """Registers the model and runs lm_eval's command line; our errors are one line on stderr.

    Args:
      argv: takes the place of the process's arguments, the program's name first; None: those.
    """
    if argv is not None:
        sys.argv[:] = argv
    try:
        importlib.import_module("moejax.evaluation.lm_eval_model")
        command_line = importlib.import_module("lm_eval.__main__")
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: lm_eval is not installed ({error}): pip install '.[evaluation]' in a clone of "
            "this repository"
        )
    try:
        command_line.cli_evaluate()
    except MoejaxError as error:  # model arguments, a checkpoint, limits, requests
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
