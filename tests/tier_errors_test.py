"""Output errors of experts in tiers: sums beside loops, the bound, the file, the commands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax import evaluate, generate, profile_experts
from moejax.checkpoints import open_checkpoint
from moejax.errors import MoejaxError
from moejax.evaluation.expert_errors import _describe_errors, load_tiers, measure_errors
from moejax.experts.ledger import Ledger, TierLedger
from moejax.experts.tiering import Tiering
from moejax.inference.runner import Runner
from moejax.models.transformer import forward, merge_weights, model_definition
from moejax.routing import profile_file
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase
from tests.packed_weights import values_of

TEXT = "the quick brown fox jumps over the lazy dog, and pack my box with jugs. " * 2
WINDOW, BATCH, TIERS = 32, 2, ("stored", "int4", "int2")
EXPERTS, LAYERS = tiny_engine.CONFIG.num_experts, 2
SKIPPED, SUBSTITUTED = len(TIERS), len(TIERS) + 1


def outputs_of(gate_up: np.ndarray, down: np.ndarray, x: np.ndarray) -> np.ndarray:
    gate, up = np.split(np.einsum("nd,ekd->nek", x, gate_up), 2, axis=-1)
    return np.einsum("nef,edf->ned", gate / (1 + np.exp(-gate)) * up, down)


class TierErrorsTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = cls.folder / "tiny"
        engine = cls.engine = tiny_engine.load_tiny_engine(cls.checkpoint)
        cls.ids = np.asarray(engine.tokenizer.encode(TEXT))
        tiering = Tiering(tiers=TIERS, quantizer="rtn", group_size=16)
        cls.tiers = load_tiers(
            open_checkpoint(str(cls.checkpoint)), tiering, engine.weights, engine.device
        )
        cls.forms = {
            name: [values_of(w) for w in pair or cls.own(engine.weights)]
            for name, pair in cls.tiers.items()
        }
        cls.buddies = np.tile((np.arange(EXPERTS) + 1) % EXPERTS, (LAYERS, 1))
        cls.buddies[:, 3] = -1
        runner = Runner(engine.config, engine.weights, engine.device)
        cls.found = measure_errors(runner, cls.tiers, cls.buddies, cls.ids, WINDOW, BATCH)
        model = merge_weights(model_definition(engine.config), engine.weights)
        num_windows = -(-(len(cls.ids) - 1) // WINDOW)
        padded = np.zeros(num_windows * WINDOW, np.int32)
        padded[: len(cls.ids) - 1] = cls.ids[:-1]
        kept = jax.jit(lambda t: forward(model, t, record=lambda x, routing: (x, routing))[1])(
            jnp.asarray(padded.reshape(num_windows, WINDOW))
        )
        x, routing = jax.device_get(kept)
        cls.layers = [
            [np.asarray(a[layer])[: len(cls.ids) - 1] for a in (x, routing.ids, routing.weights)]
            for layer in range(LAYERS)
        ]

    @staticmethod
    def own(weights: Any) -> list[Any]:
        return [weights[name] for name in ("moe.gate_up", "moe.down")]

    def losses(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """All experts' outputs float64[N, E, D] and what each form loses of them, [K, N, E, D]."""
        x = self.layers[layer][0].astype(np.float64)
        forms = {
            name: outputs_of(*(part[layer].astype(np.float64) for part in pair), x)
            for name, pair in self.forms.items()
        }
        own = forms["stored"]
        by_buddy = np.where(
            self.buddies[layer][None, :, None] >= 0, own[:, self.buddies[layer]], 0.0
        )
        return own, np.stack([*(own - of for of in forms.values()), own, own - by_buddy])

    def test_sums_are_those_of_loops(self):
        for layer in range(LAYERS):
            _, ids, weights = self.layers[layer]
            own, lost = self.losses(layer)
            expected = {n: np.zeros((EXPERTS, 5)) for n in ("plain", "bounds", "estimates")}
            outputs = 0.0
            for n, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
                y = sum(w * own[n, e] for e, w in zip(chosen, shares, strict=True))
                outputs += float(y @ y)
                for e, w in zip(chosen, shares, strict=True):
                    squared = np.square(lost[:, n, e]).sum(-1)
                    expected["plain"][e] += squared
                    expected["bounds"][e] += w * shares.sum() * squared
                    expected["estimates"][e] += w**2 * squared
            for name, value in expected.items():
                got = getattr(self.found, name)[layer]
                np.testing.assert_allclose(got, value, rtol=2e-3, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(self.found.outputs[layer], outputs, rtol=1e-4)
        np.testing.assert_array_equal(self.found.plain[..., 0], 0.0)  # the checkpoint as it is
        self.assertTrue(
            (self.found.plain[:, 3, SUBSTITUTED] == self.found.plain[:, 3, SKIPPED]).all()
        )

    def measured(self, layer: int, form: np.ndarray) -> float:
        """The layer's error where pairs int[N, A] run in these forms."""
        _, ids, weights = self.layers[layer]
        own, lost = self.losses(layer)
        at = np.arange(len(ids))[:, None], ids
        error = np.einsum("na,nad->nd", weights, lost[form, *at])
        y = np.einsum("na,nad->nd", weights, own[at])
        return float(np.sqrt((error**2).sum() / (y**2).sum()))

    def gate(self, forms: list[np.ndarray]) -> np.ndarray:
        """The ledger's gate mass [M, T + 3] of such forms; substituted pairs run in int4."""
        rows = []
        for layer, form in enumerate(forms):
            weights = self.layers[layer][2]
            mass = [float(weights[form == k].sum()) for k in range(len(TIERS) + 2)]
            mass[TIERS.index("int4")] += mass[SUBSTITUTED]
            rows.append([*mass, float(weights.sum())])
        return np.array(rows)

    def test_the_bound_holds_and_the_estimate_is_near(self):
        rng = np.random.default_rng(0)
        shape = self.layers[0][1].shape
        uniform = [np.full(shape, k) for k in range(1, 5)]
        for form in uniform:  # no matter which pairs: a theorem
            errors = self.found.of_gate(TIERS, self.gate([form] * LAYERS))
            for layer in range(LAYERS):
                self.assertLessEqual(self.measured(layer, form), errors.bound[layer] * 1.0001)
        drawn = [rng.integers(0, 5, shape) for _ in range(LAYERS)]
        errors = self.found.of_gate(TIERS, self.gate(drawn))
        for layer, form in enumerate(drawn):
            real = self.measured(layer, form)
            self.assertLess(real, errors.bound[layer])
            self.assertLess(abs(np.log(real / errors.estimate[layer])), np.log(1.3))
        np.testing.assert_array_less(errors.estimate, errors.bound)
        with self.assertRaises(ValueError):  # a tier that was not measured
            self.found.of_gate(("int3",), np.ones((LAYERS, 4)))
        self.assertAlmostEqual(errors.mean[1], np.sqrt(np.mean(errors.bound**2)))

    @pytest.mark.slow
    def test_errors_of_experts(self):
        plain = self.found.plain
        chosen = plain[..., SKIPPED] > 0
        self.assertTrue((plain[..., 1] < plain[..., 2])[chosen].all())
        self.assertFalse(plain[~chosen].any())

    def profile(self, **fields: Any) -> tuple[int, str, str]:
        text = self.folder / "text.txt"
        text.write_text(TEXT)
        fields = {"checkpoint": self.checkpoint, "text": text, "window": WINDOW, **fields}
        return commands.run(profile_experts.COMMAND, **fields)

    def test_the_profile_and_what_is_said_of_a_run(self):
        path = self.folder / "errors.safetensors"
        status, _, err = self.profile(
            tiers="stored,int4,int2", quantizer="rtn", group_size=16, output=path,
            batch_size=BATCH,
        )  # fmt: skip
        self.assertEqual(status, 0, err)
        found = profile_file.load_buddies(path, self.engine.config)
        assert found.errors is not None
        self.assertEqual(found.errors.tiers, TIERS)
        np.testing.assert_allclose(
            found.errors.plain[..., :SUBSTITUTED], self.found.plain[..., :SUBSTITUTED], rtol=1e-4
        )

        def said(group_size: int = 16, tiers: tuple[str, ...] = ("int4", "int2")) -> list[str]:
            tiering = Tiering(tiers=tiers, quantizer="rtn", group_size=group_size)
            tiers = tuple(tier.name for tier in tiering.stored())
            ledger = Ledger(
                {name: TierLedger(1) for name in tiers}, np.tile([1, 1, 0, 0, 2], (2, 1))
            )
            return _describe_errors(path, tiering, ledger, self.engine.config)

        expected = found.errors.of_gate(("int4", "int2"), np.tile([1, 1, 0, 0, 2], (2, 1)))
        near, most = (100 * of[1] for of in expected)
        lines = said()
        self.assertEqual(
            lines[1], f"layer 1: error of its output about {near:.2f} %, aligned {most:.2f} %"
        )
        self.assertIn("root mean square over layers: about ", lines[2])
        with self.subTest("evaluate prints them"):
            status, out, err = commands.run(
                evaluate.COMMAND, checkpoint=self.checkpoint, text=self.folder / "text.txt",
                window=WINDOW, stride=WINDOW, tier_errors=path, fidelity_share=0,
                **{"policy.name": "dymoe", "policy.tiers": "int4,int2", "policy.quantizer": "rtn",
                   "policy.group_size": 16, "policy.emulate": True},
            )  # fmt: skip
            self.assertEqual(status, 0, err)
            self.assertRegex(out, r"layer 1: error of its output about \d+\.\d+ %, aligned")
        self.assertIn("the profile has no errors of int8", said(tiers=("int8", "int2"))[0])
        self.assertIn("no errors of int4=/x", said(tiers=("int4=/x", "int2"))[0])
        self.assertIn("the profile's tiers have group_size=16, not 8", said(8)[0])
        tensors = load_file(path)
        metadata = {"format": profile_file.FORMAT, "provenance": '{"measured": {"names": ["a"]}}'}
        save_file(tensors, path, metadata)
        with self.assertRaisesRegex(MoejaxError, "plain is float32.2, 8, 5., not float32.2, 8, 3."):
            profile_file.load_buddies(path, self.engine.config)
        metadata["provenance"] = '{"measured": {"names": 3}}'
        save_file(tensors, path, metadata)
        with self.assertRaisesRegex(MoejaxError, "does not say which tiers it measured"):
            profile_file.load_buddies(path)

    def test_what_is_refused(self):
        for tiers, said in (("int9", "cannot be made at load"), ("int4=none/where", "none/where")):
            status, _, err = self.profile(tiers=tiers)
            self.assertEqual((status, said in err), (1, True), err)
        status, _, err = self.profile(tiers="int4", group_size=99)
        self.assertEqual((status, "groups of 99 are longer" in err), (1, True), err)
        status, _, err = commands.run(
            generate.COMMAND, "--prompt=x", checkpoint=self.checkpoint, tier_errors="x"
        )
        self.assertEqual((status, "tier_errors='x' has no effect without" in err), (1, True), err)
