"""The jobs of `scripts.bench_gpu`: every row measured on a GPU, by command."""

import dataclasses
from collections.abc import Iterator, Sequence

PARTS = ("tests", "models", "kernels", "policies", "quantizers", "benchmark", "baselines")

STUDIES = "scripts.studies"
SPEED, KERNELS = f"{STUDIES}.speed", f"{STUDIES}.kernels"


@dataclasses.dataclass(frozen=True)
class Job:
    """A process that measures.

    Attributes:
      part: one of `PARTS`.
      name: of all jobs, its own.
      seconds: that it took on an H200, with nothing compiled before; roughly.
      words: after `python`; `{rows}` is the folder of rows, `{programs}` that of programs.
      memory: GiB of the card that JAX may take, below 1 a share of it; 0: as it does by itself.
    """

    part: str
    name: str
    seconds: float
    words: tuple[str, ...]
    memory: float = 0

    def arguments(self, rows: str, programs: str) -> list[str]:
        """Arguments after `python`, for a folder of rows and one of compiled programs."""
        return [word.format(rows=rows, programs=programs) for word in self.words]


def _job(
    part: str, name: str, seconds: float, module: str, *words: str, file: str = "", gib: float = 0
) -> Job:
    """Makes a job of `python -m module`; `file`: flags of rows and programs, and the rows' file."""
    kept: Sequence[str] = ()
    if file:
        out, programs, stem = file.split()
        kept = [f"--{out}={{rows}}/{stem}.jsonl"]
        kept = kept if programs == "-" else [*kept, f"--{programs}={{programs}}"]
    return Job(part, name, seconds, ("-m", module, *words, *kept), gib)


def _tests() -> Iterator[Job]:
    """Workers share a card: a kernel's test takes little of it, a whole engine's more."""
    kernels = (
        "residual_norm", "router_topk", "row_gather", "buddy_search", "cache_plan",
        "chunk_attention", "decode_attention", "qkv_to_cache", "dequant_matmul",
        "grouped_dequant_matmul", "hqq_solve", "expert_fetch",
        "bench_kernels", "delta_step",
    )  # fmt: skip
    engines = ("cached_device", "host_store", "ssd", "checkpoints")
    common = ("-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider")
    for name, files, workers, fraction, of, seconds in (
        ("kernels", kernels, 18, 0.03, "not beyond", 320),
        ("engines", engines, 14, 0.04, "not beyond", 290),
        ("whole card", kernels, 0, 0.9, "beyond", 120),
    ):
        paths = [f"tests/{file}_test.py" for file in files]
        words = ["-m", "pytest", *common, "-n", str(workers), "-k", of, *paths]
        yield Job("tests", f"tests, {name}", seconds, tuple(words), fraction)


def _models() -> Iterator[Job]:
    """Resident models: decode at batch sizes, and a prompt of 2,048 tokens."""
    for shape, bits in (
        ("Mixtral-8x7B", 3), ("Mixtral-8x7B", 4), ("Qwen3-30B-A3B", 3), ("Qwen3-30B-A3B", 4),
        ("DeepSeek-V2-Lite", 16), ("DeepSeek-V2-Lite", 4), ("Qwen3-Next-80B-A3B", 4),
    ):  # fmt: skip
        model = (f"--config.shape={shape}", f"--config.bits={bits}",
                 f"--config.attention_bits={bits}")  # fmt: skip
        batches = "--config.batches=(1,4,16,32)"
        yield _users("models", f"decode, {shape} {bits}", 250, *model, batches)
        if (shape, bits) == ("Mixtral-8x7B", 3):  # MiLo's Table 6 is with compensators
            for dense, experts in ((512, 16), (1024, 32)):
                ranks = (f"--config.dense_rank={dense}", f"--config.expert_rank={experts}")
                few = "--config.batches=(1,16,32)"
                yield _users("models", f"decode, {shape} rank {dense}", 150, *model, *ranks, few)
        prompts = ("--config.prompt_tokens=2048", "--config.new_tokens=2")
        yield _users("models", f"prompts, {shape} {bits}", 120, *model, *prompts)


def _users(part: str, name: str, seconds: float, *words: str, record: str = "") -> Job:
    """A job of `moejax.benchmark`, as users run it; `record`: a file of everything beside rows."""
    files = [f"{{rows}}/{record}.json"] * bool(record) + ["{rows}/benchmark.jsonl"]
    return _job(
        part, name, seconds, "moejax.benchmark", *words, f"--config.output={','.join(files)}",
        "--config.compilation_cache={programs}", "--config.platform=gpu",
    )  # fmt: skip


def _kernels() -> Iterator[Job]:
    """The table of products in one process: shares of a run are of the same clocks."""
    table = ("--shapes=4096x14336,14336x4096", "--bits=16,3,4,2", "--m=1,4,16,64,1024,4096")
    beside = "--implementations=mosaic,cublas,humming"
    of = "out cache kernels"
    for name, seconds, words in (
        ("the table", 170, ("--only=dense", *table, beside, "--time_limit_s=170")),
        ("other kernels and libraries", 110, (
            "--only=dense", "--shapes=4096x14336", "--bits=3,4,2", "--m=1,16",
            "--implementations=unpack,torch,gemlite,triton", "--time_limit_s=110",
        )),
        ("experts", 130, ("--only=grouped", "--time_limit_s=130")),
        ("compensators", 50, ("--only=compensator", "--time_limit_s=50")),
    ):  # fmt: skip
        yield _job("kernels", name, seconds, f"{KERNELS}.bench_kernels", *words, file=of)
    yield _job("kernels", "routers", 60, f"{KERNELS}.bench_router", file="output - router")
    yield _job(
        "kernels",
        "attention",
        60,
        f"{KERNELS}.bench_attention",
        file="output - attention",
    )
    yield _job(
        "kernels", "attention of prompts", 120, f"{KERNELS}.bench_chunk_attention",
        file="output - chunk_attention",
    )  # fmt: skip


def _policies() -> Iterator[Job]:
    of, bench = "out programs policies", f"{SPEED}.bench_policies"

    def section(name: str, seconds: float, *words: str, section: str, gib: float = 0) -> Job:
        given = (f"--section={section}", "--host_gib=4", *words)
        return _job("policies", name, seconds, bench, *given, file=of, gib=gib)

    yield section("DynaExq", 170, section="dynaexq")
    for gib, seconds in ((16, 300), (24, 280)):  # in room for the budget and what is replayed
        yield section(
            f"DyMoE under {gib} GiB", seconds, f"--gib={gib}", section="dymoe", gib=gib + 12
        )
    yield section("BuddyMoE", 350, section="buddymoe")
    yield section("a miss's time", 120, section="latency")
    yield section("a policy's own time", 400, section="cost")
    yield section("DynaExq, bf16 and INT4", 330, section="dynaexq_wide", gib=130)
    yield section(
        "DynaExq, Qwen3-Next", 340, "--model=Qwen3-Next-80B-A3B", "--tiers=4,2", "--zipf=1",
        section="dynaexq_wide", gib=130,
    )  # fmt: skip
    for batch in (1, 8):
        yield section(
            f"BuddyMoE, V2-Lite, batch {batch}", 330, "--model=DeepSeek-V2-Lite", "--zipf=1",
            f"--batch={batch}", section="buddymoe",
        )  # fmt: skip


def _decide() -> Iterator[Job]:
    """Methods under budgets, for the picture of a shape."""
    for shape in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
        yield _job(
            "policies", f"decide, {shape}", 400, f"{SPEED}.bench_policies", "--section=decide",
            f"--model={shape}", "--attention_bits=4", "--host_gib=4", "--time_budget_s=380",
            file="out programs decide",
        )  # fmt: skip


def _quantizers() -> Iterator[Job]:
    """Beside the hqq library, where it and torch are installed."""
    of = "output cache quantizers"
    yield _job("quantizers", "quantizers", 170, f"{STUDIES}.quantizers.bench_quantizers", file=of)


def _benchmark() -> Iterator[Job]:
    """Measures as users do: prompts run, budgets swept, policies, random weights."""
    qwen3 = ("--config.shape=Qwen3-30B-A3B", "--config.attention_bits=4", "--config.context=1024")
    mixtral = ("--config.shape=Mixtral-8x7B", "--config.attention_bits=4", "--config.context=1024")
    for name, words in {
        "qwen3": (*qwen3, "--config.budgets=(8,12,16)", "--config.batches=(1,4,16)"),
        "qwen3_whole": (*qwen3, "--config.budgets=(24,)", "--config.batches=(1,4,16,32)"),
        "mixtral": (*mixtral, "--config.budgets=(12,16,24,32)", "--config.memory.prefetch=2"),
        "dynaexq": ("--config=configs/benchmark_dynaexq.py", "--config.num_prompts=32"),
        **{f"slots_{n}": (*qwen3, f"--config.memory.slots={n}") for n in (8, 24, 48, 80)},
    }.items():
        record = f"benchmark_{name}"
        yield _users("benchmark", f"benchmark, {name}", 300, *words, record=record)


def _baselines() -> Iterator[Job]:
    """Transformers with accelerate's offload, where it is installed."""
    for shape, gib, forms in (
        ("Mixtral-8x7B", 24, ("int4", "bf16")), ("Qwen3-30B-A3B", 12, ("int4", "bf16")),
        ("Mixtral-8x7B", 16, ("int4",)),
    ):  # fmt: skip
        for form in forms:
            share = ("--share=0.97",) if form == "int4" else ()
            yield _job(
                "baselines", f"accelerate, {shape} {form} under {gib} GiB", 150,
                f"{STUDIES}.dymoe.bench_accelerate", f"--model={shape}", f"--gib={gib}",
                f"--form={form}", *share, file="out - accelerate",
            )  # fmt: skip


def jobs() -> list[Job]:
    """All, by part."""
    makers = (
        _tests, _models, _kernels, _policies, _decide, _quantizers, _benchmark, _baselines,
    )  # fmt: skip
    return [job for make in makers for job in make()]
