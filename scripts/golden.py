"""Writes and compares what the engine computes, to the bit, over many configurations on a CPU.

    python -m scripts.golden write DIR                  # of the code as it is
    python -m scripts.golden compare DIR                # the same again, and what differs
    python -m scripts.golden compare DIR --only=dymoe   # configurations whose name has the word

Each configuration is a small model, random or the packaged one, under limits of memory, a policy or
neither. Recorded are token ids, hashes of float32 logits, ledgers, the plan's bytes, hashes of
recorded traces, and a hash of the lowered text of every compiled program, without its names and
locations. Run both commands on one machine: XLA rounds differently for another processor.

Transfers and disk reads that come by the clock are waited for after each step.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from scripts import quick_compile

os.environ["XLA_FLAGS"] = quick_compile.xla_flags()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from absl import app, flags
from safetensors.numpy import load_file

from moejax import Engine
from moejax.checkpoints import save_hf_checkpoint
from moejax.experts.budget import Limits
from moejax.experts.tiering import Tiering
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig, weight_shapes
from moejax.policies.buddy_lists import BuddyLists
from moejax.policies.make import make_policy
from moejax.programs import CompiledPrograms
from moejax.quantization.pipeline.recipe import Recipe, Scheme
from moejax.quantization.pipeline.run import Job, quantize_checkpoint
from tests import model_kinds
from tests.random_checkpoints import TINY

PROMPTS = [np.random.default_rng(n).integers(0, 160, n).tolist() for n in (14, 9)]
TOKENS = np.random.default_rng(0).integers(0, 160, (1, 20)).astype(np.int32)
MADE: dict[str, Any] = {"tiers": ("int4", "int2"), "quantizer": "rtn", "group_size": 16}
# Two sparse layers about a dense one; eight experts.
SMALL: dict[str, Any] = {
    "model_dim": 32, "head_dim": 8, "num_experts": 8, "expert_dim": 16, "mlp_dim": 40,
}  # fmt: skip
LEDGER_TIMES = ("stall_seconds",)

_ONLY = flags.DEFINE_string("only", "", "configurations whose name has this word; '': all")
_MOST = flags.DEFINE_integer("most", 12, "lines of differences of each configuration")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    model: str = "tiny"  # "demo", "tiny", "tiny_milo", "long" or one of `model_kinds.KINDS`
    limits: dict[str, Any] | None = None  # of memory; None for none
    policy: dict[str, Any] | None = None  # None for none
    work: Callable[["Recording"], None]  # what is asked of the engine: adds to the record


class Recording:
    """An engine at work and the record of what it gives."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.found: dict[str, Any] = {}

    def logits(self, tokens: np.ndarray = TOKENS) -> None:
        """Records the hash of the logits of every position."""
        self.found["logits"] = _hash(self.engine.logits(tokens))

    def generate(self, prompts: list[list[int]], name: str = "greedy", **settings: Any) -> None:
        """Records the tokens of answers, many steps a call."""
        wanted = {"max_new_tokens": 18, "ignore_eos": True, "temperature": 0.0} | settings
        answers = self.engine.generate(prompts, **wanted)
        self.found[name] = [list(answer.tokens) for answer in answers]

    def stream(self, prompt: list[int], count: int = 24) -> None:
        """Records the tokens of a sampled answer, one step a call."""
        chunks = self.engine.stream(
            prompt, max_new_tokens=count, ignore_eos=True, temperature=0.8, seed=3
        )
        self.found["sampled"] = [chunk.token for chunk in chunks]


def _plain(run: Recording) -> None:
    run.logits()
    run.generate(PROMPTS[:1])


def _streamed(run: Recording) -> None:
    run.logits()
    run.stream(PROMPTS[0])


def _moving(run: Recording) -> None:
    """Long enough for a policy to move experts between steps, many times."""
    run.logits()
    run.stream(PROMPTS[0], 48)


def _bulk(run: Recording) -> None:
    """Somebody asks for experts between calls."""
    memory: Any = run.engine._runner.memory
    for layer, experts in ((0, (3, 1)), (1, (0, 7, 5)), (0, (6,))):
        memory.tiers[0].transfers.request(layer, experts)
    _streamed(run)


def _mixed(run: Recording) -> None:
    """Rows of unequal prompts and settings, one of which ends early."""
    rows = [
        {"max_new_tokens": 12, "temperature": 0.0, "seed": 0},
        {"max_new_tokens": 7, "temperature": 0.9, "seed": 1, "top_k": 20},
        {"max_new_tokens": 12, "temperature": 0.7, "seed": 2, "top_p": 0.8, "min_p": 0.01},
    ]
    settings = [GenerationSettings.of(ignore_eos=True, **row) for row in rows]
    prompts = [*PROMPTS, PROMPTS[0][:3]]
    batch = run.engine.batch(prompts, settings, top_logprobs=2, steps_per_call=2)
    pieces = list(batch.steps())
    run.found["mixed"] = [
        [
            [piece.tokens, [(p.logprob.hex(), p.top) for p in piece.logprobs]] if piece else None
            for piece in call
        ]
        for call in pieces
    ]


def _chunked(run: Recording) -> None:
    """A prompt of two chunks."""
    prompt = np.random.default_rng(5).integers(0, 160, 1100).tolist()
    run.generate([prompt], max_new_tokens=4)


def _traced(run: Recording, **spec: Any) -> None:
    """Records the routing too."""
    path = run.folder / "trace"
    with run.engine.recording(path, **spec):
        _streamed(run)
    run.found["trace"] = {name: _hash(array) for name, array in load_file(path).items()}


_FULL_TRACE = functools.partial(_traced, foreseen=4, probabilities=True, importance=True)


def _buddies() -> BuddyLists:
    others = (np.arange(8)[:, None] + [1, 2, 5]) % 8
    ids = np.tile(others.astype(np.int32), (2, 1, 1))
    return BuddyLists(ids, np.full(ids.shape, 0.5, np.float32))


def _policies() -> dict[str, Case]:
    """Each policy, with real slots and with emulated ones."""
    dymoe = {"retention": 0.5, "schedule": "linear", "heavy_count": 3}
    dynaexq = {"n_hot": 3, "period": 4, "warmup": 4}
    buddymoe = make_policy("buddymoe", lists=_buddies(), rho=2, tae_tau=-1.0)
    named: dict[str, dict[str, Any]] = {
        "on_demand": {"policy": "on_demand", "slots": (3,)},
        "resident_policy": {"policy": "resident", "slots": (8,), **MADE, "tiers": ("int4",)},
        "dymoe": {"policy": "dymoe", "settings": {**dymoe, "prefetch": 0}, "slots": (3, 8), **MADE},
        "dynaexq": {"policy": "dynaexq", "settings": dynaexq, "slots": (3, 8), **MADE},
        "buddymoe": {"policy": buddymoe, "slots": (5,), **MADE, "tiers": ("int4",)},
        "compose": {
            "policy": "compose", "slots": (3, 8), **MADE,
            "settings": {"period": 8, "retention": 0.5, "prefetch": 0},
        },
    }  # fmt: skip
    cases = {}
    for name, policy in named.items():
        cases[name] = Case(policy=policy, work=_moving)
        emulated = {**policy, "emulate": True}
        work = _FULL_TRACE if name == "dymoe" else _moving
        cases[f"{name}_emulated"] = Case(policy=emulated, work=work)
    both = {"policy": "dymoe", "settings": {**dymoe, "prefetch": 2}, "slots": (3, 3), **MADE}
    cases["dymoe_prefetch"] = Case(policy=both, work=_streamed)
    cases["on_demand_prefetch"] = Case(
        policy={"policy": "on_demand", "settings": {"prefetch": 2}, "slots": (3,)}, work=_streamed
    )
    cases["dymoe_disk"] = Case(
        policy=both, limits={"host_gib": 0.00006}, work=_streamed
    )  # fmt: skip
    foreseeing = {**dynaexq, "foresight": 4}
    cases["dynaexq_disk"] = Case(
        policy={**named["dynaexq"], "settings": foreseeing}, limits={"host_gib": 0.00012},
        work=_moving,
    )  # fmt: skip
    cases["dymoe_batch"] = Case(policy=named["dymoe"], work=_mixed)
    return cases


CASES: dict[str, Case] = {
    "demo": Case(model="demo", work=_plain),
    "demo_slots_prefetch": Case(model="demo", limits={"slots": 8, "prefetch": 2}, work=_plain),
    "resident": Case(work=_FULL_TRACE),
    "slots": Case(limits={"slots": 3}, work=_traced),
    "slots_prefetch": Case(limits={"slots": 3, "prefetch": 2}, work=_streamed),
    "no_slots": Case(limits={"slots": 0, "transient": 2}, work=_streamed),
    "disk": Case(limits={"slots": 3, "host_gib": 0.0001}, work=_streamed),
    "disk_bulk": Case(limits={"slots": 3, "host_gib": 0.00013, "bulk": 4}, work=_bulk),
    "bulk": Case(limits={"slots": 3, "bulk": 4}, work=_bulk),
    "batch_slots": Case(limits={"slots": 3}, work=_mixed),
    "chunks_slots_prefetch": Case(
        model="long", limits={"slots": 3, "prefetch": 2}, work=_chunked
    ),
    "milo": Case(model="tiny_milo", work=_streamed),
    "milo_slots": Case(model="tiny_milo", limits={"slots": 3, "prefetch": 2}, work=_streamed),
    **_policies(),
    **{
        kind: Case(model=kind, limits={"slots": 2, "prefetch": 1}, work=_streamed)
        for kind in model_kinds.KINDS
    },
}  # fmt: skip


def write_models(folder: Path) -> None:
    """Writes the checkpoints of all models but the packaged one."""
    configs = {"tiny": ModelConfig(**{**TINY, **SMALL})}
    configs["long"] = dataclasses.replace(configs["tiny"], max_positions=2048)
    configs |= {kind: model_kinds.config_of(kind) for kind in model_kinds.KINDS}
    for name, config in configs.items():
        rng = np.random.default_rng(0)
        weights = {
            leaf: (leaf.endswith("norm") + 0.3 * rng.standard_normal(shape)).astype(np.float32)
            for leaf, shape in weight_shapes(config).items()
        }
        save_hf_checkpoint(folder / name, config, weights, dtype=np.dtype(np.float32))
    scheme = Scheme(
        method="rtn", bits=3, group_size=16, zero_kind="float", scale_dtype="float16", factor_bits=8
    )
    job = Job(
        source=folder / "tiny", output=folder / "tiny_milo",
        recipe=Recipe(default=scheme, rules=(), format="moejax"), rank_policy="Dense-4", passes=2,
        calibration_text=None, calibration_samples=4, calibration_length=32,
        device=jax.devices("cpu")[0], progress=False,
    )  # fmt: skip
    with mock.patch("moejax.quantization.pipeline.run.draw_report"):
        quantize_checkpoint(job)


def record(case: Case, models: Path) -> dict[str, Any]:
    """Runs a configuration and returns all that is recorded of it."""
    path = "demo" if case.model == "demo" else models / case.model
    programs: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, _lowered_texts(programs), _waiting_steps():
        engine = Engine.from_pretrained(
            path, dtype="float32", platform="cpu", compilation_cache="auto", progress=False,
            limits=None if case.limits is None else Limits(**case.limits),
            policy=None if case.policy is None else Tiering(**case.policy),
            batch=4 if case.work is _mixed else 1,
        )  # fmt: skip
        with engine:
            run = Recording(engine, Path(folder))
            case.work(run)
            run.found["ledger"] = _ledger(engine.ledger)
            run.found["plan"] = _plan(engine.budget)
            run.found["experts_used"] = engine.experts_used
    found = run.found | {"programs": programs}
    return json.loads(json.dumps(found, default=lambda number: number.item()))


def _hash(array: np.ndarray) -> str:
    kind = f"{array.dtype.name}{list(array.shape)}"
    return f"{kind} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"


def _ledger(ledger: Any) -> Any:
    """All that is not a time; of one tier or of several in one form."""
    if ledger is None:
        return None
    found: dict[str, Any] = {}
    for i, tier in enumerate(ledger.tiers.values()):
        said = tier.as_dict()
        found[f"tier {i}"] = {name: said[name] for name in said if name not in LEDGER_TIMES}
        found[f"tier {i}"]["gate_mass"] = [mass.hex() for mass in said["gate_mass"].values()]
    if ledger.gate is not None:
        found["gate"] = [[mass.hex() for mass in row] for row in ledger.gate.tolist()]
    return found


def _plan(budget: Any) -> Any:
    """Bytes by place and part."""
    if budget is None:
        return None
    return {place: dict(getattr(budget, place)) for place in ("device", "host", "disk")}


@contextlib.contextmanager
def _lowered_texts(programs: dict[str, list[str]]) -> Iterator[None]:
    """Records a hash of every program that is compiled, by the function's name, in order."""
    lower = CompiledPrograms.lower

    def lowered(self: Any, function: Any, *arguments: Any, **how: Any) -> jax.stages.Lowered:
        made = lower(self, function, *arguments, **how)
        programs.setdefault(function.__name__, []).append(_hash_of_text(made.as_text()))
        return made

    with mock.patch.object(CompiledPrograms, "lower", lowered):
        yield


def _hash_of_text(text: str) -> str:
    """Hash of a module, whatever its functions, arguments, results and callbacks are called."""
    names: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"@f{len(names)}")

    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    text = re.sub(r"index = \d+ : ui64", "", text)
    text = re.sub(r"loc\([^)]*\)", "", text)
    text = re.sub(r'@(?:"[^"]*"|[\w.$-]+)', numbered, text)
    return f"{len(text.splitlines())} lines {hashlib.sha256(text.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _waiting_steps() -> Iterator[None]:
    """Waits after each step for it, and for all that goes on between steps."""
    step = Runner._step

    def waiting(self: Any, *arguments: Any) -> Any:
        found = step(self, *arguments)
        if self.memory is not None:
            for tier in self.memory.tiers:
                _finish(tier)
        return found

    with mock.patch.object(Runner, "_step", waiting):
        yield


def _finish(tier: Any) -> None:
    """Goes on with transfers and reads until none is left."""
    end = time.monotonic() + 30
    jax.block_until_ready(tier.pool)
    while (tier.transfers is not None and tier.transfers.pending) or _reads(tier.disk):
        tier.advance()
        tier.send()
        jax.block_until_ready(tier.pool)
        if time.monotonic() > end:
            raise RuntimeError("transfers do not end")
        time.sleep(0.0005)


def _reads(disk: Any) -> bool:
    return disk is not None and bool(disk._arrived or disk._requests or disk._uses is not None)


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """A line for each number or hash that is not the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for name in [*old, *(name for name in new if name not in old)]:
            inner = f"{place}.{name}" if place else name
            lines += differences(old.get(name, "(none)"), new.get(name, "(none)"), inner)
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        lines = []
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            lines += differences(a, b, f"{place}[{i}]")
        return lines
    return [] if old == new else [f"{place}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def main(argv: list[str]) -> None:
    """Writes the record of each configuration, or compares it with one written before."""
    if len(argv) != 3 or argv[1] not in ("write", "compare"):
        sys.exit("usage: python -m scripts.golden write|compare DIR [--only=WORD] [--most=N]")
    command, directory = argv[1], Path(argv[2])
    names = [name for name in CASES if _ONLY.value in name]
    if not names:
        sys.exit(f"--only={_ONLY.value}: no configuration has it in its name; there are {[*CASES]}")
    if command == "compare" and not directory.is_dir():
        sys.exit(f"{directory} is no directory: write it first")
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for name in names:
            start = time.monotonic()
            found = record(CASES[name], Path(folder))
            jax.clear_caches()
            seconds, path = time.monotonic() - start, directory / f"{name}.json"
            if command == "write":
                path.write_text(json.dumps(found, indent=1))
                print(f"{name}: written ({seconds:.1f} s)", flush=True)
                continue
            old = json.loads(path.read_text()) if path.exists() else {}
            lines = differences(old, found)
            num_different += bool(lines)
            print(f"{name}: {len(lines) or 'no'} differences ({seconds:.1f} s)", flush=True)
            for line in lines[: _MOST.value]:
                print(f"  {line}")
            if len(lines) > _MOST.value:
                print(f"  and {len(lines) - _MOST.value} more: --most={len(lines)} prints all")
    if command == "compare":
        print(f"{num_different} of {len(names)} configurations differ")
        sys.exit(num_different > 0)


if __name__ == "__main__":
    app.run(main)
