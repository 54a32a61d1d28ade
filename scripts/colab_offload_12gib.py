# %% [markdown]
# # Run a model in 12 GiB that needs nearly 60
#
# Qwen3-30B-A3B has 30 billion parameters, of which a token uses 3 billion. Nearly all of them are
# experts. In 16 bits they do not fit a small GPU; in 4 bits they nearly do. moejax puts what every
# token needs (attention, router, embedding) on the device, as many experts as there is room for
# into *slots* beside it, and the rest into host memory, from where an expert is fetched when it is
# asked for.
#
# First the arithmetic for the real shape, which needs no weights; then a model that really runs
# under a tiny budget: the demo model, on a CPU.

# %% [markdown]
# ## Install
#
# In Colab this cell installs moejax; anywhere that moejax can be imported it does nothing. Put the
# address of the repository that this file comes from in the quotes (or into the environment
# variable `MOEJAX_REPOSITORY`). On a GPU write `moejax[cuda12,evaluation]` for
# `moejax[evaluation]`.

# %%
import importlib.util
import os
import subprocess
import sys

REPOSITORY = os.environ.get("MOEJAX_REPOSITORY", "")  # such as "git+https://.../moejax.git"

missing = [name for name in ("moejax", "matplotlib") if importlib.util.find_spec(name) is None]
if missing:
    if not REPOSITORY:
        raise SystemExit(
            f"{' and '.join(missing)} not installed: pip install '.[evaluation]' in a clone of the "
            "repository, or set REPOSITORY above to where it lies"
        )
    wanted = f"moejax[evaluation] @ {REPOSITORY}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %%
import tempfile
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from moejax import Engine, MoejaxError
from moejax.config.commands import MemoryConfig, PlanConfig
from moejax.experts.budget import GIB, Limits, describe
from moejax.planning import budget_of

QUICK = os.environ.get("MOEJAX_QUICK") == "1"  # smaller numbers everywhere, for a test
PICTURES = Path(os.environ.get("MOEJAX_PICTURES") or tempfile.mkdtemp(prefix="moejax_"))
PICTURES.mkdir(parents=True, exist_ok=True)


def show(figure: Figure, name: str) -> None:
    """Saves a picture, and shows it where this is a notebook."""
    path = PICTURES / f"{name}.png"
    figure.savefig(path, dpi=110)
    print("saved", path)
    if "ipykernel" in sys.modules:
        from IPython.display import Image, display

        display(Image(filename=path))


# %% [markdown]
# ## The plan
#
# A plan says where every byte goes, before anything is read. `bits=4` are the bits of the experts;
# `context` is how many tokens the model may look back on, for which keys and values are kept (the
# *KV cache*).

# %%
MODEL, DEVICE_GIB = "Qwen3-30B-A3B", 12


def plan(gib: float, bits: int):
    """The budget of the real shape; a MoejaxError where it cannot run."""
    memory = MemoryConfig(device_gib=gib)
    config = PlanConfig(shape=MODEL, bits=bits, context=4096, platform="gpu", memory=memory)
    return budget_of(config)


print("\n".join(describe(plan(DEVICE_GIB, bits=4))))

# %% [markdown]
# How to read it: a layer has as many slots as fit under the limit. *Transient* slots are those
# through which the other experts pass. "At worst" is a token none of whose experts is in a slot.
#
# The fewer bits an expert has, the more of them fit, and the less a fetch costs:

# %%
LINK_GIB_S = 12.0  # of the link from host to device: an assumption, about PCIe 3.0 x16

print(
    f"| bits | all weights GiB | slots of a layer under {DEVICE_GIB} GiB | host GiB "
    f"| MiB a token at worst | ms of it at {LINK_GIB_S:g} GiB/s |"
)
print("| ---: | ---: | ---: | ---: | ---: | ---: |")
plans = {}
for bits in (16, 8, 4, 3, 2):
    whole = plan(0, bits)  # 0: no limit, so everything is on the device
    limited = plan(DEVICE_GIB, bits)
    (tier,) = limited.tiers  # one form of the experts, as there is no policy
    weights = sum(n for part, n in whole.device.items() if part.startswith(("weights", "experts")))
    plans[bits] = tier
    worst = tier.link_nbytes(1)
    host = limited.total_host / GIB if limited.pooled else 0.0
    slots = f"{tier.said_slots} of {tier.num_experts}" if limited.pooled else "all"
    print(
        f"| {bits} | {weights / GIB:.1f} | {slots} | {host:.1f} "
        f"| {worst / 2**20 if limited.pooled else 0:.0f} "
        f"| {1e3 * worst / GIB / LINK_GIB_S if limited.pooled else 0:.1f} |"
    )

# %% [markdown]
# "At worst" does not happen: routers like some experts better than others and often choose again
# what they chose just now, so that most experts are found in a slot (a *hit*). How many that are
# with *these* weights, the plan cannot know. What it costs as a function of the hits, it can:

# %%
figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
hits = np.linspace(0, 0.99, 100)
for bits, style in ((16, "-"), (8, "--"), (4, "-."), (3, ":")):
    if plans[bits].pooled:
        fetched = (1 - hits) * plans[bits].link_nbytes(1)
        axes.plot(100 * hits, 1e3 * fetched / GIB / LINK_GIB_S, style, color="0.2",
                  label=f"{bits} bits")  # fmt: skip
axes.set(
    xlabel="hits, %", ylabel="ms a token on the link", yscale="log",
    title=f"{MODEL}, {LINK_GIB_S:g} GiB/s: fetching alone",
)  # fmt: skip
axes.legend()
show(figure, "offload_link_time")

# %% [markdown]
# What is too little is refused, and the smallest budget that would do is named:

# %%
try:
    plan(2, bits=4)
except MoejaxError as error:
    print(error)

# %% [markdown]
# ## Really run it: the demo model under a tiny budget
#
# The demo model is small, so is its budget: a few dozen MiB. On a CPU "device" and "host" are the
# same memory, so nothing gets faster here; but the caches, the fetching and the counting are what
# runs on a GPU, and the tokens must be the same to the last one.

# %%
NEW_TOKENS, CONTEXT = (32 if QUICK else 96), 256
PROMPT = "The history of"
SMALLER = (0.5,) if QUICK else (0.75, 0.4)  # shares of the experts that are to have room


def run(gib: float):
    """The answer, the budget and the ledger of what moved, under so much device memory."""
    limits = Limits(device_gib=gib)
    with Engine.from_pretrained("demo", context=CONTEXT, limits=limits, progress=False) as engine:
        [answer] = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        return answer, engine.budget, engine.ledger


everything, budget, _ = run(0)  # 0: no limit
total, in_experts = budget.total_device, budget.device["experts"]
print(f"without a limit: {total / 2**20:.1f} MiB, of which experts {in_experts / 2**20:.1f} MiB")

print("| device MiB | slots of a layer | hits | fetched MiB a token | same tokens |")
print("| ---: | ---: | ---: | ---: | --- |")
ran = [(total / 2**20, 100.0, 0.0)]
for share in SMALLER:
    answer, budget, ledger = run((total - (1 - share) * in_experts) / GIB)
    moved = ledger.link_bytes / 2**20 / (answer.num_prompt_tokens + len(answer.tokens) - 1)
    (tier,) = budget.tiers
    ran.append((budget.total_device / 2**20, 100 * ledger.hit_rate, moved))
    print(
        f"| {budget.total_device / 2**20:.1f} | {tier.said_slots} of {tier.num_experts} "
        f"| {ledger.hit_rate:.4f} | {moved:.2f} | {answer.tokens == everything.tokens} |"
    )

# %% [markdown]
# The ledger of the last run, in words:

# %%
print("\n".join(ledger.describe()))

figure = Figure(figsize=(6, 3.5), layout="constrained")
axes = figure.subplots()
axes.plot([r[0] for r in ran], [r[2] for r in ran], "o-", color="0.2")
for mib, hit, moved in ran:
    axes.annotate(f"{hit:.0f} % hits", (mib, moved), xytext=(6, 4), textcoords="offset points")
axes.set(xlabel="device memory, MiB", ylabel="fetched MiB a token", title="The demo model")
axes.margins(x=0.25, y=0.2)
show(figure, "offload_demo")

# %% [markdown]
# ## On a GPU: the real shape
#
# Where JAX sees a GPU, and the host has room for the experts, this cell measures the real shape
# with random weights: no download, the same work. Random weights route at random, so the benchmark
# replays a stated skew of popularity instead, and says so. It skips itself elsewhere.

# %%
room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 0
needed = plan(DEVICE_GIB, bits=4).total_host
if jax.default_backend() == "gpu" and room > needed + 4 * GIB and not QUICK:
    command = [
        sys.executable, "-m", "moejax.benchmark", f"--config.shape={MODEL}", "--config.bits=4",
        f"--config.budgets=({DEVICE_GIB},)", "--config.prompt_tokens=256",
        "--config.new_tokens=64", "--config.runs=2",
    ]  # fmt: skip
    subprocess.run(command, check=True)
else:
    print(
        f"skipped: JAX runs on {jax.default_backend()}, the host has {room / GIB:.1f} GiB free, "
        f"and {needed / GIB + 4:.1f} are wanted"
    )

# %% [markdown]
# With the weights on disk or on the hub, it is one line:
#
# ```python
# Engine.from_pretrained("Qwen/Qwen3-30B-A3B", limits=Limits(device_gib=12))
# ```
#
# or, of a directory that `moejax.quantize` made, its path in place of the name. Should the host
# have too little memory as well, `Limits(device_gib=12, host_gib=8)` leaves the rest on the disk.
