# %% [markdown]
# # Quantize a model, and see what it costs
#
# A weight is usually stored in 16 bits. *Quantization* stores it in 8, 4, 3 or 2: the weights of a
# row are cut into *groups* (of 64, say), and each group gets a scale and a zero point that map
# small integers back to numbers. The model gets smaller, and a little worse. How much worse depends
# on how scale, zero point and integers are chosen: that is what the methods differ in.
#
# This notebook quantizes the demo model in several ways and measures each on the same text, by
# *perplexity*: the exponential of the mean surprise a token; lower is better. A perplexity of 20
# says that the model is as unsure as if it had 20 equally likely tokens to choose from.

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
import time
from pathlib import Path

from matplotlib.figure import Figure

from moejax import Engine
from moejax.config.commands import QuantizeConfig
from moejax.evaluation.perplexity import log_likelihood
from moejax.quantization.pipeline.calibration import shipped_text
from moejax.quantize import run as quantize
from moejax.text.windows import Windowing

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
# ## The text
#
# A few thousand tokens of English books, Python, mathematics and Chinese that ship with moejax. It
# was among what the demo model was trained on, which is good enough to compare forms of one model
# with each other. For a figure that you tell others, take a text that it has not seen:
# `python -m moejax.evaluate --config.text=FILE`.

# %%
NUM_TOKENS = 2_048 if QUICK else 8_192
WINDOW = 512  # tokens that a prediction sees at most
text = shipped_text()
# Pieces from all over the text, since its parts differ.
PIECES = 8
piece = [text[i * len(text) // PIECES :][: 4 * NUM_TOKENS // PIECES] for i in range(PIECES)]


def perplexity(engine: Engine) -> float:
    """Perplexity of the pieces, each cut to the same number of tokens."""
    ids = [t for p in piece for t in engine.tokenizer.encode(p)[: NUM_TOKENS // PIECES]]
    measured = log_likelihood(ids, Windowing(WINDOW, WINDOW), engine.score, batch_size=4)
    return measured.perplexity


# %% [markdown]
# ## The plain model

# %%


def measured(path: str | Path) -> dict[str, float]:
    """Loads a checkpoint and measures it."""
    with Engine.from_pretrained(path, progress=False) as engine:
        return {
            "perplexity": perplexity(engine),
            "bits": engine.bits_per_weight,
            "mb": engine.weights_nbytes / 1e6,
        }


rows = {"plain": measured("demo")}
print(f"plain: {rows['plain']['mb']:.1f} MB as it runs here, {rows['plain']['bits']:.0f} bits")
print(f"perplexity {rows['plain']['perplexity']:.3f}")

# %% [markdown]
# (On a CPU the engine computes in float32, 32 bits a weight; in the file the plain model has 16.)
#
# ## The methods
#
# * `rtn`, *round to nearest*: the scale spans the group, each weight goes to the nearest step.
# * `hqq`, *half-quadratic quantization*: moves the zero point so that few large errors are traded
#   for many small ones. Looks at the weights alone.
# * `milo`: HQQ, and beside the integers a thin pair of matrices (*low-rank compensator*) that holds
#   what the rounding lost. Costs some bits, and time.
#
# `rank` is how thick the compensators are. Norms, the router and the embedding stay as they are.

# %%
RECIPES = {
    "rtn INT4": QuantizeConfig(method="rtn", bits=4),
    "rtn INT3": QuantizeConfig(method="rtn", bits=3),
    "hqq INT3": QuantizeConfig(method="hqq", bits=3),
    "milo INT3": QuantizeConfig(method="milo", bits=3, rank="Uniform-16", passes=2),
}
if QUICK:
    RECIPES = {name: RECIPES[name] for name in ("rtn INT4", "rtn INT3")}

folder = Path(tempfile.mkdtemp(prefix="moejax_quantized_"))
for name, recipe in RECIPES.items():
    output = folder / name.replace(" ", "_")
    started = time.perf_counter()
    quantize(dataclasses.replace(recipe, output=str(output)), progress=False)
    seconds = time.perf_counter() - started
    rows[name] = measured(output) | {"seconds": seconds}
    print(f"{name}: quantized in {seconds:.1f} s, perplexity {rows[name]['perplexity']:.3f}")

# %% [markdown]
# ## The table
#
# Bits a weight count everything: integers, scales, zero points, compensators, and what stayed plain
# (which in a model as small as this one is a large share; here it stays in 32 bits).

# %%
print("| form | MB | bits a weight | perplexity | worse by |")
print("| --- | ---: | ---: | ---: | ---: |")
for name, row in rows.items():
    worse = row["perplexity"] / rows["plain"]["perplexity"] - 1
    print(
        f"| {name} | {row['mb']:.2f} | {row['bits']:.2f} | {row['perplexity']:.3f} "
        f"| {100 * worse:.1f} % |"
    )

figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
for name, row in rows.items():
    if name != "plain":
        axes.plot(row["mb"], row["perplexity"], "o", color="0.3")
        axes.annotate(
            name, (row["mb"], row["perplexity"]), xytext=(5, 4), textcoords="offset points"
        )
axes.axhline(rows["plain"]["perplexity"], linestyle=":", color="0.3", label="plain")
axes.set(xlabel="MB of weights", ylabel="perplexity (lower is better)", title="The demo model")
axes.margins(x=0.25, y=0.15)
axes.legend()
show(figure, "quantize_and_compare")

# %% [markdown]
# A quantized directory is a checkpoint like any other: `Engine.from_pretrained(directory)`, `python
# -m moejax.generate --config.checkpoint=DIR`. On a GPU packed weights are multiplied as they are,
# without being unpacked first, which makes decoding faster, too.
