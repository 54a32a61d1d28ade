"""Profiles of experts on a tiny model: what is counted, the file, the command."""

import functools
import itertools
import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moejax import profile_experts
from moejax.engine import Engine
from moejax.errors import MoejaxError
from moejax.evaluation.expert_profile import Counting, profile
from moejax.inference import chunking as chunks
from moejax.inference.runner import Runner
from moejax.models.transformer import forward, merge_weights, model_definition
from moejax.policies.buddy_gates import ENTROPY_BINS
from moejax.policies.buddy_lists import alpha_schedule
from moejax.routing import profile_file as buddies
from moejax.routing.profile_file import ExpertActivity, load_buddies, profile_of, save_buddies
from tests import buddymoe_reference as paper
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase

TEXT = "the quick brown fox jumps over the lazy dog, and pack my box with jugs. " * 3
WINDOW, BATCH = 32, 2
EXPERTS = tiny_engine.CONFIG.num_experts


class ProfileTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = cls.folder / "tiny"
        cls.engine: Engine = tiny_engine.load_tiny_engine(cls.checkpoint)
        cls.runner = Runner(cls.engine.config, cls.engine.weights, cls.engine.device)
        cls.ids = np.asarray(cls.engine.tokenizer.encode(TEXT))
        cls.text = cls.folder / "text.txt"
        cls.text.write_text(TEXT)
        model = merge_weights(model_definition(cls.engine.config), cls.engine.weights)
        cls.windows = []  # each window's probabilities and ids [M, T, ...], by another path
        whole = jax.jit(lambda tokens: forward(model, tokens)[1])
        for first in range(0, len(cls.ids) - 1, WINDOW):
            tokens = cls.ids[:-1][first : first + WINDOW]
            padded = np.zeros((1, WINDOW), np.int32)
            padded[0, : len(tokens)] = tokens  # attention is causal: what follows changes nothing
            routing = whole(jnp.asarray(padded))
            cls.windows.append(
                [np.asarray(a)[:, : len(tokens)] for a in (routing.probabilities, routing.ids)]
            )

    @classmethod
    @functools.cache
    def counted(cls, **how: Any) -> ExpertActivity:
        return profile(cls.runner, cls.ids, WINDOW, BATCH, Counting(**how))

    @parameterized.parameters({}, {"warmup": 5, "warmup_weight": 0.25, "temperature": 0.8})
    def test_counts_are_those_of_loops(self, **how):
        counting = Counting(**how)
        found = self.counted(**how)
        layers = len(self.engine.config.moe_layers)
        expected = {
            "activations": np.zeros((layers, EXPERTS)),
            "coactivations": np.zeros((layers, EXPERTS, EXPERTS)),
            "weighted": np.zeros((layers, EXPERTS, EXPERTS)),
            "following": np.zeros((layers, EXPERTS, EXPERTS)),
        }
        entropies, total = [[] for _ in range(layers)], 0.0
        self.assertNotEqual(len(self.windows) % BATCH, 0)  # a batch with an empty window
        for probabilities, ids in self.windows:
            for layer, position in np.ndindex(ids.shape[:2]):
                weight = counting.warmup_weight if position < counting.warmup else 1.0
                total += weight * (layer == 0)
                p, chosen = probabilities[layer, position], ids[layer, position]
                of = dict(zip(chosen.tolist(), p[chosen] / p[chosen].sum(), strict=True))
                if layer + 1 < layers:
                    for i, j in itertools.product(of, ids[layer + 1, position].tolist()):
                        expected["following"][layer, i, j] += weight
                for i in of:
                    expected["activations"][layer, i] += weight
                    for j in set(of) - {i}:
                        expected["coactivations"][layer, i, j] += weight
                        expected["weighted"][layer, i, j] += weight * min(of[i], of[j])
                entropies[layer].append((paper.entropy(p, chosen, counting.temperature), weight))
        self.assertAlmostEqual(float(found.tokens), total)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5, err_msg=name)
        for layer in range(layers):
            values, weights = map(np.asarray, zip(*entropies[layer], strict=True))
            edges = np.linspace(0, 1, ENTROPY_BINS + 1)
            histogram = np.histogram(values, edges, weights=weights)[0]
            # Rounding may move a token to the next bin.
            np.testing.assert_allclose(
                np.cumsum(found.entropies[layer]), np.cumsum(histogram), atol=1.01
            )
        self.assertIsNone(found.cosines)

    @pytest.mark.slow
    def test_neither_batches_nor_chunks_change_the_counts(self):
        once = self.counted()
        with mock.patch.object(chunks, "MAX_PREFILL_LENGTH", 16):
            again = profile(self.runner, self.ids, WINDOW, 3, Counting())
        np.testing.assert_array_equal(again.activations, once.activations)
        np.testing.assert_array_equal(again.coactivations, once.coactivations)
        np.testing.assert_array_equal(again.following, once.following)
        np.testing.assert_allclose(again.weighted, once.weighted, rtol=1e-5)

    def test_outputs_are_compared(self):
        found = self.counted(outputs=True)
        np.testing.assert_array_equal(found.activations, self.counted().activations)
        inputs = self.inputs_of_experts()
        gate_up, down = (
            np.asarray(self.engine.weights[name], np.float64)
            for name in ("moe.gate_up", "moe.down")
        )
        for layer, x in enumerate(inputs):
            hidden = np.einsum("nd,ekd->enk", x, gate_up[layer])
            gate, up = np.split(hidden, 2, axis=-1)
            outputs = np.einsum("enf,edf->end", gate / (1 + np.exp(-gate)) * up, down[layer])
            unit = outputs / np.linalg.norm(outputs, axis=-1, keepdims=True)
            cosines = np.einsum("ind,jnd->nij", unit, unit)
            expected = np.zeros((EXPERTS, EXPERTS))
            ids = np.concatenate([ids[layer] for _, ids in self.windows])
            for n, i in np.argwhere((ids[:, :, None] == np.arange(EXPERTS)).any(axis=1)):
                expected[i] += cosines[n, i]
            np.testing.assert_allclose(found.cosines[layer], expected, rtol=1e-3, atol=1e-3)

    def inputs_of_experts(self) -> list[np.ndarray]:
        """[N, D] of each layer, of all windows one after the other."""
        model = merge_weights(model_definition(self.engine.config), self.engine.weights)
        real = type(model.moe).__call__

        def whole(tokens: jax.Array) -> list[jax.Array]:
            kept = []

            def keep(moe: Any, x: jax.Array, *rest: Any) -> Any:
                kept.append(x)
                return real(moe, x, *rest)

            with mock.patch.object(type(model.moe), "__call__", keep):
                forward(model, tokens)
            return kept

        rows = -(-(len(self.ids) - 1) // WINDOW)
        padded = np.zeros(rows * WINDOW, np.int32)
        padded[: len(self.ids) - 1] = self.ids[:-1]
        inputs = jax.jit(whole)(jnp.asarray(padded.reshape(rows, WINDOW)))
        return [np.asarray(x, np.float64)[: len(self.ids) - 1] for x in inputs]

    def profiled(self, activity: ExpertActivity | None = None, **options: Any) -> Any:
        options = {
            "source": "coactivations", "smoothing": 1.0, "alpha": 0.9, "max_buddies": 4,
            "percentile": 20, **options,
        }  # fmt: skip
        return profile_of(activity or self.counted(), {"tokens": 7}, **options)

    def test_lists_of_each_source(self):
        activity = self.counted(outputs=True)
        for source, counts in (
            ("coactivations", activity.coactivations), ("weighted", activity.weighted)
        ):  # fmt: skip
            found = self.profiled(activity, source=source, smoothing=0.5)
            for layer, of in enumerate(np.asarray(counts, np.float64)):
                expected = paper.buddies(paper.conditional(of, 0.5), 0.9, 4)
                lists = [[j for j in row if j >= 0] for row in found.lists.ids[layer].tolist()]
                self.assertEqual(lists, expected)
        found = self.profiled(activity, source="outputs", alpha=1e-6)
        means = np.asarray(activity.cosines) / np.maximum(activity.activations, 1)[:, :, None]
        means[:, np.arange(EXPERTS), np.arange(EXPERTS)] = -2
        seen = np.asarray(activity.activations) > 0
        np.testing.assert_array_equal(found.lists.ids[..., 0][seen], means.argmax(-1)[seen])
        best = np.take_along_axis(found.gains, found.lists.ids[..., :1], axis=-1)[..., 0]
        np.testing.assert_allclose(best[seen], means.max(-1)[seen], rtol=1e-6)
        self.assertIsNone(self.profiled().gains)
        with self.assertRaisesRegex(ValueError, "outputs were not compared"):
            self.profiled(source="outputs")

    def test_the_file_holds_all(self):
        path = self.folder / "round.safetensors"
        for outputs in (False, True):
            written = self.profiled(self.counted(outputs=outputs))
            save_buddies(path, written)
            self.assertEqual([p.name for p in self.folder.glob("round*")], [path.name])
            read = load_buddies(path, self.engine.config)
            jax.tree.map(
                np.testing.assert_array_equal,
                (read.lists, read.tau, read.activity),
                (written.lists, written.tau, written.activity),
            )
            self.assertEqual(read.provenance, written.provenance)
        self.assertEqual(read.provenance["lists"]["alpha"], 0.9)
        self.assertEqual(load_file(path)["buddies"].shape, (2, EXPERTS, 4))

    def test_files_that_are_refused(self):
        path = self.folder / "bad.safetensors"
        save_buddies(path, self.profiled())
        good, config = load_file(path), self.engine.config
        metadata = {"format": buddies.FORMAT, "provenance": "{}"}

        def refused(said: str, tensors: Any = good, of: Any = config, **changed: str) -> None:
            save_file(tensors, path, metadata | changed)
            with self.assertRaisesRegex(MoejaxError, said):
                load_buddies(path, of)

        refused(r"no profile of format 'moejax buddies 1' but 'pt'; profile the", format="pt")
        refused("does not say where it comes from", provenance="{")
        refused("does not say where it comes from", provenance="[" * 100_000)
        without = {name: good[name] for name in good if name not in ("q", "weighted")}
        refused("has no q, weighted; profile", without)
        refused(r"tau is float32\[3\], not float32\[2\]", good | {"tau": np.zeros(3, np.float32)})
        refused(r"buddies is float32\[", good | {"buddies": good["buddies"].astype(np.float32)})
        refused(r"buddies is of shape \[2\], not", good | {"buddies": np.zeros(2, np.int32)})
        refused("names an expert", good | {"buddies": good["buddies"] + EXPERTS})
        other = mock.Mock(moe_layers=(0, 1, 2), num_experts=EXPERTS)
        refused("a model with 2 sparse layers of 8 experts, this one has 3 of 8", of=other)
        path.write_bytes(path.read_bytes()[:-9])
        with self.assertRaisesRegex(MoejaxError, "truncated"):
            load_buddies(path)
        with self.assertRaisesRegex(MoejaxError, "no profile of experts .*none.safetensors"):
            load_buddies(self.folder / "none.safetensors")

    def run_main(self, **fields: Any) -> tuple[int, str, str]:
        fields = {"checkpoint": self.checkpoint, "text": self.text, "window": WINDOW, **fields}
        return commands.run(profile_experts.COMMAND, **fields)

    def test_the_command(self):
        status, out, err = self.run_main(
            batch_size=BATCH, alpha=0.9, alpha_last=0.5, max_buddies=5, percentile=20
        )
        self.assertEqual(status, 0, err)
        path = self.checkpoint / "buddies.safetensors"
        self.assertEqual(out.count("\n"), 1)
        self.assertIn(f"2 layers of 8 experts, {len(self.ids)} tokens of text.txt; ", out)
        self.assertIn(f"written to {path}", out)
        self.assertIn("profiling", err)
        found = load_buddies(self.checkpoint, self.engine.config)  # beside the checkpoint
        expected = self.profiled(
            alpha=alpha_schedule(0.9, 0.5, 2), smoothing=1.0, max_buddies=5, percentile=20
        )
        jax.tree.map(np.testing.assert_array_equal, found.lists, expected.lists)
        np.testing.assert_array_equal(found.tau, expected.tau)
        of = found.provenance
        self.assertEqual(of["lists"]["alpha"], [0.9, 0.5])
        self.assertEqual(
            (of["tokens"], of["window"], of["experts_per_token"]), (len(self.ids), 32, 2)
        )
        self.assertEqual(of["text"]["source"], "text.txt")
        self.assertContainsSubset(
            {"config_sha256", "tokenizer_sha256", "versions", "device", "date", "command"}, of
        )
        Engine.from_pretrained(self.checkpoint, platform="cpu", progress=False)  # still loads
        self.assertEqual(json.loads(json.dumps(of)), of)

    @parameterized.parameters(
        ({"alpha": 0.0}, "alpha=0.0 must be above 0, at most 1"),
        ({"alpha_last": 1.5}, "alpha_last=1.5 must be from 0 to 1"),
        ({"source": "magic"}, "source='magic' must be one of coactivations, weighted, outputs"),
        ({"max_buddies": 0}, "max_buddies=0 must be at least 1"),
        ({"percentile": 101.0}, "percentile=101.0 must be from 0 to 100"),
        ({"warmup_weight": 2.0}, "warmup_weight=2.0 must be from 0 to 1"),
        ({"warmup": 32}, "nothing is counted: warmup=32 of weight 0 is all of every window of 32"),
        ({"window": 257}, "window=257 is beyond the model's context of 256"),
        ({"text": "none.txt"}, "there is no text file none.txt"),
        ({"output": "no/such/x.safetensors"}, "output no/such/x.safetensors lies in no/such"),
        ({"output": __file__}, "profile_experts_test.py is there and is no profile; name another"),
        ({"checkpoint": "no/where"}, "no/where"),
    )
    def test_what_is_refused(self, fields, said):
        status, out, err = self.run_main(**fields)
        self.assertEqual((status, out), (1, ""))
        self.assertIn(said, err)
