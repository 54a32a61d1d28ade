# %% [markdown]
# # Look at experts
#
# A router picks, in every layer and for every token, a few of many experts. Which ones? Are they
# specialists? Do some always come together? Do favourites stay favourites? The answers decide what
# a cache of experts can do, and which of them may be stored with fewer bits.
#
# This notebook lets the demo model read texts of different kinds, records what its routers say (a
# *trace*), and draws it.

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
import itertools
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moejax import Engine
from moejax.quantization.pipeline.calibration import shipped_text
from moejax.routing.trace import Trace, read_trace

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
# ## Texts
#
# The text that ships with moejax has excerpts of several kinds one after the other. We cut it into
# pieces and sort them crudely: by Chinese characters, by words that only Python has, and for prose
# by how little there is but letters and usual punctuation.

# %%
TOKENS, PIECES = (256, 1) if QUICK else (512, 4)  # a piece; pieces of each kind
shipped = shipped_text()
LENGTH = 4 * TOKENS  # characters, more than enough
pieces = [shipped[i : i + LENGTH] for i in range(0, len(shipped) - LENGTH, LENGTH)]


def share_of(text: str, wanted) -> float:
    """Share of a text's characters for which `wanted` is true."""
    return sum(map(wanted, text)) / len(text)


chinese = np.array([share_of(p, lambda ch: "\u4e00" <= ch <= "\u9fff") for p in pieces])
python = np.array([p.count("self.") + p.count("def ") + p.count("torch") for p in pieces])
prose = np.array([share_of(p, lambda ch: ch.isascii() and (ch.isalpha() or ch in " ,.;\n'"))
                  for p in pieces])  # fmt: skip
kinds = {
    "prose": np.argsort(-prose)[:PIECES],
    "python": np.argsort(-python)[:PIECES],
    "chinese": np.argsort(-chinese)[:PIECES],
}
for kind, found in kinds.items():
    print(f"{kind:>8}: {pieces[found[0]][LENGTH // 2 :][:70]!r}")

# %% [markdown]
# ## Record
#
# `recording` stands around any calls of the engine. With `probabilities=True` the trace has the
# router's whole softmax, not only the choice.

# %%
traces: dict[str, Trace] = {}
with Engine.from_pretrained("demo", progress=False) as engine:
    for kind, found in kinds.items():
        path = PICTURES / f"{kind}.trace"
        with engine.recording(path, probabilities=True):
            for i in found:
                engine.logits([engine.tokenizer.encode(pieces[i])[:TOKENS]])
        traces[kind] = read_trace(path)

first = next(iter(traces.values()))
num_layers, num_experts, width = first.num_layers, first.num_experts, first.width
for kind, trace in traces.items():
    print(f"{kind}: {len(trace)} tokens x {num_layers} layers x {width} of {num_experts} experts")


# %% [markdown]
# ## Who is chosen
#
# The share of tokens for which each expert is chosen. If all were equal, every cell would be A / E,
# the experts a token over the experts of a layer. Training pushes towards that (a *load-balancing*
# loss), but over all texts together: one kind of text may well have its favourites.


# %%
def chosen_share(trace: Trace) -> np.ndarray:
    """float[M, E]: share of the tokens that chose each expert; a layer's sum is A."""
    counts = [np.bincount(ids.ravel(), minlength=num_experts) for ids in trace.ids.swapaxes(0, 1)]
    return np.stack(counts) / len(trace)


shares = {kind: chosen_share(trace) for kind, trace in traces.items()}
top = max(share.max() for share in shares.values())

figure = Figure(figsize=(8, 1.2 + 1.6 * len(shares)), layout="constrained")
rows = figure.subplots(len(shares), sharex=True)
for axes, (kind, share) in zip(rows, shares.items(), strict=True):
    image = axes.imshow(share, aspect="auto", cmap="Greys", vmin=0, vmax=top)
    axes.set(ylabel="layer", title=kind)
rows[-1].set_xlabel("expert")
figure.colorbar(image, ax=list(rows), label="share of tokens")
show(figure, "experts_chosen")

print(f"equal use would be {width / num_experts:.3f} everywhere")
for kind, share in shares.items():
    layer, expert = np.unravel_index(share.argmax(), share.shape)
    half = np.sort(share, axis=1)[:, ::-1][:, : num_experts // 4].sum(axis=1).mean() / width
    print(
        f"{kind:>8}: most wanted is expert {expert} of layer {layer}, "
        f"by {share[layer, expert]:.2f} of tokens; "
        f"the best quarter of the experts gets {100 * half:.0f} % of the choices"
    )

# %% [markdown]
# ### How different are the kinds?
#
# Half of the sum of absolute differences of two distributions (*total variation*): 0 when two texts
# use the experts alike, 1 when they share none.

# %%
names = list(shares)
for i, a in enumerate(names):
    for b in names[i + 1 :]:
        apart = np.abs(shares[a] - shares[b]).sum(axis=1) / (2 * width)
        print(f"{a} and {b}: " + " ".join(f"{x:.2f}" for x in apart) + "  (layer by layer)")

# %% [markdown]
# ## Who comes together
#
# Of the tokens that chose expert i, which share chose j too? Dark columns are experts that are
# wanted anyway; single dark cells are pairs that work together. BuddyMoE looks for a replacement of
# a missing expert among such pairs.

# %%
LAYER = num_layers // 2
everything = np.concatenate([trace.ids[:, LAYER] for trace in traces.values()])
marks = np.zeros((len(everything), num_experts))
np.put_along_axis(marks, everything.astype(np.int64), 1.0, axis=1)
together = marks.T @ marks
alone = together.diagonal()
conditional = together / np.maximum(alone, 1)[:, None]
np.fill_diagonal(conditional, np.nan)

figure = Figure(figsize=(5.5, 4.8), layout="constrained")
axes = figure.subplots()
image = axes.imshow(conditional, cmap="Greys", vmin=0)
axes.set(
    xlabel="expert j", ylabel="expert i", title=f"layer {LAYER}: share of i's tokens that chose j"
)
figure.colorbar(image, ax=axes)
show(figure, "experts_together")

# Lift: how many times more often than if the two were chosen independently.
lift = together * len(everything) / np.maximum(np.outer(alone, alone), 1)
pairs = [(lift[i, j], i, j) for i in range(num_experts) for j in range(i)]
for times, i, j in sorted(pairs, reverse=True)[:5]:
    print(f"experts {j} and {i} come together {times:.1f} times as often as by chance")

# %% [markdown]
# ## Who is hot, and for how long
#
# Windows of a few dozen tokens, one text after the other. A vertical band is an expert that stays
# hot; where the text changes kind, bands break off: what a cache has learnt is then worth little.

# %%
WINDOW = 32
joined = np.concatenate([trace.ids[:, LAYER] for trace in traces.values()])
num_windows = len(joined) // WINDOW
cut = joined[: num_windows * WINDOW].reshape(num_windows, -1)
heat = np.stack([np.bincount(ids, minlength=num_experts) for ids in cut]) / WINDOW

figure = Figure(figsize=(6.5, 6), layout="constrained")
axes = figure.subplots()
image = axes.imshow(heat, aspect="auto", cmap="Greys", vmin=0)
ends = np.cumsum([len(trace) for trace in traces.values()]) / WINDOW
for end in ends[:-1]:
    axes.axhline(end - 0.5, color="black", linewidth=1, linestyle="--")
axes.set(
    xlabel="expert", ylabel=f"window of {WINDOW} tokens", title=f"layer {LAYER}: {', '.join(names)}"
)
figure.colorbar(image, ax=axes, label="share of tokens")
show(figure, "experts_over_time")

# Of the experts that were hottest in one window, how many are in the next?
hottest = np.argsort(-heat, axis=1)[:, : num_experts // 4]
stay = [len(np.intersect1d(a, b)) / len(a) for a, b in itertools.pairwise(hottest)]
changes = {int(end) - 1 for end in ends[:-1]}
within = np.mean([x for i, x in enumerate(stay) if i not in changes])
across = np.mean([x for i, x in enumerate(stay) if i in changes])
print(f"of the hottest quarter, {100 * within:.0f} % stay hot for another window within a kind,")
print(f"{100 * across:.0f} % where the kind changes; by chance it would be 25 %")

# %% [markdown]
# ## How sure are the routers?
#
# The entropy of the softmax, as a number of experts: 1 says that the router is certain of one, E
# that it cannot tell them apart. And how much of the probability do the chosen ones hold?

# %%
probabilities = np.concatenate([t.probabilities for t in traces.values()]).astype(np.float64)
probabilities /= probabilities.sum(axis=2, keepdims=True)
entropy = -(probabilities * np.log(np.maximum(probabilities, 1e-12))).sum(axis=2)
held = np.sort(probabilities, axis=2)[:, :, -width:].sum(axis=2)
print("layer  experts it wavers between  probability of the chosen")
for layer in range(num_layers):
    print(f"{layer:>5}  {np.exp(entropy[:, layer]).mean():>26.1f}  {held[:, layer].mean():>25.2f}")

# %% [markdown]
# Next: `colab_write_a_policy.py` turns such observations into a cache that keeps the right experts.
# `python -m moejax.profile_experts` counts the same on a text of your own, for BuddyMoE.
