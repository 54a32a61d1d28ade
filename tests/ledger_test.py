"""Counts on the device, and their sums on the host."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.experts import residency
from moejax.experts.budget import LINK_GIB_PER_S
from moejax.experts.ledger import Ledger, TierLedger
from moejax.experts.residency import Counts

MIB = 2**20


def example() -> Counts:
    """Counts of 2 layers."""
    counts = residency.no_counts(2)
    counts = counts.add(0, steps=3, needed=10, hits=6, misses=4, admitted=3, streamed=1)
    counts = counts.add(1, steps=3, needed=10, hits=9, misses=1, admitted=1, evictions=1)
    return counts.add(1, prefetched=4, prefetch_hits=3, prefetch_waste=1, bulk=2)


class CountsTest(parameterized.TestCase):
    def test_adds_to_one_layer_by_name(self):
        counts = example()
        np.testing.assert_array_equal(counts.needed, [10, 10])
        np.testing.assert_array_equal(counts.admitted, [3, 1])
        np.testing.assert_array_equal(counts.bulk, [0, 2])
        self.assertEqual(int(counts.events.sum()), 27 + 35)

    def test_in_jit_with_a_traced_layer(self):
        add = jax.jit(lambda counts, layer, n: counts.add(layer, hits=n).add(layer, hits=1))
        counts = add(residency.no_counts(3), jnp.int32(2), jnp.int32(4))
        np.testing.assert_array_equal(counts.hits, [0, 0, 5])
        self.assertEqual(int(counts.events.sum()), 5)

    def test_refuses_what_it_does_not_count(self):
        with self.assertRaisesRegex(ValueError, "no events hit;"):
            residency.no_counts(1).add(0, hit=1)
        with self.assertRaisesRegex(AttributeError, "'hit'"):
            _ = residency.no_counts(1).hit


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.book = TierLedger(expert_bytes=MIB)

    def test_sums_calls_and_multiplies_by_bytes(self):
        self.book.add(jax.device_get(example()))
        self.book.add(example(), disk={"bytes": 3 * MIB, "reads": 3})
        self.assertEqual(self.book.total("needed"), 40)
        self.assertEqual(self.book.layers[1]["hits"], 18)
        self.assertEqual(self.book.hit_rate, 30 / 40)
        self.assertEqual(self.book.prefetch_precision, 3 / 4)
        expected = {"demand": 8, "stream": 2, "prefetch": 8, "bulk": 4, "disk": 3}
        self.assertEqual(self.book.bytes_by_cause, {k: n * MIB for k, n in expected.items()})
        self.assertEqual(self.book.link_bytes, 22 * MIB)
        self.assertAlmostEqual(self.book.stall_seconds(), 10 / 2**10 / LINK_GIB_PER_S)  # of 10 MiB

    def test_shares_before_any_token_are_none(self):
        ledger = Ledger({"int4": TierLedger(2)}, asked=0)
        ledger.add(np.zeros((2, 4)))
        found = json.loads(json.dumps(ledger.as_dict(), allow_nan=False))
        shares = dict.fromkeys(("int4", "skipped", "substituted"))
        self.assertEqual(found["gate_shares"], shares)
        self.assertEqual(found["gate_shares_by_layer"], [shares] * 2)

    def test_an_expert_without_its_refinement_is_half_a_miss(self):
        def counts(**amounts: int) -> Counts:
            return residency.no_counts(1).add(0, **amounts)

        missing = counts(needed=1, misses=1)
        over_all = Ledger({"int4": TierLedger(2, refines=True), "int2": TierLedger(3)})
        over_all.tiers["int4"].add(jax.device_get(missing))
        shared = Ledger({"int4": TierLedger(2), "int2": TierLedger(3)})
        shared.tiers["int4"].add(jax.device_get(missing))
        shared.tiers["int2"].add(jax.device_get(counts(needed=1, hits=1)))
        self.assertEqual((over_all.hit_rate, shared.hit_rate), (0.5, 0.5))

    def test_stalls_are_of_the_link_by_estimate_and_of_the_disk_as_measured(self):
        disk = {"bytes": 3 * MIB, "reads": 3, "waits": 3, "wait_seconds": 0.25}
        self.book.add(example(), disk=disk)
        self.book.add(example(), disk={**disk, "wait_seconds": 0.5})
        self.assertEqual(self.book.disk["wait_seconds"], 0.75)
        link = 10 / 2**10 / LINK_GIB_PER_S
        self.assertAlmostEqual(self.book.link_stall_seconds(), link)
        self.assertAlmostEqual(self.book.stall_seconds(), link + 0.75)
        found = json.loads(json.dumps(self.book.as_dict(), allow_nan=False))["stall_seconds"]
        link = 10 / 1024 / 50
        self.assertEqual(
            found,
            {
                "estimate": 0.75 + link,
                "link_estimate": link,
                "link_gib_per_s": 50,
                "disk_measured": 0.75,
            },
        )
        self.assertIn(
            "stalls: about 0.195 ms, if the link moves 50 GiB/s and 750 ms for the disk",
            self.book.describe(),
        )

    def test_sums_exceed_32_bits(self):
        counts = residency.no_counts(1).add(0, needed=2**31 - 1, hits=2**31 - 1)
        for _ in range(3):
            self.book.add(counts)
        self.assertEqual(self.book.total("needed"), 3 * (2**31 - 1))
        self.assertIs(type(self.book.total("needed")), int)

    def test_as_json(self):
        self.book.add(residency.no_counts(2))
        found = json.loads(json.dumps(self.book.as_dict(), allow_nan=False))
        self.assertIsNone(found["hit_rate"])
        self.assertTrue(math.isnan(self.book.hit_rate))
        self.book.add(example())
        found = json.loads(json.dumps(self.book.as_dict(), allow_nan=False))
        self.assertEqual(found["totals"]["admitted"], 4)
        self.assertEqual(found["layers"][0]["misses"], 4)
        self.assertEqual(found["bytes"]["demand"], 4 * MIB)

    def test_gate_mass(self):
        for _ in range(2):
            self.book.add(Counts(residency.no_counts(1).events, jnp.array([[3.0, 3.0]])))
        self.assertEqual(self.book.gate_mass, 6.0)
        self.assertEqual(self.book.as_dict()["gate_mass"], {"resident": 6.0})

    def test_refuses(self):
        self.book.add(example())
        with self.assertRaisesRegex(ValueError, "3 layers, the ledger has 2"):
            self.book.add(residency.no_counts(3))
        with self.assertRaisesRegex(ValueError, "negative"):
            self.book.add(example().add(0, needed=2**31 - 1))
        self.assertEqual(self.book.total("needed"), 20)

    def test_an_expert_without_a_slot_is_an_error_that_stays_in_the_report(self):
        with self.assertRaisesRegex(RuntimeError, "2 needed experts had no slot"):
            self.book.add(example().add(0, unserved=2))
        self.assertIn("WRONG: 2 needed experts had no slot", self.book.describe())
