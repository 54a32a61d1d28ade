"""The quantize command as a user runs it."""

import contextlib
import dataclasses
import io
import json
import lzma
import pathlib
import tempfile
from unittest import mock

import pytest
from absl.testing import parameterized

from moejax import quantize
from moejax.config.commands import QuantizeConfig
from moejax.errors import MoejaxError
from moejax.quantization.pipeline import run as pipeline
from moejax.quantization.ranks import parse_policy
from tests import commands
from tests.folder_case import FolderTestCase
from tests.random_checkpoints import write_random_checkpoint


class QuantizeMainTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.class_folder()
        cls.source = write_random_checkpoint(folder / "source")

    def setUp(self):
        super().setUp()
        # Drawing takes longer than all the rest; `quantize_pipeline_test` does it.
        self.enterContext(mock.patch.object(pipeline, "draw_report", return_value=None))
        self.output = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "out"

    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        where = {"checkpoint": self.source, "output": self.output, "platform": "cpu"}
        flags = [f"--config.{name}={value}" for name, value in where.items()]
        return commands.run(quantize.COMMAND, *flags, *arguments)

    @pytest.mark.slow
    def test_report(self):
        arguments = (
            "--config.method=rtn",
            "--config.bits=4",
            "--config.group_size=32",
            "--config.rules=experts: bits=2; head, embed: method=rtn bits=8 group=0",
        )
        status, out, err = self.run_main(*arguments)
        self.assertEqual(status, 0, err)
        self.assertIn("layer 2", err)  # of the bar
        self.assertIn("100%", err)
        totals = json.loads((self.output / "quantization.json").read_text())["totals"]
        self.assertStartsWith(out, f"quantized: {100 * totals['quantized_share']:.2f} % of ")
        self.assertRegex(out, r"experts +49,152 +0.02 +3.000\n")
        self.assertRegex(out, r"attention +36,864 +0.02 +5.000\n")
        # A row of 64 codes of 8 bits and 32 bits of scale and zero.
        self.assertRegex(out, r"head +10,240 +0.01 +8.500\n")
        self.assertRegex(
            out, r"largest relative errors:\n  0\.\d+  model\.layers\.\d\.mlp\.experts"
        )
        self.assertRegex(out, r"time: read .* s, quantize .* s, write .* s, finish .* s")
        status, out, _ = self.run_main(*arguments)
        self.assertEqual(status, 0)
        self.assertStartsWith(out, f"{self.output} is finished already; nothing was done")
        self.assertNotIn("time:", out)

    @pytest.mark.slow
    def test_from_python(self):
        config = QuantizeConfig(
            checkpoint=str(self.source),
            output=str(self.output),
            method="rtn",
            group_size=32,
            platform="cpu",
        )
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            outcome = quantize.run(config, progress=False)
        self.assertEqual(err.getvalue(), "")  # no bar
        totals = json.loads((self.output / "quantization.json").read_text())["totals"]
        self.assertEqual(outcome.totals, totals)
        self.assertFalse(outcome.was_done)
        with self.assertRaisesRegex(MoejaxError, "passes=0 must be at least 1"):
            quantize.run(dataclasses.replace(config, passes=0))

    def test_calibration_text_may_be_packed(self):
        path = self.directory / "text.txt.xz"
        path.write_bytes(lzma.compress("Fünf Wörter".encode()))
        with mock.patch.object(pipeline, "quantize_checkpoint") as started:
            quantize.run(
                QuantizeConfig(
                    checkpoint=str(self.source), output=str(self.output), calibration=str(path),
                    platform="cpu",
                )
            )  # fmt: skip
        self.assertEqual(started.call_args.args[0].calibration_text, "Fünf Wörter")

    @parameterized.parameters(
        (["--config.group_size=-1"], "group_size=-1 must be 0 (per channel) or positive"),
        (["--config.method=rtn", "--config.group_size=128"], "group_size 128 does not fit K = 64"),
        (["--config.format=gguf"], "format='gguf' is none of moejax, gptq, compressed-tensors"),
        (["--config.rank=Dense"], "rank policy 'Dense': term 'dense'"),
        (["--config.rules=heads: bits=2"], "rule 'heads: bits=2' matches nothing"),
        (["--config.passes=0"], "passes=0 must be at least 1"),
        (["--config.output="], "output='' must be a directory"),
        (["--config.output=~nobody-here/x"], "there is no such place as ~nobody-here/x"),
        (["--config.checkpoint="], "checkpoint='' must be a name"),
        (["--config.checkpoint=/no/such/place"], "no such directory: /no/such/place"),
        (["--config.platform=tpu"], "platform 'tpu' is none of"),
        (["--config.calibration=/no/such"], "there is no text file /no/such; name a file\n"),
        (["--config.calibration=wikitext2"], "there is no text file wikitext2; name a file\n"),
        (["--config.planes=2,4", "--config.bits=4"], "bits=4 beside planes=2,4"),
        (["--config.plane_weight=0.5"], "plane_weight=0.5 weighs widths of bit planes"),
        (["--config.rank_divisor=2"], "rank_divisor=2 is of milo's compensators of bit planes"),
        (
            ["--config.method=hqq", "--config.planes=2,4", "--config.factor_bits=8"],
            "factor_bits=8 is of the compensators of milo",
        ),
        (["--config.method=rtn", "--config.rank=Dense-8"], "rank=Dense-8 is of the compensators"),
        (["--config.method=hqq", "--config.passes=3"], "passes=3 is of the compensators of milo"),
    )
    def test_mistakes(self, arguments, message):
        status, out, err = self.run_main("--config.group_size=32", *arguments)
        self.assertEqual((status, out), (1, ""))
        self.assertIn(message, err)
        self.assertRegex(err, r"\Aerror: [^\n]+\n\Z")
        self.assertFalse(self.output.exists())

    @parameterized.parameters(
        ([], "Dense-25%"),
        (["--config.rank=Sparse-4 + Dense-8 + Uniform-5% within 1 MB"],
         "Dense-8 + Uniform-5% within 1000000 B"),
    )  # fmt: skip
    def test_model_without_experts_gets_no_ranks_of_them(self, arguments, mended):
        """The default rank has a term of experts; the error has one that works."""
        source = write_random_checkpoint(self.directory / "dense", moe_layers=())
        where = [f"--config.checkpoint={source}", "--config.group_size=32"]
        status, out, err = self.run_main(*where, *arguments)
        self.assertEqual((status, out), (1, ""))
        self.assertRegex(err, r"\Aerror: rank policy: \S+ concerns experts, and [^\n]+\n\Z")
        self.assertEndsWith(err, f"; set --config.rank without it: --config.rank='{mended}'\n")
        self.assertFalse(self.output.exists())
        parse_policy(mended)

    @parameterized.parameters(
        {"planes": "2,4", "plane_weight": 0.5},
        {"rules": "experts: planes=2,4", "plane_weight": 0.0, "bits": 4},
        {"planes": "2,4"},
        {"rules": "experts: planes=2,4 method=milo", "method": "rtn", "rank_divisor": 0},
        {"method": "milo", "factor_bits": 8},
        {"rules": "attention: method=milo+", "factor_bits": 8, "method": "rtn"},
    )
    def test_settings_that_have_an_effect(self, **settings):
        QuantizeConfig(**settings).check()
