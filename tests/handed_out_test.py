"""Experts handed out whole, or in shares, to the devices of a mesh: it answers as one does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine
from moejax.config.commands import PlanConfig
from moejax.config.policy import PolicyConfig
from moejax.devices import MESH_AXIS, device_nbytes, make_mesh
from moejax.experts.budget import Limits, describe
from moejax.experts.placement import _hand_out, _rows_of_each
from moejax.experts.tiering import Tiering
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.planning import budget_of
from moejax.routing.profile_file import FILE_NAME, save_buddies
from moejax.weights.handed_out import OwnExperts, table_of
from moejax.weights.qtensor import Fp8Tensor, from_codes
from moejax.weights.shares import Shares, shares_of
from tests import slow
from tests.buddy_profiles import random_profile
from tests.folder_case import FolderTestCase
from tests.mesh_test import CONFIGS, QWEN, TOKENS, MeshTestCase, Packed
from tests.quantized_stores import Fp8, Gptq, Plain

# One group of 48, which no mesh cuts.
NARROW = dataclasses.replace(
    QWEN, expert_dim=48, num_experts=12, num_layers=2, moe_layers=(0, 1)
)  # fmt: skip
ONE_LAYER = dataclasses.replace(NARROW, num_layers=1, moe_layers=(0,))


class PlacementTest(parameterized.TestCase):
    @parameterized.parameters(
        (2, 6, 0), (3, 8, 0), (8, 8, 0), (4, 6, 0), (8, 12, 3), (5, 7, 1), (4, 6, 4)
    )
    def test_each_pair_runs_once(self, count, num_experts, more):
        rng = np.random.default_rng(num_experts)
        rows = _rows_of_each(num_experts, count, more)
        for load in (np.ones((2, num_experts)), rng.random((2, num_experts)) ** 4):
            experts = _hand_out(load, count, rows)
            self.assertEqual(experts.shape, (count, 2, rows))
            for layer in (0, 1):
                held = experts[:, layer]
                self.assertTrue(all(len(set(row)) == rows for row in held.tolist()))
                copies = np.bincount(held.ravel(), minlength=num_experts)
                self.assertGreater(copies.min(), 0)
                hot = copies > 1
                if hot.any() and not hot.all():  # none that has one has the load of two
                    by_copy = load[layer] / copies
                    self.assertLessEqual(load[layer][~hot].max(), 2 * by_copy[hot].max())
                heat = (load[layer] / copies)[held]
                self.assertTrue((np.diff(heat, axis=1) <= 0).all())
            ids = np.stack([rng.permutation(num_experts)[:3] for _ in range(9)]).astype(np.int32)
            found = []
            for device, table in enumerate(table_of(experts, num_experts)):
                own = OwnExperts(jnp.asarray(table))
                row, mine = map(np.asarray, own.of_pairs(1, jnp.asarray(ids)))
                np.testing.assert_array_equal(experts[device, 1][row][mine], ids[mine])
                values = own.by_row(1, jnp.arange(num_experts), rows)
                np.testing.assert_array_equal(values, experts[device, 1])
                found.append(mine)
            np.testing.assert_array_equal(np.sum(found, axis=0), np.ones_like(ids))

    def test_loads_are_even(self):
        load = np.random.default_rng(0).zipf(1.5, (3, 64)).clip(max=50).astype(float)
        experts = _hand_out(load, 4, 16)
        for layer in range(3):
            carried = load[layer][experts[:, layer]].sum(axis=1)
            self.assertLess(carried.max(), 1.05 * carried.mean())


class HandedOutTest(MeshTestCase):
    @parameterized.parameters(
        (("narrow", "int4", "8,experts"),),  # more devices than groups; hot ones have copies
        (("narrow", "plain", "4,experts+2"),),
        (("narrow", "plain", "2,experts,heads"),),
        (("shared", "plain", "2,experts"),),
        (("latent", "plain", "4,experts"),),
        (("sigmoid", "int2", "8,experts"),),
    )
    @pytest.mark.slow
    def test_a_mesh_answers_as_one_device(self, case):
        kind, form, mesh = case
        config = NARROW if kind == "narrow" else CONFIGS[kind]
        store = Plain(config) if form == "plain" else Packed(config, int(form[3:]))
        store.write(self.directory)
        one, several = self.load(), self.load(mesh=mesh)
        self.assert_equal_answers(one, several)
        if form != "int4":  # the fast case compiles one of both
            self.assert_close_logits(one, several)
        count = len(several._runner.mesh.devices)
        rows = several._runner.mesh.num_handed_out
        for name in EXPERT_LEAVES:
            whole, own = one.weights[name], several.weights[name]
            for every, parts in zip(jax.tree.leaves(whole), jax.tree.leaves(own), strict=True):
                self.assertEqual(parts.shape[0], count * every.shape[0])
                self.assertEqual(parts.shape[1], rows)

    @parameterized.parameters(
        (("2,experts", {"slots": 2}),),  # of one layer: half of the compiling
        (("2,experts", {"slots": 2, "prefetch": 1}),),
        (("4,experts+1", {"slots": 1}),),
        (("8,experts", {"slots": 0}),),
    )
    @pytest.mark.slow
    def test_residency_is_invisible(self, case):
        mesh, limits = case
        Plain(ONE_LAYER if limits == {"slots": 2} else NARROW).write(self.directory)
        expected, some = self.load(mesh=mesh), self.load(mesh=mesh, limits=Limits(**limits))
        np.testing.assert_array_equal(some.logits(TOKENS), expected.logits(TOKENS))
        self.assertGreater(some.ledger.total("needed"), 0)
        if "+" not in mesh and limits["slots"]:  # no expert is needed on two devices
            alone = self.load(limits=Limits(slots=4))
            alone.logits(TOKENS)
            found = [
                [layer["needed"] for layer in engine.ledger.layers] for engine in (alone, some)
            ]
            self.assertEqual(*found)
        else:
            self.assert_equal_answers(expected, some)
        self.assert_planned(some)

    def assert_planned(self, engine: Engine) -> None:
        """Planned bytes are allocated bytes, on each device."""
        runner, budget = engine._runner, engine.budget
        for name, nbytes in budget.run.weights_nbytes.items():
            leaf = engine.weights.get(name, runner._own_experts)
            self.assertEqual(device_nbytes(leaf), nbytes, name)
        [tier] = runner.memory.tiers
        planned = budget.device["expert slots"] + budget.device["transient slots"]
        self.assertEqual(device_nbytes(tier.pool.banks), planned)
        tables = (tier.pool.residency, tier.pool.counts, tier.store.row_of)
        [name] = [name for name in budget.device if name.startswith("residency")]
        self.assertEqual(device_nbytes(tables), budget.device[name])
        rows = sum(leaf.nbytes for leaf in jax.tree.leaves((tier.store.gate_up, tier.store.down)))
        self.assertEqual(rows, budget.host["experts"])

    @parameterized.parameters("fp8", "act-order")
    @pytest.mark.slow
    def test_forms_that_are_not_cut(self, form):
        """Whole experts of any form; planned bytes are allocated ones."""
        model = CONFIGS["qwen3"]
        (Fp8(model) if form == "fp8" else Gptq(model, act_order=True)).write(self.directory)
        for limits in (None, Limits(slots=1)):
            with self.assert_one_line("of which a mesh does not cut experts yet"):
                self.load(mesh="2", limits=limits)
        several = self.load(mesh="2,experts", limits=Limits(device_gib=1), batch=2)
        self.assert_close_logits(self.load(), several)
        experts = [several.weights[name] for name in EXPERT_LEAVES]
        self.assertEqual(device_nbytes(experts), several.budget.device["experts"])
        with self.assert_one_line("the experts do not fit and cannot move"):
            self.load(mesh="2,experts", limits=Limits(slots=1))

    def test_a_plan_of_a_shape(self):
        """Eight devices: 16 of 128 experts each, and two more."""
        config = PlanConfig(shape="Qwen3-30B-A3B", bits=4, mesh="8,experts+2", context=64)
        budget, one = budget_of(config), budget_of(dataclasses.replace(config, mesh=""))
        self.assertEqual(budget.device["experts"] * 128, one.device["experts"] * 18)
        self.assertIn("each of 8 devices with 18 of 128 experts", describe(budget)[0])
        policy = PolicyConfig(name="dynaexq", tiers=("int4", "int2"))
        with self.assert_one_line("it has 2 tiers"):
            budget_of(dataclasses.replace(config, policy=policy))

    def test_refusals(self):
        Plain(NARROW).write(self.directory)
        with self.assert_one_line("width 48 has 6 groups of 8, too few for a mesh of 8"):
            self.load(mesh="8")
        few = Limits(slots=1)
        for said, how in (
            ("experts+9 is more than a layer has: 12", {"mesh": "2,experts+9"}),
            ("must be a number of devices", {"mesh": "experts"}),
            ("must be a number of devices", {"mesh": "2,experts,experts+1"}),
            ("host_gib=1e-05 is too little", {"limits": Limits(slots=1, host_gib=1e-5)}),
            ("memory.bulk=2: a mesh that hands", {"limits": Limits(slots=1, bulk=2)}),
            ("emulate is of one device", {"policy": Tiering(slots=(2,), emulate=True)}),
            (
                "does not serve this policy: it has 2 tiers",
                {"policy": Tiering(policy="dymoe", tiers=("int4", "int2"), group_size=16)},
            ),
            (
                "dymoe does not decide by partition",
                {"policy": Tiering(policy="dymoe", settings={"low": "skip"})},
            ),
        ):
            with self.assert_one_line(said):
                self.load(**{"mesh": "2,experts", "limits": few} | how)
        save_buddies(self.directory / FILE_NAME, random_profile(len(NARROW.moe_layers), 12))
        with self.assert_one_line("nothing moves between steps, but max_requests=4: set 0"):
            self.load(mesh="2,experts", policy=Tiering(policy="buddymoe", slots=(2,)))

    def test_a_table_is_of_each_device(self):
        mesh = make_mesh(2, "cpu")
        tables = table_of(_hand_out(np.ones((1, 4)), 2, 2), 4)
        held = jax.device_put(tables.reshape(-1, 1, 4), mesh.split())

        def device_of(table: jax.Array) -> jax.Array:
            mine = table[0, 0] >= 0
            index = jnp.where(mine, jax.lax.axis_index(MESH_AXIS), 0)
            return jax.lax.psum(index, MESH_AXIS)

        found = jax.jit(mesh.map(device_of, held, jax.sharding.PartitionSpec()))(held)
        np.testing.assert_array_equal(found, [0, 1, 0, 1])

    @parameterized.parameters(0.0, 1.0)
    @pytest.mark.slow
    def test_buddies_of_other_devices(self, kappa):
        """Nothing is fetched, so one device with the same residents decides the same.

        With kappa 1 it is one whose lists have buddies of the missing expert's device alone.
        """
        Plain(ONE_LAYER).write(self.directory)
        profile = random_profile(1, 12)
        load = np.linspace(9, 8, 12, dtype=np.float32)[None]  # so the hottest are spread
        activity = dataclasses.replace(profile.activity, activations=load)
        save_buddies(self.directory / FILE_NAME, dataclasses.replace(profile, activity=activity))
        settings = {"fall_back": "drop", "max_requests": 0}
        buddies = Tiering(policy="buddymoe", settings=settings | {"kappa": kappa}, slots=(2,))
        several = self.load(mesh="2,experts", policy=buddies)
        found = several.logits(TOKENS)
        device = np.zeros(12, int)
        device[several._runner.mesh.handed_out[1, 0]] = 1
        if kappa:
            lists, ids = profile.lists, profile.lists.ids
            apart = (ids >= 0) & (device[ids] != device[None, :, None])
            # Those that stay come first.
            order = np.argsort(apart | (ids < 0), axis=-1, kind="stable")
            kept = np.take_along_axis(np.where(apart, -1, ids), order, -1)
            q = np.where(kept >= 0, np.take_along_axis(lists.q, order, -1), 0)
            profile = dataclasses.replace(profile, lists=type(lists)(kept, q))
        save_buddies(self.directory / FILE_NAME, dataclasses.replace(profile, activity=activity))
        one = self.load(policy=Tiering(policy="buddymoe", settings=settings, slots=(4,)))
        expected = one.logits(TOKENS)
        self.assertLess(np.abs(found - expected).max() / np.abs(expected).max(), 1e-5)
        ledgers = [engine.ledger for engine in (one, several)]
        np.testing.assert_allclose(ledgers[0].gate, ledgers[1].gate, rtol=1e-4)
        self.assertGreater(ledgers[1].shares["substituted"], 0)
        self.assertEqual(ledgers[1].total("admitted"), 0)


E, D = 2, 40  # experts, and the model's width


def packed(rng, shape, bits, group_size, by_planes=False):
    groups = (*shape[:-1], -(-shape[-1] // group_size))
    return from_codes(
        rng.integers(0, 2**bits, shape, dtype=np.uint8),
        rng.uniform(0.1, 1, groups).astype(np.float32),
        rng.uniform(0, 2**bits, groups).astype(np.float32),
        bits=bits, group_size=group_size, zero_kind="float", by_planes=by_planes,
    )  # fmt: skip


def values(weight):
    if isinstance(weight, np.ndarray):
        return weight
    weight.check()
    return np.asarray(weight.dequantize())


class SharesTest(FolderTestCase):
    # Each form once, each cut in two forms.
    @slow.where(lambda cut, form: cut[0] != 160 and form not in ((3, False), (4, True)))
    @parameterized.product(
        cut=(  # width, shares, group
            (768, 8, 64),  # 12 groups: uneven
            (768, 2, 64),  # no multiple of a block of 256 codes
            (1024, 2, 128),
            (160, 3, 32),
            (100, 2, 32),  # the last group is short
        ),
        form=((2, False), (3, False), (4, False), (8, False), (4, True), (3, True), (16, False)),
    )
    def test_shares_make_up_the_expert(self, cut, form):
        width, count, group = cut
        bits, by_planes = form
        rng = np.random.default_rng(0)
        stacks = [(E, 2 * width, D), (E, D, width)]
        if bits == 16:
            gate_up, down = (rng.normal(size=shape).astype(np.float32) for shape in stacks)
        else:
            gate_up, down = (
                packed(rng, shape, bits, min(group, shape[-1]), by_planes) for shape in stacks
            )
        shares = shares_of(width, count, group)
        gates, ups, downs, seen = [], [], [], 0
        for i in range(count):
            start, stop = shares.span(i)
            self.assertEqual(start, seen)
            self.assertLess(start, stop)
            seen, size = stop, stop - start
            gate, up = np.split(values(shares.gate_up(gate_up, i)), 2, axis=-2)
            own = values(shares.down(down, i))
            self.assertEqual(gate.shape, (E, shares.share_width, D))
            self.assertEqual(own.shape, (E, D, shares.share_width))
            np.testing.assert_array_equal(gate[:, size:], 0)
            np.testing.assert_array_equal(up[:, size:], 0)
            gates.append(gate[:, :size])
            ups.append(up[:, :size])
            downs.append(own[..., :size])
        self.assertEqual(seen, width)
        found = np.concatenate([*gates, *ups], axis=-2)
        np.testing.assert_array_equal(found, values(gate_up))
        np.testing.assert_array_equal(np.concatenate(downs, axis=-1), values(down))

    def test_shares_differ_by_one_group_at_most(self):
        shares = shares_of(768, 8, 64)
        sizes = [stop - start for start, stop in map(shares.span, range(8))]
        self.assertCountEqual(sizes, [64] * 4 + [128] * 4)
        self.assertEqual(shares.share_width, 128)
        self.assertEqual(shares_of(14336, 4, None), Shares(4, 14336, 64))
        self.assertEqual(shares_of(192, 2, None), Shares(2, 192, 32))  # not padded
        self.assertEqual(shares_of(64, 8, None).share_width, 8)

    def test_what_is_not_cut(self):
        with self.assert_one_line("width 768 has 12 groups of 64, too few for a mesh of 13"):
            shares_of(768, 13, 64)
        shares = shares_of(256, 2, None)
        with self.assert_one_line("FP8", "a mesh does not serve"):
            form = Fp8Tensor(values=np.zeros(1), scales=np.zeros(1))
            shares.down(jax.tree.map(np.asarray, form), 0)
        with self.assert_one_line("cut groups of 128"):
            shares.down(packed(np.random.default_rng(0), (1, 8, 256), 4, 128), 0)
