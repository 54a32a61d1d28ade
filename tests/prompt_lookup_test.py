"""Prompt lookup of the study: drafts by brute force, answers to the token, rows of a step."""

import numpy as np
from absl.testing import absltest, parameterized

from moejax.policies.make import make_policy
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run as SimulatedRun
from moejax.routing.simulate.runs import run_policies
from moejax.routing.trace import DECODE, Trace
from scripts.studies.speed.lookup_costs import lru_misses, needed
from scripts.studies.speed.lookup_steps import LONGEST, token_rows, verify_steps
from scripts.studies.speed.lookup_texts import LOOP, without_loop


def latest_continuation(known: list[int], shortest: int) -> int:
    """Where the draft begins, by looking at every place; `len(known)` for nowhere."""
    for n in range(LONGEST, shortest - 1, -1):
        for at in range(len(known) - n - 1, -1, -1):
            if known[at : at + n] == known[-n:]:
                return at + n
    return len(known)


class PromptLookupTest(parameterized.TestCase):
    @parameterized.product(k=(0, 1, 3, 8), shortest=(2, 3))
    def test_steps_give_the_answer_with_drafts_of_the_latest_place(self, k, shortest):
        rng = np.random.default_rng(0)
        prompt, answer = rng.integers(0, 4, 40).tolist(), rng.integers(0, 4, 60).tolist()
        tokens, known, accepted = prompt + answer, len(prompt) + 1, 0
        for step in verify_steps(prompt, answer, k=k, shortest=shortest):
            start = latest_continuation(tokens[:known], shortest)
            self.assertSequenceEqual(step.sources, range(start, min(start + k, known)))
            said = [tokens[at] for at in step.sources[: step.accepted]]
            self.assertEqual(said, tokens[known : known + step.accepted])
            if step.accepted < len(step.sources) and known + step.accepted < len(tokens) - 1:
                wrong = tokens[step.sources[step.accepted]]
                self.assertNotEqual(wrong, tokens[known + step.accepted])
            self.assertLen(step.rows, 1 + len(step.sources))
            self.assertEqual(
                step.rows[: step.accepted + 1], list(range(known - 1, known + step.accepted))
            )
            known, accepted = known + step.accepted + 1, accepted + step.accepted
        self.assertEqual(known, len(tokens))
        self.assertEqual(accepted > 0, k > 0)

    def test_an_answer_that_copies_its_prompt_takes_a_step_for_k_and_one(self):
        text = list(range(100, 150))
        steps = list(verify_steps([*text, 1, 2], text, k=4, shortest=3))
        # Without an n-gram of three that is known the first tokens come one by one.
        self.assertEqual([step.accepted for step in steps[:3]], [0, 0, 4])
        self.assertLen(steps, 2 + -(-(len(text) - 3) // 5))

    def test_misses_are_those_of_the_simulator(self):
        rng, (layers, experts, most) = np.random.default_rng(1), (2, 16, 3)
        draws = rng.random((40, layers, experts)) ** (1 + np.arange(experts) / 4)
        ids = np.argsort(-draws, axis=-1)[..., :2].astype(np.uint8)
        steps = [list(range(at, at + 1 + at % most)) for at in range(36)]
        rows = np.array([[*step, *[step[0]] * (most - len(step))] for step in steps]).reshape(-1)
        trace = Trace(
            num_experts=experts, step=np.repeat(np.arange(36, dtype=np.int32), most),
            sequence=np.tile(np.arange(most, dtype=np.int32), 36), position=rows.astype(np.int32),
            phase=np.full(len(rows), DECODE, np.uint8), ids=ids[rows],
            weights=np.full((len(rows), layers, 2), 0.5, np.float16),
        )  # fmt: skip
        trace.check()
        slots = (3, 6, 10)
        policy = make_policy("on_demand")
        runs = [
            SimulatedRun(policy=policy, tiers=("int4",), expert_bytes=(1,), slots=(size,))
            for size in slots
        ]
        place = EVENTS.index("misses")
        expected = [int(found.events[DECODE, place, 0]) for found in run_policies(trace, runs)]
        masks = needed(steps, ids, experts)
        np.testing.assert_array_equal(lru_misses(masks, slots), expected)
        self.assertEqual(masks[1].sum(), len(np.unique(ids[1:3, 0])) + len(np.unique(ids[1:3, 1])))

    def test_pieces_take_the_row_of_their_last_character(self):
        # "ab|cde|f" beside "a|bc|def": last characters 1, 4, 5 lie in tokens 1, 2, 2.
        rows = token_rows(["ab", "cde", "f"], [(0, 1), (1, 3), (3, 6)])
        np.testing.assert_array_equal(rows, [1, 2, 2])

    def test_a_loop_is_cut_where_it_says_again_what_it_said(self):
        start = list(range(LOOP + 3))
        self.assertEqual(without_loop([*start, *start]), start)
        self.assertEqual(without_loop(start), start)


if __name__ == "__main__":
    absltest.main()
