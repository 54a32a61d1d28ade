r"""An OpenAI-compatible server: /v1/completions and /v1/chat/completions of one model.

    python -m moejax.serve
    python -m moejax.serve --config=configs/serve_qwen3_30b_a3b.py --config.max_batch=8
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'

stderr says when it listens and when the model is ready. SIGTERM lets answers that run finish, for
--config.grace_s seconds at most, and ends with status 0. docs/server.md has the fields of requests,
what is refused, and the metrics. It needs `pip install '.[serve]'`.
"""

import functools
import importlib.util

from absl import flags

from moejax import cli
from moejax.config.serve import ServeConfig, check_key
from moejax.errors import MoejaxError

_NEEDED = ("starlette", "uvicorn", "prometheus_client")


def _serve(config: ServeConfig, values: flags.FlagValues) -> None:
    """Loads the model and serves until a signal."""
    del values
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MoejaxError(
            f"{', '.join(missing)} not installed: pip install '.[serve]' in a clone of this "
            "repository"
        )
    # JAX is imported here: --help and mistakes need not wait for it.
    from moejax.loading import load_engine
    from moejax.serving import server

    load = functools.partial(load_engine, config, config.max_batch, running=True)
    server.serve(config, load, _read_key(config))


def _read_key(config: ServeConfig) -> str:
    """Reads the clients' key from the command line or its file; "" for none."""
    if not config.api_key_file:
        return config.api_key
    path = cli.user_path(config.api_key_file)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MoejaxError(f"api_key_file={path} cannot be read: {error}") from error
    if not key:
        raise MoejaxError(f"api_key_file={path} is empty: write the key into it")
    check_key(key, f"the key in {path}")
    return key


COMMAND = cli.Command(doc=__doc__, default=ServeConfig(), body=_serve)

if __name__ == "__main__":
    cli.run(COMMAND)
