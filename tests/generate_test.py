"""The generate command with real checkpoints: tiny random ones, and the demo that ships."""

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
import pytest
import safetensors.numpy
import tokenizers
from absl.testing import absltest, parameterized

from moejax import cli, generate
from moejax.demo import DEMO_DIRECTORY
from moejax.engine import Engine
from tests.hf_checkpoints import write_checkpoint

ROOT = pathlib.Path(__file__).parents[1]
VOCAB_SIZE = 160  # of the tiny checkpoints
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


def write_tokenizer(directory: pathlib.Path) -> None:
    """A token a character: printable ASCII, then Chinese ones up to the tiny vocabulary."""
    letters = [chr(32 + i) if i < 95 else chr(0x4E00 + i) for i in range(VOCAB_SIZE)]
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def run_in_process(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, run here."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.exit_status(generate.COMMAND, ["generate", *arguments])
    return status, out.getvalue(), err.getvalue()


def run_process(
    *arguments: str, cwd: str, pythonpath: pathlib.Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """The command as a user starts it, from a directory that is not the repository."""
    command = [sys.executable, "-m", "moejax.generate", *arguments]
    env = {
        **os.environ,
        "PYTHONPATH": str(pythonpath),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
    }
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


class TinyCheckpointTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.checkpoint = write_checkpoint("qwen3", cls.folder)
        write_tokenizer(cls.checkpoint)

    def damaged(self) -> pathlib.Path:
        """A copy of the checkpoint, to break."""
        parent = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        return pathlib.Path(shutil.copytree(self.checkpoint, parent / "copy"))

    def test_stream_is_the_engines_answer(self):
        status, out, err = run_in_process(
            f"--config.checkpoint={self.checkpoint}",
            "--prompt=Hello, world",
            "--config.max_new_tokens=20",
        )
        self.assertEqual(status, 0, err)
        engine = Engine.from_pretrained(self.checkpoint, progress=False)
        [expected] = engine.generate("Hello, world", max_new_tokens=20)
        self.assertEqual(out, f"{expected.text}\n")
        self.assertRegex(err.splitlines()[-1], r"^prompt tokens 12, new tokens 20, TTFT [\d.]+ ms")
        self.assertRegex(err, rf"loaded {re.escape(str(self.checkpoint))} on \S+ in [\d.]+ s\n")

    @pytest.mark.slow
    def test_batch_gives_each_prompt_what_it_gets_alone(self):
        common = (f"--config.checkpoint={self.checkpoint}", "--config.max_new_tokens=8")
        alone = [run_in_process(*common, f"--prompt={p}")[1] for p in ("a b c d e f", "xy")]
        _, together, _ = run_in_process(*common, "--prompt=a b c d e f", "--prompt=xy")
        self.assertEqual(together, f"=== 1 of 2 ===\n{alone[0]}=== 2 of 2 ===\n{alone[1]}")

    @parameterized.parameters(("('int2',)", 1e-3, 10), ("()", -1e-6, 1e-6))
    @pytest.mark.slow
    def test_an_answer_is_compared_with_the_exact_models(self, tiers, least, most):
        common = (
            f"--config.checkpoint={self.checkpoint}", "--config.max_new_tokens=8", "--prompt=abc",
            "--config.policy.name=resident", "--config.policy.quantizer=rtn", "--stats",
            "--config.policy.group_size=16",
        )  # fmt: skip
        kl = r"KL of the exact model to this one (-?[\d.]+) nats a token .* of 4 tokens\n"
        status, _, err = run_in_process(
            *common, f"--config.policy.tiers={tiers}", "--config.fidelity_share=0.5"
        )
        self.assertEqual(status, 0, err)
        self.assertBetween(float(re.search(kl, err)[1]), least, most)
        status, _, err = run_in_process(*common, "--config.fidelity_share=2")
        self.assertEqual((status, err), (1, "error: fidelity_share=2.0 must be from 0 to 1\n"))

    @pytest.mark.slow
    def test_chat_template_is_applied(self):
        common = (f"--config.checkpoint={self.checkpoint}", "--config.max_new_tokens=8")
        self.assertEqual(
            run_in_process(*common, "--chat", "--prompt=hi")[1],
            run_in_process(*common, "--prompt=hi!")[1],
        )

    @pytest.mark.slow
    def test_stop_string_ends_the_text(self):
        common = (f"--config.checkpoint={self.checkpoint}", "--prompt=abc")
        _, whole, _ = run_in_process(*common, "--config.max_new_tokens=16")
        stop = whole[5:7]
        _, stopped, _ = run_in_process(*common, f"--config.stop='{stop}'")
        self.assertEqual(stopped, whole[: whole.index(stop)] + "\n")

    @parameterized.parameters(
        (["--config.checkpoint=no/such/dir"], "no/such/dir"),
        (["--config.checkpoint=/no/such/dir"], "no such directory"),
        (["--config.platform=tpu"], "platform 'tpu' is none of"),
        (["--config.dtype=int8"], "int8"),
        (
            ["--dtype=float16", "--platform=cpu"],
            "dtype=float16 does not run on a CPU: take float32",
        ),
        (["--config.context=100000"], "context=100000 must be"),
        (["--config.context=8", "--prompt=more than eight"], "leaves no room in the context of 8"),
        (["--prompt="], "an empty prompt"),
    )
    def test_bad_request(self, arguments, said):
        given = (f"--config.checkpoint={self.checkpoint}", "--prompt=a", *arguments)
        if any(argument.startswith("--prompt=") for argument in arguments):
            given = (given[0], *arguments)
        self.assert_one_line(said, *given)

    def test_no_gpu_where_one_is_asked_for(self):
        if jax.default_backend() != "cpu":
            self.skipTest("there is an accelerator")
        self.assert_one_line(
            "JAX sees only cpu; on an NVIDIA machine pip install '.[cuda13]' (or '.[cuda12]') in",
            f"--config.checkpoint={self.checkpoint}",
            "--config.platform=gpu",
            "--prompt=a",
        )

    def test_broken_checkpoints(self):
        def truncate(copy: pathlib.Path) -> None:
            path = copy / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-100])

        def edit_tensors(change):
            def edit(copy: pathlib.Path) -> None:
                path = copy / "model.safetensors"
                tensors = safetensors.numpy.load_file(path)
                change(tensors)
                safetensors.numpy.save_file(tensors, path)

            return edit

        def set_architecture(copy: pathlib.Path) -> None:
            config = json.loads((copy / "config.json").read_text())
            config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
            (copy / "config.json").write_text(json.dumps(config))

        norm = "model.layers.1.input_layernorm.weight"
        cases = (
            (truncate, ("model.safetensors",)),
            (edit_tensors(lambda t: t.pop(norm)), (norm, "missing")),
            (edit_tensors(lambda t: t.update(odd=t[norm])), ("odd",)),
            (edit_tensors(lambda t: t.update({norm: t[norm][:3]})), (norm, "3", "32")),
            (set_architecture, ("Llama", "Qwen3Moe", "Mixtral")),
            (lambda copy: (copy / "config.json").unlink(), ("config.json",)),
            (lambda copy: (copy / "model.safetensors").unlink(), ("safetensors",)),
            (lambda copy: (copy / "tokenizer.json").unlink(), ("no tokenizer.json",)),
            (lambda copy: (copy / "tokenizer.json").write_text("{"), ("tokenizer.json",)),
        )
        for damage, said in cases:
            copy = self.damaged()
            damage(copy)
            with self.subTest(said=said):
                self.assert_one_line(said, f"--config.checkpoint={copy}", "--prompt=a")

    def assert_one_line(self, said: str | tuple[str, ...], *arguments: str) -> None:
        """The command fails, and its last line on stderr says all of it."""
        status, out, err = run_in_process(*arguments)
        self.assertEqual((status, out), (1, ""), err)
        self.assertNotIn("Traceback", err)
        last = err.splitlines()[-1]
        self.assertStartsWith(last, "error: ")
        self.assertEqual(err.count("error: "), 1, err)
        for words in (said,) if isinstance(said, str) else said:
            self.assertIn(words, last)

    def test_process(self):
        done = run_process(
            f"--config.checkpoint={self.checkpoint}",
            "--prompt=Hello, world",
            "--config.max_new_tokens=4",
            cwd=str(self.folder),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLen(done.stdout, len("1234\n"))
        self.assertIn(f"compilation cache: {jax.config.jax_compilation_cache_dir}\n", done.stderr)

    @pytest.mark.slow
    def test_process_that_fails(self):
        done = run_process("--config.checkpoint=/no", "--prompt=a", cwd=str(self.folder))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"\Aerror: no such directory: /no[^\n]*\n\Z")


class DemoTest(absltest.TestCase):
    """The model in the package: small, there, and served by the wheel alone."""

    def test_demo_answers(self):
        status, out, err = run_in_process("--prompt=The history of", "--config.max_new_tokens=24")
        self.assertEqual(status, 0, err)
        self.assertGreater(len(out.split()), 5)

    def test_demo_is_under_30_mb(self):
        sizes = [path.stat().st_size for path in DEMO_DIRECTORY.rglob("*") if path.is_file()]
        self.assertLess(sum(sizes), 30e6)

    @pytest.mark.slow
    def test_wheel_answers_away_from_the_repository(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        [wheel] = pathlib.Path(folder).glob("*.whl")
        site = pathlib.Path(folder) / "site"
        shutil.unpack_archive(wheel, site, format="zip")
        done = run_process("--prompt=Once", cwd=folder, pythonpath=site)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEmpty(done.stdout.strip())
        self.assertFalse((site / "tests").exists())


if __name__ == "__main__":
    absltest.main()
