"""Scaled rotary embedding against transformers: frequencies, logits of prompts, and of decode."""

import functools
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from absl.testing import parameterized
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moejax import Engine
from moejax.errors import MoejaxError
from moejax.inference import chunking as chunks
from moejax.inference.generation import GenerationSettings
from moejax.models.config import ModelConfig
from moejax.models.hf.config import model_config, to_hf_config
from moejax.models.rope import _scaled_frequencies, model_angles
from tests.hf_checkpoints import FAMILIES, TinyCheckpoint, reference_model, write_random_checkpoint
from tests.hf_defaults_test import FULL
from tests.numpy_model import RELATIVE_ERROR, relative_errors

ORIGINAL = 32  # positions
# max_position_embeddings: of the first three the scaled context, of the others the original one.
LONGEST = {"yarn": 128, "llama3": 128, "longrope": 128, "linear": 48, "dynamic": 48}
LENGTHS = (30, 90)  # of prompts: within the original positions and beyond
NUM_DECODED = 20  # of which some are beyond, too


def scaling(kind: str, num_pairs: int, **changed: Any) -> dict[str, Any]:
    """A rope of transformers 5, of a kind."""
    original = {"original_max_position_embeddings": ORIGINAL}
    fields: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 3.0},
        "yarn": {"factor": 4.0, **original},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        "longrope": {
            "factor": 4.0, "short_factor": [1.0 + 0.1 * i for i in range(num_pairs)],
            "long_factor": [1.5 + i for i in range(num_pairs)], **original,
        },
    }  # fmt: skip
    return {"rope_type": kind, "rope_theta": 1e3, **fields[kind], **changed}


def written(family: str, rope: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Fields of a config.json."""
    fields = {name: value for name, value in FULL[family].items() if name != "rope_theta"}
    return {"model_type": family, **fields, "rope_parameters": rope, **changed}


class FrequenciesTest(parameterized.TestCase):
    def compare(self, family: str, rope: dict[str, Any], **changed: Any) -> None:
        fields = json.loads(json.dumps(written(family, rope, **changed)))
        ours = model_config(fields)
        theirs = FAMILIES[family][0](**fields)
        assert ours.rope_scaling is not None
        compute = ROPE_INIT_FUNCTIONS[ours.rope_scaling.kind]
        for is_long in (False, True):
            length = 10**4 if is_long and ours.rope_scaling.kind == "longrope" else None
            expected, factor = compute(theirs, device="cpu", seq_len=length)
            found = _scaled_frequencies(
                ours.rotary_dim, ours.rope_theta, ours.rope_scaling, is_long=is_long
            )
            np.testing.assert_array_max_ulp(found, expected.numpy(), maxulp=1)
            np.testing.assert_allclose(ours.rope_scaling.rotation_scale, factor, rtol=1e-12)

    @parameterized.product(
        family=("qwen3_moe", "mixtral", "qwen3_next", "deepseek_v3"),
        kind=("linear", "dynamic", "yarn", "llama3", "longrope"),
    )
    def test_every_kind_of_every_family(self, family, kind):
        pairs = {"qwen3_next": 6, "deepseek_v3": 4}.get(family, 12)
        self.compare(family, scaling(kind, pairs))

    @parameterized.parameters(
        {"truncate": False}, {"beta_fast": 9, "beta_slow": 2.5}, {"attention_factor": 1.25},
        {"factor": 1.0}, {"mscale": 0.8, "mscale_all_dim": 0.4}, {"mscale": 0.8},
        {"beta_slow": 0.001}, {"beta_fast": 0},
    )  # fmt: skip
    def test_settings_of_yarn(self, **changed):
        self.compare("qwen3_moe", scaling("yarn", 12, **changed))

    def test_as_the_card_of_qwen3_has_it(self):
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        sizes = {"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
        fields = {"model_type": "qwen3_moe", **FULL["qwen3_moe"], **sizes, "rope_scaling": rope}
        self.compare("qwen3_moe", {**rope, "rope_theta": 1e6}, **sizes)
        config = model_config(fields)
        self.assertEqual(config.context_limit, 131072)
        rope["type"] = rope.pop("rope_type")  # as older versions spell it
        self.assertEqual(model_config(fields), config)
        self.assertEqual(
            config, model_config(written("qwen3_moe", {**rope, "rope_theta": 1e6}, **sizes))
        )

    @parameterized.parameters("linear", "dynamic", "yarn", "llama3", "longrope")
    def test_way_back(self, kind):
        for family, pairs in (("qwen3_moe", 12), ("qwen3_next", 6), ("deepseek_v3", 4)):
            config = model_config(written(family, scaling(kind, pairs), decoder_sparse_step=1))
            fields = json.loads(json.dumps(to_hf_config(config, dtype="float32")))
            self.assertEqual(model_config(fields), config)
            whole = transformers.AutoConfig.for_model(**fields).to_dict()
            self.assertEqual(model_config(whole), config)
            for name in ("rope_scaling", "rope_parameters"):
                del fields[name]
                # Each spelling says it all.
                other = json.loads(json.dumps(to_hf_config(config, dtype="float32")))
                other.pop(name)
                self.assertEqual(model_config(other), config)

    @parameterized.parameters(
        ("linear", {"factor": None}, "the factor of rope scaling of type 'linear' is missing"),
        ("llama3", {"low_freq_factor": None}, "the low_freq_factor of rope scaling of type"),
        ("llama3", {"low_freq_factor": 4.0}, "low_freq_factor 4.0 and high_freq_factor 4.0 are no"),
        ("longrope", {"long_factor": None}, "the long_factor of rope scaling of type 'longrope'"),
        ("longrope", {"long_factor": [1.0]}, "1 long_factors of longrope for 12 pairs"),
        ("longrope", {"short_factor": 3.0}, "short_factor is 3.0, expected a list of numbers"),
        ("longrope", {"short_factor": ["a"]}, "short_factor is 'a', expected a positive finite"),
        ("yarn", {"factor": "4"}, "factor is '4', expected a positive finite number"),
        ("yarn", {"truncate": 3}, "truncate is 3, expected true or false"),
        ("yarn", {"rope_theta": 1.0}, "rope_theta 1.0 with YaRN, which takes its logarithm"),
        ("yarn", {"rope_type": "mrope"}, "rope_parameters of type 'mrope'"),
        ("yarn", {"type": "linear", "rope_type": None}, "rope_parameters of type None"),
    )
    def test_refused(self, kind, changed, message):
        with self.assertRaisesRegex((MoejaxError, ValueError), message) as caught:
            model_config(written("qwen3_moe", scaling(kind, 12, **changed)))
        self.assertNotIn("\n", str(caught.exception))


def angles_of_transformers(config: Any, length: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions `start`..`length`, of a fresh model."""
    rotary = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(start, length)[None])
    half = cos.shape[-1] // 2
    return cos[..., :half].numpy(), sin[..., :half].numpy()


class AnglesTest(parameterized.TestCase):
    @parameterized.parameters("dynamic", "longrope")
    def test_each_row_turns_by_its_own_length(self, kind):
        longest = {"max_position_embeddings": LONGEST[kind]}
        fields = json.loads(json.dumps(written("qwen3_moe", scaling(kind, 12), **longest)))
        ours, theirs = model_config(fields), transformers.Qwen3MoeConfig(**fields)
        lengths = np.array([1, 31, 32, 33, 48, 49, 90], np.int32)
        positions = np.broadcast_to(np.arange(90, dtype=np.int32), (len(lengths), 90))
        found = model_angles(ours, positions, lengths)
        decoded = model_angles(ours, lengths[:, None] - 1)
        for row, length in enumerate(lengths):
            for some, one in zip(found, angles_of_transformers(theirs, length, 0), strict=True):
                np.testing.assert_allclose(some[row, :length], one[0], rtol=0, atol=3e-5)
            expected = angles_of_transformers(theirs, length, length - 1)
            for some, one in zip(decoded, expected, strict=True):
                np.testing.assert_allclose(some[row], one[0], rtol=0, atol=3e-5)


def load(directory: Path, family: str, kind: str) -> tuple[Engine, ModelConfig, Path]:
    """An engine of a tiny checkpoint with a kind of rope, its config, and where it is."""
    pairs = {"qwen3_next": 2, "deepseek_v3": 3}.get(family, 4)
    num_layers = {"qwen3_next": 2, "deepseek_v3": 2}.get(family, 1)
    fields = {
        "num_hidden_layers": num_layers, "max_position_embeddings": LONGEST[kind],
        "rope_parameters": scaling(kind, pairs),
    }  # fmt: skip
    if family == "mixtral":
        fields["head_dim"] = 8  # what transformers 5.23 cannot do without where rope is scaled
    path = directory / f"{family}_{kind}"
    write_random_checkpoint(TinyCheckpoint(family=family, fields=fields), path, seed=5)
    engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
    return engine, engine.config, path


class LogitsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.load = functools.cache(functools.partial(load, directory))

    def compare(self, family: str, kind: str) -> None:
        engine, config, path = type(self).load(family, kind)
        rng = np.random.default_rng(0)
        for length in LENGTHS:
            model = reference_model(path)  # fresh: "dynamic" remembers the longest sequence
            tokens = rng.integers(0, config.vocab_size, (1, length))
            with torch.no_grad():
                run = model(torch.as_tensor(tokens), use_cache=True)
            found = engine.logits(tokens)
            self.assertLess(relative_errors(found, run.logits.numpy()).max(), RELATIVE_ERROR)
            if length == LENGTHS[-1]:
                with mock.patch.object(chunks, "MAX_PREFILL_LENGTH", 32):
                    in_chunks = engine.logits(tokens)
                self.assertLess(relative_errors(in_chunks, found).max(), RELATIVE_ERROR)
            self.compare_decode(engine, model, tokens, run.past_key_values)

    def compare_decode(self, engine: Engine, model: Any, tokens: np.ndarray, cache: Any) -> None:
        settings = [GenerationSettings(max_new_tokens=NUM_DECODED, ignore_eos=True)]
        runner, length = engine._runner, tokens.shape[1]
        session = runner.prefill(
            tokens.tolist(), LENGTHS[-1] + NUM_DECODED, settings, (), engine.config.vocab_size
        )
        token = np.array(session.emitted.tokens)
        is_named_cache = "cache" in inspect.signature(model.forward).parameters  # 5.24 and later
        keyword = "cache" if is_named_cache else "past_key_values"
        for step in range(NUM_DECODED - 1):
            with torch.no_grad():
                run = model(
                    torch.as_tensor(token, dtype=torch.int64), **{keyword: cache},
                    position_ids=torch.tensor([[length + step]]), use_cache=True,
                )  # fmt: skip
            cache = run.past_key_values
            expected = run.logits[0, -1].log_softmax(-1).numpy()
            runner.decode(session, 1, 1)
            token = np.array(session.emitted.tokens)
            logprobs = session.emitted.logprobs
            found = np.zeros_like(expected)
            found[np.asarray(logprobs.top_ids)[0, 0]] = np.asarray(logprobs.top)[0, 0]
            self.assertLess(relative_errors(found, expected), RELATIVE_ERROR)

    @parameterized.parameters(("qwen3_moe", "yarn"), ("qwen3_moe", "dynamic"))
    @pytest.mark.slow
    def test_logits_are_those_of_transformers(self, family, kind):
        self.compare(family, kind)

    @parameterized.parameters(
        ("qwen3_moe", "linear"), ("qwen3_moe", "llama3"), ("qwen3_moe", "longrope"),
        ("qwen3_next", "yarn"), ("qwen3_next", "dynamic"), ("mixtral", "yarn"),
        ("mixtral", "dynamic"), ("deepseek_v3", "linear"), ("deepseek_v3", "dynamic"),
    )  # fmt: skip
    @pytest.mark.slow
    def test_other_kinds(self, family, kind):
        self.compare(family, kind)
