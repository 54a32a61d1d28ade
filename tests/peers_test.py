"""Other engines beside moejax: what they print is read, what fails is a row, ours stands beside."""

import dataclasses
import http.server
import json
import math
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import tokenizers
from absl import flags
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.demo import DEMO_DIRECTORY
from moejax.errors import MoejaxError
from moejax.files.result_rows import ResultRow, append_rows, read_rows
from moejax.models.config import weight_shapes
from moejax.models.shapes import CONFIGS
from moejax.weights.qtensor import QTensor
from scripts.studies.peers import (
    budgets,
    llama_cpp,
    ours,
    random_checkpoint,
    random_files,
    random_gguf,
    run_cases,
    section,
    servers,
)
from scripts.studies.peers.running import (
    Case,
    Figure,
    NotRunError,
    OutOfTimeError,
    Place,
    decode,
    prefill,
)

# Printed by llama.cpp b11434 on a CPU, on a file of `random_gguf --shape=tiny`; fields that nothing
# reads are left out.
BENCH = """warning: consult docs/build.md for compilation instructions
{"build_commit": "unknown", "build_number": 0, "n_threads": 1, "n_prompt": 32, "n_gen": 0, "n_depth": 0, "avg_ns": 1731262, "avg_ts": 27571.793247, "stddev_ts": 22386.478269, "samples_ts": [ 11742.2, 43401.4 ]}
{"build_commit": "unknown", "build_number": 0, "n_threads": 1, "n_prompt": 0, "n_gen": 8, "n_depth": 0, "avg_ns": 253746, "avg_ts": 32252.622497, "stddev_ts": 6839.032721, "samples_ts": [ 27416.7, 37088.5 ]}
{"build_commit": "unknown", "build_number": 0, "n_threads": 1, "n_prompt": 0, "n_gen": 4, "n_depth": 64, "avg_ns": 4631879, "avg_ts": 863.580417, "stddev_ts": 0.000000, "samples_ts": [ 863.58 ]}
"""  # noqa: E501
BATCHED = """
{"n_kv_max": 1024, "n_threads": 1, "pp": 16, "tg": 4, "pl": 1, "n_kv": 20, "t_pp": 0.001007, "speed_pp": 15888.778320, "t_tg": 0.000309, "speed_tg": 12944.984375, "t": 0.001316, "speed": 15197.568359}
{"n_kv_max": 1024, "n_threads": 1, "pp": 16, "tg": 4, "pl": 4, "n_kv": 80, "t_pp": 0.001746, "speed_pp": 36655.210938, "t_tg": 0.008903, "speed_tg": 1797.147095, "t": 0.010649, "speed": 7512.442871}
"""  # noqa: E501
NO_MODEL = """gguf_init_from_file: failed to open GGUF file '/tmp/nofile.gguf' (No such file)
llama_bench: error: failed to load model '/tmp/nofile.gguf'
"""


def setUpModule():
    flags.FLAGS.mark_as_parsed()


class OutputTest(parameterized.TestCase):
    def test_llama_bench(self):
        found = list(llama_cpp.of_bench(BENCH, 512))
        self.assertEqual(
            [(one.workload, one.tokens_per_s) for one in found],
            [(prefill(32), 27571.793247), (decode(512), 32252.622497), (decode(64), 863.580417)],
        )

    def test_llama_batched_bench(self):
        found = {one.workload: one.tokens_per_s for one in llama_cpp.of_batched_bench(BATCHED)}
        self.assertEqual(
            found,
            {
                prefill(16): 15888.77832, decode(16): 12944.984375,
                prefill(16, 4): 36655.210938, decode(16, 4): 1797.147095,
            },
        )  # fmt: skip

    def test_ours(self):
        figures = {
            name: {"value": value, "unit": "tokens/s"}
            for name, value in (("prefill throughput", 100.0), ("decode throughput", 50.0))
        }
        figures["device memory peak"] = {"value": 2.5, "unit": "GiB"}
        points = [
            {"status": "refused", "reason": "needs 3 GiB", "batch": 1, "device_gib": 1.0},
            {"status": "measured", "batch": 4, "device_gib": 3.0, "figures": figures},
        ]
        abouts = {1: "in 1 GiB", 3: "in 3 GiB"}
        found = list(ours.of_record(json.dumps({"points": points}), 512, abouts))
        rest = {"planned_gib": 3.0, "own_peak_gib": 2.5}
        self.assertEqual(found, [
            Figure("not run", 0.0, {"error": "needs 3 GiB"}, "in 1 GiB"),
            Figure(prefill(512, 4), 100, rest, "in 3 GiB"),
            Figure(decode(512, 4), 50, rest, "in 3 GiB"),
        ])  # fmt: skip
        with self.assertRaisesRegex(NotRunError, "needs 3 GiB"):
            list(ours.of_record(json.dumps({"points": points[:1]}), 512, abouts))


class RandomFilesTest(parameterized.TestCase):
    @parameterized.parameters(sorted(llama_cpp.ON_CPU))
    def test_a_gguf_file_has_our_parameters(self, shape):
        config = CONFIGS[shape]
        if config.tied_embeddings:
            self.skipTest("a head of its own")
        ours_too = sum(map(math.prod, weight_shapes(config).values()))
        count = sum(math.prod(one.shape) for one in random_gguf.tensors(config))
        self.assertEqual(count, ours_too)

    def test_no_file_is_written_without_room(self):
        path = Path(self.create_tempdir().full_path) / "a.gguf"
        random_files.check_room(path, 1)
        with self.assertRaisesRegex(MoejaxError, "a.gguf takes 1073741824.0 GiB, and its disk"):
            random_files.check_room(path, 2**60)

    @pytest.mark.slow
    def test_an_int4_checkpoint_that_moejax_runs(self):
        folder = Path(self.create_tempdir().full_path) / "random"
        random_checkpoint.write(CONFIGS["tiny"], folder, bits=4)
        with Engine.from_pretrained(str(folder), progress=False) as engine:
            packed = {name: weight.bits for name, weight in engine.weights.items()
                      if isinstance(weight, QTensor)}  # fmt: skip
            [answer] = engine.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)
        self.assertEqual(packed.pop("head"), 8)
        self.assertEqual(set(packed.values()), {4})
        self.assertLen(answer.tokens, 4)

    def test_answers_have_text(self):
        folder = Path(self.create_tempdir().full_path) / "random"
        config = dataclasses.replace(CONFIGS["tiny"], vocab_size=9000)
        random_checkpoint.write(config, folder, bits=4)
        known = random_checkpoint.num_texts()
        with Engine.from_pretrained(str(folder), progress=False) as engine:
            logits = engine.logits([[5, 6, 7]])[0]
        self.assertTrue((logits[:, known:] == 0).all())
        self.assertLess(logits.argmax(axis=-1).max(), known)


TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))


class _Server(http.server.BaseHTTPRequestHandler):
    """An engine that takes 10 ms a prompt and 1 ms a token, one request at a time."""

    lock = threading.Lock()
    wrong = False
    refusals: ClassVar[list[int]] = []  # statuses of the next answers

    def _answer(self, body, status=200):
        text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        metrics = f"x 1\nmoejax_device_peak_bytes {2**30}.0\n"
        self._answer(metrics if self.path == "/metrics" else {"data": [{"id": "it"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refusals:
            return self._answer({"error": "no ids here"}, self.refusals.pop())
        with self.lock:
            time.sleep(0.01 + 0.001 * (asked["max_tokens"] - 1))
        count = 3 if self.wrong else asked["max_tokens"]
        prompt = asked["prompt"]
        ids = TOKENIZER.encode(prompt).ids if isinstance(prompt, str) else prompt
        usage = {"prompt_tokens": len(ids), "completion_tokens": count}
        return self._answer({"usage": usage})

    def log_message(self, *_):
        pass


class ServersTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.port = self.server.server_address[1]

    def test_rates_are_those_of_the_engine(self):
        place = Place(Path(), Path(), time.monotonic() + 60, 60)
        prompts = servers.Prompts(64)
        before, after = servers._figures(self.port, "it", prompts, 2, place)
        self.assertEqual((before.workload, after.workload), (prefill(64, 2), decode(64, 2)))
        # One at a time: 64 tokens in 10 ms or more, a token in 1 ms or more.
        self.assertBetween(before.tokens_per_s, 1000, 7000)
        self.assertBetween(after.tokens_per_s, 300, 2500)  # a busy machine

    def test_an_answer_of_another_length_is_refused(self):
        with (
            mock.patch.object(_Server, "wrong", True),
            self.assertRaisesRegex(ValueError, "usage|asked"),
        ):
            servers.ask(self.port, "it", [300, 301], 2, 4)

    def test_a_server_that_loads_is_waited_for_and_one_that_refuses_is_not(self):
        place = Place(Path(), Path(), time.monotonic() + 60, 60)
        process, prompts = mock.Mock(**{"poll.return_value": None}), servers.Prompts(4)
        with mock.patch.object(_Server, "refusals", [503, 503]):
            self.assertEqual(servers._wait(process, self.port, place, prompts), "it")
        with (
            mock.patch.object(_Server, "refusals", [400, 503]) as refusals,
            self.assertRaisesRegex(ValueError, "status 400: .*no ids here"),
        ):
            servers._wait(process, self.port, place, prompts)
        self.assertEmpty(refusals)

    def test_a_server_that_takes_texts_gets_as_many_tokens(self):
        prompts = servers.Prompts(512, DEMO_DIRECTORY / "tokenizer.json")
        asked = {prompts(seed) for seed in range(20)}
        self.assertLen(asked, 20)
        for prompt in asked:
            self.assertIsInstance(prompt, str)
            servers.ask(self.port, "it", prompt, 512, 1)  # which counts them
        with self.assertRaisesRegex(ValueError, "asked"):
            servers.ask(self.port, "it", prompts(0) + " more", 512, 1)

    def test_the_device_memory_that_moejax_counts(self):
        self.assertEqual(servers._own_peak(self.port), 1.0)


class RunTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)

    def place(self, seconds=60.0, each=60.0):
        return Place(self.folder, self.folder, time.monotonic() + seconds, each)

    def test_the_last_words_of_a_program_that_fails(self):
        program = f"import sys; sys.stderr.write({NO_MODEL!r}); sys.exit(1)"
        with self.assertRaisesRegex(NotRunError, "error: failed to load model"):
            self.place().run([sys.executable, "-c", program])
        with self.assertRaisesRegex(NotRunError, "cannot be started"):
            self.place().run([str(self.folder / "none")])

    def test_too_slow_is_not_out_of_time(self):
        sleep = [sys.executable, "-c", "import time; time.sleep(30)"]
        with self.assertRaisesRegex(NotRunError, "took more than"):
            self.place(each=0.2).run(sleep)
        with self.assertRaises(OutOfTimeError):
            self.place(seconds=0.2).run(sleep)

    def bench(self, *cases, seconds=float("inf"), again=False):
        path = self.folder / "peers.jsonl"
        done = run_cases.names_done(path, again)
        waiting = [case for case in cases if not done.issuperset(case.names)]
        run_cases.run_cases(waiting, self.place(seconds), path, "a card")
        return read_rows(path) if path.exists() else []

    def test_a_call_goes_on_where_the_last_one_stopped(self):
        ran = []

        def case(name, error=None, seconds=1.0):
            def measure(place):
                ran.append(name)
                if error:
                    raise error
                return [Figure(decode(512), 5.0, {"version": "b1", "peak_gib": 2.0})]

            return Case("peer", f"shape, {name} | one", seconds, measure)

        cases = [
            case("good"), case("bad", NotRunError("no such flag")), case("late", OutOfTimeError()),
            case("long", seconds=1000),
        ]  # fmt: skip
        rows = self.bench(*cases, seconds=100.0)
        self.assertEqual(ran, ["good", "bad", "late"])
        self.assertEqual(
            [(row.what, row.figure, row.unit) for row in rows],
            [
                ("peer | shape, good | one | decode after 512, 1 sequence", 5.0, "tokens/s"),
                ("peer | shape, bad | one | not run", 0.0, "not run"),
            ],
        )
        self.assertEqual(rows[0].versions, {"peer": "b1"})
        self.assertEqual(rows[0].baseline, {"peak_gib": 2.0})
        self.assertEqual(rows[1].baseline, {"error": "no such flag"})
        self.bench(*cases, seconds=100.0)
        self.assertEqual(ran[3:], ["late"])
        self.bench(*cases, again=True)
        self.assertEqual(ran[4:], ["bad", "late", "long"])

    def test_a_run_of_several_budgets_is_done_with_all_its_rows(self):
        rows = [Figure(decode(512), 5.0, {}, "of 8 GiB"), Figure(decode(512), 6.0, {}, "of 9 GiB")]
        outcomes = [rows[:1], NotRunError("no memory")]

        def measure(place):
            if isinstance(outcomes[0], Exception):
                raise outcomes.pop(0)
            return outcomes.pop(0)

        case = Case("peer", "of 8 GiB", 1.0, measure, others=("of 9 GiB",))
        path = self.folder / "peers.jsonl"
        run_cases.run_cases([case], self.place(), path, "a card")
        self.assertFalse(run_cases.names_done(path, again=False).issuperset(case.names))
        run_cases.run_cases([case], self.place(), path, "a card")
        self.assertEqual(run_cases.names_done(path, again=False), set(case.names))
        self.assertEqual(
            [row.what for row in read_rows(path)],
            [
                "peer | of 8 GiB | decode after 512, 1 sequence",
                "peer | of 8 GiB | not run", "peer | of 9 GiB | not run",
            ],
        )  # fmt: skip

    def test_rows_name_no_path_of_the_machine(self):
        typed = "python -m bench_peers /tmp/r --llama_cpp=/a/b --gguf=/c --layers=2 --seconds=9"
        said = run_cases.without_paths(f"{typed} '--only=12 GiB, even'")
        wanted = "python -m bench_peers results/ --llama_cpp=LLAMA_CPP --gguf=GGUF --layers=2"
        self.assertEqual(said, wanted)


def row(peer, setting, workload, rate, gib=None, load="one"):
    baseline = {} if gib is None else {"peak_gib": gib}
    return ResultRow(
        what=f"{peer} | Qwen3-30B-A3B, 48 layers, {setting} | {load} | {workload}", figure=rate,
        unit="tokens/s", baseline=baseline, device="a card", versions={}, date="2026-11-25",
        command="python",
    )  # fmt: skip


class SectionTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        ours_form = "INT4 g64, head bf16"
        self.rows = section.taken_apart([
            row("llama.cpp", "Q4_K, head Q6_K, -ncmoe 16 -t 16", decode(512), 100, 12.0),
            row("llama.cpp", "Q4_K, head Q6_K, -ncmoe 48 -t 16", decode(512), 50, 2.0),
            row("llama.cpp", "Q4_K, head Q6_K, -ncmoe 0 -t 16", decode(512), 300, 17.0),
            row("FreeToken", "bf16, --moe-cache-rate 0.5", decode(512), 60, 30.0, "server"),
            row("moejax", f"{ours_form}, 12 GiB, even routing", decode(512), 90, 12.4),
            row("moejax", f"{ours_form}, 12 GiB, recorded routing", decode(512), 320, 12.4),
            row("moejax", f"{ours_form}, 12 GiB, skewed routing", decode(512), 330, 12.4),
            row("moejax", f"{ours_form}, 7 GiB, even routing", decode(512), 60, 7.2),
            row("moejax", f"{ours_form}, all on the device, the random routers' routing",
                decode(512), 520, 19.5),
        ])  # fmt: skip

    def test_ours_in_the_memory_that_they_took_and_losses_first(self):
        cells = section.comparisons(self.rows, [decode(512)])
        self.assertEqual([(one[2].split(", ")[-1], *one[6:]) for one in cells], [
            ("-ncmoe 48 -t 16", "", "", "", "ours takes more"),
            ("-ncmoe 16 -t 16", "90", "320", "330", "0.90"),
            ("-ncmoe 0 -t 16", "520", "520", "520", "1.73"),
            ("--moe-cache-rate 0.5", "", "", "", "not measured"),
        ])  # fmt: skip

    def test_theirs_in_the_same_budget(self):
        one = budgets.point(self.rows, "Qwen3-30B-A3B", 12, decode(512))
        self.assertEqual(one.theirs.row.figure, 100)
        self.assertEqual([one.times(routing) for routing in ours.ROUTINGS], [0.9, 3.2, 3.3])
        less = budgets.point(self.rows, "Qwen3-30B-A3B", 7, decode(512))
        self.assertEqual((less.theirs.row.figure, less.times()), (50, 1.2))
        self.assertTrue(math.isnan(less.times(ours.RECORDED)))
        none = budgets.point(self.rows, "Qwen3-30B-A3B", 3, decode(512))
        self.assertEqual((none.own, none.theirs.row.figure, none.error), ({}, 50, ""))
        none = budgets.point(self.rows, "Qwen3-30B-A3B", 1.9, decode(512))
        self.assertIsNone(none.theirs)  # it took 2
        self.assertEqual(budgets.in_line(self.rows, "moejax"), "520; 90 to 330; 60; not measured")
        self.assertEqual(budgets.in_line(self.rows, "llama.cpp"), "300; 100; 50; 50")

    def test_verdicts_and_models_without_rows(self):
        said = budgets.bars(self.rows).splitlines()
        one = decode(512)
        self.assertIn(f"| {one}, 12 GiB, even routing | 90 | 100 | 0.90 | 1.2 | missed |", said)
        self.assertIn(f"| {one}, 12 GiB, recorded routing | 320 | 100 | 3.20 | 2.5 | met |", said)
        self.assertIn(f"| {one}, 3 GiB, even routing |  | 50 |  | 1.3 | not shown |", said)
        self.assertIn("| prefill of 4096, 3 GiB |  |  |  | 1.3 | not shown |", said)
        self.assertIn("| missed |", said[2])
        self.assertIn("| not measured | not measured |",
                      budgets.by_budget(self.rows, ["Qwen3-30B-A3B"]))  # fmt: skip

    @pytest.mark.slow
    def test_pages_and_the_picture(self):
        folder = Path(self.create_tempdir().full_path)
        own = row("moejax", "INT4 g64, head bf16, 8 GiB, even routing", decode(512), 1)
        own.baseline["own_peak_gib"] = 7.9  # of a run of several budgets
        self.assertAlmostEqual(section.taken_apart([own])[0].peak_gib, 8.5)
        self.assertIn("No rows yet", budgets.short([]))
        self.assertEqual(section.draw([], folder), [])
        failed = row("FreeToken", "bf16", "not run", 0.0)
        path = folder / "rows.jsonl"
        append_rows(path, [failed.__class__(**{**failed.__dict__, "unit": "not run",
                                              "baseline": {"error": "no kernel"}})])  # fmt: skip
        rows = [*self.rows, *section.taken_apart(read_rows(path))]
        rows += [self.rows[0]._replace(shape=f"shape {i}") for i in range(3)]  # two rows of panels
        rows += section.taken_apart([
            row("llama.cpp", "Q4_K, head Q6_K, -ncmoe 0 -t 16", decode(512), 200, 17.0, "server"),
            row("moejax", "INT4 g64, head INT8, all on the device, the random routers' routing",
                decode(512), 250, 19.5, "server"),
        ])  # fmt: skip
        loops, _, servers = section.whole(rows).partition("**Servers, asked by one client**")
        self.assertIn("| no kernel |", servers)
        self.assertIn("| 200 | 19.5 | 250 | 250 | 250 | 1.25 |", servers)
        self.assertNotIn("| 250 |", loops)
        self.assertTrue(section.draw(rows, folder)[0].stat().st_size > 1000)
