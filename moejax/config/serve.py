"""Configuration of `python -m moejax.serve`."""

import dataclasses
import re
from typing import Any

from moejax.config.commands import GenerateConfig, sampling
from moejax.config.options import option
from moejax.errors import MoejaxError
from moejax.inference.generation import GenerationSettings

# Where neither a request nor the server's settings nor the checkpoint say.
SERVED: dict[str, Any] = {"max_new_tokens": 512, "temperature": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(GenerateConfig):
    """A model, its server, and defaults for request fields that clients omit.

    Files under `configs/` for `moejax.generate` can be used; fields they lack keep their defaults.
    """

    command = "moejax.serve"

    max_new_tokens: int | None = sampling(
        "max_new_tokens", "default of requests; an answer also ends at the end of the context",
        SERVED["max_new_tokens"],
    )  # fmt: skip
    temperature: float | None = sampling(
        "temperature", "default of requests; 0 is greedy", SERVED["temperature"],
        ", like OpenAI's API",
    )  # fmt: skip
    seed: int = option(0, "default seed of requests; 0: a random one")
    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0: all, for everybody",
        needed="an address; 127.0.0.1 is this machine alone",
    )  # fmt: skip
    port: int = option(
        8000, "port to listen on; 0: any that is free, which is printed", least=0, most=65535
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "names in Host beside localhost and the address it listens on; '*': any"
    )
    cors_origins: tuple[str, ...] = option(
        (), "origins of browser pages that may ask, such as 'https://chat.example'; '*': any"
    )
    api_key: str = option("", "key that clients send as Authorization: Bearer; '': none")
    api_key_file: str = option("", "a file that holds api_key, which other users can see in `ps`")
    max_connections: int = option(
        512, "most open connections; further ones get 503, or replace the longest idle one", least=1
    )
    model_name: str = option("", "model name for clients; '': the checkpoint's (last) name")
    max_batch: int = option(8, "most answers computed together", least=1)
    queue_limit: int = option(
        128, "answers that may wait for their turn; more are refused (429)", least=1
    )
    max_answers: int = option(
        32, "most answers of one request, n times its prompts; more are refused (400)", least=1
    )
    deadline_s: float = option(
        0.0, "seconds after which a request is ended (504); 0: none", least=0
    )
    max_body_bytes: int = option(4 * 2**20, "most bytes of a request's body (413)", least=1)
    warm_up: bool = option(
        True, "compile all programs before it is ready, so that no request waits for a compiler"
    )
    log_requests: bool = option(
        True, "print a line to stderr when a request has ended: its id, status, tokens and times"
    )
    grace_s: float = option(10.0, "seconds that answers may continue after SIGTERM", least=0)

    def settings(self, defaults: dict[str, Any]) -> GenerationSettings:
        """Settings of a request that gives none; `defaults` are the checkpoint's."""
        return GenerationSettings.of(**SERVED | defaults | self.request())

    def check(self) -> None:
        """Checks the fields, as `RunConfig.check`."""
        super().check()
        if self.api_key and self.api_key_file:
            raise MoejaxError("api_key and api_key_file exclude each other: give one of them")
        check_key(self.api_key, "api_key")
        for name in ("allowed_hosts", "cors_origins"):
            if not all(getattr(self, name)):
                raise MoejaxError(f"{name} holds an empty text: leave it out")
        for name in ("record_trace", "trace_dir", "fidelity_share", "tier_errors", "processes"):
            if getattr(self, name):
                raise MoejaxError(f"{name} is not for a server: use moejax.generate")


def check_key(key: str, what: str) -> None:
    """Raises MoejaxError for a key that a header cannot carry."""
    if not re.fullmatch("[!-~]*", key):
        raise MoejaxError(f"{what} must be letters, digits and signs of ASCII without spaces")
