"""The packages that people call a server with, against one of the demo.

    python3 -m venv /tmp/litellm && /tmp/litellm/bin/pip install litellm
    python -m scripts.studies.server.clients --litellm=/tmp/litellm/bin/python

A server with an API key. `litellm`, in an environment of its own, runs `litellm_calls.py`: whole
answers and streams of both endpoints, log-probabilities, times, errors, and asynchronous calls at
once. Its answers must be those of `openai`, asked in this process. Status 1 where one is not.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
from absl import app, flags

from scripts.stress_process import running_server

_LITELLM = flags.DEFINE_string("litellm", "python", "the Python that has litellm")

KEY = "sk-clients"
CALLS = Path(__file__).with_name("litellm_calls.py")


def expected(url: str) -> dict[str, Any]:
    """Answers of the `openai` package to the questions of `litellm_calls.py`."""
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    said: Any = [{"role": "user", "content": "Who was Newton?"}]
    chat = client.chat.completions.create(model="demo", messages=said, max_tokens=16, temperature=0)
    text = client.completions.create(
        model="demo", prompt="The history of", max_tokens=16, temperature=0
    )
    assert chat.usage is not None
    return {
        "chat": chat.choices[0].message.content,
        "chat_tokens": chat.usage.completion_tokens,
        "text": text.choices[0].text,
        "models": [model.id for model in client.models.list()],
    }


def main(argv: list[str]) -> None:
    """Asks by both packages and compares."""
    del argv
    with (
        tempfile.TemporaryDirectory() as place,
        running_server(Path(place) / "log", f"--config.api_key={KEY}") as server,
    ):
        url = f"http://127.0.0.1:{server.port}/v1"
        wanted = expected(url)
        done = subprocess.run(
            [_LITELLM.value, str(CALLS), url, KEY], check=False, text=True, timeout=300,
            stdout=subprocess.PIPE, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"error: {_LITELLM.value} {CALLS.name} ended with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    version = found.pop("version")
    wrong = {
        name: (value, wanted[of]) for name, (of, value) in found.items() if value != wanted[of]
    }
    print(f"litellm {version}: {len(found) - len(wrong)} of {len(found)} answers as openai's")
    for name, (value, other) in wrong.items():
        print(f"FAULT {name}: {value!r}, not {other!r}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    app.run(main)
