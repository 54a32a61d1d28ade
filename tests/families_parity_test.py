"""Families made of parts that others brought, against transformers; checkpoints that it wrote."""

import tempfile
from pathlib import Path

from absl.testing import parameterized

from moejax import Engine
from tests import parity, slow
from tests.hf_checkpoints import GLM, OLMOE, reference_model, write_checkpoint


class ParityTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    @slow.where(lambda name: name != "olmoe")
    @parameterized.parameters(*OLMOE)
    def test_olmoe(self, name):
        self.check(name, parity.softmax_gap)

    @slow.where(lambda name: name not in ("air", "flash"))
    @parameterized.parameters(*GLM)
    def test_glm(self, name):
        self.check(name, parity.grouped_gap)

    def check(self, name: str, router_gap: parity.RouterGap) -> None:
        path = write_checkpoint(name, self.directory)
        reference = parity.of_transformers(reference_model(path), router_gap)
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        parity.check(self, engine, reference, lengths=(3, 17, 9))
