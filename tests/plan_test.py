"""`python -m moejax.plan`: what it prints is what a run then allocates, and nothing is loaded."""

import dataclasses
import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine, Tiering, plan, planning
from moejax.checkpoints import open_checkpoint, safetensors_reader
from moejax.checkpoints.sizes import checkpoint_sizes, shape_sizes
from moejax.config.commands import MemoryConfig, PlanConfig
from moejax.config.policy import PolicyConfig
from moejax.experts import load, machine
from moejax.experts.budget import Limits, MachineMemory, describe
from moejax.experts.load import tier_of
from moejax.inference import chunking as chunks
from moejax.models.config import ModelConfig
from moejax.models.shapes import SHAPES
from moejax.planning import bits_line
from moejax.policies.dymoe import importance_nbytes
from moejax.weights.qtensor import CodesKind
from tests import commands, model_kinds, slow
from tests import quantized_stores as stores
from tests.folder_case import FolderTestCase
from tests.packed_weights import num_bytes
from tests.random_checkpoints import TINY, write_random_checkpoint

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
EXPERTS = ("moe.gate_up", "moe.down")
STORES = {
    "gptq": lambda: stores.Gptq(stores.QWEN),
    "gptq with act-order": lambda: stores.Gptq(stores.QWEN, act_order=True),
    "symmetric": lambda: stores.CompressedTensors(stores.QWEN),
    "fp8": lambda: stores.Fp8(stores.WIDE),
    "own, ragged ranks": lambda: stores.Own(stores.QWEN),
}
# Attention, then the experts, takes the most: [fields of a model, context].
WIDE_ATTENTION = ({"num_heads": 8, "head_dim": 32, "num_kv_heads": 2}, 256)
MANY_PRODUCTS = (
    {"model_dim": 256, "expert_dim": 32, "num_heads": 2, "num_kv_heads": 1, "experts_per_token": 4},
    128,
)
# Kinds whose shared experts, latents or delta rule take the most.
SHARED = (model_kinds.SHARED | {"shared_dim": 2048}, 64)
LATENT = (model_kinds.LATENT, 256)
DELTA = (model_kinds.DELTA | {"delta_net": dataclasses.replace(
    model_kinds.DELTA["delta_net"], num_key_heads=4, num_value_heads=8, key_dim=64, value_dim=64
)}, 256)  # fmt: skip
WIDE_EXPERTS = ({"model_dim": 128, "expert_dim": 512, "num_heads": 1, "num_kv_heads": 1}, 64)


class PlanCase(FolderTestCase):
    def run_plan(self, *arguments, status=0):
        got, out, err = commands.run(plan.COMMAND, *arguments)
        self.assertEqual(got, status, err)
        return out if status == 0 else err


class SizesTest(PlanCase):
    """From headers alone, to the byte what a load gives."""

    @parameterized.parameters(*STORES)
    def test_quantized_checkpoints(self, name):
        STORES[name]().write(self.directory)
        self.check(jnp.float32)

    @parameterized.parameters(
        (jnp.float32, {}), (jnp.bfloat16, {"tied_embeddings": True, "moe_layers": (0, 1, 2)})
    )
    def test_plain_checkpoints(self, dtype, fields):
        write_random_checkpoint(self.directory, **fields)
        self.check(dtype)

    def check(self, dtype):
        checkpoint = open_checkpoint(str(self.directory))
        sizes = checkpoint_sizes(checkpoint, np.dtype(dtype))
        cpu = jax.devices("cpu")[0]
        loaded = checkpoint.load(dtype=np.dtype(dtype).name, device=cpu, progress=False)
        terms = sum(_terms_nbytes(loaded[leaf]) for leaf in EXPERTS)
        expected = {name: leaf.nbytes for name, leaf in loaded.items() if name not in EXPERTS}
        self.assertEqual(dict(sizes.weights_nbytes), expected)
        self.assertEqual(sizes.low_rank_nbytes, terms)
        num_experts = len(checkpoint.config.moe_layers) * checkpoint.config.num_experts
        experts = sum(loaded[leaf].nbytes for leaf in EXPERTS)
        self.assertEqual(sizes.expert_nbytes * num_experts + terms, experts)

    @parameterized.parameters(
        ("gptq with act-order", "moe.gate_up is permuted"),
        ("fp8", "moe.gate_up is FP8 and moe.down is FP8"),
        ("gptq", None),
    )
    def test_what_has_no_slot_form_may_stay_but_not_move(self, name, said):
        STORES[name]().write(self.directory)
        asked = f"--config.checkpoint={self.directory}"
        self.assertIn("experts stay on the device", self.run_plan(asked))
        if said is None:
            self.assertIn("slots: 1 of 3", self.run_plan(asked, "--config.memory.slots=1"))
            return
        err = self.run_plan(asked, "--config.memory.slots=1", status=1)
        self.assertRegex(err, f"cannot move: .*{said}.*\n$")

    def test_what_is_converted_cannot_be_waited_for_on_the_cpu(self):
        stores.Gptq(dataclasses.replace(stores.QWEN, num_experts=12)).write(self.directory)
        asked = [f"--config.checkpoint={self.directory}", "--config.memory.slots=1"]
        asked.append("--config.memory.transient=1")
        err = self.run_plan(*asked, "--config.memory.host_gib=1e-9", status=1)
        least = re.search(r"would do is (\S+) GiB", err)[1]
        asked.append(f"--config.memory.host_gib={least}")
        self.assertRegex(self.run_plan(*asked), r"% of the experts are not in host memory")
        err = self.run_plan(*asked, "--config.platform=cpu", status=1)
        self.assertIn(f"{self.directory}: experts that are converted while they are read", err)

    def test_packed_experts_are_counted_without_reading_a_tensor(self):
        stores.Own(stores.QWEN).write(self.directory)
        checkpoint = open_checkpoint(str(self.directory))
        expected = checkpoint_sizes(checkpoint, np.dtype(np.float32))
        with mock.patch.object(safetensors_reader, "read_tensor", side_effect=AssertionError):
            self.assertEqual(checkpoint_sizes(checkpoint, np.dtype(np.float32)), expected)

    def test_a_shape_in_codes(self):
        config = ModelConfig(**TINY)
        kind = CodesKind(bits=4, group_size=16, zero_kind="float", scale_dtype="float16")
        sizes = shape_sizes(config, np.dtype(np.float16), expert_kind=kind)
        # Matrices [64, 64] and [64, 32], of each weight 4 bits and 32 for 16 weights.
        self.assertEqual(sizes.expert_nbytes, 64 * (64 + 32) * 6 // 8)
        self.assertEqual(sizes.expert_form, "int4")
        said = bits_line(config, sizes, [tier_of(sizes)])
        self.assertRegex(
            said, r"^weights: [\d.]+ bits a weight \(experts: int4 6\.00; the rest [\d.]+\)"
        )

    @parameterized.parameters(("gptq", "int4"), ("fp8", "fp8"), ("", "32-bit floats"))
    def test_the_form_of_the_experts_is_named(self, name, form):
        if name:
            STORES[name]().write(self.directory)
        else:
            write_random_checkpoint(self.directory)
        said = self.run_plan(f"--config.checkpoint={self.directory}", "--config.dtype=float32")
        self.assertIn(f"experts in {form}, on a gpu\n", said)
        self.assertRegex(
            said, rf"\nweights: [\d.]+ bits a weight \(experts: {form} [\d.]+; the rest"
        )


class ContractTest(PlanCase):
    """An engine and its programs allocate no more than the plan."""

    def engine(self, limits, shape, batch, policy=None):
        fields, context = shape
        fields = {"num_experts": 8, "num_layers": 2, "moe_layers": (0, 1), **fields}
        write_random_checkpoint(self.directory, **fields)
        return Engine.from_pretrained(
            self.directory, dtype="float32", platform="cpu", context=context,
            compilation_cache="", progress=False, limits=limits, batch=batch,
            policy=policy,
        )  # fmt: skip

    def check_programs(self, engine, context, batch):
        # Texts that are scored are read in chunks of the length that is planned for.
        engine._runner.short_chunk = 0
        prompts = np.random.default_rng(0).integers(0, TINY["vocab_size"], (batch, context - 8))
        engine.generate(prompts.tolist(), max_new_tokens=6)
        # Few pairs go another way on a CPU, and of plain experts they take more.
        engine.generate(prompts[:1, :9].tolist(), max_new_tokens=2)
        planned = engine.budget.device["activations and workspace"]
        for part, nbytes in engine.budget.device.items():
            if part.startswith(("experts on their way in a step", "importance of tokens")):
                planned += nbytes
        programs = engine._runner.programs._programs.values()
        found = max(program.memory_analysis().temp_size_in_bytes for program in programs)
        self.assertLessEqual(found, planned)
        self.assertLess(planned, 2 * found)

    @slow.repeats()
    @parameterized.parameters(
        (WIDE_EXPERTS, 4), (WIDE_ATTENTION, 1), (SHARED, 4), (LATENT, 1), (DELTA, 1)
    )
    def test_programs_take_no_more_than_planned_and_not_much_less(self, shape, batch):
        engine = self.engine(Limits(), shape, batch)
        self.assertFalse(engine.budget.pooled)
        self.check_programs(engine, shape[1], batch)

    # With waves and wide experts, XLA on a CPU copies the slots around the loop over blocks.
    @parameterized.parameters((3, WIDE_ATTENTION, 4), (8, WIDE_EXPERTS, 1))
    @pytest.mark.slow
    def test_programs_of_pooled_runs_take_what_was_planned(self, slots, shape, batch):
        engine = self.engine(Limits(slots=slots, transient=2), shape, batch)
        self.check_programs(engine, shape[1], batch)

    @slow.where(lambda answers: answers)
    @parameterized.parameters(False, True)
    def test_embeddings_are_loaded_to_where_the_plan_has_them(self, answers):
        found = []
        for pinned in (True, False):
            place = self.enter_context(mock.patch.object(load, "host_place"))
            place.side_effect = lambda device, pinned=pinned: jax.sharding.SingleDeviceSharding(
                device, memory_kind="pinned_host" if pinned else "device"
            )
            engine = self.engine(Limits(slots=3, transient=2), WIDE_ATTENTION, 1)
            kind = engine.weights["embed"].sharding.memory_kind
            self.assertEqual(kind, "pinned_host" if pinned else "device")
            self.assertIn("embeddings", engine.budget.host)
            if answers:
                found.append(engine.generate([[5, 6, 7]], max_new_tokens=6)[0].tokens)
        self.assertEqual(found[:1], found[1:])

    @parameterized.parameters((3, WIDE_ATTENTION, 4), (8, WIDE_EXPERTS, 1))
    def test_pooled_runs_allocate_what_was_planned(self, slots, shape, batch):
        engine = self.engine(Limits(slots=slots, transient=2), shape, batch)
        planned = dict(engine.budget.device)
        host = dict(engine.budget.host)
        for name, leaf in engine.weights.items():
            place = host.pop("embeddings") if name == "embed" else planned.pop(f"weights {name}")
            self.assertEqual(place, leaf.nbytes)
        (memory,) = engine._runner.memory.tiers
        pool, store = memory.pool, memory.store
        size = planned.pop("expert slots") + planned.pop("transient slots")
        self.assertEqual(num_bytes(pool.banks), size)
        tables = num_bytes((pool.residency, pool.counts, store.row_of))
        self.assertEqual(planned.pop("residency tables"), tables)
        rows = num_bytes((store.gate_up, store.down))
        self.assertEqual(host, {"experts": rows})
        left = {"KV cache", "activations and workspace", "experts on their way in a step"}
        self.assertEqual(set(planned), left)

    # Chunks of a whole prompt and of part of one.
    @parameterized.parameters(
        (WIDE_ATTENTION, 1, 256), (WIDE_ATTENTION, 2, 64), (MANY_PRODUCTS, 4, 128)
    )
    @pytest.mark.slow
    def test_a_policy_that_weighs_tokens_by_attention(self, shape, batch, longest):
        policy = Tiering(policy="dymoe", tiers=("int4", "int2"), quantizer="rtn", group_size=16)
        with mock.patch.object(chunks, "MAX_PREFILL_LENGTH", longest):
            engine = self.engine(Limits(), shape, batch, policy)
            self.check_programs(engine, shape[1], batch)
        c, budget = engine.config, engine.budget
        self.assertEqual(budget.tiers[0].run.chunk, longest)
        importance = importance_nbytes(
            batch=batch, length=longest, num_keys=shape[1], num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, itemsize=4, platform="cpu",
        )  # fmt: skip
        self.assertEqual(budget.device["importance of tokens"], importance)
        self.assertIn("importance of tokens", "\n".join(describe(budget)))


class MainTest(PlanCase):
    def test_example_is_what_it_says(self):
        path = CONFIGS / "plan_mixtral_16gib.py"
        out = self.run_plan(f"--config={path}")
        self.assertIn("= 15.993 GiB of 16", out)
        self.assertIn("slots: 4 or 5 of 8 a layer (50.4 % of the experts), and 2 transient", out)
        self.assertRegex(out, r"at worst: 5\.91 GiB a token of a decode step, 118\.12 ms")
        out = self.run_plan(f"--config={path}", "--config.memory.host_gib=20")
        self.assertIn("host memory: 203 of 256 experts (79.3 %)", out)
        self.assertIn("warning: 21 % of the experts are not in host memory", out)

    @parameterized.parameters(
        "plan_deepseek_v2_lite",
        "plan_deepseek_moe_16b",
        "plan_qwen3_next_80b_a3b",
        "plan_gpt_oss_120b",
        "plan_qwen3_6_35b_a3b",
        "plan_glm_4_7_flash",
    )
    def test_tables_of_the_examples_are_what_they_say(self, name):
        """Slots at each size of device; and parts add up to the total."""
        path = CONFIGS / f"{name}.py"
        _, _, table = path.read_text().partition("    device_gib    ")
        head, *rows = table.partition('"""')[0].strip().splitlines()
        rows = [re.split(r" {2,}", row.strip()) for row in rows]
        self.assertEqual([row[0] for row in rows], ["12", "16", "24", "32", "48"])
        for place, bits in enumerate(head.split()):
            for row in rows:
                gib, said = row[0], row[1 + place]
                asked = f"--config={path}", f"--config.memory.device_gib={gib}", f"--config.{bits}"
                out = self.run_plan(*asked, status=int(said == "none"))
                if said == "none":
                    self.assertIn("the smallest that would do is", out)
                    continue
                if said == "all":
                    self.assertIn("experts stay on the device", out)
                else:
                    least, _, experts = said.partition(" of ")
                    more = rf"{least}( or {int(least) + 1})? of {experts}"
                    self.assertRegex(out, f"slots: {more} a layer")
                parts = re.findall(r"  device (.+?) +([\d.]+) MiB", out)
                *each, (_, total) = ((part, float(mib)) for part, mib in parts)
                self.assertAlmostEqual(sum(mib for _, mib in each), total, delta=0.01 * len(each))
                self.assertLessEqual(total, 1024 * float(gib))

    def test_a_policy_is_warned_and_refused_as_a_run_is(self):
        write_random_checkpoint(self.directory, num_experts=8)
        asked = [f"--config.checkpoint={self.directory}", "--config.memory.slots=4"]
        policy = ["--config.policy.name=on_demand", "--config.policy.group_size=16"]
        asked += ["--config.policy.tiers=('int4',)", *policy, "--config.memory.transient=3"]
        err = self.run_plan(*asked, "--config.memory.host_gib=1e-9", status=1)
        self.assertIn("memory.host_gib=1e-09 is too little for experts of int4", err)
        least = re.search(r"would do is (\S+) GiB", err)[1]
        asked.append(f"--config.memory.host_gib={least}")
        out = self.run_plan(*asked)
        self.assertRegex(out, r"disk +experts  +\d")
        self.assertRegex(out, r"warning: \d+ % of the experts are not in host memory")
        err = self.run_plan(*asked, "--config.platform=cpu", status=1)
        self.assertIn("tier int4: experts that are converted while they are read", err)
        two = [*asked, "--config.policy.name=dynaexq", "--config.policy.tiers=('int2',)"]
        err = self.run_plan(*two, status=1)  # of which each has a share of it
        self.assertIn(f"memory.host_gib={float(least):g} is too little for experts of int4", err)
        least = re.search(r"would do is (\S+) GiB", err)[1]
        out = self.run_plan(*two, f"--config.memory.host_gib={least}")
        enough = re.search(r"experts of int4 are not in host memory.* to (\S+) GiB", out)[1]
        out = self.run_plan(*two, f"--config.memory.host_gib={enough}")
        self.assertNotIn("not in host memory", out)

    def test_options_that_do_nothing_are_told_and_a_missing_copy_is_an_error(self):
        write_random_checkpoint(self.directory)
        asked = f"--config.checkpoint={self.directory}"
        out = self.run_plan(asked, "--config.memory.prefetch=2", "--config.memory.bulk=2")
        self.assertIn("memory.prefetch=2, memory.bulk=2 is without effect: every expert", out)
        out = self.run_plan(
            asked, "--config.memory.host_gib=1", "--config.memory.prefetch_in=decode"
        )
        self.assertIn("memory.prefetch_in=decode, memory.host_gib=1.0 is without effect", out)
        for policy in ([], ["--config.policy.name=on_demand"]):
            err = self.run_plan(asked, "--config.memory.disk_path=/no/where", *policy, status=1)
            self.assertIn("no such directory: /no/where", err)

    def test_nothing_is_read_but_headers(self):
        write_random_checkpoint(self.directory)
        with mock.patch.object(safetensors_reader, "read_tensor", side_effect=AssertionError):
            out = self.run_plan(f"--config.checkpoint={self.directory}")
        # bfloat16 on the accelerator that is planned of, whatever this machine has.
        weights = 2 * 160 * 64 / 2**20
        self.assertRegex(out, rf"weights embed +{weights:.2f} MiB")
        self.assertIn("on a gpu", out)
        self.assertIn("warning: context=0 takes what the prompts need; here it is 256", out)

    def test_a_plain_head_is_named_where_slots_are_few(self):
        asked = ["--config.shape=Qwen3-30B-A3B", "--config.bits=4", "--config.attention_bits=4"]
        few, many = (self.run_plan(*asked, f"--config.memory.device_gib={n}") for n in (3, 12))
        slots = int(re.search(r"slots: (\d+) or \d+ of 128", few)[1])
        more = int(re.search(r"the head takes 593.50 MiB: .* for (\d+) more slots a layer", few)[1])
        packed = self.run_plan(*asked, "--config.head_bits=8", "--config.memory.device_gib=3")
        self.assertIn(f"slots: {slots + more} or {slots + more + 1} of 128", packed)
        for out in (many, packed):
            self.assertNotIn("the head takes", out)

    def test_the_impossible_is_refused_with_what_would_do(self):
        asked = ("--config.shape=Qwen3-30B-A3B", "--config.memory.device_gib=2")
        err = self.run_plan(*asked, status=1)
        self.assertRegex(err, r"\Aerror: memory.device_gib=2 is too little [^\n]+\n\Z")
        least = re.search(r"would do is (\S+) GiB", err)[1]
        out = self.run_plan(asked[0], f"--config.memory.device_gib={least}")
        self.assertIn("slots: 0 of 128", out)
        self.assertIn("warning: no expert is cached", out)

    @parameterized.parameters(
        ("--config.shape=Mixtral", "shape='Mixtral' must be one of Qwen3-30B-A3B"),
        ("--config.bits=5", "bits=5 must be one of 2, 3, 4, 8, 16"),
        ("--config.batch=0", "batch=0 must be at least 1"),
        ("--config.context=5000", "context=5000 is beyond the model's own 2048"),
        ("--config.checkpoint=/no/where", "no such directory: /no/where"),
        ("--config.platform=tpu", "platform 'tpu' is none of auto, cpu, gpu"),
    )
    def test_mistakes_are_named(self, argument, said):
        self.assertIn(said, self.run_plan(argument, status=1))

    @parameterized.parameters(
        ("Qwen3-Next-80B-A3B", 48, ("int4", "int2"), 32, 60),
        ("Qwen3-Next-80B-A3B", 48, ("int4", "int2"), 48, 262),
        ("Qwen3-30B-A3B", 48, ("bf16", "int4"), 32, 31),
    )
    def test_two_tiers_of_a_shape_are_within_the_budget(self, shape, num_layers, names, gib, slots):
        config = PlanConfig(
            shape=shape, policy=PolicyConfig(name="dynaexq", tiers=names), context=8192,
            memory=MemoryConfig(device_gib=gib),
        )  # fmt: skip
        budget = planning.budget_of(config)
        weights = {"Qwen3-Next-80B-A3B": 3 * 2048 * 512, "Qwen3-30B-A3B": 3 * 2048 * 768}[shape]
        # A group of 64 weights has a scale and a zero of 16 bits each.
        bits = {"bf16": 16, "int4": 4 + 0.5, "int2": 2 + 0.5}
        nbytes = [int(weights * bits[name] / 8) for name in names]
        hot, cold = budget.tiers
        self.assertEqual([tier.tier.expert_nbytes for tier in budget.tiers], nbytes)
        self.assertEqual(cold.slots, cold.num_experts)
        self.assertEqual(hot.slots, slots)  # of docs/memory.md
        self.assertEqual(hot.transient, 1)  # no step fetches a hot expert
        taken = num_layers * (hot.slots * nbytes[0] + cold.slots * nbytes[1])
        self.assertLessEqual(taken, gib * 2**30)
        self.assertLessEqual(budget.total_device, gib * 2**30)
        self.assertGreater(budget.total_device + num_layers * nbytes[0], gib * 2**30)  # no more

    @parameterized.parameters(("Qwen3-Next-80B-A3B", 32, 512), ("Qwen3-30B-A3B", 16, 768))
    def test_planes_of_a_shape_count_an_expert_once(self, shape, gib, expert_dim):
        asked = (
            f"--config.shape={shape}", f"--config.memory.device_gib={gib}", "--config.context=4096",
            "--config.policy.name=dynaexq", "--config.policy.tiers=int4,int2",
        )  # fmt: skip
        hot = []
        for how in ((), ("--config.planes=2,4",)):
            out = self.run_plan(*asked, *how)
            hot.append(int(re.search(r"int4: .*, (\d+) of \d+ cached", out)[1]))
            self.assertRegex(out, r"int2: .*, (\d+) of \1 cached")
        self.assertGreater(hot[1], 2 * hot[0])
        kib = 3 * 2048 * expert_dim * 2 / 8 / 1024  # two bits a weight, no constants
        said = f"{kib:.2f} KiB" if kib < 1024 else f"{kib / 1024:.2f} MiB"
        self.assertIn(f"int4: experts of {said}", out)
        self.assertIn("by bit planes 2,4, on a gpu", out)
        self.assertIn("(experts: int4 2.00 and int2 2.50 together", out)

    @parameterized.parameters(
        # Copies of INT4 serve who asks for INT2; planes do not, nor where all ask for INT2.
        ("dymoe", "", "", "0"), ("dymoe", "planes=2,4", "", "128"),
        ("on_demand", "", "", "0"), ("on_demand", "", "tier=int2", "128"),
        ("scripts.studies.dymoe.controls:AsAsked", "", "", "128"),
    )  # fmt: skip
    def test_the_lower_tier_has_slots_where_the_first_does_not_serve(self, policy, how, given, low):
        out = self.run_plan(
            "--config.shape=Qwen3-30B-A3B", "--config.memory.device_gib=16", "--config.context=640",
            "--config.attention_bits=4", f"--config.policy.name={policy}",
            "--config.policy.tiers=int4,int2", f"--config.policy.settings={given}",
            *(f"--config.{word}" for word in filter(None, [how])),
        )  # fmt: skip
        self.assertEqual(re.search(r"int2: .*, (\d+) of 128 cached", out)[1], low)

    def test_a_mesh_cuts_a_shape_of_mxfp4_in_its_own_groups(self):
        config = PlanConfig(shape="Qwen3-30B-A3B", mxfp4=True, mesh="8", context=64)
        [tier] = planning.budget_of(config).tiers
        self.assertEqual(tier.tier.expert_nbytes, 3 * 2048 * 96 * 4.25 / 8)  # 3 of 24 groups

    @parameterized.parameters(
        ((), "planes='2,4' has no effect without shape"),
        (("shape=Qwen3-30B-A3B", "policy.name=dynaexq", "policy.tiers=int4,int3"),
         "policy.tiers: int3 is none of the widths of planes=2,4"),
        (("shape=Qwen3-30B-A3B", "policy.name=dynaexq", "policy.tiers=mxfp4,int2"),
         "policy.tiers: mxfp4 has no bit planes: name int4 of planes=2,4, or leave planes out"),
        (("shape=Qwen3-30B-A3B", "planes=2,5"), "planes=2,5 is none of 2,3, 2,4"),
    )  # fmt: skip
    def test_planes_that_cannot_be(self, asked, said):
        asked = [f"--config.{option}" for option in asked]
        self.assertIn(said, self.run_plan("--config.planes=2,4", *asked, status=1))

    def test_tiers_of_a_shape_are_those_of_a_checkpoint_of_it(self):
        write_random_checkpoint(self.directory)
        asked = (
            "--config.policy.name=dynaexq", "--config.policy.tiers=('bf16','int2')",
            "--config.policy.group_size=16", "--config.context=64",
            "--config.policy.slots=('2','4')",
        )  # fmt: skip
        of_checkpoint = self.run_plan(f"--config.checkpoint={self.directory}", *asked)
        with mock.patch.dict(SHAPES, {"tiny": ModelConfig(**TINY)}):
            of_shape = self.run_plan("--config.shape=tiny", "--config.bits=16", *asked)
        self.assertEqual(of_shape, f"tiny, tiers without files, on a gpu\n{of_checkpoint}")
        self.assertRegex(of_shape, r"bf16: experts of 12\.00 KiB, 2 of 4 cached a layer")

    @parameterized.parameters(
        (("buddymoe",), ("int4",), "buddymoe needs a profile: lists=FILE"),
        (
            ("dynaexq", "settings=foresight=1,foresee_by=links"),
            ("int4", "int2"),
            "foresee_by=links needs a profile: links=FILE",
        ),
        (("dynaexq",), ("int4=/a", "int2"), "a shape takes no checkpoint /a: int4 alone"),
        (("dynaexq",), ("high", "int2"), "'high' says no bits"),
        (("auto",), (), "moejax.sweep --config.trace=FILE --config.recommend=True"),
    )
    def test_what_needs_files_is_refused_of_a_shape(self, policy, tiers, said):
        name, *settings = policy
        asked = [f"--config.policy.{setting}" for setting in (f"name={name}", *settings)]
        asked += [f"--config.policy.tiers={tiers}"] if tiers else []
        err = self.run_plan("--config.shape=Qwen3-30B-A3B", *asked, status=1)
        self.assertIn(said, err)
        self.assertLen(err.strip().splitlines(), 1)

    def test_this_machine(self):
        path = self.directory / "meminfo"
        path.write_text("MemTotal:       10 kB\nMemAvailable:    7 kB\n")
        self.assertEqual(machine._available_nbytes(path), 7 * 1024)
        self.assertIsNone(machine._available_nbytes(self.directory / "nothing"))
        path.write_text("something else\n")
        self.assertIsNone(machine._available_nbytes(path))
        with mock.patch.object(machine, "_available_nbytes", return_value=5):
            with mock.patch.dict("os.environ", {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "3"}):
                self.assertEqual(
                    machine.this_machine("gpu"),
                    MachineMemory(host_nbytes=5, pinned_nbytes=3 * 2**30),
                )
            self.assertEqual(machine.this_machine("cpu"), MachineMemory(host_nbytes=5))


def _terms_nbytes(leaf):
    return num_bytes(getattr(leaf, "compensators", ()))
