"""Several devices, a share of every expert each: they answer as one device does.

Float32 sums in another order differ by rounding, which no routing of these models turns on.
"""

import functools
from typing import Any

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.devices import make_mesh
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from tests import model_kinds, slow
from tests.folder_case import FolderTestCase
from tests.quantized_stores import Fp8, Own, Plain
from tests.random_checkpoints import TINY

PROMPTS = [[5, 9, 2, 41, 7, 30, 11], [3, 8, 80]]
TOKENS = np.arange(24).reshape(2, 12)
SMALL: dict[str, Any] = {"vocab_size": 96, "num_experts": 6, "max_positions": 64, "mlp_dim": 64}
QWEN = ModelConfig(**TINY | SMALL | {"expert_dim": 576})  # 12 groups of 48
CONFIGS = {"qwen3": QWEN} | {
    kind: model_kinds.config_of(
        kind, **SMALL | {"expert_dim": 384, "num_experts": 8, "shared_dim": 384}
    )
    for kind in model_kinds.KINDS
}


class Packed(Own):
    """Groups of 48 with float zeros, all matrices packed; weights of about 0.1."""

    def __init__(self, model, bits):
        super().__init__(model, ranks=(0,), bits=bits)

    def matrix(self, prefix, shape):
        tensors, weights = super().matrix(prefix, shape)
        factor = np.float16(0.4 / 2**self.bits)
        tensors = {
            name: (tensor * factor).astype(tensor.dtype) if name.endswith("scales") else tensor
            for name, tensor in tensors.items()
        }
        return tensors, weights * factor


def stores() -> dict[str, Any]:
    return {f"int{bits}": functools.partial(Packed, bits=bits) for bits in (2, 3, 4)} | {
        "plain": Plain
    }


class MeshTest(FolderTestCase):
    def load(self, **how: Any) -> Engine:
        engine = Engine.from_pretrained(
            self.directory, dtype="float32", platform="cpu", progress=False, **how
        )
        self.addCleanup(engine.close)
        return engine

    @slow.where(lambda case: case not in (("qwen3", "int4", 8), ("shared", "plain", 2)))
    @parameterized.product(
        case=(
            ("qwen3", "int4", 8),  # 12 groups: uneven
            ("qwen3", "int3", 4),
            ("qwen3", "int2", 2),
            ("shared", "plain", 2),
            ("latent", "plain", 4),
            ("delta", "plain", 2),
            ("sigmoid", "int3", 8),
        ),
    )
    def test_mesh_answers_as_one_device(self, case):
        kind, form, count = case
        stores()[form](CONFIGS[kind]).write(self.directory)
        one, several = self.load(), self.load(mesh=str(count))
        expected = one.logits(TOKENS)
        found = several.logits(TOKENS)
        scale = np.abs(expected).max()
        self.assertLess(np.abs(found - expected).max() / scale, 1e-5)
        how: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
        answers = [
            [answer.tokens for answer in engine.generate(PROMPTS, **how)]
            for engine in (one, several)
        ]
        self.assertEqual(*answers)
        # Every device has a share of the experts, and the rest whole.
        for name, leaf in several.weights.items():
            for array in jax.tree.leaves(leaf):
                self.assertLen(array.sharding.device_set, count)
                self.assertEqual(array.is_fully_replicated, name not in EXPERT_LEAVES, name)

    def test_errors_take_one_line(self):
        Packed(QWEN, 4).write(self.directory)
        with self.assert_one_line("mesh=16 takes 16 devices, but JAX sees 8 of the platform cpu"):
            self.load(mesh="16")
        with self.assert_one_line("mesh='two' must be a number of devices"):
            self.load(mesh="two")
        self.assertIsNone(make_mesh("1", "cpu"))
        self.assertEqual(make_mesh("2,2", "cpu").size, 4)

    def test_fp8_is_refused(self):
        Fp8(CONFIGS["qwen3"]).write(self.directory)
        with self.assert_one_line("FP8, which a mesh does not serve yet"):
            self.load(mesh="2")


if __name__ == "__main__":
    absltest.main()
