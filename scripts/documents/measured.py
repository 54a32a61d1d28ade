"""Tables of docs/ that come from committed rows, and a real plan."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median

from moejax import cli, plan
from moejax.experts.budget import describe
from moejax.files.result_rows import ResultRow, read_rows
from moejax.planning import budget_of, model_of
from scripts.documents.commands import ROOT
from scripts.studies.tables.paper import markdown_table

STUDIES = ROOT / "scripts/studies"
KERNELS = STUDIES / "kernels"
LINK_GIB_S = 50.0  # what bars count with; PCIe 5 gives less
PLAN = ("--config.shape=Qwen3-30B-A3B", "--config.bits=4", "--config.attention_bits=4",
        "--config.memory.device_gib=8", "--config.memory.host_gib=12",
        "--config.memory.prefetch=8", "--config.memory.bulk=4",
        "--config.context=4096")  # fmt: skip
RECIPE = ("--config.shape=Qwen3-30B-A3B", "--config.bits=4", "--config.attention_bits=4",
          "--config.memory.device_gib=11", "--config.context=4096")  # fmt: skip
TIERED = ("--config.policy.name=dynaexq", "--config.policy.tiers=int4,int2",
          "--config.memory.device_gib=0.15", "--config.context=512", "--config.dtype=bfloat16",
          "--config.platform=gpu")  # fmt: skip


Rows = dict[str, ResultRow]  # by implementation
Curves = dict[str, dict[int, Rows]]  # by "section | shape and form", then by rows of x or tokens


def kernel_tables() -> str:
    """Times of packed products beside other libraries, from the rows of `bench_kernels`."""
    made = [_kernels_of(read_rows(path)) for path in sorted(KERNELS.glob("kernels_*.jsonl"))]
    return "\n\n".join(reversed(made))


def _kernels_of(rows: list[ResultRow]) -> str:
    """Tables of one device."""
    lines, curves = [_of_whom(rows), ""], _curves(rows)
    for name, sizes in curves.items():
        section, form = name.split(" | ")
        # By every packed form stands the bf16 product of its shape by cuBLAS.
        plain = curves.get(f"{section} | {form.split()[0]} bfloat16", {})
        beside = {
            size: {n: r for n, r in plain.get(size, {}).items() if n == "cublas"} | of
            for size, of in sorted(sizes.items())
        }
        what = "rows of x" if section == "dense" else "tokens"
        lines += [f"**{section}, {form}**, microseconds by {what}:", "", _times_table(beside), ""]
    return "\n".join(lines).rstrip()


def _curves(rows: list[ResultRow]) -> Curves:
    """The times of products and layers."""
    found: Curves = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        parts = row.what.split(" | ")
        size = re.fullmatch(r"[MT] (\d+)", parts[2]) if len(parts) == 4 else None
        if row.unit == "us" and size:
            found[" | ".join(parts[:2])][int(size[1])][parts[3]] = row
    return found


def _times_table(sizes: Mapping[int, Rows]) -> str:
    """Microseconds by implementation and size, and what bytes and operations allow."""
    cells = [
        [name, *(f"{rows[name].figure:.1f}" if name in rows else "" for rows in sizes.values())]
        for name in dict.fromkeys(name for rows in sizes.values() for name in rows)
    ]
    bounds = [f"{_bound(rows):.1f}" for rows in sizes.values()]
    cells.append(["bound by bytes or operations", *bounds])
    return markdown_table(["us", *map(str, sizes)], cells, "lr")


def _bound(rows: Rows) -> float:
    """Microseconds of the packed form: baselines beside it read more."""
    packed = min(rows.values(), key=lambda row: row.baseline["bandwidth_bound_us"])
    return max(float(packed.baseline[f"{kind}_bound_us"]) for kind in ("bandwidth", "compute"))


def mxfp4_table() -> str:
    """MXFP4 experts beside INT4 ones at the shape of gpt-oss-120b: time a byte."""
    rows = read_rows(KERNELS / "kernels_h100.jsonl")
    curves = _curves(rows)
    plain, packed = (
        curves[f"grouped | {name}"] for name in ("gpt-oss-120b int4g64 float",
                                                 "gpt-oss-120b-mxfp4 mxfp4")
    )  # fmt: skip
    head = ["tokens", "kernel", "INT4 g64, us", "MXFP4, us", "MXFP4 / INT4, time", "time a byte"]
    cells = []
    for size in sorted(plain.keys() & packed.keys()):
        for kernel in ("mosaic", "triton"):
            if kernel not in plain[size] or kernel not in packed[size]:
                continue
            first, second = plain[size][kernel], packed[size][kernel]
            times = second.figure / first.figure
            a_byte = times * float(first.baseline["bytes"]) / float(second.baseline["bytes"])
            figures = f"{first.figure:.1f}", f"{second.figure:.1f}", f"{times:.2f}", f"{a_byte:.2f}"
            cells.append([str(size), kernel, *figures])
    return "\n".join([_of_whom(rows), "", markdown_table(head, cells, "rlr")])


def products_table() -> str:
    """Products of many rows: ours in INT4 beside cuBLAS's in bf16, and the bar of their speeds."""
    rows = read_rows(KERNELS / "products_h100.jsonl")
    curves, ratios = _curves(rows), []
    sizes = sorted({size for curve in curves.values() for size in curve})
    lines = []
    for name in [name for name in curves if "int4" in name]:
        plain, cells = curves[f"{name.split(' int4')[0]} bfloat16"], []
        for size in sizes:
            theirs, ours = plain[size]["cublas"].figure, curves[name][size]["mosaic"].figure
            ratios.append(theirs / ours)
            cells.append(f"{theirs:.1f} / {ours:.1f} = {ratios[-1]:.2f}")
        lines.append([name.split()[2], *cells])
    slow = sum(ratio < 0.95 for ratio in ratios)
    bar = (f"Under 0.95 of cuBLAS's speed: {slow} of {len(ratios)}; least {min(ratios):.2f}, "
           f"median {median(ratios):.2f} (bar: none under 0.95, median at least 1).")  # fmt: skip
    head = ["cuBLAS / ours, us", *(f"M {size}" for size in sizes)]
    return "\n".join([_of_whom(rows), "", bar, "", markdown_table(head, lines, "lr")])


def budget_prompts() -> str:
    """Prompts under budgets: their bytes over the link, and the least time that these take."""
    rows = read_rows(STUDIES / "speed/prompts_h100.jsonl")
    pattern = re.compile(
        r"(.*), ([^,]*), random weights.*?(?:, (at commit \w+))?, batch 1, ([\d.]+) GiB, "
        r"1 prompts of (\d+) random tokens; routing decode: made up, even popularity"
    )
    found: dict[tuple[str, int, float, str], dict[str, ResultRow]] = defaultdict(dict)
    for row in rows:
        if match := pattern.match(row.what):
            key = match[2], int(match[5]), float(match[4]), match[3] or ""
            found[key][match[1]] = row
    head = ["model", "prompt", "JAX's memory", "over the link", "at 50 GiB/s",
            "time to the first token", "share of that bound"]  # fmt: skip
    lines = []
    for (model, tokens, gib, commit), one in sorted(found.items()):
        moved, took = one["link bytes of a prompt"].figure, one["TTFT median"].figure
        bound_ms = moved * 1e6 / 2**30 / LINK_GIB_S * 1e3
        prompt = f"{tokens:,} {commit}".rstrip()
        lines.append([model, prompt, f"{gib:g} GiB", f"{moved / 1e3:.2f} GB", f"{bound_ms:.0f} ms",
                      f"{took:.0f} ms", f"{100 * bound_ms / took:.0f} %"])  # fmt: skip
    return "\n".join([_of_whom(rows), "", markdown_table(head, lines, "llr")])


def long_prompts() -> str:
    """Prefill rates of long prompts that are alone, beside their bars."""
    rows = {row.what: row for row in read_rows(STUDIES / "peers/peers_h100.jsonl")}
    said = []
    for tokens, least in ((8192, 18_000), (32768, 10_000)):
        (row,) = (row for what, row in rows.items()
                  if re.match(r"moejax \| Qwen3-30B-A3B, .*all on the device", what)
                  and what.endswith(f"| prefill of {tokens}"))  # fmt: skip
        said.append(f"{tokens:,} tokens of Qwen3-30B-A3B in INT4 at {row.figure:,.0f} tokens/s "
                    f"(at least {least:,})")  # fmt: skip
    return f"{' and '.join(said)}, {row.device}, one run"


def a_plan() -> str:
    """Plan that `moejax.plan` prints of a shape, and of the demo in two tiers."""
    config, _ = cli.parse(plan.COMMAND, ["plan", *PLAN])
    name, _, sizes, _ = model_of(config)
    head = f"{name}, experts in {sizes.expert_form}, on a gpu"
    whole = "\n".join([*_command(PLAN), "", "```text", head, *describe(budget_of(config)), "```"])
    config, _ = cli.parse(plan.COMMAND, ["plan", *TIERED])
    tiers = describe(budget_of(config))
    said = ["And of two tiers under a policy:", "", *_command(TIERED), "", "```text", *tiers, "```"]
    return "\n".join([whole, "", *said])


def recipe_plan() -> str:
    """Plans of the recipe's model under its own budget and under the measured one."""
    rows, plans = [], []
    for gib in ("11", "12"):
        words = [*RECIPE, f"--config.memory.device_gib={gib}"]
        config, _ = cli.parse(plan.COMMAND, ["plan", *words])
        plans.append("\n".join(describe(budget_of(config))))
    for said, pattern in (
        ("device memory", r"device total .*= (.*) of \d+"),
        ("host memory", r"host   total .*= (.*)"),
        ("slots of a layer, of 128", r"slots: (\d+(?: or \d+)?) of"),
        ("over the link at worst, a token", r"worst: (.*?) a token"),
        ("over the link at worst, a prefill chunk of 1024", r"worst: (.*?) a full"),
    ):
        cells = [match[1] for one in plans if (match := re.search(pattern, one))]
        rows.append([said, *cells])
    head = ["plan", "`memory.device_gib=11`", "`memory.device_gib=12`"]
    return "\n".join([*_command(RECIPE), "", markdown_table(head, rows, "lr")])


def _command(arguments: tuple[str, ...]) -> list[str]:
    quoted = [re.sub(r"=(\(.*)", r'="\1"', word) for word in arguments]
    lines, line = [], "python -m moejax.plan"
    for word in quoted:
        if len(line) + len(word) > 90:
            lines.append(f"{line} \\")
            line = " "
        line = f"{line} {word}"
    return ["```bash", *lines, line, "```"]


def _of_whom(rows: list[ResultRow]) -> str:
    """Device, versions and dates of a table."""
    devices = sorted({row.device for row in rows})
    dates = sorted({row.date for row in rows})
    names = sorted({name for row in rows for name in row.versions} - {"python", "jaxlib"})
    said = ", ".join(
        f"{name} {'/'.join(sorted({row.versions[name] for row in rows if name in row.versions}))}"
        for name in names
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{', '.join(devices)}; {said}; {when}."


REGIONS: dict[str, Callable[[], str]] = {
    "kernels": kernel_tables,
    "mxfp4": mxfp4_table,
    "products": products_table,
    "budget prompts": budget_prompts,
    "long prompts": long_prompts,
    "plan": a_plan,
    "recipe plan": recipe_plan,
}
