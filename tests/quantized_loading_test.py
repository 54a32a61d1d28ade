"""Whole quantized checkpoints: leaves against weights placed by hand; what loading costs."""

import contextlib
import dataclasses
import io
import json
import tracemalloc
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl import logging
from absl.testing import parameterized

from moejax.checkpoints import open_checkpoint, reader
from moejax.inference.runner import Runner
from moejax.models.hf.config import to_hf_config
from moejax.weights.qtensor import Fp8Tensor, QTensor, dense
from tests import model_kinds, slow
from tests import quantized_files as files
from tests.hf_checkpoints import reference_model
from tests.numpy_model import RELATIVE_ERROR, relative_errors
from tests.quantized_stores import (
    MIXTRAL,
    QWEN,
    WIDE,
    Awq,
    CompressedTensors,
    Fp8,
    Gptq,
    Hqq,
    LoadingTestCase,
    MixedBits,
    Own,
    Plain,
)

ATTENTION = ("attention.qkv_proj", "attention.o_proj")
EXPERTS = ("moe.gate_up", "moe.down")
MLP = ("mlp.gate_up", "mlp.down")


LATENT = ("attention.q_a", "attention.q_b", "attention.kv_a", "attention.kv_b", "attention.o_proj")
DELTA = ("delta.qkvz_proj", "delta.ba_proj", "delta.o_proj")
SHARED = ("shared.gate_up", "shared.down")


class KindsTest(LoadingTestCase):
    """DeepSeek-V2, Qwen3-Next and Qwen3.5 as others quantize them: leaves, and logits."""

    @parameterized.product(kind=("latent", "delta", "by_part"), make=(Gptq, Awq))
    @pytest.mark.slow
    def test_codes(self, kind, make):
        changes = {"num_layers": 2}
        if kind == "latent":
            quantized = (*LATENT, *MLP, *EXPERTS, *SHARED)
            latent = model_kinds.LATENT["latent"]  # queries' rank is to hold whole groups
            changes |= {"moe_layers": (1,), "latent": dataclasses.replace(latent, query_rank=64)}
        else:
            quantized = (*DELTA, *ATTENTION, *EXPERTS, *SHARED)
            delta = model_kinds.KINDS[kind]["delta_net"]
            # Words of AWQ hold eight outputs, here one of each value head.
            delta = dataclasses.replace(delta, layers=(0,), num_value_heads=8)
            changes |= {"moe_layers": (0, 1), "delta_net": delta}

        class Published(make):
            """Leaves plain what is not a linear layer's matrix, and gates of one output."""

            def is_plain(self, placement):
                is_matrix = len(placement.shape) == 2 and placement.shape[0] > 1
                return super().is_plain(placement) or not is_matrix

        store = Published(model_kinds.config_of(kind, **changes))
        store.write(self.directory)
        weights = self.assert_loads(store, QTensor, quantized)
        tokens = np.random.default_rng(0).integers(0, 160, (1, 20), np.int32)
        plain = {name: jnp.asarray(leaf) for name, leaf in store.leaves().items()}
        found, expected = (
            Runner(store.model, of, jax.devices("cpu")[0]).logits(tokens) for of in (weights, plain)
        )
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)


class GptqV1Test(LoadingTestCase):
    @parameterized.parameters(2, 3, 4, 8)
    @pytest.mark.slow
    def test_logits_with_zero_points_of_0_are_those_of_transformers(self, bits):
        store = Gptq(QWEN, bits=bits)
        store.write(self.directory)
        tokens = np.random.default_rng(0).integers(0, QWEN.vocab_size, (1, 20), np.int32)
        found = Runner(QWEN, self.load(store), jax.devices("cpu")[0]).logits(tokens)
        plain = self.directory / "plain"
        plain.mkdir()
        files.write(plain / "model.safetensors", store.weights)
        fields = to_hf_config(QWEN, dtype="float32")
        (plain / "config.json").write_text(json.dumps(fields))
        with torch.no_grad():
            expected = reference_model(plain)(torch.as_tensor(tokens)).logits.numpy()
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)


class Partial(Gptq):
    """Leaves one matrix plain."""

    def is_plain(self, placement):
        return super().is_plain(placement) or "layers.1.self_attn.q_proj" in placement.name


class Apart(Gptq):
    """Has an act-order of its own for each matrix."""

    def matrix(self, prefix, shape):
        return super().matrix(prefix + ".x", shape)


class ValuesTest(LoadingTestCase):
    @parameterized.named_parameters(
        ("gptq_qwen", lambda: Gptq(QWEN), (*ATTENTION, *EXPERTS, *MLP)),
        ("gptq_mixtral", lambda: Gptq(MIXTRAL, is_v1=False), (*ATTENTION, *EXPERTS)),
        ("gptq_order", lambda: Gptq(QWEN, act_order=True), (*ATTENTION, *EXPERTS, *MLP)),
        ("awq", lambda: Awq(MIXTRAL), (*ATTENTION, *EXPERTS)),
        ("compressed_tensors", lambda: CompressedTensors(QWEN), (*ATTENTION, *EXPERTS, *MLP)),
        ("hqq", lambda: Hqq(QWEN), (*ATTENTION, *EXPERTS, *MLP)),
    )
    def test_codes(self, make, quantized):
        store = make()
        store.write(self.directory)
        weights = self.assert_loads(store, QTensor, quantized)
        orders = {leaf for leaf in quantized if weights[leaf].permutation is not None}
        has_order = isinstance(store, Gptq) and store.act_order
        # The dense layer was stored without an order, and one group of experts' inputs has none.
        ordered = {*ATTENTION, "moe.gate_up"}
        self.assertEqual(orders, ordered if has_order else set())

    @parameterized.parameters(False, True)
    def test_fp8(self, fused):
        store = Fp8(WIDE, fused=fused)
        store.write(self.directory)
        self.assert_loads(store, Fp8Tensor, (*ATTENTION, *EXPERTS, *MLP))

    @slow.repeats()
    @parameterized.parameters(True, False)
    def test_own_format(self, is_host):
        store = Own(QWEN)
        store.write(self.directory)
        everything = (*ATTENTION, *EXPERTS, *MLP, "embed", "head")
        with mock.patch.object(reader, "_is_host", return_value=is_host):
            weights = self.assert_loads(store, QTensor, everything, rtol=1e-5)
        gate_up = weights["moe.gate_up"]
        # Every rank costs its own rows: the pools hold the sum of the ranks and no more.
        rows = sum(int(c.rank.sum()) for c in gate_up.compensators)
        self.assertEqual(rows, sum(c.u.shape[0] for c in gate_up.compensators))
        self.assertGreater(len({c.first_row for c in gate_up.compensators}), 1)
        self.assertGreater(len(gate_up.compensators), 2)  # kinds of factors, apart

    @parameterized.parameters("gptq", "fp8")
    @pytest.mark.slow
    def test_staged_by_layer(self, name):
        store = Gptq(QWEN, act_order=True) if name == "gptq" else Fp8(WIDE)
        store.write(self.directory)
        kind = QTensor if name == "gptq" else Fp8Tensor
        with mock.patch.object(reader, "_is_host", return_value=False):
            self.assert_loads(store, kind, (*ATTENTION, *EXPERTS, *MLP))

    @parameterized.parameters(
        (
            lambda: Fp8(QWEN), Fp8Tensor, ("attention.o_proj", "moe.down", "mlp.down"),
            "moe.gate_up is dequantized to float32.*no multiples of 128 rows",
        ),
        (
            lambda: MixedBits(QWEN), QTensor, (*ATTENTION, *MLP),
            "moe.gate_up is dequantized to float32.*its matrices have bits 4 and 8",
        ),
        (
            lambda: Partial(QWEN), QTensor, ("attention.o_proj", *EXPERTS, *MLP),
            "some of its matrices are quantized and some are not",
        ),
        (
            lambda: Apart(QWEN, act_order=True), QTensor, ("attention.o_proj", "moe.down", *MLP),
            "parts of one matrix have different act-orders",
        ),
    )  # fmt: skip
    def test_what_one_kind_cannot_hold_is_dequantized_and_said(self, make, kind, quantized, said):
        store = make()
        store.write(self.directory)
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            self.assert_loads(store, kind, quantized)
        self.assertRegex(" ".join(logs.output), said)
        plain = {leaf for leaf in (*ATTENTION, *EXPERTS, *MLP) if leaf not in quantized}
        self.assertLen(logs.output, len(plain))

    def test_what_is_dequantized_is_of_the_dtype_that_is_asked_for(self):
        store = MixedBits(QWEN)
        store.write(self.directory)
        expected = store.leaves()["moe.down"].astype(jnp.bfloat16)
        np.testing.assert_array_equal(self.load(store, jnp.bfloat16)["moe.down"], expected)

    def test_zero_points_and_scales_are_widened_without_loss(self):
        class Joined(Gptq):
            def matrix(self, prefix, shape):
                self.symmetric = "experts.1" in prefix
                tensors, weights = super().matrix(prefix, shape)
                if "experts.2" in prefix:
                    tensors[".scales"] = tensors[".scales"].astype(np.float32)
                return tensors, weights

        store = Joined(QWEN)
        store.write(self.directory)
        rules = {r".*experts\.1\.": {"sym": True}}
        store.config["dynamic"] = rules
        store.save(self.directory)
        weights = self.assert_loads(store, QTensor, (*ATTENTION, *EXPERTS, *MLP))
        self.assertEqual(weights["moe.down"].zero_kind, "integer")
        self.assertEqual(weights["moe.down"].scales.dtype, jnp.float32)
        self.assertEqual(weights["mlp.down"].scales.dtype, jnp.float16)


class OpenTest(LoadingTestCase):
    def test_checkpoint_loads_it(self):
        store = Gptq(QWEN)
        store.write(self.directory)
        checkpoint = open_checkpoint(str(self.directory))
        self.assertTrue(checkpoint.is_quantized)
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            weights = checkpoint.load(dtype="auto", device=jax.devices()[0], progress=True)
        self.assertIn("100%", stderr.getvalue())
        self.assertIsInstance(weights["moe.down"], QTensor)
        self.assertEqual(weights["embed"].dtype, jnp.float32)
        self.assertEqual(reader.stored_dtype(self.directory, is_quantized=True), np.float32)

    def test_settings_in_a_file_of_their_own(self):
        store = Gptq(QWEN)
        store.write(self.directory)
        settings = {k: v for k, v in store.config.items() if k != "quant_method"}
        store.config = None
        store.save(self.directory)
        (self.directory / "quantize_config.json").write_text(json.dumps(settings))
        weights = open_checkpoint(str(self.directory)).load(
            dtype="float32", device=jax.devices()[0], progress=False
        )
        expected = store.leaves()["moe.down"]
        np.testing.assert_array_equal(dense(weights["moe.down"], jnp.float32), expected)


class HostMemoryTest(LoadingTestCase):
    SLACK_BYTES = 2_500_000  # Python's objects, headers, the plan

    @slow.where(lambda make, is_host: not is_host or make is Plain)
    @parameterized.product(make=(Awq, Plain), is_host=(True, False))
    def test_peak_is_model_and_one_tensor(self, make, is_host):
        model = dataclasses.replace(
            MIXTRAL, model_dim=512, expert_dim=1024, num_experts=8, num_layers=3, vocab_size=512
        )
        store = make(model)
        store.write(self.directory)
        store.tensors, store.weights = {}, {}
        with mock.patch.object(reader, "_is_host", return_value=is_host):
            self.load(store)  # compiles
            tracemalloc.start()
            weights = self.load(store)
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        model_bytes = sum(weight.nbytes for weight in weights.values())
        slab_bytes = max(weight.nbytes // 3 for name, weight in weights.items() if "moe." in name)
        # A matrix: its words, the codes of one byte in two orders, the packed words.
        matrix_bytes = 4 * model.model_dim * model.expert_dim
        plain_bytes = 2 * weights["embed"].nbytes
        held_bytes = model_bytes if is_host else slab_bytes + plain_bytes
        if is_host:  # or tracemalloc does not see numpy's memory
            self.assertGreater(peak_bytes, 0.9 * model_bytes)
        self.assertLess(peak_bytes, held_bytes + matrix_bytes + self.SLACK_BYTES)
        self.assertGreater(model_bytes, 2 * (slab_bytes + plain_bytes))
