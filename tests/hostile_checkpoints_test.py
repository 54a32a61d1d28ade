"""Checkpoints made to take time or memory: each is refused in one line, soon and within little."""

import functools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import jax
import pytest
import tokenizers
from absl.testing import parameterized
from safetensors import safe_open

from moejax.checkpoints import open_checkpoint, safetensors_reader
from moejax.checkpoints.safetensors_reader import MOST_TENSORS, read_header
from moejax.demo import DEMO_DIRECTORY
from moejax.errors import MoejaxError
from moejax.files.checksums import checksum_fields
from moejax.files.small import MOST_VALUES
from moejax.text.tokenizer import Tokenizer
from tests import slow
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import write_checkpoint
from tests.quantized_stores import QWEN, Gptq, Own

# Times what parsing a header of 200,000 tensors takes, and bytes. Without limits such files took
# minutes and gigabytes.
MOST_PARSES, BYTES = 30, 500_000_000
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def peak_bytes() -> int:
    """Most that was resident since `/proc/self/clear_refs` was written to."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def empty_tensors(count, prefix):
    entry = '"%s%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(entry % (prefix, i) for i in range(count)) + "}").encode()


def cpu_seconds(run):
    start = time.process_time()
    run()
    return time.process_time() - start


@functools.cache
def most_seconds():
    """Returns the limit in CPU seconds, by this machine's speed as it is now."""
    content = empty_tensors(200_000, "x")
    return MOST_PARSES * min(cpu_seconds(lambda: json.loads(content)) for _ in range(2))


class HostileTestCase(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.device = jax.devices("cpu")[0]

    def assert_refused(self, path, *said):
        """Opening and loading ends in one line within the limits."""
        signal.alarm(60)  # where it waits for ever
        Path("/proc/self/clear_refs").write_text("5")
        before, start = peak_bytes(), time.process_time()
        with self.assertRaises(MoejaxError) as caught:
            checkpoint = open_checkpoint(str(path))
            Tokenizer.from_directory(checkpoint.directory)
            checkpoint.load(dtype="float32", device=self.device, progress=False)
        spent, taken = time.process_time() - start, peak_bytes() - before
        signal.alarm(0)
        self.assertLess(spent, most_seconds())
        self.assertLess(taken, BYTES)
        message = str(caught.exception)
        for part in said:
            self.assertIn(part, message)
        self.assertNotIn("\n", message)
        self.assertLess(len(message), 5000)

    def edit_config(self, path, **fields):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class ConfigTest(HostileTestCase):
    @parameterized.product(
        name=("qwen3", "mixtral"), count=(10**8, 10**30, 2**62, 9_999), quantized=(False, True)
    )
    def test_layers(self, name, count, quantized):
        if quantized:
            path = Gptq(QWEN).write(self.directory)
        else:
            path = write_checkpoint(name, self.directory)
        self.edit_config(path, num_hidden_layers=count)
        said = "expected at most 10000" if count > 10_000 else "9,999 layers of"
        self.assert_refused(path, "config.json", said)

    @parameterized.product(name=("qwen3", "mixtral", "own"), count=(2**31, 2**70, 60_000))
    def test_experts(self, name, count):
        if name == "own":
            path = Own(QWEN).write(self.directory)
        else:
            path = write_checkpoint(name, self.directory)
        self.edit_config(path, num_local_experts=count, num_experts=count)
        said = "expected at most 65536" if count > 2**16 else "layers of 60,000 experts take at"
        self.assert_refused(path, "config.json", said)

    def test_experts_in_one_tensor(self):
        path = write_checkpoint("qwen3_fused", self.directory)
        self.edit_config(path, num_local_experts=60_000, num_experts=60_000)
        self.assert_refused(path, "wrongly shaped tensors", "[60000, 32]")

    @parameterized.parameters("vocab_size", "hidden_size", "moe_intermediate_size", "head_dim")
    def test_widths(self, name):
        path = write_checkpoint("qwen3", self.directory)
        self.edit_config(path, **{name: 2**40})
        self.assert_refused(path, "config.json")

    @pytest.mark.slow
    def test_many_layers_without_experts(self):
        path = write_checkpoint("qwen3", self.directory)
        self.edit_config(
            path, num_hidden_layers=9_000, mlp_only_layers=list(range(400_000)), layer_types=None
        )
        self.assert_refused(path, "missing tensors (")

    # Long texts are made when they are needed: absl writes out what a test is given.
    @parameterized.parameters(
        (lambda: "[" * 100_000, "nested more than 64 deep"),
        (lambda: '{"a":' * 900 + "1" + "}" * 900, "nested more than 64 deep"),
        (lambda: '{"rope_scaling":' + "[" * 60 + "]" * 60 + "}", "model_type"),
        (lambda: "[" + "[]," * 10_000_000 + "[]]", "holds 20,000,002 values, expected at most"),
        (lambda: '{"a": "' + "x" * 60_000_000 + '"}', "more than 48 MB"),
        (lambda: '{"model_type": "' + "x" * 40_000_000 + '"}', "characters"),
        (lambda: '{"num_hidden_layers": ' + "9" * 5000 + "}", "cannot read"),
        (lambda: "null", "holds a NoneType, expected a JSON object"),
    )  # fmt: skip
    def test_size_and_depth(self, text, said):
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            path = write_checkpoint("qwen3", self.directory)
            if name != "config.json" and said == "model_type":
                continue
            kept = (path / name).read_bytes() if (path / name).exists() else None
            (path / name).write_text(text())
            if name == "config.json" or said != "characters":
                self.assert_refused(path, name, said)
            if kept is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(kept)


class SpecialFileTest(HostileTestCase):
    NAMES = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        WEIGHTS,
    )

    def checkpoint(self):
        for name in self.NAMES[:-2]:
            shutil.copy(DEMO_DIRECTORY / name, self.directory)
        (self.directory / WEIGHTS).symlink_to(DEMO_DIRECTORY / WEIGHTS)
        (self.directory / "chat_template.jinja").write_text("{{ messages }}")

    @parameterized.product(name=NAMES, kind=("FIFO", "device", "directory", "socket"))
    def test_files_that_are_none(self, name, kind):
        self.checkpoint()
        path = self.directory / name
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "directory":
            path.mkdir()
        else:
            os.mknod(path, 0o600 | 0o140000)
        self.assert_refused(self.directory, str(path))

    def test_links_to_files_are_followed(self):
        self.checkpoint()
        blobs = self.directory / "blobs"
        blobs.mkdir()
        for i, name in enumerate(self.NAMES):
            path = self.directory / name
            path.rename(blobs / str(i))
            path.symlink_to(Path("blobs") / str(i))
        checkpoint = open_checkpoint(str(self.directory))
        self.assertIsNotNone(Tokenizer.from_directory(self.directory).chat_template)
        self.assertIn("embed", checkpoint.load(dtype="float32", device=self.device, progress=False))

    def test_an_index(self):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        (path / INDEX).unlink()
        os.mkfifo(path / INDEX)
        self.assert_refused(path, f"{path / INDEX} is a FIFO, expected a regular file")


class HeaderTest(HostileTestCase):
    def headed(self, content, length=None, file_bytes=None, name=WEIGHTS):
        path = self.directory / name
        with path.open("wb") as file:
            file.write((len(content) if length is None else length).to_bytes(8, "little"))
            file.write(content)
            if file_bytes is not None:
                file.truncate(file_bytes)

    def setUp(self):
        super().setUp()
        path = write_checkpoint("qwen3", self.directory)
        if path != self.directory:
            for file in path.iterdir():
                shutil.copy(file, self.directory)

    @parameterized.parameters(12 * 10**9, 100_000_001)
    def test_length(self, length):
        self.headed(b"{", length, length + 10**6)
        self.assert_refused(self.directory, f"its header has {length:,} bytes", "100,000,000")

    def test_length_beyond_the_file(self):
        self.headed(b"{", 2**63, 1000)
        self.assert_refused(self.directory, "is truncated")

    @slow.repeats()
    @parameterized.parameters(
        lambda: b'{"a":[' + b"[]," * 30_000_000 + b"[]]}",
        lambda: b'{"a":"' + b"x" * 99_000_000 + b'"}',
        lambda: b'{"a":' + b"[" * 90_000_000,
    )
    def test_content(self, content):
        self.headed(content())
        self.assert_refused(self.directory, WEIGHTS, "is not a safetensors file")

    @slow.where(lambda count: count > 1000)
    @parameterized.parameters(300, 300_000)
    def test_a_legal_file_of_many_tensors(self, count):
        """Two axes and a checksum each: more values than any other JSON file may hold."""
        path, most_values = self.directory / WEIGHTS, MOST_VALUES * count // 300_000
        names = [f"model.layers.{i // 1000}.experts.{i % 1000}.weight" for i in range(count)]
        entry = '"%s":{"dtype":"U8","shape":[1,1],"data_offsets":[%d,%d]}'
        entries = ",".join(entry % (name, i, i + 1) for i, name in enumerate(names))
        metadata = json.dumps({"__metadata__": checksum_fields(dict.fromkeys(names, 7))})
        self.headed(f"{metadata[:-1]},{entries}}}".encode())
        with path.open("ab") as file:
            file.write(bytes(count))
        content = path.read_bytes()
        self.assertGreater(sum(content.count(mark) for mark in (b",", b"[", b"{")), most_values)
        with safe_open(path, framework="numpy") as file:
            self.assertLen(file.keys(), count)
        with mock.patch.object(safetensors_reader, "MOST_VALUES", most_values):
            found = read_header(path)
        self.assertEqual(list(found), names)
        self.assertEqual(found[names[-1]].checksum, 7)

    def test_values_beside_many_tensors(self):
        """A name a tensor allows so many values, which stand elsewhere here, and far more."""
        offsets = b'"data_offsets":0,' * 300_000
        content = b'{"a":{' + offsets + b'"b":[' + b"[]," * 9_000_000 + b"[]]}}"
        self.headed(content)
        self.assert_refused(self.directory, WEIGHTS, "values, expected at most 3,000,000")
        self.headed(content.replace(b"[],", b"", 7_700_000))
        self.assert_refused(self.directory, WEIGHTS, "is not a safetensors file")

    @pytest.mark.slow
    def test_two_million_empty_tensors(self):
        self.headed(empty_tensors(1_700_000, ""))
        self.assert_refused(self.directory, f"hold more than {MOST_TENSORS:,} tensors")

    @pytest.mark.slow
    def test_many_empty_tensors(self):
        self.headed(empty_tensors(200_000, "x"))
        self.assert_refused(self.directory, "missing tensors (", "unexpected tensors (200000)")

    def test_many_empty_tensors_in_many_files(self):
        (self.directory / WEIGHTS).unlink()
        names = [f"model-{i}.safetensors" for i in range(4)]
        for i, name in enumerate(names):
            self.headed(empty_tensors(200_000, f"{i}x"), name=name)
        index = {"weight_map": {str(i): name for i, name in enumerate(names)}}
        (self.directory / INDEX).write_text(json.dumps(index))
        self.assert_refused(self.directory, f"hold more than {MOST_TENSORS:,} tensors")

    @pytest.mark.slow
    def test_an_index_of_many(self):
        (self.directory / WEIGHTS).unlink()
        for weight_map, said in (
            ({str(i): "a" for i in range(600_000)}, "more than 524,288 tensors"),
            ({str(i): str(i) for i in range(20_000)}, "more than 10,000 files"),
        ):
            (self.directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
            self.assert_refused(self.directory, INDEX, said)


def tokenizer_fields(**changed):
    """A tokenizer.json of two letters."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    model |= changed.pop("model", {})
    return {"version": "1.0", "added_tokens": [], "model": model, **changed}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(*pieces, **special):
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special}


ADDED = {"id": 3, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
ADDED |= {"special": False}
TEXT_A, TEXT_B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
MARK = {"SpecialToken": {"id": "[X]", "type_id": 0}}


class TokenizerTest(HostileTestCase):
    def write(self, fields):
        for name in ("config.json", WEIGHTS):
            (self.directory / name).symlink_to(DEMO_DIRECTORY / name)
        (self.directory / "tokenizer.json").write_text(json.dumps(fields))

    @parameterized.parameters(
        # Each of these makes the library panic, and the last three end the process.
        ({"post_processor": template(MARK, TEXT_A)}, "puts '[X]', which is none of its tokens"),
        ({"post_processor": template(TEXT_B)}, "['B'], expected one text A"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "pieces of length 0"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}}, "strips the end"),
        ({"model": {"continuing_subword_prefix": "zzzz"}}, "continuing_subword_prefix 'zzzz'"),
        ({"model": {"continuing_subword_prefix": "z", "merges": ["a é"]}}, "_prefix 'z'"),
        # These make much of little.
        ({"normalizer": replace({"String": "a"}, "a" * 10**6)}, "makes 1,000,000 characters"),
        ({"normalizer": replace({"Regex": "a"}, "a" * 100)}, "makes 101 characters"),
        ({"normalizer": replace({"String": ""}, "a" * 100)}, "makes 101 characters"),
        ({"decoder": replace({"String": "a"}, "a" * 10**6)}, "its decoder makes 1,000,000"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 9}},
            "ByteLevel twice",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "1000000 characters before"),
        ({"post_processor": template(*[TEXT_A] * 1000)}, "1000 pieces"),
        (
            {"post_processor": template(MARK, TEXT_A, **{"[X]": {"ids": [0] * 10**6}})},
            "as many ids as no token has",
        ),
        ({"added_tokens": [{"id": 3, "content": "a" * 10**6}]}, "of 1,000,000 characters"),
        # This one never ends.
        (
            {
                "normalizer": {"type": "Strip", "strip_left": True, "strip_right": True},
                "added_tokens": [ADDED | {"content": "\n"}],
            },
            "its normalizer makes nothing of the added token '\\n'",
        ),
        # These lack something, or are nothing.
        ({"model": {"unk_token": "<unk>"}}, "unknown token '<unk>' is not in its vocabulary"),
        (
            {"model": {"type": "WordLevel", "unk_token": "?", "merges": None}},
            "unknown token '?' is not",
        ),
        ({"normalizer": {"type": "New"}}, "its normalizer has the type 'New', which is not"),
        ({"normalizer": [1]}, "it is not understood"),
        ({"added_tokens": [{"content": 5}]}, "it is not understood"),
        ({"model": {"merges": ["a c"]}}, "Token `c` out of vocabulary"),
        ({"normalizer": replace({"Regex": "("}, "")}, "Oniguruma error"),
    )
    def test_refused(self, changed, said):
        self.write(tokenizer_fields(**changed))
        self.assert_refused(self.directory, f"{self.directory / 'tokenizer.json'}", said)

    def test_the_plain_one_is_read(self):
        self.write(tokenizer_fields())
        tokenizer = Tokenizer.from_directory(self.directory)
        self.assertEqual(tokenizer.encode("abba"), [2, 1, 0])

    def test_what_fails_later_is_one_line(self):
        model = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "merges": None}
        self.write(tokenizer_fields(model=model))
        tokenizer = Tokenizer.from_directory(self.directory)
        self.assertEqual(tokenizer.encode("a"), [0])
        with self.assertRaisesRegex(
            MoejaxError, f"tokenizer of {self.directory} failed: Encounter"
        ):
            tokenizer.encode("z")

    def test_a_panic_is_one_line(self):
        self.write(tokenizer_fields())
        tokenizer = Tokenizer.from_directory(self.directory)
        broken = tokenizer_fields(post_processor=template(TEXT_B))
        tokenizer._encoder = tokenizers.Tokenizer.from_str(json.dumps(broken))
        with self.assertRaisesRegex(MoejaxError, "failed: index out of bounds.*; download"):
            tokenizer.encode("a")
