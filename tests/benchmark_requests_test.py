"""Prompts of a benchmark, made-up routing's place in it, and its figures by hand."""

import contextlib
import json
import lzma
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moejax.benchmarking import bandwidth, requests, routing, running
from moejax.benchmarking.measuring import BatchTimes, Bench, Measurement
from moejax.benchmarking.models import models_of
from moejax.benchmarking.requests import _RawPrompt, read_prompt_file
from moejax.config.benchmark import BenchmarkConfig
from moejax.errors import MoejaxError
from moejax.inference.generation import GenerationSettings
from moejax.inference.steps import StepOutput
from moejax.models.shapes import TINY
from moejax.routing.trace import Trace, trace_of_replay
from tests.folder_case import FolderTestCase

SHAREGPT = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "one"}, {"from": "gpt", "value": "two"},
        {"from": "human", "value": "three"}]},
    {"id": "b", "conversations": [
        {"from": "gpt", "value": "two"}, {"from": "human", "value": "three"}]},
    {"id": "c", "conversations": [{"from": "gpt", "value": "only"}]},
    {"id": "d", "conversations": []},
    {"id": "e", "conversations": [{"from": "user", "value": "four"}]},
]  # fmt: skip


class Letters:
    """A tokenizer of letters, and one chat template or none."""

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def spelt(ids: list[int]) -> str:
    return "".join(chr(i) if i else "^" for i in ids)


class FileTest(FolderTestCase):
    def read(self, name: str, text: str, split: str = "lines") -> requests.PromptFile:
        path = self.directory / name
        content = text.encode()
        path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
        return read_prompt_file(path, split)

    def test_a_line_or_a_paragraph_is_a_prompt(self):
        text = "one\ntwo\n\n\nthree\r\n"
        lines = self.read("x.txt", text)
        self.assertEqual([p.text for p in lines.prompts], ["one", "two", "three"])
        paragraphs = self.read("x.txt.xz", text, "paragraphs")
        self.assertEqual([p.text for p in paragraphs.prompts], ["one\ntwo", "three"])

    def test_json_lines(self):
        rows = [{"prompt": "a"}, {"text": "b"}, {"messages": [{"role": "user", "content": "c"}]}]
        found = self.read("x.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n").prompts
        self.assertEqual(found[:2], [_RawPrompt("a"), _RawPrompt("b")])
        self.assertEqual(found[2].messages, ({"role": "user", "content": "c"},))

    def test_sharegpt_asks_with_the_first_human_turn(self):
        found = self.read("x.json", json.dumps(SHAREGPT))
        self.assertEqual([p.messages[0]["content"] for p in found.prompts],
                         ["one", "three", "four"])  # fmt: skip
        self.assertEqual(found.num_skipped, 2)

    @parameterized.parameters(
        ("x.json", '{"a": 1}', "no list"),
        ("x.json", "[1]", "entry 0 is no JSON object"),
        ("x.json", '[{"id": "q7", "conversations": [{"from": "human"}]}]',
         r'entry 0 \(id q7\): turn 0 needs "from" and "value"'),
        ("x.json", '[{"id": "q", "conversations": []}]', "holds no prompt"),
        ("x.json", '[{"id": "q", "conversations": "a"}]', r"\(id q\): conversations must be"),
        ("x.json", '[{"id": "q"}]', r"entry 0 \(id q\) has no prompt, text, messages or conv"),
        ("x.json", "[", "is not JSON"),
        ("x.json", "[" * 100_000, "is not JSON"),
        ("x.jsonl", '{"prompt": "\\ud800 hi"}', "line 1 is not UTF-8"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt"}', "line 2 is not JSON"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": 3}', "line 2: prompt must be a text"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}', "message 0 needs a role and a content"),
        ("x.txt", " \n\n", "holds no prompt"),
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, name, text, said):
        with self.assertRaisesRegex(MoejaxError, said):
            self.read(name, text)

    def test_no_file(self):
        with self.assertRaisesRegex(MoejaxError, "there is no prompt file"):
            read_prompt_file(self.directory / "none.json", "lines")

    def test_messages_go_through_the_template(self):
        file = self.read("x.json", json.dumps(SHAREGPT))
        by_template = requests.of_file(file, Letters("t"), num_prompts=2, longest=99)
        self.assertEqual([*map(spelt, by_template.prompts)], ["<user>one", "<user>three"])
        self.assertIn("through the chat template", by_template.about)
        self.assertIn("2 entries without a human turn", by_template.about)
        plain = requests.of_file(file, Letters(), num_prompts=0, longest=99)
        self.assertEqual([*map(spelt, plain.prompts)], ["^one", "^three", "^four"])

    def test_long_prompts_are_cut_and_counted(self):
        file = self.read("x.txt", "12345\n123\n1234")
        found = requests.of_file(file, Letters(), num_prompts=0, longest=4)
        self.assertEqual([*map(spelt, found.prompts)], ["^123", "^123", "^123"])
        self.assertEqual(found.num_cut, 2)
        self.assertEqual([*map(len, found.batches(2))], [2, 1])
        with self.assertRaisesRegex(MoejaxError, "num_prompts=4, but x.txt holds 3"):
            requests.of_file(file, Letters(), num_prompts=4, longest=4)


class LengthTest(absltest.TestCase):
    def test_a_text_gives_prompts_of_a_length_from_different_places(self):
        found = requests.of_text("abcdef", Letters(), num_prompts=3, length=8, name="it")
        self.assertEqual([*map(spelt, found.prompts)], ["abcdefab", "cdefabcd", "efabcdef"])

    def test_random_tokens(self):
        found = requests.at_random(7, num_prompts=5, length=50, seed=1)
        array = np.asarray(found.prompts)
        self.assertEqual(array.shape, (5, 50))
        self.assertEqual((array.min(), array.max()), (0, 6))


def measured(*runs: list[BatchTimes]) -> Measurement:
    return Measurement(list(runs), [1.0] * len(runs), {}, 2.0, 0.0, 0.0, 0.0)


# Two requests of 4 and 6 tokens, 5 new each: calls of 3 steps and of 1.
FIRST = BatchTimes([4, 6], [5, 5], 0.5, [(0.3, 3), (0.2, 1)])
SECOND = BatchTimes([10, 10], [5, 5], 1.5, [(0.6, 3), (0.1, 1)])


class EndsTest(absltest.TestCase):
    def test_a_call_in_which_all_answers_ended_is_no_time_of_a_step(self):
        """Two answers of 9 tokens asked for, in calls of 4; both end in the second call."""
        calls = iter([[[2, 2, 2, 2], [2, 2, 0, -1]], [[0, -1, -1, -1], [-1] * 4], [[-1] * 4] * 2])
        session = types.SimpleNamespace(failures_before=0, emitted=StepOutput([[1], [1]], None))

        def decode(*_: Any) -> None:
            session.emitted = StepOutput(next(calls), None)

        runner: Any = types.SimpleNamespace(
            memory=None, fixed=None, programs=types.SimpleNamespace(seconds=0.0), decode=decode,
            prefill=lambda *_: session, reading=lambda _: contextlib.nullcontext(),
        )  # fmt: skip
        settings = GenerationSettings.of(max_new_tokens=9)
        bench = Bench(runner, context=64, settings=settings, eos_ids=(0,), steps_per_call=4)
        found = bench._batch([[5, 6], [7]])
        self.assertEqual([steps for _, steps in found.calls], [4])
        self.assertEqual(found.new_tokens, [6, 4])
        self.assertGreater(found.ended_s, 0)
        self.assertAlmostEqual(found.until_end_s, found.calls[0][0] + found.ended_s)


class TimesTest(absltest.TestCase):
    def test_by_hand(self):
        found = running._of_times(measured([FIRST, SECOND]))
        expected = {
            "TTFT median": 1000.0,  # of 500, 500, 1500, 1500
            "TTFT p99": 1500.0,
            "TPOT median": 1e3 * (0.125 + 0.175) / 2,
            "ITL median": 1e3 * (0.1 + 0.2) / 2,  # of 0.1 x 4 and 0.2 x 4
            "prefill throughput": 30 / 2.0,
            "decode throughput": 16 / 1.2,
            "output throughput": 20 / 3.2,
            "request throughput": 4 / 3.2,
        }
        for name, value in expected.items():
            self.assertAlmostEqual(found[name].value, value, places=6, msg=name)

    def test_runs_are_a_median_and_a_spread(self):
        slow = [BatchTimes([4], [2], 9.0, [(4.0, 1)])]
        quick = [BatchTimes([4], [2], 1.0, [(1.0, 1)])]
        middle = [BatchTimes([4], [2], 2.0, [(3.0, 1)])]
        found = running._of_times(measured(slow, quick, middle))["TTFT median"]
        self.assertEqual((found.value, found.low, found.high), (2000.0, 1000.0, 9000.0))

    def test_one_token_has_no_tpot(self):
        found = running._of_times(measured([BatchTimes([4], [1], 1.0, [])]))
        self.assertIn("TTFT median", found)
        self.assertNotIn("TPOT median", found)
        self.assertNotIn("decode throughput", found)

    def test_positions(self):
        # Steps read 5, 6, 7, 8 and 7, 8, 9, 10 positions.
        self.assertEqual(running._positions(FIRST), (26 + 34) / 4)
        self.assertEqual(running._positions(FIRST, window=6), (5 + 6 * 3 + 6 * 4) / 4)


class FloorTest(absltest.TestCase):
    def test_by_hand(self):
        def leaf(nbytes: int) -> Any:
            return jnp.zeros(nbytes, jnp.uint8)

        runner: Any = types.SimpleNamespace(
            config=TINY, dtype=np.dtype(np.float32), mesh=None,
            weights={"embed": leaf(10**6), "head": leaf(1000), "attention.o_proj": leaf(200),
                     "moe.gate_up": leaf(8000), "moe.down": leaf(4000)},
        )  # fmt: skip
        found = running._of_floor(measured([FIRST]), runner, bandwidth.Bandwidth(1e6, "x"))
        # The embeddings are looked up; 2 of 8 experts; keys and values of 2 layers, 2 heads of 16.
        least = 1000 + 200 + 12000 * 2 / 8 + 15 * 2 * 2 * 2 * 16 * 4
        self.assertAlmostEqual(found["byte floor of a decode step"].value, least / 1e6)
        self.assertAlmostEqual(found["time of the byte floor"].value, 1e3 * least / 1e6)
        share = 100 * (least / 1e6) / 0.125
        self.assertAlmostEqual(found["share of the byte floor"].value, share)


class BandwidthTest(parameterized.TestCase):
    @parameterized.parameters(
        ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12), ("NVIDIA H200", 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12), ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA L40S", 0.864e12), ("Tesla T4", 0.32e12), ("NVIDIA H200 MIG 1g.18gb", None),
        ("Something new", None),
    )  # fmt: skip
    def test_names(self, kind, expected):
        self.assertEqual(bandwidth._stated(kind), expected)

    def test_what_is_not_known_is_measured_and_said(self):
        with mock.patch.object(bandwidth, "COPIED_BYTES", 2**20):
            found = bandwidth.bandwidth_of(jax.devices("cpu")[0])
        self.assertEqual(found.source, "measured by a copy of 1 MiB")
        self.assertBetween(found.bytes_per_s, 1e8, 1e13)


class RoutingTest(parameterized.TestCase):
    def of_trace(self, trace: Trace, batch: int) -> routing.Workload:
        return routing.of_trace(TINY, trace, batch, recall=0.85, seed=0, name="x")

    def test_a_trace_of_the_shape_is_replayed_as_it_is(self):
        ids = np.arange(40 * 2 * 2).reshape(40, 2, 2) % 8
        found = self.of_trace(trace_of_replay(ids, 8), 2)
        self.assertEqual(found.ids.shape, (256, 2, 2, 2))
        np.testing.assert_array_equal(found.ids[:40, :, 0], ids)
        np.testing.assert_array_equal(found.ids[40:80, :, 0], ids)
        np.testing.assert_array_equal(found.ids[:20, :, 1], ids[20:])
        chosen = np.take_along_axis(found.probabilities, found.ids, -1)
        rest = found.probabilities.copy()
        np.put_along_axis(rest, found.ids, 0, axis=-1)
        self.assertTrue((chosen.min(-1) >= rest.max(-1)).all())

    def test_a_trace_of_fewer_experts_is_scaled_and_says_so(self):
        ids = np.arange(30 * 1 * 1).reshape(30, 1, 1) % 4
        found = self.of_trace(trace_of_replay(ids, 4), 1)
        self.assertIn("scaled from 4 experts, gates made up", found.about)
        self.assertEqual(found.ids.shape[1:], (2, 1, 2))
        with self.assertRaisesRegex(MoejaxError, "does not suit the shape"):
            self.of_trace(trace_of_replay(ids, 5), 1)

    def test_skew_makes_some_popular(self):
        def most(exponent: float) -> float:
            how: dict[str, Any] = {"exponent": exponent, "recall": 0.85, "seed": 0, "shape": ""}
            counts = routing.with_skew(TINY, 1, **how).activations()
            return float((counts.max(1) / counts.sum(1)).mean())

        self.assertLess(most(0.0), 0.2)
        self.assertGreater(most(3.0), 0.35)


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"batches": (0,)}, "batches=.0,. must be numbers"), ({"batches": (1, 2000)}, "batches"),
        ({"budgets": (-1.0,)}, "budgets"), ({"runs": 0}, "runs=0 must be at least 1"),
        ({"new_tokens": 0}, "new_tokens"), ({"shape": "Qwen"}, "shape='Qwen' must be one of"),
        ({"skew": "zipf:1"}, "has no effect without shape: give shape, or leave skew"),
        ({"shape": "tiny", "skew": "zipf"}, "uniform or zipf:S"),
        ({"shape": "tiny", "skew": "uniform", "trace": "x"}, "both say the routing"),
        ({"shape": "tiny", "prompts": "x"}, "prompts is of a checkpoint"),
        ({"shape": "tiny", "num_prompts": 6, "batches": (2, 4)}, "no multiple of batch 4"),
        ({"shape": "tiny", "mxfp4": True, "expert_rank": 8}, "in MXFP4 have no compensators"),
        ({"shape": "tiny", "mxfp4": True, "bits": 3, "dense_rank": 8}, "give fewer bits"),
        ({"output": "x.txt"}, "must end with one of"), ({"split": "words"}, "split"),
    )  # fmt: skip
    def test_what_is_refused(self, fields, said):
        with self.assertRaisesRegex(MoejaxError, said):
            BenchmarkConfig(**fields).check()

    def test_a_mesh_cuts_mxfp4_in_its_own_groups(self):
        how: dict[str, Any] = {"shape": "tiny", "platform": "cpu", "mesh": "2"}
        found = models_of(BenchmarkConfig(mxfp4=True, **how))
        self.assertEqual(found._own.expert_dim, 32)  # one group of each of two devices
        with self.assertRaisesRegex(MoejaxError, "1 groups of 64, too few for a mesh of 2"):
            models_of(BenchmarkConfig(bits=4, **how))

    def test_points_are_every_batch_under_every_budget(self):
        config = BenchmarkConfig(batches=(1, 4), budgets=(12.0, 0.0))
        self.assertEqual(config.points(), [(1, 12.0), (4, 12.0), (1, 0.0), (4, 0.0)])
