"""Generates text from prompts, or talks in a conversation.

    python -m moejax.generate --prompt="Once upon a time"
    python -m moejax.generate --config=configs/qwen3_30b_a3b.py --chat

The new text goes to stdout as it is generated; all else goes to stderr, a line of figures last.
With several prompts the answers are computed as one batch and printed in order, each under a
heading.
"""

import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from moejax import cli
from moejax.config.commands import GenerateConfig
from moejax.errors import MoejaxError, print_stderr
from moejax.files.whole import check_directory
from moejax.inference import report
from moejax.inference.conversation import converse, read_turns, thinking_remarks
from moejax.loading import check_recorded, load_engine, recorded
from moejax.text.chat_template import ChatSettings
from moejax.text.prompts import read_prompts

if TYPE_CHECKING:  # importing the engine imports JAX, which --help and mistakes need not wait for
    from moejax.engine import Engine
    from moejax.inference.generation import Chunk, Timing

_MOST_ECHOED = 1000  # characters of a prompt


def _define_flags(values: flags.FlagValues) -> None:
    """Defines the flags beside `--config`."""
    flags.DEFINE_boolean("stats", False, "a line of counts for each layer", flag_values=values)
    flags.DEFINE_multi_string("prompt", [], "a text to continue", flag_values=values)
    flags.DEFINE_multi_string(
        "prompt_file", [], "a UTF-8 file, one prompt; - is standard input", flag_values=values
    )
    flags.DEFINE_boolean(
        "chat",
        False,
        "each prompt is a user's message in the model's chat template; without a prompt, talk: on "
        "a terminal, or each line of standard input is a turn",
        flag_values=values,
    )


def _generate(config: GenerateConfig, values: flags.FlagValues) -> None:
    """Loads the model and answers every prompt, or talks."""
    prompts = read_prompts(values.prompt, values.prompt_file)
    turns = read_turns() if values.chat and not prompts else None
    if not prompts and turns is None:
        raise MoejaxError(
            "no prompt: give --prompt, --prompt_file, or --chat on a terminal or with lines on "
            "standard input"
        )
    if not values.chat and config.chat_settings() != ChatSettings():
        raise MoejaxError("system_prompt and thinking are of conversations: give --chat, too")
    if config.fidelity_share and not (values.stats and prompts):
        raise MoejaxError(
            f"fidelity_share={config.fidelity_share:g} is measured under --stats, in answers to "
            "--prompt or --prompt_file: give both, or leave it out"
        )
    check_recorded(config)
    if config.trace_dir:
        check_directory(cli.user_path(config.trace_dir), "trace_dir")
    if not config.processes:
        _answer(config, values, prompts, turns)
        return
    if turns is not None:
        raise MoejaxError("a conversation runs in one process: give --prompt, or no processes")
    from moejax.devices import joined_processes

    with joined_processes(config.processes):
        _answer(config, values, prompts, turns)


def _answer(
    config: GenerateConfig, values: flags.FlagValues, prompts: list[str], turns: Any
) -> None:
    """Loads the model and answers, as `_generate`."""
    engine = load_engine(config, max(1, len(prompts)))
    assert engine.tokenizer is not None
    request = config.request()
    request["add_special_tokens"] &= not values.chat  # the template writes them
    chat, given = config.chat_settings(), prompts
    if values.chat:
        print_stderr(*thinking_remarks(chat, engine.tokenizer))
        chats = (chat.messages([{"role": "user", "content": prompt}]) for prompt in prompts)
        prompts = [engine.tokenizer.apply_chat_template(of, **chat.variables()) for of in chats]
    with report.tracing(config.trace_dir), recorded(engine, config):
        if turns is not None:
            answer = functools.partial(_stream_answer, engine, request)
            converse(turns, engine.tokenizer, chat, answer)
        elif len(prompts) == 1:
            chunks: list[Chunk] = []
            shown = _echoed(given[0], ends_line=values.chat)
            _stream_answer(engine, request, prompts[0], chunks, shown)
            answers = [[chunk.token for chunk in chunks]]
        else:
            shown_all = [_echoed(text, ends_line=values.chat) for text in given]
            answers = _print_answers(engine, prompts, request, shown_all)
    if values.stats:
        print_stderr(*(engine.ledger.describe_layers() if engine.ledger else [report.NO_COUNTS]))
        if engine.ledger and config.policy.name:
            from moejax.evaluation.expert_errors import layer_errors

            print_stderr(*layer_errors(config, engine))
        if engine.ledger and config.fidelity_share and config.policy.tiering():
            from moejax.evaluation.fidelity import kl_from_exact

            special = request["add_special_tokens"]
            ids = [engine.tokenizer.encode(of, add_special_tokens=special) for of in prompts]
            print_stderr(kl_from_exact(config, engine, ids, answers))


def _stream_answer(
    engine: "Engine",  # has a tokenizer
    request: dict[str, Any],  # the answer's settings
    prompt: str,
    chunks: list["Chunk"],  # each chunk is appended as it is generated
    shown: str = "",  # printed before the answer
) -> None:
    """Prints the answer while it is generated, then the closing line."""
    assert engine.tokenizer is not None
    special = request["add_special_tokens"]
    token_ids = engine.tokenizer.encode(prompt, add_special_tokens=special)
    for chunk in engine.stream(token_ids, **request):
        print(chunk.text if chunks else shown + chunk.text, end="", flush=True)
        chunks.append(chunk)
    print(flush=True)
    _close(engine, request, chunks[-1].timing, len(token_ids), len(chunks))


def _echoed(prompt: str, *, ends_line: bool) -> str:
    """Returns the end of a prompt, faint, if stdout is a terminal; else nothing."""
    if not sys.stdout.isatty():
        return ""
    shown = prompt if len(prompt) <= _MOST_ECHOED else f"...{prompt[-_MOST_ECHOED:]}"
    if os.environ.get("TERM") != "dumb":
        shown = f"\x1b[2m{shown}\x1b[0m"
    return f"{shown}\n" if ends_line else shown


def _print_answers(
    engine: "Engine", prompts: Sequence[str], request: dict[str, Any], shown: Sequence[str]
) -> list[list[int]]:
    """Answers the prompts as one batch; prints the answers in order, then the closing line.

    `shown[i]` is printed before the i-th answer.

    Returns:
      Each answer's tokens.
    """
    answers = engine.generate(prompts, **request)
    for i, (answer, before) in enumerate(zip(answers, shown, strict=True), start=1):
        print(f"=== {i} of {len(answers)} ===\n{before}{answer.text}", flush=True)
    counts = ((answer.num_prompt_tokens, len(answer.tokens)) for answer in answers)
    _close(engine, request, answers[0].timing, *map(sum, zip(*counts, strict=True)))
    return [list(answer.tokens) for answer in answers]


def _close(
    engine: "Engine", request: dict[str, Any], timing: "Timing", prompt_tokens: int, new_tokens: int
) -> None:
    from moejax.inference.generation import describe_defaults

    figures = report.closing_line(
        timing,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        device_peak_bytes=report.device_peak_bytes(engine.device),
        settings=describe_defaults(engine.defaults, request),
    )
    print_stderr(figures, *(engine.ledger.describe() if engine.ledger else []))


COMMAND = cli.Command(
    doc=__doc__, default=GenerateConfig(), define_flags=_define_flags, body=_generate
)

if __name__ == "__main__":
    cli.run(COMMAND)
