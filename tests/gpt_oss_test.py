"""gpt-oss against transformers: sinks, alternating windows, biases, clamped gates."""

import contextlib
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moejax import Engine
from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.experts import open_experts
from moejax.errors import MoejaxError
from moejax.inference.generation import AnswerBuilder
from moejax.quantization.pipeline.expert_rows import QuantizedRows
from moejax.quantization.pipeline.inventory import take_inventory
from moejax.quantization.pipeline.quantizers import Program
from moejax.quantization.pipeline.recipe import Recipe, Scheme, parse_rules, schemes
from moejax.quantization.pipeline.run import Job, quantize_checkpoint
from moejax.text.tokenizer import Tokenizer
from moejax.weights import linear as ops
from moejax.weights.qtensor import dense
from pallas_kernels import decode_attention, grouped_dequant_matmul, mxfp4
from pallas_kernels.gating import Gating
from pallas_kernels.op import offset_refusal
from pallas_kernels.packed import PackedMatrices, plain, with_scale_pairs
from pallas_kernels.target import SIMULATED, Target, current_target
from pallas_kernels.triton import product
from tests import slow
from tests.decode_attention_test import Shape, parts_of, random_operands
from tests.hf_checkpoints import reference_model, write_checkpoint
from tests.parity import ParityTestCase
from tests.random_checkpoints import write_tokenizer


class KernelTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.product(splits=(1, 4), window=(None, 40))
    def test_decode_attention_with_sinks(self, splits, window):
        shape = Shape(3, 8, 2, 32, 90, 81, window)
        of = random_operands(shape, "bfloat16", seed=4)
        sinks = np.random.default_rng(5).normal(0, 3, (shape.layers, 8)).astype(np.float32)
        found = decode_attention.decode_attention(
            of.q, of.keys, of.values, layer=of.layer, positions=jnp.asarray(of.positions),
            kv_length=shape.kv_length, window=window, sinks=jnp.asarray(sinks),
            implementation="triton", interpret=True,
            tiles=decode_attention.AttentionTiles(16, splits, 4, 2),
        )  # fmt: skip
        for b, h in np.ndindex(found.shape[:2]):
            q, k, v = parts_of(of, shape, b, h)
            powers = np.exp(k @ q / np.sqrt(32))
            weights = powers / (powers.sum() + np.exp(np.float64(sinks[of.layer, h])))
            off = np.abs(np.asarray(found[b, h]).astype(np.float64) - weights @ v)
            self.assertLess((off / (weights @ np.abs(v))).max(), 2**-6)

    def check_biases_and_clamped_gates(self, implementation, num_tokens, bias_dtype, target):
        rng, gating = np.random.default_rng(6), Gating(alpha=1.702, limit=1.5, up_offset=1.0)
        x, gate_up = (
            rng.normal(0, 1, size).astype(np.float32).astype(jnp.bfloat16)
            for size in ((num_tokens, 64), (4, 96, 64))
        )
        bias = rng.normal(0, 3, (num_tokens, 2, 96)).astype(jnp.dtype(bias_dtype))
        slot = rng.integers(0, 4, (num_tokens, 2)).astype(np.int32)
        tier = np.where(rng.random(slot.shape) < 0.2, -1, 0).astype(np.int32)
        pairs = grouped_dequant_matmul.Assignments(*map(jnp.asarray, (tier, slot, 1.0 * slot)))
        wide = np.einsum("nk,nafk->naf", x.astype(np.float64), gate_up.astype(np.float64)[slot])
        gate, up = np.split(wide + bias.astype(np.float64), 2, axis=-1)
        gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
        expected = (up + 1) * gate / (1 + np.exp(-1.702 * gate)) * (tier >= 0)[..., None]
        found = grouped_dequant_matmul.api.PRODUCT[implementation](
            jnp.asarray(x), pairs, [plain(jnp.asarray(gate_up))], [()], None, target,
            bias=jnp.asarray(bias), gating=gating,
        )  # fmt: skip
        found = np.asarray(found).astype(np.float64)
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-4)

    @slow.repeats(lambda implementation: implementation)
    @parameterized.parameters(
        ("reference", 3), ("triton", 3), ("triton", 150), ("mosaic", 3), ("mosaic", 12),
        ("mosaic", 3, "bfloat16"), ("mosaic", 3, "float16"),
    )  # fmt: skip
    def test_biases_and_clamped_gates(self, implementation, num_tokens, bias_dtype="float32"):
        self.check_biases_and_clamped_gates(implementation, num_tokens, bias_dtype, SIMULATED)

    @parameterized.product(
        implementation=("triton", "mosaic"), num_tokens=(3, 12), bias_dtype=("float32", "bfloat16")
    )
    @pytest.mark.gpu
    def test_compiled_biases_and_clamped_gates(self, **how):
        self.check_biases_and_clamped_gates(target=current_target(), **how)

    def test_mosaic_refuses_biases_and_other_gates_of_many_rows(self):
        shape = jax.ShapeDtypeStruct((200, 256), jnp.bfloat16)
        target, stacks = Target("gpu", (9, 0)), [plain(jnp.zeros((2, 512, 256), jnp.bfloat16))]
        reason = grouped_dequant_matmul.OPERATION.refusal(
            "mosaic", shape, 2, stacks, stacks, [], False, target=target
        )
        self.assertIn("silu(gate) * up alone, without a bias", reason)

    @parameterized.parameters(
        (4608, 2880, False), (4608, 2912, True), (4096, 2912, False), (9000, 2912, False)
    )  # fmt: skip
    def test_triton_refuses_scales_that_jax_miscounts(self, num_experts, num_inputs, is_refused):
        """All experts of gpt-oss-120b in one stack, whose scales go by pairs; odd ones do not."""
        parts = {
            "words": jax.ShapeDtypeStruct((num_experts, 5760, num_inputs // 8), jnp.uint32),
            "scales": jax.ShapeDtypeStruct((num_experts, 5760, num_inputs // 32), jnp.uint8),
        }
        weights = PackedMatrices(**parts, zeros=None, num_inputs=num_inputs, bits=4, group_size=32)
        reason = product.refusal(weights) or ""
        self.assertEqual("2 to 4 Gi elements" in reason, is_refused, reason)
        if num_inputs == 2880:
            scales = jax.eval_shape(with_scale_pairs, weights).scales
            self.assertIsNone(offset_refusal(scales))


class Mxfp4Test(ParityTestCase):
    def test_stored_matrices_are_those_that_transformers_dequantizes(self):
        engine, stored = self.load("oss_mxfp4"), self.reference("oss_mxfp4").state_dict()
        for leaf, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            weight = engine.weights[f"moe.{leaf}"]
            self.assertEqual(ops.packing(weight), "MXFP4 in groups of 32")
            self.assertEqual(
                weight.nbytes * 32, math.prod(weight.shape) * 17
            )  # 4 bits, and 8 for 32 weights
            for layer in range(4):
                expected = stored[f"model.layers.{layer}.mlp.experts.{name}"].mT.numpy()
                if leaf == "gate_up":
                    expected = np.concatenate([expected[:, ::2], expected[:, 1::2]], axis=1)
                np.testing.assert_array_equal(weight[layer].dequantize(), expected)

    @parameterized.parameters(
        (".1.mlp.experts.gate_up_proj", "moe.gate_up is dequantized"),
        (".1.mlp.experts.down_proj", "moe.down is dequantized"), (".down_proj", ""),
    )  # fmt: skip
    def test_plain_experts_beside_packed_ones_keep_their_values(self, end, said):
        """One layer's matrices are plain, or those of one kind; what is dequantized is named."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        path = write_checkpoint("oss_mxfp4", directory)
        tensors, plain = load_file(path / "model.safetensors"), reference_model(path).state_dict()
        for name in [name for name in tensors if name.endswith(f"{end}_blocks")]:
            name = name.removesuffix("_blocks")
            del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            tensors[name] = plain[name].contiguous().numpy()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        warned = self.assertLogs if said else self.assertNoLogs
        with warned("absl", "WARNING") as logs:
            found = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        if said:
            self.assertStartsWith(logs.records[0].getMessage(), said)
        packed = self.load("oss_mxfp4")
        for leaf, weight in packed.weights.items():
            expected = np.asarray(dense(weight, jnp.float32))
            np.testing.assert_array_equal(dense(found.weights[leaf], jnp.float32), expected, leaf)
        tokens = np.arange(1, 13)[None]
        np.testing.assert_allclose(found.logits(tokens), packed.logits(tokens), rtol=0, atol=1e-4)

    @pytest.mark.slow
    def test_rows_are_quantized_while_they_are_read(self):
        opened = open_checkpoint(write_checkpoint("oss_mxfp4", self.directory))
        stored, cpu = self.reference("oss_mxfp4").state_dict(), jax.devices("cpu")[0]
        scheme = Scheme(
            method="rtn", bits=8, group_size=32, zero_kind="float", scale_dtype="float32",
            factor_bits=8,
        )  # fmt: skip
        reader = open_experts(opened, dtype="float32", device=cpu)
        rows = QuantizedRows(reader, Program(scheme=scheme, max_rank=0, passes=1))
        self.addCleanup(rows.close)
        into = [np.empty(part.shape, part.dtype) for part in rows.row]
        tree = jax.tree.structure((rows.gate_up, rows.down))
        for layer, expert in ((0, 0), (3, rows.num_experts - 1)):
            rows.read(layer, expert, into)
            found = jax.tree.unflatten(tree, [jnp.asarray(part) for part in into])
            for name, weight in zip(("gate_up_proj", "down_proj"), found, strict=True):
                expected = stored[f"model.layers.{layer}.mlp.experts.{name}"][expert].mT.numpy()
                if name == "gate_up_proj":
                    expected = np.concatenate([expected[::2], expected[1::2]])
                off = np.abs(np.asarray(dense(weight, jnp.float32)) - expected).max()
                self.assertLessEqual(off, 0.01 * np.abs(expected).max())

    def test_scales_that_overflow_are_refused(self):
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        path = write_checkpoint("oss_mxfp4", directory)
        tensors = load_file(path / "model.safetensors")
        name = min(name for name in tensors if name.endswith("_scales"))
        for exponent, said in ((mxfp4.LARGEST, ""), (255, f"{name} holds scales above 208")):
            tensors[name].flat[-1] = exponent
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
            refused = self.assertRaisesRegex(MoejaxError, said)
            with refused if said else contextlib.nullcontext():
                Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)

    def test_recipes_that_would_harm_are_refused(self):
        inventory = take_inventory(write_checkpoint("oss_mxfp4", self.directory))
        rtn = Scheme(
            method="rtn", bits=4, group_size=32, zero_kind="auto", scale_dtype="float32",
            factor_bits=8,
        )  # fmt: skip
        with self.assertRaisesRegex(MoejaxError, "gate_proj is stored in MXFP4, and method=none"):
            rules = parse_rules("experts: method=none")
            schemes(Recipe(default=rtn, rules=rules, format="moejax"), inventory)
        for target in ("gptq", "compressed-tensors"):
            with self.assertRaisesRegex(MoejaxError, f"format={target}: no other engine .*gpt_oss"):
                schemes(Recipe(default=rtn, rules=(), format=target), inventory)
        self.assertNotEmpty(schemes(Recipe(default=rtn, rules=(), format="moejax"), inventory))

    @parameterized.parameters(
        ("oss_bf16_all_experts",), ("oss_mxfp4_bf16_wide",), ("oss_mxfp4_bf16_wide", (2, 8))
    )
    @pytest.mark.slow
    def test_quantized_to_the_package_s_own_format(self, name, planes=()):
        source = write_checkpoint(name, self.directory)
        write_tokenizer(source, 160)
        scheme = Scheme(
            method="rtn", bits=8, group_size=32, zero_kind="auto", scale_dtype="float32",
            factor_bits=8, planes=planes,
        )  # fmt: skip
        recipe = Recipe(
            default=scheme, rules=parse_rules("attention: method=none"), format="moejax"
        )
        output = self.directory / f"{name}_int8{len(planes)}"
        job = Job(
            source=source, output=output, recipe=recipe, rank_policy="Uniform-0", passes=1,
            calibration_text=None, calibration_samples=0, calibration_length=0,
            device=jax.devices("cpu")[0], progress=False,
        )  # fmt: skip
        quantize_checkpoint(job)
        plain, found = self.load(name), self.load(output.name)
        for leaf, weight in plain.weights.items():
            expected = np.asarray(dense(weight, jnp.float32))
            off = np.abs(np.asarray(dense(found.weights[leaf], jnp.float32)) - expected).max()
            self.assertLessEqual(off, 0.01 * np.abs(expected).max(), leaf)
        self.assertEqual(ops.packing(found.weights["moe.down"])[:4], "INT8")


class HarmonyTest(parameterized.TestCase):
    WORDS = ("analysis", "final", "assistant", "let", "me", "see", "4", "!", "json", "to=x")

    def answer(self, text: str, max_tokens: int = 100, stop: tuple = ()) -> AnswerBuilder:
        marks = ("start", "channel", "message", "end", "return", "constrain")
        names = [f"<|{name}|>" for name in marks]
        vocab = {word: i for i, word in enumerate((*self.WORDS, *names))}
        encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, names[0]))
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        encoder.add_special_tokens(names)
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        encoder.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer.from_directory(folder)
        builder = AnswerBuilder(
            tokenizer, stop=stop, eos_ids=(vocab["<|return|>"],), max_tokens=max_tokens
        )
        for token in tokenizer.encode(text, add_special_tokens=False)[:max_tokens]:
            builder.push(token)
        return builder

    def test_the_text_is_the_final_channel(self):
        thought = "<|channel|> analysis <|message|> let me see <|end|>"
        said = "<|start|> assistant <|channel|> final <|message|> 4 ! <|return|>"
        found = self.answer(f"{thought} {said}")
        self.assertEqual((found.text, found.finish_reason), ("4 !", "eos"))
        self.assertEqual(found.thoughts, "let me see")
        self.assertLen(found.tokens, 15)
        # Stop strings are the text's, not the thoughts'.
        self.assertEqual(self.answer(f"{thought} {said}", stop=("see", "!")).text, "4 ")
        cut = self.answer(f"{thought} {said}", max_tokens=5)
        self.assertEqual((cut.text, cut.thoughts), ("", "let me"))

    @parameterized.parameters(
        ("<|channel|> final <|constrain|> json <|message|> 4 <|return|>", "4"),
        ("<|start|> assistant <|channel|> final <|constrain|> json <|message|> 4", "4"),
        ("<|start|> assistant <|message|> 4", "4"),
        ("<|start|> assistant to=x <|message|> 4", ""),
        ("<|start|> assistant <|channel|> analysis to=x <|constrain|> json <|message|> 4", ""),
    )
    def test_headers(self, text, shown):
        found = self.answer(text)
        self.assertEqual((found.text, found.thoughts), (shown, ""))

    def test_a_text_without_channels_is_whole(self):
        self.assertEqual(self.answer("let me see 4").text, "let me see 4")
        self.assertEqual(self.answer("4 <|message|> see").text, "4 see")
