"""Turns of prompts: short ones first, by clients, and none waits for ever."""

import dataclasses

from absl.testing import absltest

from moejax.inference.turns import MOST_PASSED, PromptTurns


@dataclasses.dataclass(eq=False)
class Prompt:
    client: str
    num_left: int
    name: str = ""


def turns_of(*prompts: Prompt) -> PromptTurns[Prompt]:
    turns: PromptTurns[Prompt] = PromptTurns()
    for prompt in prompts:
        turns.add(prompt)
    return turns


def run(turns: PromptTurns[Prompt], chunk: int = 10) -> str:
    """Runs a chunk; the name of its prompt."""
    prompt = turns.next()
    turns.count(prompt)
    prompt.num_left -= chunk
    if prompt.num_left <= 0:
        turns.remove(prompt)
    return prompt.name


class TurnsTest(absltest.TestCase):
    def test_the_client_with_least_left_and_its_shortest_prompt(self):
        turns = turns_of(
            Prompt("a", 20, "x"), Prompt("a", 10, "y"), Prompt("a", 10, "z"), Prompt("b", 30, "w")
        )
        self.assertEqual("".join(run(turns) for _ in range(7)), "wwwyzxx")
        self.assertFalse(turns)

    def test_short_prompts_that_keep_coming_do_not_stop_a_long_one(self):
        for client in ("a", "b"):  # of its own client, and of another
            turns = turns_of(Prompt("a", 1000, "long"))
            found = []
            for _ in range(4 * (MOST_PASSED + 1)):
                turns.add(Prompt(client, 10, "short"))
                found.append(run(turns))
            self.assertEqual(found, (["short"] * MOST_PASSED + ["long"]) * 4)

    def test_a_short_prompt_waits_for_one_chunk_of_many_long_ones(self):
        for client in ("a", "b"):  # all of one client, or of another
            turns = turns_of(*(Prompt("a", 10**6, "long") for _ in range(16)))
            for _ in range(40):
                run(turns)
                turns.add(Prompt(client, 10, "short"))
                found = [run(turns)]
                while found[-1] != "short":
                    found.append(run(turns))
                self.assertLessEqual(len(found), 2)

    def test_each_of_many_long_prompts_has_its_turns(self):
        turns = turns_of(*(Prompt("a", 10**6, str(i)) for i in range(8)))
        found = []
        for _ in range(8 * (MOST_PASSED + 1) * 3):
            turns.add(Prompt("b", 10, "short"))
            found.append(run(turns))
        for i in range(8):
            self.assertGreaterEqual(found.count(str(i)), 2)

    def test_many_prompts_of_a_client_get_no_more_turns(self):
        turns = turns_of(*(Prompt("a", 1000, "a") for _ in range(8)), Prompt("b", 5000, "b"))
        found = [run(turns) for _ in range(100)]
        self.assertEqual(found.count("a"), 20)

    def test_what_was_removed_is_forgotten(self):
        gone, stays = Prompt("a", 10), Prompt("b", 50, "b")
        turns = turns_of(gone, stays)
        turns.remove(gone)
        self.assertEqual(run(turns), "b")
