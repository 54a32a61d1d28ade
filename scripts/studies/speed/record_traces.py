"""Records traces of a model's routing by domain: a prompt of held-out text, then decoded tokens.

    python -m scripts.studies.speed.record_traces --checkpoint=RUN/model --texts=DIR --output=traces

DIR holds valid/{books,textbooks,code,math,chinese}.jsonl.xz. Writes OUTPUT/DOMAIN.trace for each:
the prompt in one step, then a token a step, sampled.
`moejax.benchmark --config.trace=traces/books.trace` and `moejax.sweep --config.trace=...` replay
them, in another shape with experts mapped (`benchmarking.routing._scaled_trace`). A domain that has
a trace is passed over.
"""

from pathlib import Path

from absl import app, flags

from moejax.engine import Engine
from moejax.inference.recorder import facts
from scripts.studies.quality.bench import DOMAINS, Texts

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "whose routing")
_TEXTS = flags.DEFINE_string("texts", None, "folder of the texts", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "folder of the traces", required=True)
_PROMPT = flags.DEFINE_integer("prompt", 512, "tokens of the prompt")
_TOKENS = flags.DEFINE_integer("tokens", 1024, "tokens that are decoded")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "of sampling")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")


def record(engine: Engine, texts: Texts, domain: str, path: Path) -> int:
    """Records one domain; returns the number of decoded tokens."""
    prompt = texts.domain(domain, 1).tokens[0, :-1].tolist()
    about = facts(_CHECKPOINT.value, f"{domain}, held out: {len(prompt)} tokens, then decoded")
    with engine.recording(path, about=about, foreseen=8, importance=True):
        (answer,) = engine.generate(
            [prompt], max_new_tokens=_TOKENS.value, temperature=_TEMPERATURE.value, top_k=0,
            top_p=1.0, seed=0,
        )  # fmt: skip
    return len(answer.tokens)


def main(argv: list[str]) -> None:
    """Records every domain."""
    del argv
    folder = Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    with Engine.from_pretrained(
        _CHECKPOINT.value, platform=_PLATFORM.value, generation_config=False, progress=False
    ) as engine:
        engine.eos_ids = ()  # an answer that ends early leaves few steps to replay
        assert engine.tokenizer is not None
        texts = Texts(Path(_TEXTS.value), engine.tokenizer, _PROMPT.value)
        for domain in DOMAINS:
            path = folder / f"{domain}.trace"
            if not path.exists():
                print(f"{path}: {record(engine, texts, domain, path)} tokens decoded", flush=True)


if __name__ == "__main__":
    app.run(main)
