"""Conversations: on a real terminal, in a pipe, from Python; Ctrl-C while XLA compiles."""

import functools
import io
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psutil
import pytest
import transformers
from absl.testing import absltest, parameterized

from moejax import generate
from moejax.engine import Engine
from moejax.errors import MoejaxError
from moejax.inference import compile_notice
from moejax.inference.generation import Chunk
from tests import commands, slow
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import write_checkpoint
from tests.random_checkpoints import write_tokenizer

ROOT = pathlib.Path(__file__).parents[1]
# Says what it is given: the system prompt, the roles, and whether the model is to think.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}!{% endfor %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
)
# A shell in the background ignores SIGINT, and its children with it.
SPAWN = (
    "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
)
WAIT_S = 120.0


class Terminal:
    """A process of the command on a pseudo-terminal, typed at and read."""

    def __init__(self, *arguments: str, **environment: str):
        command = [sys.executable, "-c", SPAWN, sys.executable, "-m", "moejax.generate", *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=0
        )
        self.seen = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while text := os.read(self.process.stdout.fileno(), 4096).decode(errors="replace"):
            self.seen += text

    @property
    def shown(self) -> str:
        """Returns the text that stays; lines about compiling are erased."""
        return re.sub(r"\x1b7.*?\x1b\[\?7h", "", self.seen, flags=re.DOTALL)

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), text.encode())

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Where a pattern that was seen behind a place ends."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if found := re.compile(pattern).search(self.seen, after):
                return found.end()
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in {self.seen[after:]!r}")

    def status(self) -> int:
        """The exit status, once the process has ended; nothing is left open."""
        self._thread.join(WAIT_S)
        with self.process as process:
            return process.wait(WAIT_S)


class ConversationTest(FolderTestCase):
    def terminal(self, *arguments: str, **environment: str) -> Terminal:
        """A process that does not outlive the test; what ends with it is hung up."""
        terminal = Terminal(*self.common, *arguments, **environment)
        self.addCleanup(terminal.status)
        self.addCleanup(terminal.process.kill)
        return terminal

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = write_checkpoint("qwen3", cls.folder)
        write_tokenizer(cls.checkpoint, 160)
        (cls.checkpoint / "chat_template.jinja").write_text(TEMPLATE)
        cls.common = (f"--config.checkpoint={cls.checkpoint}", "--config.max_new_tokens=6")
        cls.engine = Engine.from_pretrained(cls.checkpoint, progress=False)
        cls.addClassCleanup(cls.engine.close)

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(generate, "load_engine", lambda *_: self.engine))

    def piped(self, text: bytes, *arguments: str) -> tuple[int, str, str]:
        return commands.run(generate.COMMAND, *self.common, *arguments, stdin=text)

    @classmethod
    @functools.cache
    def answer(cls, prompt: str) -> str:
        out, _ = commands.succeed(generate.COMMAND, *cls.common, f"--prompt={prompt}")
        return out.removesuffix("\n")

    def test_piped_lines_are_turns(self):
        lines = "ab\n\n/no_think\n/nothing\ncd\n/reset\nef\n/exit\nnever\n"
        status, out, err = self.piped(lines.encode(), "--chat", "--config.system_prompt=Be brief")
        first = self.answer("s:Be brief!u:ab!")
        second = self.answer(f"s:Be brief!u:ab!a:{first}!u:cd![False]")
        third = self.answer("s:Be brief!u:ef![False]")
        self.assertEqual((status, out), (0, f"{first}\n{second}\n{third}\n"), err)
        self.assertIn("there is no command /nothing: /help, /reset,", err)
        self.assertEqual(err.count("new tokens 6"), 3)
        self.assertNotIn("> ", err + out)

    @slow.repeats()
    @parameterized.parameters(
        ("on", "[True]"), ("auto", ""), ("off", "[False]"), ("high", "[high]")
    )  # fmt: skip
    def test_thinking_by_flag_and_by_command(self, flag, first):
        text = b"ab\n/think\n/reset\nab\n/no_think\n/reset\nab\n"
        status, out, err = self.piped(text, "--chat", f"--config.thinking={flag}")
        expected = [self.answer(f"u:ab!{how}") for how in (first, "[True]", "[False]")]
        self.assertEqual((status, out), (0, "\n".join(expected) + "\n"), err)
        self.assertNotIn("changes nothing", err)

    def test_ctrl_c_ends_an_answer_and_its_part_stays_in_the_conversation(self):
        stream = Engine.stream

        def interrupted(engine: Engine, prompt: Any, **how: Any) -> Iterator[Chunk]:
            for chunk in stream(engine, prompt, **how):
                yield chunk
                if not seen:  # the second chunk may have all the rest
                    seen.append(chunk)
                    signal.raise_signal(signal.SIGINT)

        seen: list[Chunk] = []
        # A shell in the background ignores the signal, and its children with it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        typed = mock.Mock(isatty=lambda: True)
        with (
            mock.patch.object(Engine, "stream", interrupted),
            mock.patch.object(sys, "stdin", typed),
            mock.patch("builtins.input", side_effect=["ab", "cd", EOFError]),
        ):
            out, err = commands.succeed(generate.COMMAND, *self.common, "--chat")
        part, second, _ = out.split("\n")
        whole = self.answer("u:ab!")
        self.assertStartsWith(whole, part)
        self.assertNotIn(part, ("", whole))
        self.assertIn("interrupted; Ctrl-C once more, or Ctrl-D, ends the conversation\n", err)
        self.assertEqual(second, self.answer(f"u:ab!a:{part}!u:cd!"))

    def test_what_is_piped_may_be_wrong(self):
        for text, arguments, said in (
            (b"ab\nc\xe9\n", ("--chat",), "error: standard input is not UTF-8 in line 2"),
            (b"\n \n", ("--chat",), "or with lines on standard input"),
            (b"", ("--prompt_file=-",), "standard input (prompt file -) is empty"),
            (b"x" * 600 + b"\ny\n", ("--chat",), "leaves no room"),
        ):
            status, _, err = self.piped(text, *arguments)
            self.assertEqual(status, 1)
            self.assertIn(said, err.splitlines()[-1])

    def test_a_prompt_from_standard_input(self):
        status, out, err = self.piped(b"abc", "--prompt_file=-")
        self.assertEqual((status, out), (0, f"{self.answer('abc')}\n"), err)

    @pytest.mark.slow
    def test_on_a_terminal(self):
        """Ctrl-C ends an answer that is still being compiled, and at the prompt the session."""
        terminal = self.terminal("--chat", "--config.compilation_cache=", XLA_FLAGS="")
        terminal.wait_for("> ", terminal.wait_for("end with Ctrl-D"))
        terminal.type("/help\n")
        terminal.wait_for("/no_think  the opposite")
        terminal.type("ab\n")
        place = terminal.wait_for(r"\x1b8\x1b\[K\[preparing the program [a-z ]+, \d+ s so far")
        terminal.type("\x03")
        place = terminal.wait_for("interrupted; Ctrl-C once more, or Ctrl-D", place)
        place = terminal.wait_for("> ", place)
        terminal.type("ab\n")
        place = terminal.wait_for("new tokens 6", place)
        self.assertIn(f"\n{self.answer('u:ab!')}\r\n", terminal.shown)  # the first is forgotten
        place = terminal.wait_for("> ", place)
        terminal.type("\x03")
        terminal.wait_for("error: interrupted", place)
        self.assertEqual(terminal.status(), 130)

    def test_a_prompt_is_shown_on_a_terminal(self):
        with mock.patch.dict(os.environ, TERM="xterm"):
            out, _ = commands.succeed(generate.COMMAND, *self.common, "--prompt=abc", terminal=True)
        self.assertEqual(out, f"\x1b[2mabc\x1b[0m{self.answer('abc')}\n")

    def test_from_python(self):
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
        reference = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.checkpoint / "tokenizer.json"), chat_template=TEMPLATE
        )
        engine = self.engine
        switches: list[dict[str, Any]] = [
            {}, {"enable_thinking": True}, {"reasoning_effort": "low"},
        ]  # fmt: skip
        for variables in switches:
            expected = reference.apply_chat_template(messages, tokenize=False, **variables)
            ids = reference.encode(expected)
            prompt = engine.chat_prompt(messages, **variables)
            self.assertEqual(prompt, ids)
            answer = engine.chat(messages, **variables, max_new_tokens=5)
            [same] = engine.generate([ids], max_new_tokens=5)
            self.assertEqual(answer.tokens, same.tokens)
        for wrong, said in (
            ([], "at least one message"),
            ("hi", "must be a list"),
            ([{"role": "robot", "content": "x"}], "role 'robot' is none of system,"),
            ([{"role": "user", "content": 5}], "content must be a text, not 5"),
        ):
            with self.assertRaisesRegex(MoejaxError, said):
                engine.chat(wrong)


def children_cpu_seconds() -> float:
    """Returns CPU seconds of the processes that were started here and have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


class CtrlCTest(absltest.TestCase):
    @pytest.mark.slow
    def test_while_xla_compiles(self):
        """A program of many sorts, which takes most of a minute; JAX alone crashes in the end."""
        probe = (
            "import signal, sys, jax, jax.numpy as jnp; from moejax import cli, generate\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "def many(x):\n"
            "    for i in range(60):\n"
            "        x = jnp.sort(jnp.sin(x @ x), axis=i % 2) * i\n"
            "    return x\n"
            "def body(config, values):\n"
            "    lowered = jax.jit(many).lower(jnp.ones((64, 64)))\n"
            "    try:\n"
            "        print('compiling', flush=True); lowered.compile(); print('compiled')\n"
            "    finally:\n"
            "        print('cleaned up')\n"
            "cli.run(cli.Command(doc='', default=generate.COMMAND.default,\n"
            "                    define_flags=lambda values: None, body=body))"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        process = subprocess.Popen(
            [sys.executable, "-c", probe], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        before = sum(psutil.Process(process.pid).cpu_times()[:2]) + children_cpu_seconds()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
        self.assertLess(children_cpu_seconds() - before, 1.5)  # what went on after it
        self.assertEqual(
            (process.returncode, out, err), (130, "cleaned up\n", "error: interrupted\n")
        )


class CompileNoticeTest(absltest.TestCase):
    def test_in_a_log_it_has_a_line_of_its_own(self):
        log = io.StringIO()
        print("an answer's first words", end="", file=log)
        wait = mock.patch.object(compile_notice, "_LINE_S", 0.0)
        with wait, compile_notice.compile_notice("decode", log):
            while not log.getvalue().endswith("run\n"):
                time.sleep(0.001)
        words, line = log.getvalue().splitlines()
        self.assertEqual(words, "an answer's first words")
        self.assertRegex(line, r"^preparing the program decode, 0 s so far; it is compiled once")
