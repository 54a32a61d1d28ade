"""Weights and logits that are NaN, infinite or huge: one error, and other rows live on."""

import concurrent.futures
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.checkpoints.safetensors_reader import check_range, in_range, stored_tensors
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits
from moejax.inference.steps import _names_a_token
from tests import slow, tiny_engine
from tests.folder_case import FolderTestCase
from tests.serving_case import served, tiny_chat_engine

NO_TOKEN = "the model's logits are NaN or infinite"
PROMPT = list(range(40, 52))
BAD = 5  # a token whose embedding is wrong
TENSORS = (
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    "model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.self_attn.k_norm.weight", "model.layers.1.mlp.gate.weight",
    "model.layers.0.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight",
    "model.layers.1.mlp.experts.7.down_proj.weight",
)  # fmt: skip


def poisoned(engine: Engine, value: float) -> Engine:
    """The engine with another embedding of one token."""
    engine.weights["embed"] = engine.weights["embed"].at[BAD].set(value)
    engine._runner.weights = engine.weights
    return engine


class LoadTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        tiny_engine.load_tiny_engine(cls.folder)
        cls.file = cls.folder / "model.safetensors"
        tensors = safetensors.numpy.load_file(cls.file)  # saved by others, without checksums
        safetensors.numpy.save_file(tensors, cls.file)
        cls.content = cls.file.read_bytes()

    def setUp(self):
        super().setUp()
        self.file.write_bytes(self.content)

    def put(self, name: str, value: float, place: int = -1) -> None:
        """One number of a tensor, in place."""
        tensor = stored_tensors(self.folder)[name]
        content = bytearray(self.content)
        numbers = np.frombuffer(content, tensor.dtype, tensor.num_bytes // 4, tensor.offset)
        numbers[place] = value
        self.file.write_bytes(content)

    @slow.repeats(lambda name: name)
    @parameterized.product(name=TENSORS, value=(np.nan, -np.inf, 1e30))
    def test_a_checkpoint_is_refused_by_the_tensors_name(self, name, value):
        self.put(name, value)
        last = ", ".join(str(n - 1) for n in stored_tensors(self.folder)[name].shape)
        wrong = re.escape(f"{name} holds {np.float32(value)!s} at [{last}]; with NaN, infinite or ")
        whole: dict[str, Any] = {}
        for how in (whole, {"limits": Limits(slots=3)}):
            with self.assertRaisesRegex(MoejaxError, wrong):
                Engine.from_pretrained(self.folder, platform="cpu", progress=False, **how)

    @pytest.mark.slow
    def test_a_place_is_said_of_whole_tensors_alone(self):
        values = np.zeros((8, 6), np.float32)
        values[7, 4] = np.inf
        path = self.folder / "model.safetensors"
        safetensors.numpy.save_file({"a": values}, path)
        [tensor] = stored_tensors(self.folder).values()
        with self.assertRaisesRegex(MoejaxError, r"a holds inf at \[7, 4\]; with"):
            check_range(tensor, values)
        for of, own in (
            (tensor.part(4, (4, 6)), values[4:]),
            (tensor.columns(3, 6), values[:, 3:]),
        ):
            with self.assertRaisesRegex(MoejaxError, "a holds inf; with"):
                check_range(of, own)

    def test_experts_of_the_disk_are_refused_when_they_are_read(self):
        self.put("model.layers.1.mlp.experts.7.down_proj.weight", np.nan)
        limits = Limits(slots=2, transient=2, host_gib=15 * 6144 / 2**30)
        with self.assertRaisesRegex(MoejaxError, "experts.7.down_proj.weight holds nan at"):
            engine = Engine.from_pretrained(
                self.folder, platform="cpu", progress=False, limits=limits
            )
            engine.logits(np.arange(160)[None])  # which need all experts

    @parameterized.parameters("float32", "float16", "bfloat16", "float8_e4m3fn")
    def test_every_code_of_small_floats(self, name):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        word = np.dtype(f"uint{8 * dtype.itemsize}")
        codes = np.arange(2 ** min(16, 8 * dtype.itemsize)).astype(word)
        codes = codes << (16 if dtype.itemsize == 4 else 0)
        values = codes.view(dtype)
        for value in values[:: 1 if dtype.itemsize == 1 else 37]:
            exact = float(value)
            self.assertEqual(in_range("w", np.full(3, value)), abs(exact) < 2**63, exact)
        self.assertTrue(in_range("w", np.zeros((0, 3), dtype)))
        self.assertTrue(in_range("w", np.full(3, 2**31 - 1, np.int32)))


class LogitsTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.whole = tiny_engine.load_tiny_engine(cls.folder)
        cls.addClassCleanup(cls.whole.close)

    def engine(self, **how: Any) -> Engine:
        """One engine of the class, whose embeddings are mended, or one that is loaded as told."""
        if not how:
            self.addCleanup(self.whole.weights.update, embed=self.whole.weights["embed"])
            return self.whole
        engine = tiny_engine.load_tiny_engine(self.folder, **how)
        self.addCleanup(engine.close)
        return engine

    def test_flag(self):
        """Every mix of four logits, as torch draws a token of their softmax or refuses to."""
        numbers = (-np.inf, -3e38, 0.5, 3e38, np.inf, np.nan)
        logits = np.array(list(itertools.product(numbers, repeat=4)), np.float32)
        drawn = []
        for row in torch.from_numpy(logits):
            try:
                torch.multinomial(torch.softmax(row, -1), 1)
                drawn.append(True)
            except RuntimeError as error:
                self.assertIn("nan` or element < 0", str(error))
                drawn.append(False)
        self.assertIn(True, drawn)
        np.testing.assert_array_equal(jax.jit(_names_a_token)(jnp.asarray(logits)), drawn)
        equal_or_masked = jnp.asarray([[0.0, 0.0], [-jnp.inf, 0.0], [-jnp.inf, -jnp.inf]])
        np.testing.assert_array_equal(_names_a_token(equal_or_masked), [True, True, False])

    def test_generate_and_stream_raise(self):
        engine = self.engine()
        for value, temperature in itertools.product((np.nan, np.inf), (0.0, 1.0)):
            poisoned(engine, value)
            how = {"max_new_tokens": 3, "temperature": temperature}
            with self.assertRaisesRegex(MoejaxError, f"^{NO_TOKEN}"):
                engine.generate([[*PROMPT, BAD]], **how)
            with self.assertRaisesRegex(MoejaxError, f"^prompt 2 of 2: {NO_TOKEN}"):
                engine.generate([PROMPT, [*PROMPT, BAD]], **how)
            with self.assertRaisesRegex(MoejaxError, NO_TOKEN):
                list(engine.stream([*PROMPT, BAD], **how))
            self.assertLen(engine.generate([PROMPT], **how)[0].tokens, 3)

    @pytest.mark.slow
    def test_an_answer_that_meets_such_a_token_ends_there(self):
        engine = self.engine()
        plain = engine.generate([PROMPT], max_new_tokens=8, ignore_eos=True)[0].tokens
        place = next(i for i, token in enumerate(plain) if token not in PROMPT)
        engine.weights["embed"] = engine.weights["embed"].at[plain[place]].set(np.nan)
        answer = engine.stream(PROMPT, max_new_tokens=8, ignore_eos=True)
        self.assertEqual([next(answer).token for _ in plain[: place + 1]], plain[: place + 1])
        with self.assertRaisesRegex(MoejaxError, NO_TOKEN):
            next(answer)

    def test_log_likelihoods_raise(self):
        engine = poisoned(self.engine(), np.nan)
        with self.assertRaisesRegex(MoejaxError, f"pair 1: {NO_TOKEN}"):
            engine.scorer.of_tokens([(PROMPT, [1, 2]), ([*PROMPT, BAD], [3])])


class ServerTest(absltest.TestCase):
    def test_one_request_gets_the_error_and_its_neighbours_their_answers(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        engine = tiny_chat_engine(folder)
        self.addCleanup(engine.close)
        bad = engine.tokenizer.decode([BAD])
        body = {"max_tokens": 8, "temperature": 0}
        with served(engine) as server:
            status, alone, _ = server.post("/v1/completions", {"prompt": "the fox", **body})
            self.assertEqual(status, 200)
            poisoned(engine, np.nan)
            prompts = ["the fox", f"the fox{bad}", "the fox"]
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                posts = [
                    pool.submit(server.post, "/v1/completions", {"prompt": prompt, **body})
                    for prompt in prompts
                ]
                found = [post.result() for post in posts]
            self.assertEqual([status for status, _, _ in found], [200, 500, 200])
            error = found[1][1]["error"]
            self.assertEqual(error["code"], "engine_error")
            self.assertIn(NO_TOKEN, error["message"])
            for place in (0, 2):
                text = found[place][1]["choices"][0]["text"]
                self.assertEqual(text, alone["choices"][0]["text"])
            self.assertEqual(server.get("/health")[0], 200)
