"""Broken quantized checkpoints: one line that names the thing and the mend."""

import json

import numpy as np
from absl.testing import parameterized

from moejax import Tiering, generate, loading
from moejax.checkpoints import open_checkpoint
from moejax.config.commands import EvaluateConfig, GenerateConfig
from moejax.errors import MoejaxError
from moejax.experts.tiering import verify_all
from moejax.weights.qtensor import QTensor
from tests import quantized_files as files
from tests.quantized_stores import QWEN, Gptq, LoadingTestCase, Own

SHORT = {"size": 5, "sha256": "x"}
NAME = "model.layers.0.mlp.experts.1.up_proj"


class FaultTest(LoadingTestCase):
    def edited(self, store, edit):
        store.write(self.directory)
        edit(store.tensors)
        files.write(self.directory / "model.safetensors", store.tensors)
        return store

    @parameterized.parameters(
        (f"{NAME}.scales", lambda _: None, f"missing tensors (1): {NAME}.scales [2, 32];"),
        (f"{NAME}.qzeros", lambda a: a[:1], "qzeros is [1, 4] in the file, [2, 4] by config.json"),
        (f"{NAME}.qweight", lambda a: a.view(np.float32), "qweight is float32, expected int32"),
        (f"{NAME}.bias", lambda _: np.ones(32, np.float16), f"unexpected tensors (1): {NAME}.bias"),
        ("x.qweight", lambda _: np.zeros(3, np.int32), "unexpected tensors (1): x.qweight [3]"),
    )
    def test_a_tensor_that_does_not_fit(self, name, change, said):
        def edit(tensors):
            found = change(tensors.pop(name, None))
            tensors |= {} if found is None else {name: found}

        self.assert_refused(self.edited(Gptq(QWEN), edit), said)

    def test_a_bias_may_be_zero(self):
        bias = {f"{NAME}.bias": np.zeros(32, np.float16)}
        store = self.edited(Gptq(QWEN), lambda t: t.update(bias))
        self.assertIsInstance(self.load(store)["moe.down"], QTensor)

    def test_a_whole_matrix_is_missing(self):
        def edit(tensors):
            for name in [name for name in tensors if name.startswith(NAME)]:
                del tensors[name]

        said = f"missing tensors (1): {NAME}.weight [32, 64]"
        self.assert_refused(self.edited(Gptq(QWEN), edit), said)

    def test_plain_weights_under_a_quantized_label(self):
        store = Gptq(QWEN)
        store.is_plain = lambda placement: True
        store.write(self.directory)
        self.assert_refused(store, "quant_method 'gptq', but no tensor is quantized; take the")


class ManifestTest(LoadingTestCase):
    @parameterized.parameters(
        ({"layout": "planes-v0"}, "layout 'planes-v0', this version reads"),
        ({"files": {"model.safetensors": SHORT}}, "5 by quantization.json"),
        ({"files": {"model-2.safetensors": SHORT}}, "model-2.safetensors is missing"),
    )
    def test_fields(self, changed, said):
        store = Own(QWEN)
        store.write(self.directory)
        path = self.directory / "quantization.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        self.assert_refused(store, "quantization.json", said)

    def test_no_manifest(self):
        store = Own(QWEN)
        store.write(self.directory)
        (self.directory / "quantization.json").unlink()
        self.assert_refused(store, f"no quantization.json in {self.directory}")

    def test_runs_verify_when_asked(self):
        tiers = self.directory / "tier"
        tiers.mkdir()
        Own(QWEN).write(tiers)
        manifest = json.loads((tiers / "quantization.json").read_text())
        del manifest["files"]["config.json"]
        (tiers / "quantization.json").write_text(json.dumps(manifest))
        tiering = Tiering(policy="resident", tiers=(f"low={tiers}",))
        own, packed = verify_all("demo", "", tiering)
        self.assertEqual(own, "verified demo: 737 tensors by the checksums in their files")
        self.assertEqual(packed, f"verified {tiers}: 1 files by SHA-256 of quantization.json")
        path = tiers / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        asked = {"checkpoint": str(tiers), "platform": "cpu", "verify": True}
        for run in (
            lambda: verify_all("demo", "", tiering),
            lambda: verify_all("demo", str(tiers), None),
            lambda: generate.load_engine(GenerateConfig(**asked)),
            lambda: loading.load_scoring_engine(EvaluateConfig(**asked), tiers, None),
        ):
            with self.assertRaisesRegex(MoejaxError, "model.safetensors is not what was written"):
                run()
        open_checkpoint(str(tiers))  # unasked, sizes alone are compared before tensors are read

    @parameterized.parameters(
        ({}, "does not list model.embed_tokens.weight"),
        ({"shape": [96, 60]}, "model.embed_tokens.weight is [96, 60], [96, 64] by config.json"),
        ({"bits": 5}, "the entry of model.embed_tokens.weight is not understood"),
        ({"bits": 4}, "[96, 6] in the file, [96, 8] by config.json"),
        ({"group_size": 65}, "has group_size 65, but 64 inputs"),
        ({"zero_kind": "integer"}, "model.embed_tokens.zeros is float16, expected uint8"),
    )
    def test_entries(self, changed, message):
        store = Own(QWEN)
        store.write(self.directory)
        path = self.directory / "quantization.json"
        fields = json.loads(path.read_text())
        name = "model.embed_tokens.weight"
        fields["tensors"][name] |= changed
        if not changed:
            del fields["tensors"][name]
        path.write_text(json.dumps(fields))
        self.assert_refused(store, message)
