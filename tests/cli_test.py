"""The command line with an engine that only pretends: flags, streams, errors, exit statuses."""

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
from absl.testing import absltest, parameterized

from moejax import __version__, cli, evaluate, generate, loading, plan, quantize
from moejax.config.commands import GenerateConfig, MemoryConfig
from moejax.config.policy import PolicyConfig
from moejax.errors import MoejaxError
from moejax.inference import report
from moejax.inference.generation import Chunk, Generation, Timing
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase

ROOT = pathlib.Path(__file__).parents[1]
TIMING = Timing(ttft_s=0.25, decode_s=1.5, num_decoded=3, compile_s=2.5)


class FakeTokenizer:
    """A token a character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    chat_template = "with enable_thinking"

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, enable_thinking: bool | None = None
    ) -> str:
        thinks = "" if enable_thinking is None else f"<{enable_thinking}>"
        return thinks + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class FakeEngine:
    """Says each prompt back in capitals, and remembers what it was asked."""

    def __init__(self) -> None:
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.device = jax.devices("cpu")[0]
        self.ledger = None
        self.defaults: dict[str, Any] = {}
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    def stream(self, prompt: list[int], **request: Any) -> Iterator[Chunk]:
        self.asked.append((prompt, request))
        answer = "".join(map(chr, prompt)).upper()
        for i, letter in enumerate(answer):
            yield Chunk(letter, ord(letter), "eos" if i == len(answer) - 1 else None, TIMING)

    def generate(self, prompts: Sequence[str], **request: Any) -> list[Generation]:
        self.asked.append((prompts, request))
        return [
            Generation(text.upper(), [*map(ord, text)], "eos", len(text), TIMING)
            for text in prompts
        ]


class CliTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.engine = FakeEngine()
        self.enter_context(mock.patch.object(generate, "load_engine", self._load))
        self.config: GenerateConfig | None = None
        self.num_prompts = 0

    def _load(self, config: GenerateConfig, num_prompts: int) -> FakeEngine:
        self.config, self.num_prompts = config, num_prompts
        return self.engine

    def run_main(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Runs a command, checks its exit status, returns its stdout and stderr."""
        got, out, err = commands.run(generate.COMMAND, *arguments)
        self.assertEqual(got, status, err)
        return out, err

    def assert_fails(self, said: str, *arguments: str, status: int = 1) -> None:
        """The command prints nothing but one line on stderr."""
        out, err = self.run_main(*arguments, status=status)
        self.assertEqual(out, "")
        self.assertIn(said, err)
        self.assertRegex(err, r"\Aerror: [^\n]+\n\Z")

    def test_answer_on_stdout_figures_on_stderr(self):
        out, err = self.run_main("--prompt=abc")
        self.assertEqual(out, "\x01ABC\n")
        self.assertRegex(
            err,
            r"\Aprompt tokens 4, new tokens 4, TTFT 250\.0 ms, TPOT 500\.00 ms, 2\.3 tokens/s, "
            r"peak memory: device n/a, host \d+ MiB; compile 2\.50 s [^\n]*\n\Z",
        )

    def test_settings_of_the_checkpoint_are_named(self):
        self.engine.defaults = {"temperature": 0.6, "top_k": 20}
        self.assertIsNone(GenerateConfig().temperature)
        for arguments, said in (
            ([], "; by generation_config.json: temperature 0.6, top_k 20\n"),
            (["--config.top_k=5"], "; by generation_config.json: temperature 0.6\n"),
            (["--config.top_k=None"], "; by generation_config.json: temperature 0.6, top_k 20\n"),
            (["--config.temperature=0"], " (in none of the times)\n"),
        ):
            self.assertTrue(self.run_main("--prompt=a", *arguments)[1].endswith(said), arguments)
        self.run_main("--prompt=a", "--config.generation_config=false")
        self.assertFalse(self.config.generation_config)  # `load_engine` hands it on

    def test_answer_comes_while_it_is_made(self):
        seen = []
        out = io.StringIO()

        def stream(prompt: list[int], **request: Any) -> Iterator[Chunk]:
            for i in range(3):
                seen.append(out.getvalue())
                yield Chunk("x", 1, "length" if i == 2 else None, TIMING)

        with mock.patch.object(self.engine, "stream", stream), contextlib.redirect_stdout(out):
            self.assertEqual(cli.exit_status(generate.COMMAND, ["generate", "--prompt=a"]), 0)
        self.assertEqual(seen, ["", "x", "xx"])

    def test_overrides_reach_the_request(self):
        self.run_main(
            "--prompt=a",
            "--config.temperature=0.5",
            "--config.top_k",
            "3",
            "--config.seed=7",
            "--config.stop=\n\n",
            "--config.stop=END",
            "--config.add_special_tokens=false",
            "--config.checkpoint=some/model",
        )
        expected = GenerateConfig(
            checkpoint="some/model",
            temperature=0.5,
            top_k=3,
            seed=7,
            stop=("\n\n", "END"),
            add_special_tokens=False,
        )
        self.assertEqual(self.config, expected)
        self.assertEqual(self.engine.asked, [([ord("a")], expected.request())])

    def test_counts_that_there_are_none_of(self):
        _, err = self.run_main("--prompt=a", "--stats")
        self.assertIn("--stats: nothing to count, as all experts are on the device", err)

    def test_before_a_model_is_loaded(self):
        picture = self.directory / "x.png"
        picture.write_bytes(b"a picture")
        policy = ("--config.policy.name=dymoe", "--config.fidelity_share=0.5")
        for arguments, said in (
            ((f"--config.record_trace={picture}",), f"{picture} is there and is no trace"),
            ((f"--config.record_trace={self.directory}",), f"{self.directory} is a directory"),
            (("--config.record_trace=no/such/x",), "lies in no/such, which is not there"),
            ((f"--config.trace_dir={picture}",), f"trace_dir {picture}: File exists; name a"),
            (("--config.record_trace=~nobody-here/x",), "no such place as ~nobody-here/x"),
            (policy, "fidelity_share=0.5 is measured under --stats"),
        ):
            self.assert_fails(said, "--prompt=a", *arguments)
            self.assertIsNone(self.config)
        self.assertEqual(picture.read_bytes(), b"a picture")

    def test_config_file_then_override(self):
        self.run_main(f"--config={ROOT}/configs/qwen3_30b_a3b.py", "--config.top_k=5", "--prompt=a")
        self.assertEqual((self.config.checkpoint, self.config.top_k), ("Qwen/Qwen3-30B-A3B", 5))

    def test_config_file_lacks_fields_that_another_command_has(self):
        # A file of generate's serves plan, whose own fields it lacks.
        argv = ["plan", f"--config={ROOT}/configs/demo.py", "--config.batch=8"]
        config, _ = cli.parse(plan.COMMAND, argv)
        self.assertEqual((config.checkpoint, config.batch), ("demo", 8))

    @parameterized.parameters(
        (["--max_new_tokens=5"], {"max_new_tokens": 5}),
        (["--max_new_tokens", "5"], {"max_new_tokens": 5}),
        (["-top_k=3", "--config.top_k=4"], {"top_k": 4}),
        (["--seed=3"], {"seed": 3}),
        (["--device_gib=2"], {"memory": MemoryConfig(device_gib=2.0)}),
        (
            ["--config.memory.device_gib", "1.5", "--memory.slots=8"],
            {"memory": MemoryConfig(device_gib=1.5, slots=8)},
        ),
        ([], {"checkpoint": "demo"}),
        (["--verify"], {"verify": True}),
        (["--verify=Yes", "--config.verify=0"], {"verify": False}),
        (["--config.verify=on"], {"verify": True}),
        (["--noadd_special_tokens"], {"add_special_tokens": False}),
        (["--noconfig.add_special_tokens"], {"add_special_tokens": False}),
        (["--policy.name=dymoe", "--tiers=int4,int2"], {"tiers": ("int4", "int2")}),
        (["--policy.name=dymoe", "--tiers=('int4', 'int2')"], {"tiers": ("int4", "int2")}),
        (["--policy.name=dymoe", "--config.policy.slots=8,32"], {"slots": ("8", "32")}),
        (["--policy.name=dymoe", "--config.policy.slots=('8','32')"], {"slots": ("8", "32")}),
        (["--policy.name=dymoe", "--config.policy.slots=8"], {"slots": ("8",)}),
        (["--stop=a, b", "--stop='5'", "--stop=5"], {"stop": ("a, b", "5", "5")}),
        (["--stop=(a"], {"stop": ("(a",)}),
    )
    def test_short_names_and_lists(self, arguments, expected):
        self.run_main("--prompt=a", *arguments)
        of_policy = {"tiers", "slots"} & set(expected)
        policy = PolicyConfig(name="dymoe", **expected) if of_policy else PolicyConfig()
        own = {} if of_policy else expected
        self.assertEqual(self.config, GenerateConfig(policy=policy, **own))

    def test_several_prompts_make_one_batch(self):
        path = self.directory / "p.txt"
        path.write_bytes("数\r\n".encode())
        out, err = self.run_main("--prompt=ab", "--prompt=c", f"--prompt_file={path}")
        self.assertEqual(out, "=== 1 of 3 ===\nAB\n=== 2 of 3 ===\nC\n=== 3 of 3 ===\n数\r\n\n")
        self.assertEqual(self.engine.asked[0][0], ["ab", "c", "数\r\n"])
        self.assertEqual(self.num_prompts, 3)
        self.assertIn("prompt tokens 6, new tokens 6,", err)

    def test_chat_wraps_the_prompt(self):
        out, _ = self.run_main("--chat", "--prompt=hi")
        self.assertEqual(out, "<USER>HI<ASSISTANT>\n")

    def test_chat_on_a_terminal_sees_the_whole_conversation(self):
        with (
            mock.patch.object(sys, "stdin", mock.Mock(isatty=lambda: True)),
            mock.patch("builtins.input", side_effect=["a", "b", EOFError]),
        ):
            out, err = self.run_main("--chat", "--stats")
        first = "<USER>A<ASSISTANT>"
        self.assertEqual(out, f"{first}\n<USER>A<ASSISTANT>{first}<USER>B<ASSISTANT>\n")
        self.assertEqual(err.count("new tokens"), 2)
        self.assertEndsWith(err, f"{report.NO_COUNTS}\n")

    @parameterized.parameters(
        ([], "no prompt: give --prompt"),
        (["--prompt=a", "--config.thinking=yes"], "thinking='yes' must be one of auto, on, off,"),
        (["--prompt=a", "--config.thinking=on"], "are of conversations: give --chat, too"),
        (["--prompt=a", "--config.temperature=-1"], "temperature=-1.0 must be"),
        (["--prompt=a", "--config.memory.slots=-3"], "memory.slots=-3 must be at least -1"),
        (["--prompt=a", f"--config={ROOT}/configs/quantize_demo.py"], "made for moejax.quantize,"),
        (["--prompt=a", "--config=no/such/file.py"], "config file 'no/such/file.py' does not"),
        (["--prompt=a", "--config="], "config file '' does not exist"),
        (["--prompt=\udcff"], "--prompt is not UTF-8 at character 0"),
        (["--prompt_file=no/such"], "prompt file no/such: No such file"),
        (["--prompt="], "an empty prompt: --prompt needs a text"),
        (["--prompt_file=/dev/null"], "prompt file /dev/null is empty"),
        (["--prompt_file=."], "prompt file .: Is a directory"),
    )
    def test_bad_input(self, arguments, said):
        self.assert_fails(said, *arguments)

    @parameterized.parameters(
        (["--promt=a"], "there is no flag --promt; did you mean --prompt?"),
        (["--prompt=a", "--zzzqqq=1"], "there is no flag --zzzqqq (--help lists the flags)"),
        (["--prompt=a", "--temprature=1"], "did you mean --config.temperature?"),
        (["--prompt=a", "--config.temprature=1"], "did you mean 'temperature'?"),
        (["--prompt=a", "--device_gb=1"], "did you mean --config.memory.device_gib?"),
        (["--prompt=a", "--slots=8"], "write --config.memory.slots or --config.policy.slots"),
        (["--prompt=a", "--config.temperature=hot"], "temperature='hot' must be a number"),
        (["--prompt=a", "--config.top_k=1.5"], "top_k='1.5' must be a whole number"),
        (["--prompt=a", "--config.verify=maybe"], "verify='maybe' must be true or false"),
        (["--prompt=a", "--config.top_k"], "--config.top_k needs a value: --config.top_k=VALUE"),
        (["--prompt=a", "--notop_k"], "there is no flag --notop_k"),
        (["--prompt=a", "--config"], "--config needs a value"),
        (["--prompt"], "--prompt needs a value: --prompt=VALUE"),
        (["--prompt=two", "words"], "'words' is no flag"),
        (["--config=a.py", "--config=b.py"], "--config names two files"),
        (["--prompt=a", "--", "--config=zzz"], "'--config=zzz' is no flag"),
        (["--prompt=a", "--", "--config.zzz=1"], "'--config.zzz=1' is no flag"),
        (["--prompt=a", "--config.memory=5"], "it is a group: memory.device_gib"),
        (["--prompt=a", "--config.memory.device_gb=5"], "did you mean 'memory.device_gib'?"),
        (["--prompt=a", "--config.slots=5"], "did you mean 'memory.slots' or 'policy.slots'?"),
    )
    def test_bad_flags(self, arguments, said):
        self.assert_fails(said, *arguments, status=2)

    @parameterized.parameters(
        "--config=zzz", "--config.zzz=1", "--config.seed=x", "--verbose", "--help", "--", "--config"
    )
    def test_value_that_looks_like_a_flag(self, text):
        self.run_main("--prompt", text, "--config.seed", "3", f"--config.stop={text}")
        [(prompt, _)] = self.engine.asked
        self.assertEqual("".join(map(chr, prompt[1:])), text)
        self.assertEqual((self.config.seed, self.config.stop), (3, (text,)))

    def test_prompt_file_that_is_not_utf8(self):
        path = self.directory / "latin1.txt"
        path.write_bytes(b"caf\xe9")
        self.assert_fails(f"prompt file {path} is not UTF-8 at byte 3", f"--prompt_file={path}")

    @parameterized.parameters(
        ("def get_config():\n    return {'a': 1}", "get_config() gave a dict"),
        ("def get_config():\n    return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def get_config(:", "SyntaxError"),
        ("def get_config():\n    raise ValueError('mine')", "ValueError: mine"),
        ("x = 1", "has no attribute 'get_config'"),
        (
            "from ml_collections import config_dict\n"
            "def get_config():\n    return config_dict.ConfigDict({'temprature': 1.0})",
            "did you mean 'temperature'?",
        ),
    )
    def test_bad_config_file(self, source, said):
        path = self.directory / "config.py"
        path.write_text(source)
        # ml_collections runs every config file in the one module of this name.
        self.addCleanup(sys.modules.pop, "config_config", None)
        out, err = self.run_main(f"--config={path}", "--prompt=a", status=1)
        self.assertEqual(out, "")
        self.assertIn(said, err)
        self.assertEqual(err.count("\n"), 1, err)

    def test_checkpoint_without_a_tokenizer(self):
        mute = self.directory / "mute"
        tiny_engine.load_tiny_engine(mute, tokenizer=False)
        with self.assertRaisesRegex(MoejaxError, "mute has no tokenizer.json: add the original"):
            loading.load_engine(GenerateConfig(checkpoint=str(mute), platform="cpu"))

    @parameterized.parameters(
        (MoejaxError("mine"), "error: mine\n", 1),
        (PermissionError(13, "Permission denied", "x"), "Permission denied: 'x'", 1),
        (KeyboardInterrupt(), "error: interrupted\n", 130),
    )
    def test_errors_while_running(self, error, said, status):
        with mock.patch.object(self.engine, "stream", side_effect=error):
            self.assert_fails(said, "--prompt=a", status=status)
            for flag in ("--verbose", "-verbose", "--verbose=true", "--verbose=1"):
                _, err = self.run_main("--prompt=a", flag, status=status)
                self.assertStartsWith(err, "Traceback (most recent call last):")
                self.assertIn(said, err)
            for flag in ("--noverbose", "--verbose=false", "--config.stop=--verbose"):
                self.assert_fails(said, "--prompt=a", flag, status=status)

    @parameterized.parameters("--verbose", "--verbose=true")
    def test_verbose_where_flags_cannot_be_read(self, flag):
        _, err = self.run_main("--promt=a", flag, status=2)
        self.assertStartsWith(err, "Traceback (most recent call last):")

    def test_interrupted_commands_that_resume_say_so(self):
        again = "error: interrupted; run the same command again to resume\n"
        never = "error: interrupted\n"
        for command, arguments, said in (
            (quantize.COMMAND, ["--output=x"], again),
            (evaluate.COMMAND, ["--output=no/such/x.json"], never),  # nothing is kept yet
            (evaluate.COMMAND, [], never),
            (evaluate.COMMAND, ["--output=no/such/x.json", "--policy.name=dymoe"], never),
            (generate.COMMAND, [], never),
        ):
            body = mock.Mock(side_effect=KeyboardInterrupt)
            interrupted = dataclasses.replace(command, body=body)
            self.assertEqual(commands.run(interrupted, *arguments), (130, "", said))

    def test_a_bug_keeps_its_traceback(self):
        with (
            mock.patch.object(self.engine, "stream", side_effect=TypeError("bug")),
            self.assertRaisesRegex(TypeError, "bug"),
        ):
            self.run_main("--prompt=a")

    @parameterized.parameters("--help", "-h", "-help")
    def test_help_lists_flags_and_every_field(self, flag):
        out, err = self.run_main(flag)
        self.assertEqual(err, "")
        self.assertIsNone(self.config)
        for name in ("--prompt_file", "--chat", "--verbose", "--config.repetition_penalty"):
            self.assertIn(f"  {name} ", out)
        self.assertIn("  --config.memory.device_gib ", out)
        self.assertNotIn("  --config.memory ", out)

    @parameterized.parameters(("dymoe", DyMoE()), ("dynaexq", DynaExq()), ("buddymoe", BuddyMoe()))
    def test_help_shows_the_settings_of_the_named_policy(self, name, policy):
        out, _ = self.run_main(f"--config.policy.name={name}", "--help")
        shown = out.split(f"\nSettings of {name} and their defaults, for policy.settings:\n")[1]
        for field in dataclasses.fields(policy):
            if field.name != "lists":  # the checkpoint's
                value = getattr(policy, field.name)
                said = "" if value == () else re.escape(str(value))
                self.assertRegex(shown, rf"(?m)^  {field.name}={said} +\S", field.name)
        self.assertNotIn("Settings of", self.run_main("--help")[0])


class ProcessTest(absltest.TestCase):
    """Behaviour that needs a separate process."""

    def start(self, *arguments: str, **how: Any) -> "subprocess.Popen[str]":
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=env, text=True, stderr=subprocess.PIPE, **how)

    def test_help_and_mistakes_do_not_wait_for_jax(self):
        """Configurations of the benchmark and of sweeps import it."""
        probe = (
            "import importlib, sys; from moejax import cli\n"
            "for name in sys.argv[2:]:\n"
            "    command = importlib.import_module(f'moejax.{name}').COMMAND\n"
            "    status = cli.exit_status(command, ['main', sys.argv[1]])\n"
            "    print(name, status, 'jax' in sys.modules, file=sys.stderr)"
        )
        mains = [name for name in cli.MAINS if name not in ("benchmark", "lm_eval", "sweep")]
        for flag, names, status in (("--help", mains, 0), ("--temperature=-1", ["generate"], 1)):
            process = self.start("-c", probe, flag, *names, stdout=subprocess.PIPE)
            out, err = process.communicate()
            self.assertEqual(out.count("--config.checkpoint "), len(mains) * (flag == "--help"))
            for name in names:
                self.assertIn(f"{name} {status} False\n", err)

    def test_the_installed_command(self):
        def moejax(*arguments: str) -> tuple[int, str, str]:
            process = self.start("-m", "moejax", *arguments, stdout=subprocess.PIPE)
            out, err = process.communicate()
            return process.returncode, out, err

        entry = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
        self.assertEqual(entry, {"moejax": "moejax.cli:main"})
        self.assertEqual(moejax("--version"), (0, f"moejax {__version__}\n", ""))
        status, out, _ = moejax("-h")
        self.assertEqual(status, 0)
        for name in cli.MAINS:
            self.assertRegex(out, rf"\n  {name} +\S.*\n")
            self.assertTrue((ROOT / "moejax" / f"{name}.py").is_file())
        status, out, _ = moejax("generate", "-h")
        self.assertEqual(status, 0)
        self.assertIn("--config.max_new_tokens", out)
        status, out, err = moejax("genrate")
        self.assertEqual((status, out), (2, ""))
        self.assertStartsWith(
            err, "error: moejax has no command 'genrate'; did you mean 'generate'?"
        )
        status, _, err = moejax("plan", "--batch=0")
        self.assertEqual((status, err), (1, "error: batch=0 must be at least 1\n"))

    def test_every_main_is_a_command(self):
        mains = {
            path.stem for path in (ROOT / "moejax").glob("*.py")
            if "\nif __name__ ==" in path.read_text("utf-8")
        }  # fmt: skip
        self.assertEqual(mains, {*cli.MAINS, "__main__"})

    def test_reader_that_goes_away(self):
        probe = (
            "import itertools; from moejax import cli, generate\n"
            "def body(config, values):\n"
            "    for i in itertools.count():\n"
            "        print(i, flush=True)\n"
            "command = cli.Command(doc='', default=generate.COMMAND.default,\n"
            "                      define_flags=lambda values: None, body=body)\n"
            "cli.run(command)"
        )
        process = self.start("-c", probe, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        with process.stderr as stderr:
            self.assertEqual(stderr.read(), "error: standard output was closed before the end\n")
        self.assertEqual(process.wait(), 141)

    def test_closed_streams(self):
        command = [sys.executable, "-m", "moejax.generate"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for redirected, out, err in (
            (">&-", "", "error: standard output is closed; send it to a file, or to /dev/null\n"),
            ("2>&-", "", ""),
            (
                "<&-",
                "",
                "error: no prompt: give --prompt, --prompt_file, or --chat on a terminal or with "
                "lines on standard input\n",
            ),
        ):
            done = subprocess.run(
                ["bash", "-c", f'"$@" --chat {redirected}', "-", *command],
                env=env,
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            self.assertEqual((done.returncode, done.stdout, done.stderr), (1, out, err))

    def interrupted(self, body: str, before: str = "", times: int = 1) -> tuple[int, str, str]:
        """Status, output and errors of a command that is interrupted at each line of its output."""
        # A shell in the background ignores SIGINT, and its children with it.
        probe = (
            "import atexit, signal, time; from moejax import cli, generate\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"def wait(*_):\n    print('waits', flush=True); time.sleep(60)\n{before}\n"
            f"def body(config, values):\n    {body}\n"
            "command = cli.Command(doc='', default=generate.COMMAND.default,\n"
            "                      define_flags=lambda values: None, body=body)\n"
            "cli.run(command)"
        )
        process = self.start("-c", probe, stdout=subprocess.PIPE)
        assert process.stdout is not None
        lines = []
        for _ in range(times):
            lines.append(process.stdout.readline())
            process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        return process.returncode, "".join(lines) + out, err

    def test_ctrl_c(self):
        found = self.interrupted("wait()")
        self.assertEqual(found, (130, "waits\n", "error: interrupted\n"))

    def test_an_interrupt_in_a_callback_of_the_collector_counts(self):
        body = "\n    ".join(["gc.callbacks.append(lambda *_: wait())", "gc.collect()", "wait()"])
        found = self.interrupted(body, "import gc")
        self.assertEqual((found[0], found[2]), (130, "error: interrupted\n"))

    def test_ctrl_c_once_more_while_the_first_is_told_of(self):
        found = self.interrupted("wait()", "cli._fail = wait", times=2)
        self.assertEqual(found, (130, "waits\nwaits\n", ""))

    def test_a_bug_after_ctrl_c_keeps_its_traceback_and_ends_at_once(self):
        body = "\n    ".join(["try: wait()", "except KeyboardInterrupt: 1 / 0"])
        status, _, err = self.interrupted(body, "atexit.register(wait)")
        self.assertEqual(status, 1)
        self.assertStartsWith(err, "Traceback (most recent call last):")
        self.assertEndsWith(err, "ZeroDivisionError: division by zero\n")
