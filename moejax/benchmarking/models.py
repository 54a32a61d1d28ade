"""The models that are measured: a checkpoint's, or of random weights and a real shape.

Of a shape, rows of the host are made once for each precision. A tier that holds every expert on the
device never fetches one, and what a bulk transfer reads no step waits for: where a plan says so,
experts share rows of `_FEW_GIB`, which is more than a processor's cache holds.
"""

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.benchmarking import routing
from moejax.benchmarking.random_weights import (
    Packing,
    expert_terms,
    expert_terms_nbytes,
    random_weights,
)
from moejax.benchmarking.routing import Workload
from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.sizes import PLACES, mesh_splits_heads
from moejax.config.benchmark import PROMPT_TOKENS, BenchmarkConfig
from moejax.devices import (
    DeviceMesh,
    asked_experts,
    asked_heads,
    choose_device,
    device_nbytes,
    enable_compilation_cache,
    make_mesh,
    plain_memory_errors,
)
from moejax.engine import Engine
from moejax.errors import MoejaxError, print_stderr
from moejax.experts.budget import (
    Budget,
    BudgetError,
    Limits,
    RunSizes,
    TierBudget,
    TierSize,
    make_budget,
)
from moejax.experts.budget.planned import EMBEDDINGS, EMBEDDINGS_LEAF
from moejax.experts.cache import ExpertMemory
from moejax.experts.host_store import HostStore
from moejax.experts.load import empty_tier, plan_tiers, preload_first
from moejax.experts.machine import check_room, device_limits, room_nbytes
from moejax.experts.pinned_memory import host_place
from moejax.experts.placement import handed_out, load_of
from moejax.experts.tiering import STORED, Tiering, choose, shape_is_mxfp4
from moejax.inference.chunking import PlannedSizes, planned_chunks
from moejax.inference.runner import Runner
from moejax.models.attention import copies_cache, stores_scores
from moejax.models.config import PLAIN_ROUTER, ModelConfig, weight_shapes
from moejax.models.head_shares import HEAD_LEAVES, HeadShares, splits_heads
from moejax.models.leaf_kinds import EXPERT_LEAVES, VOCABULARY_LEAVES
from moejax.models.shapes import CONFIGS, with_layers
from moejax.policies.base import AnyPolicy
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.make import make_policy, parts_of, settings_of
from moejax.quantization.pipeline.recipe import parse_planes
from moejax.routing.trace import Trace, read_trace
from moejax.text.tokenizer import Tokenizer
from moejax.weights.handed_out import table_nbytes
from moejax.weights.qtensor import Weight
from moejax.weights.shares import shares_of
from pallas_kernels import mxfp4
from pallas_kernels.target import target_of

_FEW_GIB = 4.0
_NUM_DRAWN = 8  # different experts; the others are copies, in memory of their own


class _SyntheticRows:
    """All experts of a shape in host memory; a `moejax.experts.host_store.RowSource`."""

    def __init__(
        self, config: ModelConfig, packing: Packing, device: jax.Device, num_rows: int,
        *, is_plane: bool = False, mesh: DeviceMesh | None = None,
    ):  # fmt: skip
        """Draws a few experts, all rows of `packing`, or planes of as many bits."""
        self.num_layers = len(config.moe_layers)
        self.num_experts = (mesh.num_handed_out if mesh else 0) or config.num_experts
        small = dataclasses.replace(
            config, num_layers=1, moe_layers=(0,), num_experts=_NUM_DRAWN, delta_net=None,
            window_layers=None, experts_per_token=min(config.experts_per_token, _NUM_DRAWN),
            router=PLAIN_ROUTER, vocab_size=64,
        )  # fmt: skip
        drawn = random_weights(small, packing, device)
        stacks: Any = tuple(drawn[name] for name in EXPERT_LEAVES)
        if is_plane:
            stacks = tuple(stack.words for stack in stacks)
        leaves, tree = jax.tree.flatten(stacks)
        self._drawn = [np.asarray(leaf)[0] for leaf in leaves] * (mesh.size if mesh else 1)
        self.row = tuple(jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for leaf in leaves)
        self.row_nbytes = sum(part.size * part.dtype.itemsize for part in self.row)
        self.gate_up, self.down = jax.tree.unflatten(tree, self.row)
        self.uses_jax = False
        del drawn, stacks, leaves
        total = self.num_layers * self.num_experts
        self.store = HostStore(self, num_rows, device, mesh)
        self.store.fill(progress=False)
        self.nbytes, row_of = sum(array.nbytes for array in self.store.arrays), self.store.row_of
        row_of[...] = np.arange(total).reshape(row_of.shape) % num_rows  # few are shared

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """One of the drawn experts."""
        del check
        for part, drawn in zip(into, self._drawn, strict=True):
            np.copyto(part, drawn[(layer * self.num_experts + expert) % _NUM_DRAWN])


def on_mesh(
    dense: Mapping[str, Weight], mesh: DeviceMesh, config: ModelConfig
) -> dict[str, Weight]:
    """Gives each device rows of the vocabulary, heads if they are split, and all of the others."""
    heads = HeadShares(config, mesh.size)

    def split(name: str, leaf: Weight) -> Weight:
        if name in VOCABULARY_LEAVES:
            rows: Weight = mesh.split_rows(leaf)
            return rows
        if name not in HEAD_LEAVES or not mesh.splits_heads:
            return jax.device_put(leaf, mesh.replicated)
        host = jax.tree.map(np.asarray, leaf)
        parts = [jax.device_put(heads.take(name, host, i), d) for i, d in mesh.local.items()]
        joined: Weight = jax.tree.map(lambda *leaves: mesh.join(leaves), *parts)
        return joined

    return {name: split(name, leaf) for name, leaf in dense.items()}


def _replay(memory: ExpertMemory, workload: Workload, batch: int) -> None:
    """From now on decode steps of so many sequences take what the workload says."""
    if workload.ids.shape[2] != batch:
        raise ValueError(f"a workload of {workload.ids.shape[2]} sequences, not {batch}")

    def kept(array: np.ndarray) -> jax.Array:
        return jax.device_put(array, memory.place)

    def logits(probabilities: np.ndarray) -> jax.Array:
        return kept(np.log(np.maximum(probabilities, np.finfo(np.float32).tiny)))

    said = logits(workload.probabilities)
    first, *others = memory.tiers
    policy, ahead, predicted = memory.spec.policy, None, None
    if policy is None and first.spec.prefetch:
        ahead = kept(workload.expected(first.spec.prefetch))
    if policy is not None and policy.needs.predicted:
        predicted = logits(workload.predicted)
    first.store = dataclasses.replace(
        first.store, replay=said, replay_ahead=ahead, replay_predicted=predicted
    )
    for tier in others:
        tier.store = dataclasses.replace(tier.store, replay=None, replay_ahead=None)


OWN_ROUTING = "the model's own"
NEAR_UNIFORM = (
    "the random routers' own, near uniform (all experts are on the device, nothing is replayed; "
    "memory.slots of all experts replays them from a pool)"
)
# Of buddy lists, as `moejax.profile_experts` makes them by default.
CFT_ALPHA, SMOOTHING, MOST_BUDDIES = 0.95, 1.0, 16
REPLAYED = "replayed routing"  # a part of the budget
BFLOAT16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class _LoadedModel:
    """A model that is ready."""

    runner: Runner
    budget: Budget | None  # what was planned; None without limits
    routing: str  # where decode steps' experts are from, for people
    load_s: float = 0.0  # seconds that it took; 0 where it was there already
    close: Callable[[], object] = lambda: None  # gives back what no other measurement uses


class CheckpointModels:
    """A checkpoint's engines, each loaded for its batch and budget."""

    def __init__(self, config: BenchmarkConfig, device: jax.Device):
        self._asked, self.device = config, device
        self._checkpoint = open_checkpoint(config.checkpoint, config.read_bits)
        self.config, self.eos_ids = self._checkpoint.config, self._checkpoint.eos_ids
        self.tokenizer = Tokenizer.from_directory(self._checkpoint.directory)
        self.about = config.checkpoint
        if config.read_bits:
            self.about += f" in {config.read_bits} bits"
        mesh = make_mesh(config.mesh, config.platform)
        if mesh is not None:
            by_heads = mesh_splits_heads(
                self._checkpoint, asked_heads(config.mesh), mesh.size,
                dtype=self._checkpoint.choose_dtype(config.dtype, device),
                batch=max(config.batches), context=_context(config),
            )  # fmt: skip
            experts = handed_out(config.mesh, self.config, load_of(self._checkpoint))
            mesh = dataclasses.replace(mesh, splits_heads=by_heads, handed_out=experts)
        self.about += _mesh_text(mesh)
        # One choice for all batches: those of a model without limits share an engine.
        self._mesh = f"{mesh.size},{'heads' if mesh.splits_heads else 'whole'}" if mesh else ""
        if mesh and (more := asked_experts(config.mesh)) is not None:
            self._mesh += f",experts+{more}"
        self._tiering = config.policy.tiering()
        self._whole: Engine | None = None

    def load(self, batch: int, gib: float, context: int) -> _LoadedModel:
        """A model under a limit of the device, 0: none; BudgetError where it cannot run.

        Without limits and policy one engine serves all batches.
        """
        limits = self._limits(gib)
        is_whole = limits is None and self._tiering is None
        if is_whole and self._whole is not None:
            runner = self._whole._runner  # the loop itself is timed
            return _LoadedModel(runner, None, OWN_ROUTING)
        if self._whole is not None:
            self._whole.close()
            self._whole = None
        gc.collect()
        engine = self._engine(context, limits, policy=self._tiering, batch=batch)
        if is_whole:
            self._whole = engine
        runner = engine._runner
        found = _LoadedModel(runner, engine.budget, OWN_ROUTING, engine.load_seconds)
        return found if is_whole else dataclasses.replace(found, close=engine.close)

    def exact(self, context: int) -> Engine:
        """The model without a policy, under the largest budget that was asked for."""
        gibs = [gib for _, gib in self._asked.points()]
        limits = self._limits(0 if 0 in gibs else max(gibs))
        return self._engine(context, limits, progress=False)

    def _limits(self, gib: float) -> Limits | None:
        memory = dataclasses.replace(self._asked.memory, device_gib=gib)
        return None if memory == type(memory)() else memory.limits()

    def _engine(self, context: int, limits: Limits | None, **more: Any) -> Engine:
        return Engine.from_pretrained(
            self._checkpoint.directory, dtype=self._asked.dtype, platform=self._asked.platform,
            context=context, compilation_cache=self._asked.compilation_cache, limits=limits,
            generation_config=False, read_bits=self._asked.read_bits, mesh=self._mesh, **more,
        )  # fmt: skip


class _ShapeModels:
    """Models of random weights; dense weights and rows of the host are made once."""

    def __init__(self, config: BenchmarkConfig, device: jax.Device):
        self._asked, self.device = config, device
        self._trace: Trace | None = read_trace(Path(config.trace)) if config.trace else None
        self._tiering = config.policy.tiering()
        stored = self._tiering.stored() if self._tiering else ()
        is_mxfp4 = shape_is_mxfp4(config.mxfp4, stored)
        planes = parse_planes(config.planes) if config.planes else ()
        own = planes[-1] if planes else mxfp4.BITS if config.mxfp4 else config.bits
        self._bits, self._by_profile = [own], False
        if (tiering := self._tiering) is not None:
            assert isinstance(tiering.policy, str)
            self._bits = [tier.bits_of_shape(own) for tier in stored]
            parts = parts_of(tiering.policy, tiering.settings)
            self._by_profile = "lists" in settings_of(tiering.policy, parts)
            if planes and not set(self._bits) <= set(planes):
                raise MoejaxError(f"planes={config.planes} are not the widths of policy.tiers")
            if tiering.emulate:
                raise MoejaxError("a shape takes no policy.emulate")
        self.config = with_layers(CONFIGS[config.shape], config.layers)
        self.tokenizer: Tokenizer | None = None
        self.eos_ids: tuple[int, ...] = ()
        self._packing = Packing(
            bits=own, group_size=config.group_size, mxfp4=is_mxfp4,
            attention_bits=config.attention_bits, shared_bits=config.shared_bits,
            head_bits=config.head_bits,
            dense_rank=config.dense_rank, expert_rank=config.expert_rank,
        )  # fmt: skip
        packed = self._packing
        layers = f"{self.config.num_layers} layers, " if config.layers else ""
        self.about = f"{config.shape}, {layers}random weights, {packed.describe()}"
        self._mesh = mesh = self._divided(make_mesh(config.mesh, config.platform))
        self.about += _mesh_text(mesh)
        self._own = self.config  # of the experts that a device has
        if mesh is not None and mesh.handed_out is None:
            units = [
                mxfp4.GROUP_SIZE if is_mxfp4 and bits == mxfp4.BITS else config.group_size
                for bits in self._bits
                if bits != 16
            ]  # of all tiers, which are cut alike
            unit = math.lcm(*units) if units else None
            shares = shares_of(self.config.expert_dim, mesh.size, unit)
            self._own = dataclasses.replace(self.config, expert_dim=shares.share_width)
        # The cache's and the workspace's are of a device's heads.
        self._planned = self._own
        if mesh is not None and mesh.splits_heads:
            self._planned = HeadShares(self._own, mesh.size).own
        with plain_memory_errors(device):
            dense = random_weights(self._own, packed, device, experts=False)
            self._dense = on_mesh(dense, mesh, self._own) if mesh else dense
            jax.block_until_ready(self._dense)
        self._embeddings_on_host = False
        self._terms: Any = None
        self._rows: dict[tuple[int, int, int], _SyntheticRows] = {}
        self._dense_nbytes = {n: device_nbytes(leaf) for n, leaf in self._dense.items()}
        if mesh is not None and (rows := mesh.num_handed_out):
            num_layers, num_experts = len(self.config.moe_layers), self.config.num_experts
            self._dense_nbytes[PLACES] = table_nbytes(num_layers, num_experts, mesh.size, rows)
        self._whole: Runner | None = None

    def _divided(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """Splits attention where that is asked for, or pays in the largest batch."""
        if mesh is None:
            return None
        asked = self._asked
        shares = HeadShares(self.config, mesh.size)
        refusal = shares.refusal(1 if asked.attention_bits == 16 else asked.group_size)
        if asked.dense_rank and refusal is None:
            refusal = "has low-rank compensators"
        by_heads = splits_heads(
            shares, asked_heads(asked.mesh), refusal, batch=max(asked.batches),
            context=_context(asked), itemsize=BFLOAT16_BYTES,
        )  # fmt: skip
        experts = handed_out(asked.mesh, self.config)
        return dataclasses.replace(mesh, splits_heads=by_heads, handed_out=experts)

    def load(self, batch: int, gib: float, context: int) -> _LoadedModel:
        """Loads an engine, as `CheckpointModels.load`."""
        start = time.perf_counter()
        asked = dataclasses.replace(self._asked.memory, device_gib=gib, host_gib=0.0).limits()
        if self._whole is not None and (asked != Limits() or self._tiering is not None):
            self._whole = None
            gc.collect()
        planned = sum(self._dense_nbytes.values())
        limits = device_limits(self.device, asked, planned_nbytes=planned)
        with plain_memory_errors(self.device):
            found = self._loaded(batch, context, limits)
        return dataclasses.replace(found, load_s=time.perf_counter() - start)

    def _loaded(self, batch: int, context: int, limits: Limits) -> _LoadedModel:
        tiering, work = self._tiering, self._routing(batch)
        policy = None if tiering is None else self._policy(tiering, work)
        names = ["experts"] if tiering is None else [tier.name for tier in tiering.stored()]
        tiers = [
            TierSize(
                name=name,
                expert_nbytes=self._expert_nbytes(bits),
                low_rank_nbytes=expert_terms_nbytes(self.config, self._packing),
            )
            for name, bits in zip(names, self._bits, strict=True)
        ]
        nbytes, refines = work.probabilities.nbytes, (False,) * len(tiers)
        if policy is None or tiering is None:
            nbytes += 4 * limits.prefetch * work.ids[..., 0, 0].size
            budget = make_budget(self._run(batch, context, nbytes), tiers, limits)
            if not budget.pooled:
                return self._resident(budget, limits)
        else:
            nbytes += work.predicted.nbytes if policy.needs.predicted else 0
            run = self._run(batch, context, nbytes)
            widths = self._bits if self._asked.planes and self._mesh is None else ()
            budget, refines = plan_tiers(policy, run, tiers, tiering.slots, limits, widths)
        if self._asked.expert_rank and (policy is not None or self._mesh is not None):
            raise BudgetError(
                f"expert_rank={self._asked.expert_rank} is for experts without a policy, on one "
                "device: leave it out, or the policy and the mesh"
            )
        # Before slots take what the embeddings have: a budget has room for one of both.
        self._place_embeddings(on_host=EMBEDDINGS in budget.host)
        memories, held = [], 0
        hot = work.activations() if self._by_profile else None
        for bits, part, is_plane in zip(self._bits, budget.tiers, refines, strict=True):
            plane = bits - self._bits[-1] if is_plane else 0
            rows = self._made_rows(bits, part, plane)
            tier = empty_tier(
                part, rows, rows.store, self._own, self.device, self._mesh, self._dense,
                refines=plane, terms=self._made_terms(),
            )  # fmt: skip
            if tier.host is not None:
                print_stderr(tier.host.text)
            held += preload_first(tier, part, hot, held, self.config)
            memories.append(tier)
        width, stored = self.config.experts_per_token, [STORED] if policy is None else names
        memory = ExpertMemory(memories, stored, policy, width=width)
        return self._moving(memory, work, batch, budget)

    def _made_terms(self) -> Any:
        """Low-rank terms of experts that move, which are all on the device; made once."""
        if self._terms is None:
            self._terms = expert_terms(self._own, self._packing, self.device)
        return self._terms

    def _place_embeddings(self, *, on_host: bool) -> None:
        """Moves the embeddings to where a budget has them: host memory or the device."""
        if on_host != self._embeddings_on_host:
            leaf: Any = self._dense[EMBEDDINGS_LEAF]
            own = leaf.sharding.with_memory_kind(self.device.default_memory().kind)
            moved = jax.device_put(leaf, host_place(self.device) if on_host else own)
            self._dense = {**self._dense, EMBEDDINGS_LEAF: moved}
            self._embeddings_on_host = on_host

    def _expert_nbytes(self, bits: int) -> int:
        """Bytes of a device's part of an expert in a precision."""
        shapes = weight_shapes(self._own)
        sizes = [shapes[name][-2:] for name in EXPERT_LEAVES]
        if bits == 16:
            return sum(BFLOAT16_BYTES * math.prod(size) for size in sizes)
        return sum(map(self._packing.kind(bits).num_bytes, sizes))

    def _made_rows(self, bits: int, part: TierBudget, refines: int) -> _SyntheticRows:
        """Rows of a precision, or of its last plane; made once."""
        nbytes, total = part.tier.expert_nbytes, part.num_layers * part.num_experts
        limit = self._asked.memory.host_gib / (self._mesh.size if self._mesh else 1)
        few = _FEW_GIB if part.has_all_slots else 0
        gib = min(filter(None, (limit, few)), default=0)
        num_rows = min(total, max(1, int(gib * 2**30) // nbytes)) if gib else total
        form = bits, refines
        held = [count for *of, count in self._rows if tuple(of) == form and count >= num_rows]
        if held:
            return self._rows[*form, max(held)]
        start = time.perf_counter()
        packing = dataclasses.replace(self._packing, bits=refines or bits, expert_rank=0)
        made = _SyntheticRows(
            self._own, packing, self.device, num_rows, is_plane=refines > 0, mesh=self._mesh
        )
        assert made.row_nbytes == nbytes, (made.row_nbytes, nbytes)
        self._rows[*form, num_rows] = made
        spent = time.perf_counter() - start
        print_stderr(
            f"{part.tier.name}{' refinements' if refines else ''}: {num_rows} rows of "
            f"{total} experts, {made.nbytes / 2**30:.1f} GiB, in {spent:.1f} s"
        )
        return made

    def _resident(self, budget: Budget, limits: Limits) -> _LoadedModel:
        """A model whose experts are all on the device."""
        if self._whole is not None:
            self._whole.planned = PlannedSizes(chunk=budget.run.chunk)
            return _LoadedModel(self._whole, None, NEAR_UNIFORM)
        self._place_embeddings(on_host=False)
        self._terms = None
        if not limits.device_gib:
            check_room(budget.device, room_nbytes(self.device, sum(self._dense_nbytes.values())))
        devices = self._mesh.devices if self._mesh else (self.device,)
        own = dataclasses.replace(self._own, num_experts=budget.run.num_experts)
        drawn = [random_weights(own, self._packing, device, dense=False) for device in devices]
        experts = drawn[0]
        if self._mesh is not None:
            join = self._mesh.join
            experts = jax.tree.map(lambda *leaves: join(leaves), *drawn)
        weights = jax.block_until_ready(self._dense | experts)
        runner = Runner(self.config, weights, self.device, mesh=self._mesh)
        runner.planned = PlannedSizes(chunk=budget.run.chunk)
        if limits == Limits():
            self._whole = runner
        stated = budget if limits.device_gib else None
        return _LoadedModel(runner, stated, NEAR_UNIFORM)

    def _moving(
        self, memory: ExpertMemory, work: routing.Workload, batch: int, budget: Budget
    ) -> _LoadedModel:
        _replay(memory, work, batch)
        mesh = self._mesh
        if mesh is not None:
            experts = handed_out(self._asked.mesh, self.config, work.activations())
            mesh = dataclasses.replace(mesh, handed_out=experts)
        runner = Runner(self.config, self._dense, self.device, memory=memory, mesh=mesh)
        runner.planned = PlannedSizes(chunk=budget.run.chunk)
        said = f"decode: {work.about}; prefill: the random routers' own, near uniform"
        if gib := self._asked.memory.host_gib:
            said += f"; experts share rows of {gib:g} GiB of host memory, as many bytes each"

        def close() -> None:
            runner.programs.close()
            memory.close()
            for leaf in jax.tree.leaves(memory.pool):  # but not the host's rows
                if not leaf.is_deleted():
                    leaf.delete()
            gc.collect()

        return _LoadedModel(runner, budget, said, close=close)

    def _routing(self, batch: int) -> routing.Workload:
        asked = self._asked
        how: dict[str, Any] = {"recall": asked.recall, "seed": asked.seed}
        if self._trace is None:
            how |= {"shape": asked.shape, "exponent": asked.exponent()}
            how |= {"shift_every": asked.shift_every}
            return routing.with_skew(self.config, batch, **how)
        name = Path(asked.trace).name
        return routing.of_trace(self.config, self._trace, batch, name=name, **how)

    def _run(self, batch: int, context: int, replayed_nbytes: int) -> RunSizes:
        parts = self._dense_nbytes | {REPLAYED: replayed_nbytes}
        sizes = (BFLOAT16_BYTES, target_of(self.device))
        chunks = planned_chunks(self.config, batch, context, *sizes)
        return RunSizes(
            config=self._planned, weights_nbytes=parts, batch=batch, context=context,
            chunk=chunks[0], longer_chunks=chunks[1:],
            platform=self.device.platform, itemsize=BFLOAT16_BYTES,
            stores_scores=stores_scores(self.config, *sizes),
            copies_cache=copies_cache(self.config, *sizes),
            num_devices=self._mesh.size if self._mesh else 1,
            handed_out=self._mesh.num_handed_out if self._mesh else 0,
            room_nbytes=room_nbytes(self.device, sum(self._dense_nbytes.values())),
        )  # fmt: skip

    def _policy(self, tiering: Tiering, work: routing.Workload) -> AnyPolicy:
        """The policy; without a profile, buddies are by co-activations of the workload."""
        assert isinstance(tiering.policy, str)
        settings = dict(tiering.settings)
        if self._by_profile and "lists" not in settings:
            shares = conditional_coactivation(work.coactivations(), SMOOTHING)
            settings["lists"] = buddy_lists(shares, CFT_ALPHA, MOST_BUDDIES)
            return make_policy(tiering.policy, **settings)
        return choose(tiering, Path(), self.config).policy


def _context(config: BenchmarkConfig) -> int:
    """Slots of a sequence's cache."""
    return config.context or (config.prompt_tokens or PROMPT_TOKENS) + config.new_tokens


def _mesh_text(mesh: DeviceMesh | None) -> str:
    split = ", attention split by heads" if mesh and mesh.splits_heads else ""
    if mesh and (rows := mesh.num_handed_out):
        split += f", {rows} experts of a layer each"
    return f", on {mesh.size} devices{split}" if mesh else ""


Models = CheckpointModels | _ShapeModels


def models_of(config: BenchmarkConfig) -> Models:
    """Models that a configuration names."""
    device = choose_device(config.platform)
    enable_compilation_cache(config.compilation_cache)
    return _ShapeModels(config, device) if config.shape else CheckpointModels(config, device)
