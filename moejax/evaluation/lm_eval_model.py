"""moejax as a model of EleutherAI's lm_eval: `python -m moejax.lm_eval --model moejax ...`.

Model arguments are `pretrained`, `batch_size` and the fields of `moejax.evaluate`'s configuration
that name a model and how it runs:

    --model_args pretrained=DIR,dtype=bfloat16,memory.device_gib=12
    --model_args config=configs/mine.py,policy.settings=retention=0.8

lm_eval splits them at commas, so a tuple (`policy.tiers`) is written with `+`: `int4+int2`, and
settings of a policy have spaces between them: `"policy.settings=retention=0.8 low=skip"`. Longer
settings go to a config file with a `get_config()`, as for `moejax.evaluate`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import lm_eval.models  # noqa: F401 -- lm_eval registers its own only while it knows none
import tqdm
from absl import flags
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from moejax import cli
from moejax.checkpoints import resolve_checkpoint
from moejax.config.commands import EvaluateConfig
from moejax.config.options import options
from moejax.errors import MoejaxError
from moejax.inference.likelihood import TokenPair
from moejax.loading import load_scoring_engine

# Read like flags, but no main.
_ARGUMENTS = cli.Command(
    doc=__doc__ or "", default=EvaluateConfig(), body=lambda config, values: None
)
# Generation arguments, by lm_eval's names and by ours.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _read_arguments(arguments: dict[str, Any]) -> EvaluateConfig:
    """Builds the configuration from lm_eval's model arguments.

    Args:
      arguments: `pretrained`, `config` and fields of `EvaluateConfig`, groups by dots.
    """
    arguments = dict(arguments)
    argv = ["lm_eval"]
    if path := arguments.pop("config", ""):
        argv.append(f"--config={path}")
    tuples = {of.name for of in options(EvaluateConfig()) if isinstance(of.default, tuple)}
    for name, value in arguments.items():
        field = "checkpoint" if name == "pretrained" else name
        if field in tuples and isinstance(value, str):
            value = tuple(value.split("+"))
        argv.append(f"--config.{field}={value}")
    try:
        config, _ = cli.parse(_ARGUMENTS, argv)
    except flags.Error as error:
        raise MoejaxError(f"model arguments: {error}") from error
    return config


@register_model("moejax")
class MoejaxLM(TemplateLM):
    """An engine behind lm_eval's interface.

    Tokens, truncation and stop strings follow lm_eval's Hugging Face class, so that figures of the
    two can be set side by side; the tokenizers for which they differ are those of
    `moejax.inference.likelihood`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        **fields: Any,
    ):
        """Loads the checkpoint.

        Args:
          pretrained: as `moejax.evaluate`'s `checkpoint`; None: its default.
          batch_size: sequences at once; None or "auto": its default.
          device: "cpu", "gpu", "cuda...", "auto" or None for any.
          max_gen_toks: most tokens of an answer, unless the task sets its own.
          **fields: fields of `EvaluateConfig`; see the module.
        """
        super().__init__()
        del max_batch_size
        if pretrained is not None:
            fields["pretrained"] = pretrained
        if batch_size not in (None, "auto"):
            fields["batch_size"] = batch_size
        if device and device != "auto":
            fields.setdefault("platform", "cpu" if device == "cpu" else "gpu")
        if not isinstance(max_gen_toks, int) or max_gen_toks < 1:
            raise MoejaxError(f"max_gen_toks={max_gen_toks} must be a number of tokens, at least 1")
        config = _read_arguments(fields)
        self._config = config
        self._max_gen_toks = max_gen_toks
        with self._exact():
            self.engine = load_scoring_engine(
                config, resolve_checkpoint(config.checkpoint), config.policy.tiering()
            )
        assert self.engine.tokenizer is not None
        self._tokens = self.engine.tokenizer

    @contextlib.contextmanager
    def _exact(self) -> Iterator[None]:
        """Makes float32 products exact on every device."""
        with jax.default_matmul_precision("highest"):
            yield

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        name = self._tokens.special_tokens.get("eos_token")
        found = self._tokens.token_id(name) if name else None
        return self.engine.eos_ids[0] if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """Token that stands for an empty context."""
        prefix = self.engine.scorer.prefix_id
        if prefix is None:
            raise MoejaxError("an empty context needs a bos or eos token, and the model has none")
        return prefix

    @property
    def max_length(self) -> int:
        """Most tokens of the model's context."""
        return self.engine.scorer.max_length

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer, unless the task sets its own."""
        return self._max_gen_toks

    @property
    def batch_size(self) -> int:
        """Sequences per batch."""
        return self._config.num_rows()

    @property
    def tokenizer_name(self) -> str:
        """Name in lm_eval's cache of requests."""
        return self._config.checkpoint.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids with the tokenizer's beginning unless the text has it; no eos."""
        del kwargs
        return self.engine.scorer.encode(string, special=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        del kwargs
        pairs: list[TokenPair] = [(context, continuation) for _, context, continuation in requests]
        with self._exact(), _bar("loglikelihood", len(pairs), disable_tqdm) as bar:
            found = self.engine.scorer.of_tokens(
                pairs, batch_size=self.batch_size, on_done=bar.update
            )
        answers = [(scored.log_likelihood, scored.is_greedy) for scored in found]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts; see `PairScorer.of_whole_texts`."""
        texts = [request.args[0] for request in requests]
        with self._exact(), _bar("loglikelihood_rolling", len(texts), disable_tqdm) as bar:
            found = self.engine.scorer.of_whole_texts(
                texts, batch_size=self.batch_size, on_done=bar.update
            )
        for text, scored in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), scored.log_likelihood)
        return [scored.log_likelihood for scored in found]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers all requests; those of like settings and lengths share a batch."""
        asked = [(self.tok_encode(request.args[0]), *request.args) for request in requests]
        order = sorted(
            range(len(asked)), key=lambda i: (repr(sorted(asked[i][2].items())), -len(asked[i][0]))
        )
        answers = [""] * len(asked)
        with self._exact(), _bar("generate_until", len(asked), disable_tqdm) as bar:
            while order:
                settings = asked[order[0]][2]
                batch = [i for i in order[: self.batch_size] if asked[i][2] == settings]
                order = order[len(batch) :]
                texts = self._generate([asked[i][0] for i in batch], dict(settings))
                for i, text in zip(batch, texts, strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", (asked[i][1], settings), text)
                bar.update(len(batch))
        return answers

    def _generate(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        """Answers one batch."""
        until = settings.pop("until", None) or []
        lengths = [settings.pop(name, None) for name in _LENGTHS]
        new_tokens = next((int(n) for n in lengths if n is not None), self._max_gen_toks)
        greedy = not settings.pop("do_sample", settings.get("temperature", 0.0) > 0)
        unknown = settings.keys() - {*_SAMPLING}
        if unknown:
            raise MoejaxError(f"generation arguments that moejax does not have: {sorted(unknown)}")
        if greedy:
            settings["temperature"] = 0.0
        budget = self.engine.budget
        room = (budget.run.context if budget else self.max_length) - new_tokens
        if room < 1:
            raise MoejaxError(f"max_gen_toks={new_tokens} leaves no room for a prompt")
        stop = (until,) if isinstance(until, str) else tuple(until)
        found = self.engine.generate(
            [prompt[-room:] for prompt in prompts],
            max_new_tokens=new_tokens,
            stop=tuple(text for text in stop if text),
            **settings,
        )
        return [answer.text or "" for answer in found]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders the prompt of a conversation."""
        return self._tokens.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Source of the chat template, for lm_eval's records."""
        return (self._tokens.chat_template or "") if chat_template else None


def _bar(name: str, total: int, disable: bool) -> "tqdm.tqdm[Any]":
    return tqdm.tqdm(total=total, desc=f"moejax {name}", disable=disable)
