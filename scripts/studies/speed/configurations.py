"""Flags of `moejax.benchmark` by method, for pictures and tables; which methods have rows."""

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from moejax.files.result_rows import read_rows
from moejax.models.shapes import CONFIGS

Words = tuple[str, ...]
Methods = Mapping[str, Words]
QWEN3, MIXTRAL = "Qwen3-30B-A3B", "Mixtral-8x7B"
BUDGETS = (6.0, 8.0, 12.0, 16.0, 24.0)  # GiB
CACHE_RATES = (0.75, 0.5, 0.375)
_PROMOTIONS = "period=64"
_DYMOE, _AHEAD = "retention=0.75,prefetch=0", "retention=0.75,prefetch=-1"


def flags_of(**values: object) -> Words:
    """Flags of a configuration, `memory__slots=3` for `memory.slots`."""
    return tuple(f"--config.{name.replace('__', '.')}={value}" for name, value in values.items())


def _policy(name: str, tiers: str, settings: str, **more: object) -> Words:
    return flags_of(policy__name=name, policy__tiers=tiers, policy__settings=settings, **more)


DECIDE: Methods = {
    "INT4": flags_of(bits=4),
    "INT3": flags_of(bits=3),
    "INT2": flags_of(bits=2),
    "MiLo INT3": flags_of(bits=3, expert_rank=16),
    "DyMoE 4/2": _policy("dymoe", "int4,int2", _DYMOE),
    "DyMoE 4/0": _policy("dymoe", "int4", f"{_DYMOE},low=skip"),
    "DynaExq 4/2": _policy("dynaexq", "int4,int2", _PROMOTIONS),
    "BuddyMoE": _policy("buddymoe", "int4", "rho=3"),
    "DyMoE 4/0 + BuddyMoE": _policy(
        "compose", "int4", f"parts=dymoe+buddymoe,{_DYMOE},low=skip,rho=3"
    ),
}
# Table 3 of DyMoE; look-ahead in prompts alone or nowhere and planes are no rows of the paper.
_TABLE_3: Methods = {
    "load on demand": flags_of(memory__slots=0, budgets="(16,)"),  # alike under any
    "cache": (),
    "cache, 4/2": _policy("dymoe", "int4,int2", _DYMOE),
    "cache, 4/0": _policy("dymoe", "int4", f"{_DYMOE},low=skip"),
    "cache, 4/0, prefetch in prompts": _policy(
        "dymoe", "int4", f"{_AHEAD},low=skip", memory__prefetch_in="prefill"
    ),
    "cache, 4/0, prefetch": _policy("dymoe", "int4", f"{_AHEAD},low=skip"),
    "cache, 4/2, planes": _policy("dymoe", "int4,int2", _DYMOE, planes="2,4"),
    "cache, 4/2, prefetch": _policy("dymoe", "int4,int2", _AHEAD),
    "cache, prefetch": flags_of(memory__prefetch=2),
    "cache, prefetch in prompts": flags_of(memory__prefetch=2, memory__prefetch_in="prefill"),
    "cache, 4/2, planes, prefetch": _policy("dymoe", "int4,int2", _AHEAD, planes="2,4"),
}


def _dynaexq(num_experts: int) -> Methods:
    """DynaExq while the workload shifts, beside INT2 and INT4 resident, and INT2 in a pool.

    A quarter of the experts are hot, or as many as planes allow under 16 GiB (83 of 128).
    """
    most = num_experts * 83 // 128

    def hot(count: int, **more: object) -> Words:
        slots = f"{count},{num_experts}"
        return _policy(
            "dynaexq", "int4,int2", _PROMOTIONS, policy__slots=slots, shift_every=256, **more
        )

    return {
        "resident": flags_of(bits=2),
        "planes": hot(num_experts // 4, planes="2,4"),
        "copies": hot(num_experts // 4),
        "resident INT4": flags_of(bits=4),
        "planes, more hot": hot(most, planes="2,4"),
        "pool": flags_of(bits=2, memory__slots=num_experts, shift_every=256),
    }


def _dynaexq_wide(num_experts: int) -> Methods:
    """DynaExq of bf16 and INT4 under budgets, beside INT4; INT4 and INT2 of larger models."""
    whole = {"memory__slots": num_experts, "budgets": "(0,)"}
    return {
        "resident": flags_of(bits=4, budgets="(0,)"),
        "pool": flags_of(bits=4, **whole),
        "bf16/int4": _policy("dynaexq", "bf16,int4", _PROMOTIONS, shift_every=256),
        "int4/int2": _policy("dynaexq", "int4,int2", _PROMOTIONS, shift_every=256),
        "int4/int2, planes": _policy(
            "dynaexq", "int4,int2", _PROMOTIONS, shift_every=256, planes="2,4"
        ),
    }


def _buddymoe(num_experts: int) -> Methods:
    """Substitution at cache rates, beside the cache alone and random experts."""
    found = {}
    for rate in CACHE_RATES:
        slots = round(rate * num_experts)
        for name, ahead in (("original", 0), ("original, prefetch", 2)):
            found[f"{name}, c {rate:g}"] = flags_of(memory__slots=slots, memory__prefetch=ahead)
        for name, policy, settings in (  # Algorithm 1 as printed
            ("original, residents of a profile", "buddymoe", "keep_fetched=False,rho=0"),
            ("random", "scripts.studies.buddymoe.controls:RandomExpert", "keep_fetched=False"),
            ("co-activation", "buddymoe", "keep_fetched=False"),
            ("co-activation, rho 3", "buddymoe", "keep_fetched=False,rho=3"),
            ("co-activation, rho 1", "buddymoe", "keep_fetched=False,rho=1"),
        ):
            found[f"{name}, c {rate:g}"] = _policy(policy, "int4", settings, policy__slots=slots)
    return found


def _cost(num_experts: int) -> Methods:
    """A policy's own time: every expert is there and runs in INT4 or INT2, as in the pool alone."""
    one, two = str(num_experts), f"{num_experts},{num_experts}"
    return {
        "pool": flags_of(memory__slots=num_experts),
        "on_demand": _policy("on_demand", "int4", "", policy__slots=one),
        "dymoe 4/0": _policy(
            "dymoe", "int4", "retention=1,prefetch=0,low=skip", policy__slots=one
        ),
        "dymoe 4/2": _policy("dymoe", "int4,int2", "retention=1,prefetch=0", policy__slots=two),
        "buddymoe": _policy("buddymoe", "int4", "rho=0", policy__slots=one),
        "dynaexq": _policy("dynaexq", "int8,int4", "n_hot=0", policy__slots=f"1,{one}"),
        "pool, INT2": flags_of(bits=2, memory__slots=num_experts),
        "dynaexq 4/2": _policy("dynaexq", "int4,int2", "n_hot=0", policy__slots=f"1,{one}"),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """Methods of one question."""

    shape: str  # the model, unless another one is asked for
    methods: Callable[[int], Methods]  # flags by method, of so many experts a layer
    common: Words  # flags of all, which those of a method may replace

    def of(self, shape: str) -> Methods:
        """The methods for a shape."""
        return self.methods(CONFIGS[shape].num_experts)


def _budgets(*gibs: float) -> Words:
    return flags_of(budgets=f"({','.join(f'{gib:g}' for gib in gibs)},)")


SECTIONS: Mapping[str, Section] = {
    "decide": Section(QWEN3, lambda _: DECIDE, flags_of(attention_bits=4) + _budgets(*BUDGETS)),
    # The warm-up takes the steps before the first shift.
    "dynaexq": Section(QWEN3, _dynaexq, flags_of(batches="(1,4,16)", new_tokens=256)),
    "dynaexq_wide": Section(QWEN3, _dynaexq_wide, flags_of(new_tokens=256) + _budgets(32, 48)),
    "dymoe": Section(MIXTRAL, lambda _: _TABLE_3, flags_of(new_tokens=64) + _budgets(12, 16, 24)),
    "buddymoe": Section(QWEN3, _buddymoe, ()),
    "cost": Section(QWEN3, _cost, ()),
}


def has_rows(output: Path, command: list[str]) -> bool:
    """Whether a file has rows of a command, of each of its batches under each of its budgets."""
    said, found = shlex.join(command), ""
    if output.is_file():
        found = "\n".join(row.what for row in read_rows(output) if row.command == said)
    given = dict(re.findall(r"--config\.(batches|budgets)=(\S*)", "\n".join(command)))
    batches, budgets = (
        [float(number) for number in re.findall(r"[\d.]+", given.get(name, default))]
        for name, default in (("batches", "1"), ("budgets", "0"))
    )
    return all(
        re.search(f", batch {batch:g}, " + (f"{gib:g} GiB" if gib else r"\d+ prompts"), found)
        for batch in batches
        for gib in budgets
    )
