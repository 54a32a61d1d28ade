# %% [markdown]
# # Write a policy of your own, in 30 lines
#
# When the experts of a model do not fit the accelerator, some lie in its memory, in *slots*, and
# the others in host memory, from where they must be fetched over a slow link when the router asks
# for them. An expert that is found in a slot is a *hit*; one that is not is a *miss*, and the
# answer waits for it. The expert that was used least recently leaves first (LRU). A **policy**
# decides which experts run at which precision, and which are left out.
#
# The plain one, `on_demand`, runs every expert that the router asks for. Here we write another, try
# it on a recorded trace in seconds and without weights (a *sweep*), see how it fares beside that
# one and beside the best that any could do, and then run it in the engine.

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
import dataclasses
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from moejax import Engine, Tiering
from moejax.policies.base import SKIPPED, Decision, Observation, Policy, PolicySpec
from moejax.quantization.pipeline.calibration import shipped_text
from moejax.routing.simulate.sweeping import SweepPoint, Tiers, sweep
from moejax.routing.trace import DECODE, read_trace

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
# ## Record a trace
#
# A trace says which experts each token's routers chose, with which weights. It holds no text and no
# weights of the model; a cache can be tried on it as if the model ran.

# %%
NUM_PROMPTS, NEW_TOKENS = (2, 48) if QUICK else (4, 128)
text = shipped_text()  # prose, code, mathematics and Chinese
starts = [i * len(text) // NUM_PROMPTS for i in range(NUM_PROMPTS)]
path = PICTURES / "demo.trace"

with Engine.from_pretrained("demo", progress=False) as engine:
    c = engine.config
    prompts = [engine.tokenizer.encode(text[i : i + 400])[:48] for i in starts]
    answers = []
    with engine.recording(path, foreseen=4):
        for prompt in prompts:  # one after the other: each token is a step of its own
            answers += engine.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)

trace = read_trace(path)
print(f"{len(trace)} tokens, {int((trace.phase == DECODE).sum())} of them decoded;")
print(f"{trace.num_layers} layers, each chooses {trace.width} of {trace.num_experts} experts")

# %% [markdown]
# ## The policy
#
# A policy is three pure functions over a state of fixed shapes, so that they can be compiled into
# the model's step:
#
# * `init` makes the state;
# * `decide` is called once a layer and step, after the router has spoken: it sees an `Observation`
#   (who was chosen, with which weights, who lies in a slot) and returns a `Decision`;
# * `transfers` may ask for experts to be moved between steps. Ours does not.
#
# Ours remembers how much *weight* each expert got lately, $s \leftarrow \beta s + w$. If `least` is
# above 0, an expert that is not here and has less than that is left out. That loses a little of the
# answer (the *gate mass* that was skipped says how much), and saves a fetch.
#
# Settings that are to be swept belong into the state: then many of them run side by side.


# %%
class SkipUnwantedState(NamedTuple):
    """seen float32[M, E] by layer and expert; decay and least float32[]."""

    seen: jax.Array
    decay: jax.Array
    least: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipUnwanted(Policy[SkipUnwantedState]):
    """Skips an expert that is not in the cache if it got little weight lately."""

    name = "skip_unwanted"
    decay: float = 0.9
    least: float = 0.0

    def init(self, spec: PolicySpec) -> SkipUnwantedState:
        """Nothing was seen yet."""
        seen = jnp.zeros((spec.num_layers, spec.num_experts))
        return SkipUnwantedState(seen, jnp.float32(self.decay), jnp.float32(self.least))

    def decide(
        self, state: SkipUnwantedState, o: Observation
    ) -> tuple[Decision, SkipUnwantedState]:
        """Runs what the router chose, in the one tier there is."""
        weights = jnp.where(o.active[:, None], o.weights, 0.0)
        now = jnp.zeros(o.probabilities.shape[1]).at[o.ids].add(weights)
        seen = state.decay * state.seen[o.layer] + now
        least = 0.0 if o.is_prefill else state.least  # prompts are read in full
        skip = ~o.resident[0][o.ids] & (seen[o.ids] < least)
        tier = jnp.where(skip | ~o.active[:, None], SKIPPED, 0)
        decision = Decision(o.ids, tier, o.weights, jnp.zeros(o.ids.shape, bool))
        return decision, state._replace(seen=state.seen.at[o.layer].set(seen))


# %% [markdown]
# ## Sweep it
#
# Every setting goes through the whole trace. `best` is Belady's cache, which knows the future: no
# cache that serves what the router asks for has more hits. A setting that skips experts may have
# more, since what is skipped is not counted as needed.

# %%
SLOTS = (8,) if QUICK else (4, 8, 16, 24)
expert_bytes = 3 * c.model_dim * c.expert_dim * 2  # three matrices of 16 bits a weight
tiers = Tiers(names=("stored",), expert_bytes=(expert_bytes,))
decays = (0.9,) if QUICK else (0.8, 0.9, 0.99)
leasts = (0.0, 0.1, 0.2)

swept: list[tuple[str, SweepPoint]] = []
plain = [{"slots": slots} for slots in SLOTS]
swept += [("on_demand", one) for one in sweep(trace, "on_demand", plain, tiers)]
own = [
    {"slots": slots, "decay": decay, "least": least}
    for slots in SLOTS
    for decay in decays
    for least in leasts
]
for one in sweep(trace, SkipUnwanted, own, tiers):
    setting = f"decay={one.setting['decay']:g} least={one.setting['least']:g}"
    swept.append((f"skip_unwanted {setting}", one))

print("| policy | slots | hits | best | KB fetched a token | skipped |")
print("| --- | ---: | ---: | ---: | ---: | ---: |")
for name, one in sorted(swept, key=lambda pair: (pair[1].slots, pair[1].hit_rate)):
    moved = sum(one.traffic.bytes_by_cause.values()) / 1e3
    print(
        f"| {name} | {one.slots[0]} | {one.hit_rate:.4f} | {one.best_hit_rate:.4f} "
        f"| {moved:.1f} | {100 * one.gate['skipped']:.2f} % |"
    )

# %% [markdown]
# `on_demand` is LRU, and so is `skip_unwanted` with `least=0`, which skips nothing. A setting that
# skips more fetches less: the last column is the share of the router's weight that it pays.

# %%
figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
for name in dict.fromkeys(n for n, _ in swept):
    points = [(one.slots[0], 100 * one.hit_rate) for n, one in swept if n == name]
    axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
best = {one.slots[0]: 100 * one.best_hit_rate for n, one in swept if n == "on_demand"}
axes.plot(best.keys(), best.values(), "k:", label="best (Belady)")
axes.set(xlabel="slots a layer", ylabel="hits, %", title="Skipping experts that got little weight")
axes.legend(fontsize=8)
show(figure, "write_a_policy")

# %% [markdown]
# ## Run it
#
# The same object goes into the engine; `slots` says how many experts of a layer the device caches.
# With `least=0` every expert that the router chose runs, so that the tokens must be those of the
# model that has all its experts on the device. With `least=0.2` some experts are left out.

# %%
for least in (0.0, 0.2):
    tiering = Tiering(policy=SkipUnwanted(least=least), slots=(8,))
    with Engine.from_pretrained("demo", progress=False, policy=tiering) as engine:
        [found] = engine.generate(prompts[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        ledger = engine.ledger
    same = sum(a == b for a, b in zip(found.tokens, answers[0].tokens, strict=True))
    print(
        f"least={least:g}: {same} of {len(found.tokens)} tokens as with all experts on the device"
    )
    print(
        f"  hits {ledger.hit_rate:.4f} (the prompt's included), "
        f"{ledger.link_bytes / 1e6:.1f} MB moved"
    )
    print(f"  gate mass skipped {100 * ledger.shares['skipped']:.2f} %")

# %% [markdown]
# ## Where to go from here
#
# `moejax/policies/` holds DynaExq, DyMoE and BuddyMoE in the same form, with several *tiers* (the
# same expert at several precisions) and look-ahead. `python -m moejax.sweep --help` sweeps those
# from the command line, on a trace of any model.
