"""Given texts under a policy: read one at a time, with promotions between chunks of its period."""

import dataclasses
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine, cli
from moejax.evaluation.perplexity import log_likelihood
from moejax.experts.cache import ExpertMemory
from moejax.experts.ledger import Ledger, TierLedger
from moejax.experts.tiering import Tiering
from moejax.inference.chunking import next_chunk
from moejax.text.windows import Windowing
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase

TEXT = "".join(f"the {a} fox jumps over {b} dogs. " for a in "abcdefgh" for b in "xyz")
PERIOD = 16  # chunks of it are of one size
DYNAEXQ = {"policy": "dynaexq", "settings": {"period": PERIOD}, "slots": (3, 8)}
DYMOE = {"policy": "dymoe", "settings": {"retention": 0.5}, "slots": (2, 8)}
ONE_LAYER = dataclasses.replace(tiny_engine.CONFIG, num_layers=1, moe_layers=(0,))
MADE = {"tiers": ("int4", "int2"), "quantizer": "rtn", "group_size": 16}


class PolicyScoringTest(FolderTestCase):
    engines: ClassVar[dict[str, Engine]] = {}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = cls.folder / "dynaexq"
        cls.text = cls.folder / "text.txt"
        cls.text.write_text(TEXT)

    @classmethod
    def engine(cls, **policy: Any) -> Engine:
        """An engine as if it were new; kept, since compiling is most of the time."""
        key = str(policy)
        if key not in cls.engines:
            name, how = policy["policy"], Tiering(**MADE, **policy)
            # DyMoE's first layer is critical as a whole.
            config = ONE_LAYER if name == "dynaexq" else tiny_engine.CONFIG
            cls.engines[key] = tiny_engine.load_tiny_engine(
                cls.folder / name, config=config, policy=how
            )
            cls.addClassCleanup(cls.engines[key].close)
        memory = cls.engines[key]._runner.memory
        for tier in memory.tiers:
            tier._reallocate()
        memory.reset()
        return cls.engines[key]

    def nats(self, engine: Engine, batch_size: int, window: int = 48) -> float:
        ids = engine.tokenizer.encode(TEXT)[:401]
        how = {"batch_size": batch_size}
        return log_likelihood(ids, Windowing(window, window), engine.score, **how).nats

    # Windows of 50 end within a period, which takes chunks of every size.
    @parameterized.product(policy=(DYNAEXQ, DYMOE), window=(48, 50), emulated=(0, 1))
    @pytest.mark.slow
    def test_one_figure_at_every_batch_size_in_real_and_emulated_slots(
        self, policy, window, emulated
    ):
        found = {}
        for emulate in (False, True)[: 1 + emulated]:
            for batch_size in (1, 8):
                engine = self.engine(**policy, emulate=emulate)
                found[emulate, batch_size] = self.nats(engine, batch_size, window)
                self.assertBetween(engine.ledger.shares["int4"], 0.05, 0.95)
        np.testing.assert_allclose(list(found.values()), found[False, 1], rtol=1e-6)

    @pytest.mark.slow
    def test_promotions_between_chunks_of_the_period(self):
        engine, counts = self.engine(**DYNAEXQ, emulate=False), []
        step, ledger = ExpertMemory.step, engine.ledger
        asked, bulk, gate = ledger.asked, ledger.tiers["int4"].total("bulk"), ledger.gate

        def counting(memory: ExpertMemory, since: Any = None, num_tokens: int = 0) -> Any:
            counts.append(num_tokens)
            return step(memory, since, num_tokens)

        with mock.patch.object(ExpertMemory, "step", counting):
            self.nats(engine, 8)
        ends, ledger = np.cumsum(counts).tolist(), engine.ledger
        self.assertEqual(ends[-1], 400)
        # The policy is asked when each period has passed, not some tokens later.
        self.assertContainsSubset(range(PERIOD, 400, PERIOD), ends)
        self.assertGreaterEqual(ledger.asked - asked, 399 // PERIOD)  # not at the end
        self.assertGreaterEqual(ledger.tiers["int4"].total("bulk") - bulk, 3)
        gate = ledger.gate - gate
        np.testing.assert_allclose(gate[:, -1], 400, rtol=1e-5)  # a token's weights' sum is 1
        np.testing.assert_allclose(gate[:, :3].sum(axis=1), 400, rtol=1e-5)
        said = f"between steps the policy was asked {ledger.asked} times what to move"
        self.assertIn(said, ledger.describe())

    @pytest.mark.slow
    def test_rows_of_logits_do_not_meet_in_the_policy(self):
        rows = np.random.default_rng(0).integers(0, 160, (3, 48))
        together = self.engine(**DYNAEXQ, emulate=False).logits(rows)
        engine = self.engine(**DYNAEXQ, emulate=False)
        alone = np.concatenate([engine.logits(row[None]) for row in rows])
        np.testing.assert_array_equal(together, alone)
        self.assertGreater(engine.ledger.shares["int4"], 0)

    @pytest.mark.slow
    def test_continuations_are_scored_alike_at_every_batch_size(self):
        # 48 tokens of each are run, three periods.
        pairs = np.random.default_rng(2).integers(0, 160, (4, 49))
        scores = []
        for size in (1, 4):
            scorer = self.engine(**DYNAEXQ, emulate=False).scorer
            found = scorer.of_tokens([(p[:41].tolist(), p[41:].tolist()) for p in pairs],
                                     batch_size=size)  # fmt: skip
            scores.append([scored.log_likelihood for scored in found])
        self.assertEqual(*scores)

    def run_main(self, command: cli.Command, *arguments: str, **fields: Any) -> tuple[str, str]:
        fields = {
            "checkpoint": self.checkpoint, "policy.name": "dynaexq", "policy.slots": "('3','8')",
            "policy.tiers": "('int4','int2')", "policy.quantizer": "rtn",
            "policy.group_size": 16, **fields,
        }  # fmt: skip
        return commands.succeed(command, *arguments, **fields)

    TOO_SHORT = (
        "WARNING: between steps the policy was asked 0 times what to move, so it moved nothing: "
        "the run was too short for it"
    )

    def test_a_run_too_short_for_the_policy_says_so(self):
        ledger = Ledger({"int4": TierLedger(10), "int2": TierLedger(4)})
        ledger.add(np.asarray([[1.0, 0.0, 0.0, 0.0, 1.0]]))
        ledger.asked = 0
        self.assertIn(self.TOO_SHORT, ledger.describe())


class NextChunkTest(parameterized.TestCase):
    @parameterized.parameters(
        (100, 128, 1024, 128),  # what is left, padded
        (100, 128, 24, 16),  # a power of two
        (84, 112, 8, 8),
        (9, 12, 1, 1),
        (12, 40, 1024, 16),
        (8, 8, 1024, 8),  # padding does not reach past the cache
    )
    def test_size(self, num_left, room, most, expected):
        self.assertEqual(next_chunk(num_left, room, most), expected)
