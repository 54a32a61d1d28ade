"""The engine: prompts in, text out."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.sizes import mesh_splits_heads
from moejax.devices import (
    DeviceMesh,
    asked_experts,
    asked_heads,
    check_dtype,
    choose_device,
    enable_compilation_cache,
    make_mesh,
    plain_memory_errors,
)
from moejax.errors import MoejaxError
from moejax.experts.bits import BitsPerWeight, bits_of
from moejax.experts.budget import Budget, Limits
from moejax.experts.cache import ExpertMemory
from moejax.experts.ledger import Ledger
from moejax.experts.load import load_limited
from moejax.experts.placement import handed_out, load_of
from moejax.experts.tiering import Tiering
from moejax.inference.batch import RowBatch, raise_errors
from moejax.inference.chunking import (
    MAX_PREFILL_LENGTH,
    FixedSizes,
    PlannedSizes,
    cache_length,
    least_cache_length,
    planned_chunks,
)
from moejax.inference.compile_notice import compile_notice
from moejax.inference.continuous import ContinuousBatch
from moejax.inference.generation import (
    Chunk,
    Generation,
    GenerationSettings,
    read_generation_defaults,
    with_defaults,
)
from moejax.inference.kernel_warnings import describe_packing
from moejax.inference.likelihood import PairScorer, Scored
from moejax.inference.recorder import RecordSpec, recording
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig, Pages
from moejax.text.chat_template import checked_messages
from moejax.text.tokenizer import Prompt, Tokenizer, check_tokens, token_ids_of
from moejax.weights import linear as ops
from moejax.weights.linear import KernelChoice
from moejax.weights.qtensor import Weight
from pallas_kernels.target import target_of

PLANNED_CONTEXT = 4096  # under limits of memory, where the context is left to the prompts
STEPS_PER_CALL = 16  # decode steps of one call of a batch whose rows begin together


class Engine:
    """A loaded model that answers prompts.

    Attributes:
      config: the model's shape.
      weights: flat dict of layer-stacked leaves, plain or packed, on `device`.
      tokenizer: None if the checkpoint has none; prompts are then token ids.
      eos_ids: tokens that end an answer.
      device: runs the model.
      context: cache length of every call, or 0 to take what the prompts need.
      defaults: the checkpoint's `GenerationSettings`.
      load_seconds: time to read the checkpoint.
      budget: the plan, if `from_pretrained` was given limits.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: tuple[int, ...] = (),
        device: jax.Device | None = None,
        context: int = 0,
        kernels: ops.Kernels | None = None,
        memory: ExpertMemory | None = None,
        defaults: Mapping[str, Any] | None = None,
        mesh: DeviceMesh | None = None,
    ):
        """Makes an engine from weights on the device; `from_pretrained` reads them.

        Args:
          device: None for JAX's default one.
          kernels: kernels for packed weights; None for the device's.
          memory: holds the experts if `weights` lack them (`moejax.experts`).
          defaults: fields of `GenerationSettings` in place of its own defaults.
          mesh: devices that the weights are on, `device` the first; None: one device.
        """
        if not 0 <= context <= config.context_limit:
            raise MoejaxError(
                f"context={context} must be from 0 (as needed) to {config.context_limit}, "
                f"the model's own"
            )
        self.config = config
        self.weights = dict(weights)
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.device = device or choose_device("auto")
        self.context = context
        self.defaults = dict(defaults or {})
        self.load_seconds = 0.0
        self.budget: Budget | None = None
        self._open: Runner | None = Runner(
            config, self.weights, self.device, kernels=kernels, memory=memory, mesh=mesh
        )
        self._open.one_stream = memory is not None and memory.spec.policy is not None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        platform: str = "auto",
        context: int = 0,
        compilation_cache: str = "auto",
        progress: bool = True,
        limits: Limits | None = None,
        policy: Tiering | None = None,
        batch: int = 1,
        running: bool = False,
        generation_config: bool = True,
        read_bits: int = 0,
        mesh: str | int = "",
    ) -> "Engine":
        """Loads a checkpoint.

        Args:
          path: a Hugging Face directory, a directory written by `save_orbax`, a name such as
            "Qwen/Qwen3-30B-A3B", or "demo", the model that comes with the package.
          dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, what the file holds
            elsewhere.
          platform: "cpu", "gpu", or "auto".
          context: cache length, 0 for what each call needs.
          compilation_cache: directory of compiled programs, "auto", or "" for none.
          progress: draws a bar on stderr, and reports long compilations there.
          limits: memory limits; experts that do not fit are fetched while the model runs. None: all
            are on the device.
          policy: decides which experts run, in which stored form; None: those of the router.
          batch: sequences per batch that the limits must hold; more may run out of memory.
          running: the limits hold a running batch (`continuous_batch`) of so many rows instead, in
            pages; other calls take one sequence then.
          generation_config: settings that a call omits come from the checkpoint's
            generation_config.json; its eos tokens apply either way.
          read_bits: width in which a checkpoint of bit planes is read; 0: the widest.
          mesh: number of devices that run the model together, each with its share of every expert
            (`devices.make_mesh`); "": one. Limits of the device are then those of each. "2,heads"
            splits attention, too, "2,whole" does not (`models.head_shares`); "2,experts" hands
            experts out whole (`weights.handed_out`).

        Raises:
          MoejaxError: with one line for every kind of bad input.
        """
        device = choose_device(platform)
        devices = make_mesh(mesh, platform)
        check_dtype(dtype, device.platform)
        enable_compilation_cache(compilation_cache)
        start = time.perf_counter()
        checkpoint = open_checkpoint(str(path), read_bits)
        # Between steps experts would arrive at another time in each process.
        if policy is not None and jax.process_count() > 1:
            raise MoejaxError("a policy runs in one process: leave policy out, or start one alone")
        tokenizer = Tokenizer.from_directory(checkpoint.directory)  # before weights take minutes
        defaults = read_generation_defaults(checkpoint.directory) if generation_config else {}
        planned = context or min(PLANNED_CONTEXT, checkpoint.config.context_limit)
        chosen = checkpoint.choose_dtype(dtype, device)
        if devices is not None:
            by_heads = mesh_splits_heads(
                checkpoint, asked_heads(mesh), devices.size, dtype=chosen, batch=batch,
                context=planned,
            )  # fmt: skip
            experts = None
            if asked_experts(mesh) is not None:
                if jax.process_count() > 1:
                    raise MoejaxError(f"mesh={mesh}: one process hands experts out: run one alone")
                experts = handed_out(mesh, checkpoint.config, load_of(checkpoint))
            devices = dataclasses.replace(devices, splits_heads=by_heads, handed_out=experts)
        with plain_memory_errors(device):
            together = 1 if running else batch  # in a prefill step
            chunks = planned_chunks(
                checkpoint.config, together, planned, chosen.itemsize, target_of(device)
            )
            weights, memory, budget = load_limited(
                checkpoint, limits or Limits(), policy, dtype=dtype, device=device, batch=batch,
                context=planned, chunks=chunks, progress=progress, mesh=devices, is_running=running,
            )  # fmt: skip
        engine = cls(
            checkpoint.config, weights, tokenizer=tokenizer, eos_ids=checkpoint.eos_ids,
            device=device, context=context, memory=memory, defaults=defaults, mesh=devices,
        )  # fmt: skip
        engine._runner.planned = PlannedSizes.of(budget)
        if limits is not None or policy is not None:
            engine.budget = budget
        if progress:
            engine._runner.programs.announce = compile_notice
        engine.load_seconds = time.perf_counter() - start
        return engine

    def close(self) -> None:
        """Ends threads and transfers, frees weights, pools and pinned memory; may be repeated.

        Later calls raise MoejaxError, and so does the rest of a stream.
        """
        runner, self._open, self.weights = self._open, None, {}
        if runner is None:
            return
        runner.programs.close()
        if runner.memory is not None:
            with contextlib.suppress(RuntimeError):  # steps that run read the disk, or lost it
                jax.block_until_ready(runner.memory.pool)
            runner.memory.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _runner(self) -> Runner:
        if self._open is None:
            raise MoejaxError("the engine is closed: load it again")
        return self._open

    @property
    def ledger(self) -> Ledger | None:
        """Ledger of expert movement so far; None if all experts are among the weights."""
        memory = self._runner.memory
        return memory.read_counters() if memory else None

    @property
    def host_text(self) -> str:
        """States what the host's cores multiply, and by which rates; "" where they do nothing."""
        memory = self._runner.memory
        host = memory.tiers[0].host if memory else None
        return host.text if host else ""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in compiling so far."""
        return self._runner.programs.seconds

    @property
    def is_compiling(self) -> bool:
        """Whether another thread's call compiles a program, which nothing interrupts."""
        return self._open is not None and self._open.programs.is_compiling

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the activations."""
        return self._runner.dtype

    @property
    def devices_text(self) -> str:
        """Name of the device, or of the devices of a mesh."""
        mesh = self._runner.mesh
        if mesh is None:
            return str(self.device)
        split = ", attention split by heads" if mesh.splits_heads else ""
        if mesh.handed_out is not None:
            split += f", {mesh.num_handed_out} of {self.config.num_experts} experts each"
        return ", ".join(map(str, mesh.devices)) + split

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all weights: codes, scales, zeros, low-rank terms; replicated leaves once."""
        return sum(leaf.nbytes for leaf in self.weights.values())

    @property
    def num_weights(self) -> int:
        """Parameters of the model, its experts wherever they are; tied ones count once."""
        return self.bits.num_weights

    @property
    def bits_per_weight(self) -> float:
        """Bits per parameter of all that is stored: every tier, and plain weights."""
        return self.bits.overall

    @property
    def bits(self) -> BitsPerWeight:
        """Bits per weight by part, and their bytes."""
        return bits_of(self.config, self.weights, self._runner.memory)

    @property
    def weights_summary(self) -> str:
        """The size of the weights and how they are packed, in one line."""
        bits, stored = self.bits, dict(self.weights)
        if memory := self._runner.memory:
            for name, tier in zip(bits.experts_nbytes, memory.tiers, strict=True):
                stored |= {f"{leaf} in {name}": stack for leaf, stack in tier.stacks().items()}
        packing = describe_packing(stored, self._runner.products)
        return f"{bits.nbytes / 1e6:.1f} MB, {bits.describe()}{packing}"

    @property
    def kernels(self) -> dict[str, str]:
        """Kernel choice of each product: {"decode attention.o_proj": "mosaic, int4g64 float", ...}.

        The choices are those of the calls so far, the last of a phase if they differ; before the
        first call, those for a batch of one, which is traced. If a kernel refused, its reason
        follows.
        """
        return {
            f"{phase} {name}": of.describe()
            for phase, found in self._products().items()
            for name, of in found.items()
        }

    def _products(self) -> dict[str, dict[str, KernelChoice]]:
        if found := self._runner.products:
            return found
        sizes = {"prefill": MAX_PREFILL_LENGTH, "decode": 1}
        return {phase: self._runner.kernel_choices(size, 1) for phase, size in sizes.items()}

    @property
    def experts_used(self) -> list[str]:
        """Forms that ran the experts so far (`moejax.models.moe`), by name."""
        return sorted(self._runner.experts_used)

    @property
    def num_traces(self) -> int:
        """Programs traced so far; constant after warm-up."""
        return self._runner.programs.num_traces

    def recording(
        self, path: str | Path, *, about: dict[str, str] | None = None, **spec: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Records the routing of calls to a trace at `path`; `spec` has `RecordSpec`'s fields."""
        return recording(self._runner, Path(path), RecordSpec(**spec), about)

    def generate(self, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[Generation]:
        """Answers a prompt or a batch of prompts.

        Args:
          prompts: texts or lists of token ids; a single one, or a list.
          **settings: fields of `GenerationSettings`; `defaults` apply to omitted ones.

        Returns:
          One answer per prompt, equal to the answer of the prompt alone with its own seed (`seed` +
          i). In float32 to the token, unless the best two logits are within rounding of each other;
          in bfloat16 a batch of another size rounds differently, and near ties fall either way.
        """
        wanted = GenerationSettings.of(**with_defaults(self.defaults, settings))
        ids = [self._encode(prompt, wanted) for prompt in _as_batch(prompts)]
        if not ids:
            return []
        batch = self.batch(ids, wanted.by_prompt(len(ids)), steps_per_call=STEPS_PER_CALL)
        for deltas in batch.steps():
            raise_errors(deltas)
        return [
            Generation(
                answer.text if self.tokenizer else None,
                answer.tokens,
                answer.finish_reason or "length",
                len(prompt),
                batch.timing,
                answer.thoughts,
            )
            for answer, prompt in zip(batch.answers, ids, strict=True)
        ]

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Chunk]:
        """Answers one prompt, a token at a time; arguments as in `generate`."""
        wanted = GenerationSettings.of(**with_defaults(self.defaults, settings))
        ids = self._encode(prompt, wanted)
        return self._stream(self.batch([ids], wanted.by_prompt(1)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        **settings: Any,
    ) -> Generation:
        """Answers the last message of a conversation.

        Args:
          messages: each with "role" (system, user or assistant) and "content".
          **settings: fields of `GenerationSettings`.
        """
        prompt = self.chat_prompt(
            messages, enable_thinking=enable_thinking, reasoning_effort=reasoning_effort
        )
        [answer] = self.generate([prompt], **settings)
        return answer

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """Encodes a conversation in the model's chat template, for `generate` and `stream`.

        Args:
          messages: each with "role" (system, user or assistant) and "content".
          enable_thinking: for templates that know it, such as Qwen3's; None: their own default.
          reasoning_effort: likewise, such as gpt-oss': low, medium or high.

        Raises:
          MoejaxError: the messages are wrong, or the checkpoint has no tokenizer or no template.
        """
        checked = checked_messages(messages)
        if self.tokenizer is None:
            raise MoejaxError("this checkpoint has no tokenizer.json: it takes no messages")
        switches: dict[str, Any] = {
            "enable_thinking": enable_thinking, "reasoning_effort": reasoning_effort,
        }  # fmt: skip
        variables = {name: value for name, value in switches.items() if value is not None}
        text = self.tokenizer.apply_chat_template(checked, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template writes them

    def _stream(self, batch: RowBatch) -> Iterator[Chunk]:
        for deltas in batch.steps():
            raise_errors(deltas)
            [delta] = deltas
            assert delta is not None
            for token in delta.tokens:
                yield Chunk(delta.text, token, delta.finish_reason, batch.timing)

    def logits(self, token_ids: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Computes logits of every position.

        Args:
          token_ids: int[B, T], rows of one length.

        Returns:
          float32[B, T, V] on the host, computed a chunk at a time.
        """
        try:
            tokens = np.asarray(token_ids)
        except ValueError as error:
            raise MoejaxError("logits takes rows of one length; call it once a length") from error
        if tokens.ndim != 2 or not tokens.size:
            raise MoejaxError(f"logits takes token ids [B, T], not shape {tokens.shape}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise MoejaxError(f"logits takes token ids, not {tokens.dtype}")
        _check_length(tokens.shape[1], self.config.context_limit)
        check_tokens(tokens, self.config.vocab_size)
        return self._runner.logits(tokens.astype(np.int32))

    def score(self, tokens: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Sums the negative log-likelihood of given tokens; logits stay on the device.

        Args:
          tokens: int32[B, T], inputs, padded at the end.
          lengths: int32[B], inputs of each row.
          targets: int32[B, T], the token after each input; -1 is not counted.

        Returns:
          float64[B], in nats, summed over each row.
        """
        _check_length(tokens.shape[1], self.config.context_limit, "windows of ")
        check_tokens(tokens, self.config.vocab_size)
        check_tokens(targets[targets != -1], self.config.vocab_size)
        return self._runner.score(tokens, lengths, targets)

    @property
    def scorer(self) -> PairScorer:
        """Scorer of texts and token ids."""
        return PairScorer(self._runner, self.tokenizer, self.eos_ids)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]], **how: Any) -> list[Scored]:
        """Scores each (context, continuation); see `PairScorer.of_texts` for `how`."""
        return self.scorer.of_texts(pairs, **how)

    def _cache_length(
        self, prompts: list[list[int]], settings: GenerationSettings, batch_size: int = 0
    ) -> int:
        """Cache length S of a call: the engine's context, or a bucket that holds the call.

        `batch_size`: sequences of the call; 0: one per prompt.
        """
        planned = self.budget.run.context if self.budget else self.config.context_limit
        return cache_length(
            max(map(len, prompts)), settings.max_new_tokens, self.context, planned,
            self.config.context_limit,
            least_cache_length(self.config, batch_size or len(prompts), self.dtype.itemsize),
        )  # fmt: skip

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt that leave room for an answer."""
        planned = self.budget.run.context if self.budget else self.config.context_limit
        return (self.context or planned) - 1

    def check_prompt(self, ids: list[int]) -> None:
        """Raises MoejaxError, naming the lengths, if a prompt leaves no room to answer."""
        self._cache_length([ids], GenerationSettings())

    def continuous_batch(self, num_lanes: int, **how: Any) -> ContinuousBatch:
        """A running batch of at most `num_lanes` rows, which come and go.

        Limits of memory must have been planned for it (`from_pretrained`, `running`), and give it
        its pages; without them it has some for every slot of all rows. If `context` is 0, a prompt
        and its answer take what was planned, or 4,096 tokens.

        Args:
          **how: see `ContinuousBatch`.
        """
        planned = self.budget.run.context if self.budget else self.config.context_limit
        context = self.context or (planned if self.budget else min(PLANNED_CONTEXT, planned))
        longest = self._runner.longest_chunk(1, context)
        if self._runner.memory is None:  # all rows wait for a chunk, and nothing is fetched for it
            longest = min(longest, MAX_PREFILL_LENGTH)
        sizes = FixedSizes.of(self.device.platform, longest, context)
        pages = Pages(1 + num_lanes * Pages(0).of(context))
        if self.budget and self.budget.run.is_running:
            pages = Pages(min(pages.number, self.budget.run.num_pages))
        return ContinuousBatch(
            self._runner, self.tokenizer, self.eos_ids, num_lanes=num_lanes, pages=pages,
            sizes=sizes, **how,
        )  # fmt: skip

    def batch(
        self, prompts: Sequence[list[int]], settings: Sequence[GenerationSettings], **how: Any
    ) -> RowBatch:
        """Prompts as token ids with settings each, as one batch; `how`: see `RowBatch`."""
        length = max(
            self._cache_length([prompt], own, len(prompts))
            for prompt, own in zip(prompts, settings, strict=True)
        )
        return RowBatch(
            self._runner, self.tokenizer, prompts, settings, length, self.eos_ids, **how
        )

    def _encode(self, prompt: Prompt, settings: GenerationSettings) -> list[int]:
        return token_ids_of(
            prompt, self.tokenizer, self.config.vocab_size,
            add_special_tokens=settings.add_special_tokens,
        )  # fmt: skip


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Makes a list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
    except TypeError as error:
        raise MoejaxError(f"a prompt is text or a list of token ids ({error})") from error
    if listed and all(isinstance(item, int | np.integer) for item in listed):
        return [listed]
    return listed


def _check_length(length: int, longest: int, what: str = "") -> None:
    """Raises MoejaxError if a context is too short for so many tokens, described by `what`."""
    if length > longest:
        raise MoejaxError(f"{what}{length} tokens do not fit the model's context of {longest}")
