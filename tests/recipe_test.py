"""Recipes: which scheme each matrix gets, and what is refused."""

import dataclasses

from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.quantization.pipeline.inventory import take_inventory
from moejax.quantization.pipeline.recipe import Recipe, Scheme, parse_rules, schemes
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import write_checkpoint

DEFAULT = Scheme(
    method="rtn", bits=3, group_size=16, zero_kind="auto", scale_dtype="float16", factor_bits=8
)


def scheme(**changes) -> Scheme:
    return Scheme(**{**vars(DEFAULT), **changes})


class RecipeTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Three layers, K of 32 and 16 in the experts of the sparse one, 40 in the dense MLPs.
        cls.inventory = take_inventory(write_checkpoint("qwen3_mlp_only", cls.class_folder()))

    def schemes(self, *rules, default=DEFAULT, target="moejax"):
        recipe = Recipe(default=default, rules=parse_rules("; ".join(rules)), format=target)
        return schemes(recipe, self.inventory)

    def assert_refused(self, *messages, rules=(), **how):
        with self.assert_one_line(*messages):
            self.schemes(*rules, **how)

    def methods(self, found):
        """The methods of each class."""
        kinds = {}
        for entry in self.inventory.entries:
            if entry.name in found:
                kinds.setdefault(entry.kind, set()).add(found[entry.name].method)
        return kinds

    def test_classes_of_the_inventory(self):
        kinds = {entry.name: entry.kind for entry in self.inventory.entries}
        for name, kind in {
            "model.embed_tokens": "embed",
            "lm_head": "head",
            "model.norm": "norm",
            "model.layers.0.self_attn.q_norm": "norm",
            "model.layers.0.self_attn.o_proj": "attention",
            "model.layers.0.mlp.up_proj": "mlp",
            "model.layers.1.mlp.experts.7.down_proj": "experts",
            "model.layers.1.mlp.gate": "router",
        }.items():
            self.assertEqual(kinds[f"{name}.weight"], kind)

    def test_defaults(self):
        expected = {kind: {"rtn"} for kind in ("attention", "experts", "mlp")}
        self.assertEqual(self.methods(self.schemes()), expected)

    def test_auto_zero_kind_is_the_formats(self):
        name = "model.layers.0.self_attn.q_proj.weight"
        self.assertEqual(self.schemes()[name].zero_kind, "float")
        plus = self.schemes(default=scheme(method="milo+"))[name]
        self.assertEqual(plus.zero_kind, "symmetric")
        found = self.schemes("mlp: group=8", target="compressed-tensors")
        self.assertEqual(found[name].zero_kind, "integer")

    def test_per_channel_is_k(self):
        found = self.schemes(default=scheme(group_size=0))
        self.assertEqual(found["model.layers.0.mlp.down_proj.weight"].group_size, 40)

    @parameterized.parameters(
        "head: method=rtn bits=8 group=0",
        "lm_head: method=rtn bits=8 group_size=0",
        "re:lm_(?:head|tail): method=rtn bits=8 group=0",
        "lm_*, nothing: method=rtn bits=8 group=0",
        "head: method=hqq bits=8 ; head: method=rtn group=0",
    )
    def test_patterns(self, rule):
        found = self.schemes(rule)["lm_head.weight"]
        self.assertEqual((found.method, found.bits, found.group_size), ("rtn", 8, 32))

    def test_later_rules_win(self):
        found = self.schemes("experts: bits=2", "*.experts.3.*: bits=4", "*.up_proj: method=none")
        prefix = "model.layers.1.mlp.experts"
        self.assertEqual(found[f"{prefix}.2.down_proj.weight"].bits, 2)
        self.assertEqual(found[f"{prefix}.3.down_proj.weight"].bits, 4)
        self.assertNotIn(f"{prefix}.3.up_proj.weight", found)

    def test_act_order_is_of_gptq_alone(self):
        default = scheme(act_order=True)
        self.assert_refused("act_order is gptq's", default=default)
        self.assertLen(self.schemes("attention: method=gptq", default=default), len(self.schemes()))

    def test_a_tied_model_has_no_head(self):
        entries = [shard.entries for shard in self.inventory.shards]
        tied = [
            dataclasses.replace(shard, entries=tuple(e for e in own if e.kind != "head"))
            for shard, own in zip(self.inventory.shards, entries, strict=True)
        ]
        recipe = Recipe(default=DEFAULT, rules=parse_rules("head: method=rtn"), format="moejax")
        with self.assertRaisesRegex(MoejaxError, r"router, embed \(its head is the embedding\)"):
            schemes(recipe, dataclasses.replace(self.inventory, shards=tuple(tied)))

    @parameterized.parameters(
        ("head", "not of the form PATTERN: KEY=VALUE"),
        ("head: 8", "'8' is none of method="),
        ("head: bit=8", "'bit=8' is none of method=, bits="),
        ("head: bits=many", "bits=many must be a number"),
        ("head: bits=²", "bits=² must be a number"),
        ("re:a(: bits=3", "unterminated subpattern"),
        ("heads: method=rtn", "matches nothing", "router, embed, head", "model.layers.0.self_attn"),
        ("norm: method=rtn", "never quantized"),
        ("head: bits=8", "lm_head, which is not quantized", "method=rtn"),
        ("head: method=rtm", "rule 'head: method=rtm', lm_head: method=rtm is none of none, rtn"),
        ("attention: bits=5", "bits=5 is none of 2, 3, 4, 8"),
        ("attention: bits=4 planes=2,4", "planes are widths in place of bits"),
        ("attention: method=milo rank_divisor=2", "rank_divisor is of milo's compensators of bit"),
        ("attention: planes=2,4 rank_divisor=2", "no matrix of the rule has them"),
        ("attention: zero=big", "zero_kind=big is none of auto, float"),
        ("attention: scale=bfloat16", "scale_dtype=bfloat16 is none of float16, float32"),
        ("attention: method=milo factor_bits=5", "factor_bits=5 is none of 3, 4, 8, 16"),
        ("attention: method=hqq zero=integer", "solves for a float zero point"),
        ("head: method=gptq", "lm_head: method=gptq sees the inputs of attention"),
        (
            "experts: group=64",
            "model.layers.1.mlp.experts.0.gate_proj: group_size 64 does not fit K = 32",
            "32, 0 (per channel",
        ),
    )
    def test_refused(self, rule, *messages):
        self.assert_refused(*messages, rules=[rule])

    def test_rank_divisor_needs_one_matrix_with_planes(self):
        rules = ("experts: method=milo planes=2,4 rank_divisor=3", "*.up_proj: bits=4")
        found = self.schemes(*rules, default=scheme(rank_divisor=2))
        self.assertEqual({(s.planes, s.rank_divisor) for s in found.values()}, {
            ((), 2), ((), 3), ((2, 4), 3),
        })  # fmt: skip

    def test_nothing_to_do(self):
        self.assert_refused("nothing is to be done", default=scheme(method="none"))

    @parameterized.parameters(
        (scheme(method="milo"), "has no place for the compensators of milo"),
        (scheme(method="hqq"), "has no float zero points (hqq)"),
        (scheme(zero_kind="float"), "has no float zero points (rtn)"),
        (scheme(group_size=16), "has no shorter last group (K = 40, group_size 16)"),
    )
    def test_what_other_engines_files_cannot_hold(self, default, message):
        how = {"default": default, "target": "compressed-tensors"}
        self.assert_refused(message, "take format=moejax", **how)

    @parameterized.parameters(
        ("packs 32 inputs or outputs at a time (N = 16, K = 32)",),
        ("has scales in float16 only", "*: method=none", "*.o_proj: method=rtn scale=float32"),
    )
    def test_what_gptq_files_cannot_hold(self, message, *rules):
        self.assert_refused(message, rules=rules, target="gptq")

    def test_embedding_in_a_file_of_other_engines(self):
        rules = ["*: method=none", "embed: method=rtn"]
        self.assert_refused("quantizes linear layers only", rules=rules, target="gptq")
