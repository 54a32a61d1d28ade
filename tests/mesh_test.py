"""Several devices, a share of every expert each: they answer as one device does.

Float32 sums in another order differ by rounding, which no routing of these models turns on.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moejax import Engine, devices
from moejax.checkpoints import open as checkpoints
from moejax.checkpoints import safetensors_reader
from moejax.checkpoints.experts import ExpertReader
from moejax.checkpoints.open import open_checkpoint
from moejax.checkpoints.reader import CheckpointReader
from moejax.checkpoints.sizes import checkpoint_sizes
from moejax.devices import MESH_AXIS, REPLICATED, DeviceMesh, device_nbytes, make_mesh, mesh_size
from moejax.experts.budget import Limits
from moejax.experts.load import _rows_of
from moejax.experts.share_rows import ShareRows
from moejax.experts.tiering import STORED, StoredTier, Tiering
from moejax.inference.generation import GenerationSettings
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.head_shares import HEAD_LEAVES, HeadShares, splits_heads
from moejax.models.layer_index import layer_indices
from moejax.models.leaf_kinds import EXPERT_BIASES, EXPERT_LEAVES, VOCABULARY_LEAVES
from moejax.models.moe import ResidentExperts
from moejax.models.shapes import SHAPES
from moejax.models.transformer import merge_weights, model_definition
from moejax.weights.linear import Kernels
from scripts.studies.speed.whole_experts import WholeExperts
from tests import hf_checkpoints, model_kinds, slow
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import TinyCheckpoint
from tests.quantized_stores import Own, Plain
from tests.random_checkpoints import TINY, write_random_checkpoint

PROMPTS = [[5, 9, 2, 41, 7, 30, 11], [3, 8, 80]]
TOKENS = np.arange(24).reshape(2, 12)
SMALL: dict[str, Any] = {"vocab_size": 99, "num_experts": 6, "max_positions": 64, "mlp_dim": 64}
QWEN = ModelConfig(**TINY | SMALL | {"expert_dim": 576})  # 12 groups of 48
CONFIGS = {"qwen3": QWEN, "tied": dataclasses.replace(QWEN, tied_embeddings=True)} | {
    kind: model_kinds.config_of(
        kind,
        **SMALL | {"expert_dim": 384, "num_experts": 8},
        shared_dim=384 * ("shared_dim" in model_kinds.KINDS[kind]),
    )
    for kind in model_kinds.KINDS
}


CONFIGS["uneven"] = dataclasses.replace(QWEN, num_layers=2, moe_layers=(1,))
CONFIGS["small"] = dataclasses.replace(CONFIGS["uneven"], expert_dim=64)
CONFIGS["heads"] = dataclasses.replace(QWEN, num_heads=16, num_kv_heads=8, head_dim=24)


class Packed(Own):
    """Groups of 48 with float zeros, all matrices packed; weights of about 0.1."""

    def __init__(self, model, bits):
        super().__init__(model, ranks=(0,), bits=bits)

    def matrix(self, prefix, shape):
        tensors, weights = super().matrix(prefix, shape)
        factor = np.float16(0.4 / 2**self.bits)
        tensors = {
            name: (tensor * factor).astype(tensor.dtype) if name.endswith("scales") else tensor
            for name, tensor in tensors.items()
        }
        return tensors, weights * factor


def stores() -> dict[str, Any]:
    return {f"int{bits}": functools.partial(Packed, bits=bits) for bits in (2, 3, 4)} | {
        "plain": Plain
    }


def run_together(commands: list[list[str]], num_devices: int = 1) -> list[Any]:
    """Runs `moejax.generate` with each of the lists of flags at once; processes, when all ended."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
    }

    def run(flags: list[str]) -> Any:
        command = [sys.executable, "-m", "moejax.generate", *flags]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )

    with concurrent.futures.ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(run, commands))


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Collects the bytes of every read of a tensor's values."""
    found: list[int] = []

    def read_at(descriptor: int, view: memoryview, offset: int) -> int:
        found.append(len(view))
        return original(descriptor, view, offset)

    original = safetensors_reader._read_at
    with mock.patch.object(safetensors_reader, "_read_at", read_at):
        yield found


def fuse_experts(directory: Path) -> None:
    """Writes the experts of each layer as one tensor, as transformers 5 does."""
    path = directory / "model.safetensors"
    tensors, found = load_file(path), collections.defaultdict(list)
    for name in sorted(name for name in tensors if ".experts." in name):
        module, _, rest = name.partition(".experts.")
        found[module, rest.split(".")[1]].append(tensors.pop(name))
    for module in {module for module, _ in found}:
        gate, up, down = (np.stack(found[module, f"{x}_proj"]) for x in ("gate", "up", "down"))
        tensors[f"{module}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{module}.experts.down_proj"] = down
    save_file(tensors, path)


HOW: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}


class MeshTestCase(FolderTestCase):
    """Engines of the checkpoint in `directory`, which should answer alike."""

    def load(self, **how: Any) -> Engine:
        engine = Engine.from_pretrained(
            self.directory, dtype="float32", platform="cpu", progress=False, **how
        )
        self.addCleanup(engine.close)
        return engine

    def assert_close_logits(self, one: Engine, other: Engine) -> None:
        expected, found = one.logits(TOKENS), other.logits(TOKENS)
        self.assertLess(np.abs(found - expected).max() / np.abs(expected).max(), 1e-5)

    def assert_equal_answers(self, one: Engine, other: Engine) -> None:
        answers = [[a.tokens for a in engine.generate(PROMPTS, **HOW)] for engine in (one, other)]
        self.assertEqual(*answers)


class MeshTest(MeshTestCase):
    # Answers of a mesh: handed_out_test.py.
    @slow.where(lambda case: case != ("small", "plain", "2,heads"))
    @parameterized.product(
        case=(
            ("uneven", "int4", "8"),  # 12 groups
            ("qwen3", "int3", "4"),
            ("qwen3", "int2", "2"),
            ("shared", "plain", "2"),
            ("tied", "plain", "4"),
            ("latent", "plain", "4"),
            ("delta", "plain", "2"),
            ("sigmoid", "int3", "8"),
            ("joint", "plain", "2"),
            ("biased", "plain", "4"),
            ("by_part", "plain", "2"),
            ("lite", "plain", "4"),
            ("sinks", "plain", "2"),
            ("small", "plain", "2,heads"),
            ("heads", "int4", "8,heads"),
            ("heads", "int3", "4,heads"),
            ("delta", "plain", "2,heads"),  # gates of heads
            ("biased", "plain", "2,heads"),
        )
    )
    def test_mesh_answers_as_one_device(self, case):
        kind, form, mesh = case
        count, by_heads = mesh_size(mesh), mesh.endswith("heads")
        if kind in ("delta", "joint", "biased", "by_part", "lite", "sinks"):
            write_random_checkpoint(self.directory, **vars(CONFIGS[kind]))
        else:
            stores()[form](CONFIGS[kind]).write(self.directory)
        one, several = self.load(), self.load(mesh=mesh)
        self.assert_close_logits(one, several)
        if kind != "small":  # which always runs, and compiles as little as may be
            self.assert_equal_answers(one, several)
        targets, lengths = np.roll(TOKENS, -1, axis=1), np.full(2, TOKENS.shape[1])
        scores = [engine.score(TOKENS, lengths, targets) for engine in (one, several)]
        np.testing.assert_allclose(*scores, rtol=1e-5)
        pairs = [([5, 6, 7], [8, 9]), ([3], [4])]
        found = [engine.scorer.of_tokens(pairs) for engine in (one, several)]
        likelihoods = [[pair.log_likelihood for pair in pairs] for pairs in found]
        np.testing.assert_allclose(*likelihoods, rtol=1e-5)
        # Every device has a share of the experts, some rows of the vocabulary, perhaps some heads,
        # and the rest whole.
        for name, leaf in several.weights.items():
            for array in jax.tree.leaves(leaf):
                self.assertLen(array.sharding.device_set, count)
                is_split = name in (*EXPERT_LEAVES, *EXPERT_BIASES, *VOCABULARY_LEAVES)
                is_split |= by_heads and name in HEAD_LEAVES
                self.assertEqual(array.is_fully_replicated, not is_split, name)

    @parameterized.parameters("2", "2,heads", "2,experts")
    @pytest.mark.slow
    def test_a_running_batch(self, mesh):
        Plain(dataclasses.replace(QWEN, expert_dim=192)).write(self.directory)
        how = {"max_new_tokens": 9, "ignore_eos": True}
        expected = [answer.tokens for answer in self.load().generate(PROMPTS, **how)]
        several = self.load(limits=Limits(slots=3), batch=3, mesh=mesh)
        batch = several.continuous_batch(2)
        found = {batch.submit(prompt, GenerationSettings(**how)): [] for prompt in PROMPTS}
        while batch.num_rows:
            for row, delta in batch.step():
                found[row] += delta.tokens
        self.assertEqual([*found.values()], expected)

    @parameterized.parameters(
        (("slots", 2),), (("slots", 8),), (("slots", "2,heads"),), (("dynaexq", 2),),
        (("dymoe", 3),), (("dymoe", "2,heads"),),
    )  # fmt: skip
    @pytest.mark.slow
    def test_residency_is_invisible_on_a_mesh(self, case):
        """Where experts are changes no bit; who is where, and why, is as on one device."""
        what, mesh = case
        count, slots = mesh_size(mesh), QWEN.num_experts
        Plain(dataclasses.replace(QWEN, expert_dim=192)).write(self.directory)
        if what == "slots":
            limits = Limits(slots=3, prefetch=2)
            one, some, expected = (
                self.load(limits=limits), self.load(limits=limits, mesh=mesh), self.load(mesh=mesh),
            )  # fmt: skip
        else:
            how = {"policy": what, "tiers": ("int4", "int2"), "group_size": 32}
            settings = {"period": 4, "warmup": 4} if what == "dynaexq" else {}
            moving = Tiering(settings=settings, slots=(2, slots), **how)
            one, some = self.load(policy=moving), self.load(policy=moving, mesh=mesh)
            expected = None
        found = [engine.logits(TOKENS) for engine in (one, some)]
        self.assertLess(np.abs(found[0] - found[1]).max() / np.abs(found[0]).max(), 1e-5)
        if expected is not None:
            np.testing.assert_array_equal(found[1], expected.logits(TOKENS))
        ledgers = [engine.ledger for engine in (one, some)]
        for name, tier in ledgers[0].tiers.items():
            shared = ledgers[1].tiers[name]
            self.assertEqual(shared.layers, tier.layers)
            self.assertEqual(shared.bulk_requests, tier.bulk_requests)
            self.assertEqual(count * shared.expert_bytes, tier.expert_bytes)
        if what == "dynaexq":
            self.assertGreater(ledgers[1].tiers["int4"].bulk_requests["inserted"], 0)
        if what != "slots":
            return
        # Planned bytes are allocated bytes, on each device.
        [tier], pool = some._runner.memory.tiers, some.budget.device
        for name, nbytes in some.budget.run.weights_nbytes.items():
            self.assertEqual(device_nbytes(some.weights[name]), nbytes, name)
        cache = some._runner._fresh([0], some.budget.run.context)[0].cache
        self.assertEqual(device_nbytes(cache), pool["KV cache"])
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(tier.pool.banks))
        planned = pool["expert slots"] + pool["transient slots"]
        self.assertEqual(held, count * planned)
        rows = sum(leaf.nbytes for leaf in jax.tree.leaves((tier.store.gate_up, tier.store.down)))
        self.assertEqual(rows, some.budget.host["experts"])

    def test_devices_add_their_parts_in_float32(self):
        """Parts that cancel to a hundredth of themselves: rounded to bfloat16 they would not."""
        config = ModelConfig(**TINY | {"moe_layers": (0,), "num_layers": 1, "expert_dim": 16})
        mesh, rng, half = make_mesh(2, "cpu"), np.random.default_rng(0), jnp.bfloat16
        how = {"kernels": Kernels(implementation="reference")}  # its products are float32
        definition = model_definition(config, share_axis=MESH_AXIS, **how)
        one = dataclasses.replace(config, expert_dim=8)  # a device's
        leaves = {
            name: rng.normal(0, 0.5, shape).astype(half)
            for name, shape in weight_shapes(one).items()
        }
        down = rng.integers(64, 128, leaves["moe.down"].shape)
        rest = rng.integers(-1, 2, down.shape)
        shares = {"moe.gate_up": [leaves["moe.gate_up"]] * 2, "moe.down": [down, rest - down]}
        weights = {
            name: jax.device_put(np.concatenate(shares[name]).astype(half), mesh.split())
            if name in shares
            else jax.device_put(leaf, mesh.replicated)
            for name, leaf in leaves.items()
        }
        x = jax.device_put(rng.normal(size=(5, config.model_dim)).astype(half), mesh.replicated)

        def layer(weights, x):
            model, mask = merge_weights(definition, weights), jnp.ones(len(x), bool)
            experts = ResidentExperts(model.moe, "grouped_kernel")
            [index] = layer_indices(config)
            return model.mlp_block(x[None], index, mask[None], experts, None, normed=x)[0][0]

        found = jax.jit(mesh.map(layer, (weights, x), REPLICATED))(weights, x)
        self.assertEqual(found.dtype, half)
        x, router, gate_up = (
            np.float64(of) for of in (x, leaves["moe.router"][0], leaves["moe.gate_up"][0])
        )
        scores = np.exp(x @ router.T)
        expected = np.zeros_like(x)
        for row, (token, of_token) in enumerate(zip(x, scores, strict=True)):
            chosen = np.argsort(-of_token)[: config.experts_per_token]
            for expert, weight in zip(chosen, of_token[chosen], strict=True):
                gate, up = np.split(gate_up[expert] @ token, 2)
                hidden = np.float64((gate / (1 + np.exp(-gate)) * up).astype(half))
                expected[row] += weight / of_token[chosen].sum() * rest[0, expert] @ hidden
        self.assertLess(np.abs(np.float64(found) - expected).max() / np.abs(expected).max(), 0.01)

    @parameterized.parameters(
        (("mxfp4", 2, "resident"),),  # 3 groups: uneven
        (("float32", 4, "resident"),),
        (("float32", 2, "slots"),),
        (("mxfp4", 3, "tiers"),),
        (("float32", "2,heads", "resident"),),  # sinks, biases of attention
    )
    @pytest.mark.slow
    def test_biases_of_experts_are_cut_as_they_are(self, case):
        """gpt-oss: the down bias is added once, those of gates and ups along the width."""
        form, mesh, where = case
        spec = TinyCheckpoint(
            family="gpt_oss", mxfp4=form == "mxfp4",
            fields={"intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.2},
        )  # fmt: skip
        hf_checkpoints.write_random_checkpoint(spec, self.directory, seed=0)
        tiers = Tiering(
            policy="dymoe", settings={"retention": 0.5}, tiers=("mxfp4", "int2"), slots=(2, 8),
            group_size=32, quantizer="rtn",
        )  # fmt: skip
        how: dict[str, Any] = {"slots": {"limits": Limits(slots=2)}, "tiers": {"policy": tiers}}
        how = how.get(where, {})
        one, several = self.load(**how), self.load(**how, mesh=mesh)
        self.assert_close_logits(one, several)
        if case != ("mxfp4", 2, "resident"):
            self.assert_equal_answers(one, several)
        whole, down = one.weights["moe.gate_up_bias"], several.weights["moe.down_bias"]
        self.assertLess(several.weights["moe.gate_up_bias"].shape[-1], whole.shape[-1])
        self.assertFalse(np.any(down[len(whole) :]))

    @pytest.mark.slow
    def test_the_plan_counts_the_width_to_which_tiers_are_padded(self):
        """Three groups of 32 on two devices: tiers are 64 wide, the plain experts' shares 48."""
        Plain(dataclasses.replace(QWEN, expert_dim=96)).write(self.directory)
        tiers = Tiering(policy="dymoe", tiers=("int4", "int2"), slots=(2, 6), group_size=32)
        engine = self.load(policy=tiers, mesh="2")
        widths = {tier.store.gate_up.shape[-2] // 2 for tier in engine._runner.memory.tiers}
        self.assertEqual({engine.budget.run.config.expert_dim}, widths)
        self.assertEqual(widths, {64})

    def test_tiers_that_would_miss_their_biases_are_refused(self):
        spec = TinyCheckpoint(family="gpt_oss", fields={"intermediate_size": 96})
        hf_checkpoints.write_random_checkpoint(spec, self.directory, seed=0)
        tiers = Tiering(
            policy="dymoe", tiers=("int4", "int2"), slots=(2, 8), group_size=32, quantizer="rtn"
        )
        with self.assert_one_line("in units of 32 and their biases in units of 16"):
            self.load(policy=tiers, mesh="2")

    def test_where_attention_is_split(self):
        qwen, joint, latent = (
            SHAPES[name] for name in ("Qwen3-30B-A3B", "OLMoE-1B-7B", "DeepSeek-V2-Lite")
        )
        how = {"context": 4096, "itemsize": 2}
        for asked, batch, expected in ((None, 1, False), (None, 16, True), (False, 16, False)):
            shares = HeadShares(qwen, 4)
            self.assertEqual(splits_heads(shares, asked, None, batch=batch, **how), expected)
        for config, count, said in (
            (qwen, 8, "4 key/value heads"), (joint, 2, "all heads together"), (latent, 2, "latent"),
        ):  # fmt: skip
            shares = HeadShares(config, count)
            refusal = shares.refusal()
            self.assertIn(said, refusal)
            self.assertFalse(splits_heads(shares, None, refusal, batch=64, **how))
            with self.assert_one_line(said):
                splits_heads(shares, True, refusal, batch=64, **how)

    def test_errors_take_one_line(self):
        Packed(QWEN, 4).write(self.directory)
        with self.assert_one_line("mesh=16 takes 16 devices, but JAX sees 8 of the platform cpu"):
            self.load(mesh="16")
        with self.assert_one_line("a mesh does not serve experts from disk yet: raise it to"):
            self.load(mesh="2", limits=Limits(slots=2, host_gib=1e-4))
        for mesh in ("two", "heads", "heads,2"):
            with self.assert_one_line(f"mesh='{mesh}' must be a number of devices"):
                self.load(mesh=mesh)
        with self.assert_one_line("shares of 32 outputs, no multiple of the groups of 48"):
            self.load(mesh="2,heads")
        biases = {"moe.other_bias": (1,)}
        with (
            mock.patch.object(checkpoints, "weight_shapes", lambda config: biases),
            self.assert_one_line("does not serve experts with moe.other_bias yet"),
        ):
            self.load(mesh="2")
        self.assertIsNone(make_mesh("1", "cpu"))
        self.assertEqual(make_mesh("2,2", "cpu").size, 4)
        self.assertEqual(make_mesh(2, "cpu").size, 2)

    def test_places_of_processes(self):
        found = devices._place_of_process("10.0.0.1:9000,2,1")
        expected = {"coordinator_address": "10.0.0.1:9000", "num_processes": 2, "process_id": 1}
        self.assertEqual(found, expected)
        self.assertEqual(devices._place_of_process("auto"), {})
        for text in ("10.0.0.1,2,1", "a:1,2", "a:1,2,x"):
            with self.assert_one_line("must be HOST:PORT,NUMBER,INDEX"):
                devices._place_of_process(text)
        with self.assert_one_line("of 2 the last has the number 1"):
            devices._place_of_process("a:1,2,2")
        with (
            mock.patch.object(jax, "process_count", lambda: 4),
            self.assert_one_line("the 4 processes have 8, and each has to take part: mesh=8"),
        ):
            make_mesh("2", "cpu")

    def test_a_process_reads_its_own_shares(self):
        expert = np.arange(2 * 12 * 4, dtype=np.float32).reshape(1, 1, 24, 4)
        whole = WholeExperts(expert, np.arange(48, dtype=np.float32).reshape(1, 1, 4, 12))
        every, own = ShareRows(whole, 3), ShareRows(whole, 3, [2])
        rows = [[np.empty(part.shape, part.dtype) for part in own.row] for _ in range(4)]
        every.read(0, 0, [part for row in rows[:3] for part in row])
        own.read(0, 0, rows[3])
        for one, other in zip(rows[2], rows[3], strict=True):
            np.testing.assert_array_equal(one, other)

    @slow.where(lambda form: "int4" in form)
    @parameterized.parameters("plain", "fused", "int4", "plain heads", "int4 heads")
    def test_two_processes_read_the_files_once(self, form):
        """Each reads its experts and rows of the vocabulary, and both read what both hold."""
        sizes: dict[str, Any] = {"model_dim": 32, "num_experts": 2, "moe_layers": (1,)}
        sizes |= {"expert_dim": 2048, "head_dim": 24}  # half of a row of down is a page
        config, by_heads = dataclasses.replace(QWEN, **sizes), "heads" in form
        is_packed = "int4" in form
        if is_packed:
            Packed(config, 4).write(self.directory)
        else:
            write_random_checkpoint(self.directory, dtype=jnp.float32, **vars(config))
        if form == "fused":
            fuse_experts(self.directory)
        mesh = make_mesh("2,heads" if by_heads else "2", "cpu")
        reader = CheckpointReader(self.directory, config, dtype=np.dtype(np.float32))
        tensors = [*reader.stored.values()]
        how = {"progress": False, "mesh": mesh}
        with counted_reads() as alone:
            whole = reader.load(mesh.replicated, **how)
        self.assertEqual(sum(alone), sum(tensor.num_bytes for tensor in tensors))
        checkpoint = open_checkpoint(str(self.directory))
        planned = checkpoint_sizes(checkpoint, np.dtype(np.float32), 2, by_heads=by_heads)
        for name, nbytes in planned.weights_nbytes.items():
            self.assertEqual(device_nbytes(whole[name]), nbytes, name)
        read_twice = [
            tensor
            for tensor in tensors
            if (
                not re.search("experts|embed|head", tensor.name)
                and not (by_heads and re.search("[qkv]_proj", tensor.name))
            )
            or (is_packed and "down_proj" in tensor.name)  # rows of 512 bytes
        ]
        with counted_reads() as both:
            for i, device in mesh.local.items():
                one = {i: device}
                with (
                    mock.patch.object(DeviceMesh, "local", one),
                    mock.patch.object(DeviceMesh, "join", lambda self, parts: parts[0]),
                ):
                    found = reader.load(mesh.replicated, **how)
                heads = [name for name in HEAD_LEAVES if by_heads and name in found]
                for name in (*EXPERT_LEAVES, *VOCABULARY_LEAVES, *heads):
                    at = i if name in VOCABULARY_LEAVES else 0
                    pairs = zip(*map(jax.tree.leaves, (whole[name], found[name])), strict=True)
                    for expected, own in pairs:
                        np.testing.assert_array_equal(
                            expected.addressable_data(i), own.addressable_data(at)
                        )
        more = sum(tensor.num_bytes for tensor in read_twice)
        self.assertEqual(sum(both), sum(alone) + more)
        # Experts that move are read alike.
        stacks = jax.tree.leaves([whole[name] for name in EXPERT_LEAVES])
        with counted_reads() as moving:
            for i in (0, 1):
                experts = ExpertReader(reader)
                rows = _rows_of(StoredTier(STORED, ""), None, experts, 2, [i])
                row = [np.empty(part.shape, part.dtype) for part in rows.row]
                for expert in range(config.num_experts):
                    rows.read(0, expert, row)
                    for leaf, part in zip(stacks, row, strict=True):
                        np.testing.assert_array_equal(leaf.addressable_data(i)[0, expert], part)
                rows.close()
        of_experts = [t for t in tensors if "experts" in t.name]
        twice = sum(tensor.num_bytes for tensor in of_experts if tensor in read_twice)
        self.assertEqual(sum(moving), sum(t.num_bytes for t in of_experts) + twice)

    @parameterized.parameters(("2",), ("2", "--config.memory.slots=3"), ("2,heads",))
    @pytest.mark.slow
    def test_two_processes_answer_as_one(self, mesh, *limit):
        how = ["--prompt=The history of", "--config.max_new_tokens=6", "--config.platform=cpu",
               "--config.temperature=0", f"--config.mesh={mesh}", *limit]  # fmt: skip
        [alone] = run_together([how], num_devices=2)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        found = run_together([[*how, f"--config.processes={address},2,{i}"] for i in range(2)])
        self.assertEqual([one.returncode for one in found], [0, 0], found[0].stderr)
        printed = [re.sub(r"\[Gloo\].*\n", "", one.stdout) for one in found]  # by the C++ library
        self.assertEqual(printed, [alone.stdout, ""])
        self.assertNotEmpty(alone.stdout)
