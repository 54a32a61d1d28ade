"""Text in, text out.

    python -m moejax.generate --prompt="Once upon a time"
    python -m moejax.generate --config=configs/qwen3_30b_a3b.py --chat

The new text goes to stdout as it comes; all else goes to stderr, a line of figures last. With
several prompts the answers are computed as one batch and printed in order, each under a heading.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from moejax import cli, report
from moejax.config import GenerateConfig
from moejax.errors import MoejaxError
from moejax.loading import compared, load_engine, say
from moejax.prompts import read_prompts

if TYPE_CHECKING:  # importing the engine imports JAX, which --help and mistakes need not wait for
    from moejax.engine import Engine
    from moejax.generation import Chunk, Timing
    from moejax.tokenizer import Tokenizer


def define_flags(values: flags.FlagValues) -> None:
    """The flags beside `--config`."""
    flags.DEFINE_boolean("stats", False, "a line of counts for each layer", flag_values=values)
    flags.DEFINE_multi_string("prompt", [], "a text to continue", flag_values=values)
    flags.DEFINE_multi_string("prompt_file", [], "a UTF-8 file, one prompt", flag_values=values)
    flags.DEFINE_boolean(
        "chat",
        False,
        "each prompt is a user's message in the model's chat template; without a prompt, talk",
        flag_values=values,
    )


def generate(config: GenerateConfig, values: flags.FlagValues) -> None:
    """Loads the model and answers every prompt, or talks."""
    prompts = read_prompts(values.prompt, values.prompt_file)
    # Stdin is None where the caller closed it.
    if not prompts and not (values.chat and sys.stdin is not None and sys.stdin.isatty()):
        raise MoejaxError("no prompt: give --prompt, --prompt_file, or --chat on a terminal")
    if config.fidelity_share and not (values.stats and prompts):
        raise MoejaxError(
            f"fidelity_share={config.fidelity_share:g} is measured under --stats, in answers to "
            "--prompt or --prompt_file: give both, or leave it out"
        )
    report.check_recorded(config)
    engine = load_engine(config, max(1, len(prompts)))
    if engine.tokenizer is None:
        raise MoejaxError(f"{config.checkpoint} has no tokenizer.json, so it takes no text")
    request = config.request()
    request["add_special_tokens"] &= not values.chat  # the template writes them
    if prompts and values.chat:
        chats = ([{"role": "user", "content": prompt}] for prompt in prompts)
        prompts = [engine.tokenizer.apply_chat_template(chat) for chat in chats]
    with report.tracing(config.trace_dir), report.recorded(engine, config):
        if not prompts:
            converse(engine, engine.tokenizer, request)
        elif len(prompts) == 1:
            chunks = stream_answer(engine, engine.tokenizer, prompts[0], request)
            answers = [[chunk.token for chunk in chunks]]
        else:
            answers = print_answers(engine, prompts, request)
    if values.stats:
        say(*(engine.ledger.describe_layers() if engine.ledger else [report.NO_COUNTS]))
        if engine.ledger and config.fidelity_share and config.policy.tiering():
            special = request["add_special_tokens"]
            given = [engine.tokenizer.encode(of, add_special_tokens=special) for of in prompts]
            say(compared(config, engine, given, answers))


def stream_answer(
    engine: "Engine", tokenizer: "Tokenizer", prompt: str, request: dict[str, Any]
) -> list["Chunk"]:
    """Prints the answer as it comes, then the closing line; returns the answer's chunks."""
    token_ids = tokenizer.encode(prompt, add_special_tokens=request["add_special_tokens"])
    chunks = []
    for chunk in engine.stream(token_ids, **request):
        chunks.append(chunk)
        print(chunk.text, end="", flush=True)
    print(flush=True)
    _close(engine, request, chunks[-1].timing, len(token_ids), len(chunks))
    return chunks


def print_answers(
    engine: "Engine", prompts: Sequence[str], request: dict[str, Any]
) -> list[list[int]]:
    """Answers the prompts as one batch; prints the answers in order, then the closing line.

    Returns:
      The tokens of each.
    """
    answers = engine.generate(prompts, **request)
    for i, answer in enumerate(answers, start=1):
        print(f"=== {i} of {len(answers)} ===\n{answer.text}", flush=True)
    counts = ((answer.num_prompt_tokens, len(answer.tokens)) for answer in answers)
    _close(engine, request, answers[0].timing, *map(sum, zip(*counts, strict=True)))
    return [list(answer.tokens) for answer in answers]


def converse(engine: "Engine", tokenizer: "Tokenizer", request: dict[str, Any]) -> None:
    """Talks on the terminal until end of input; every turn sees the whole conversation."""
    say("end with Ctrl-D")
    messages: list[dict[str, str]] = []
    while True:
        try:
            messages.append({"role": "user", "content": input("> ")})
        except EOFError:
            print()
            return
        prompt = tokenizer.apply_chat_template(messages)
        chunks = stream_answer(engine, tokenizer, prompt, request)
        answer = "".join(chunk.text for chunk in chunks)
        messages.append({"role": "assistant", "content": answer})


def _close(
    engine: "Engine",
    request: dict[str, Any],
    timing: "Timing",
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    from moejax.generation_defaults import describe_defaults

    figures = report.closing_line(
        timing,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        device_peak_bytes=report.device_peak_bytes(engine.device),
        settings=describe_defaults(engine.defaults, request),
    )
    say(figures, *(engine.ledger.describe() if engine.ledger else []))


COMMAND = cli.Command(
    doc=__doc__, default=GenerateConfig(), define_flags=define_flags, body=generate
)

if __name__ == "__main__":
    cli.run(COMMAND)
