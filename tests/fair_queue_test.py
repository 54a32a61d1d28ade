"""Turns of clients, of their requests and of prompts' chunks."""

import dataclasses
import random

from absl.testing import absltest, parameterized

from moejax.inference.generation import GenerationSettings
from moejax.inference.turns import MOST_PASSED, PromptTurns
from moejax.serving.batcher import _FairQueue
from moejax.serving.rows import Row


def row(client: str, seed: int = 0) -> Row:
    settings = GenerationSettings(seed=seed)
    return Row(seed, [1], settings, False, False, lambda part: None, client)


def filled(**requests: list[int]) -> _FairQueue:
    """A queue of requests with so many rows by client; seeds count a client's rows."""
    queue = _FairQueue()
    for client, counts in requests.items():
        number = 0
        for count in counts:
            queue.add([row(client, number + i) for i in range(count)])
            number += count
    return queue


def taken(queue: _FairQueue, count: int) -> list[str]:
    return [f"{one.client}{one.index}" for one in queue.take(count)]


class FairQueueTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("a_request_s_order", {"a": [5]}, ["a0 a1 a2", "a3 a4", ""]),
        ("clients", {"a": [100], "b": [1], "c": [3]}, ["a0 b0 c0 a1", "c1 a2 c2 a3"]),
        ("clients_of_many_requests", {"a": [1] * 20, "b": [4]}, ["a0 b0 a1 b1 a2 b2"]),
        # Seeds 0 to 49, 50, 51 and 52.
        ("requests", {"a": [50, 1, 2]}, ["a0 a50 a51 a1 a52"]),
    )
    def test_turns(self, requests, expected):
        queue = filled(**requests)
        for turns in expected:
            self.assertEqual(" ".join(taken(queue, max(3, len(turns.split())))), turns)
        self.assertLen(queue, sum(map(sum, requests.values())) - len(" ".join(expected).split()))

    def test_a_client_that_comes_has_its_turn(self):
        queue = filled(a=[100], c=[3])
        taken(queue, 3)
        queue.add([row("d")])
        self.assertIn("d0", taken(queue, 3))

    def test_what_is_over_goes_and_nobody_loses_a_turn(self):
        queue = filled(a=[2], b=[2, 1], c=[1])
        queue.drop(lambda one: one.client == "a" or one.index == 1)
        self.assertLen(queue, 3)
        self.assertEqual([queue.has(client) for client in "abc"], [False, True, True])
        self.assertEqual(taken(queue, 9), ["b0", "c0", "b2"])
        self.assertFalse(queue.has("b"))

    def test_no_client_waits_longer_than_a_row_of_every_other(self):
        """Random arrivals: between two turns of a client that waits, others have one each."""
        rng, queue = random.Random(0), _FairQueue()
        clients, since = "abcdef", dict.fromkeys("abcdef", 0)
        for _ in range(300):
            if rng.random() < 0.6:
                client = rng.choice(clients)
                if not queue.has(client):
                    since[client] = 0
                queue.add([row(client)] * rng.randrange(1, 30))
            for one in queue.take(rng.randrange(4)):
                for other in clients:
                    since[other] += queue.has(other)
                self.assertLess(since[one.client], len(clients) + 1)
                since[one.client] = 0


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
