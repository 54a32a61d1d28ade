# %% [markdown]
# # First steps with moejax
#
# A *Mixture-of-Experts* (MoE) language model is a usual transformer with one change: in place of
# one feed-forward block, each layer has many small ones, the *experts*, and a *router*, a tiny
# linear layer, that picks a few of them for each token. So the model has many parameters, of which
# a token uses few. That makes it fast to compute and hungry for memory; moejax is about the memory.
#
# This notebook loads the small model that ships with moejax, looks at its shape, writes text with
# it, and reads its probabilities. Everything runs on a CPU, in less than a minute.

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

import numpy as np
from matplotlib.figure import Figure

from moejax import Engine

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
# ## Load a model
#
# `"demo"` is the model that ships. A directory in Hugging Face's form or a name on the hub, such as
# `"Qwen/Qwen3-30B-A3B"`, would do as well.

# %%
engine = Engine.from_pretrained("demo", progress=False)
c = engine.config

layers = len(c.moe_layers)  # those with experts: here all of them
one_expert = 3 * c.model_dim * c.expert_dim  # gate, up and down matrices
in_experts = layers * c.num_experts * one_expert
used = engine.num_weights - in_experts + layers * c.experts_per_token * one_expert
print(f"{layers} layers of {c.num_experts} experts; a token uses {c.experts_per_token} of each")
print(f"parameters            {engine.num_weights:>12,}")
print(f"  of them in experts  {in_experts:>12,}  ({100 * in_experts / engine.num_weights:.0f} %)")
print(f"  that a token uses   {used:>12,}  ({100 * used / engine.num_weights:.0f} %)")
print(f"on {engine.device}: {engine.weights_summary}")

# %% [markdown]
# ## Write text
#
# A prompt is first read at once (*prefill*), then the answer comes token by token (*decode*). The
# time to the first token is called TTFT, the time of each later one TPOT. The very first call also
# compiles programs for this machine; that is counted apart.
#
# The demo model has 13 million parameters: it writes fluent nonsense.

# %%
NEW_TOKENS = 16 if QUICK else 64
[answer] = engine.generate("The history of", max_new_tokens=NEW_TOKENS)
print("The history of" + answer.text)
print()
t = answer.timing
print(f"compiling {t.compile_s:.1f} s, TTFT {1e3 * t.ttft_s:.1f} ms, TPOT {1e3 * t.tpot_s:.2f} ms")

# %% [markdown]
# Without further settings decoding is *greedy*: always the likeliest token. With a temperature the
# next token is drawn at random; the same seed gives the same text.

# %%
for seed in (1, 2, 1):
    [answer] = engine.generate(
        "The history of", max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.95, seed=seed
    )
    print(f"seed {seed}: {answer.text!r}\n")

# %% [markdown]
# `stream` hands out the text while it comes, and `stop` ends it at a string.

# %%
print("def fibonacci(n):", end="")
for chunk in engine.stream("def fibonacci(n):", max_new_tokens=NEW_TOKENS, stop=("\n\n",)):
    print(chunk.text, end="", flush=True)
print(f"\n[ended by {chunk.finish_reason}]")

# %% [markdown]
# ## Read probabilities
#
# For every position of a text the model says how likely each token of its vocabulary is to follow.
# `logits` are these numbers before they are made probabilities by a softmax.

# %%
ids = engine.tokenizer.encode("The capital of the United States is")
last = engine.logits([ids])[0, -1].astype(np.float64)
probabilities = np.exp(last - last.max())
probabilities /= probabilities.sum()
best = np.argsort(-probabilities)[:10]
words = [engine.tokenizer.decode([int(token)]) for token in best]
for word, token in zip(words, best, strict=True):
    print(f"{100 * probabilities[token]:5.1f} %  {word!r}")

figure = Figure(figsize=(6, 3), layout="constrained")
axes = figure.subplots()
axes.barh([repr(word) for word in words][::-1], 100 * probabilities[best][::-1], color="0.4")
axes.set(xlabel="probability, %", title="What follows 'The capital of the United States is'")
show(figure, "first_steps_next_token")

# %% [markdown]
# ## Let it choose
#
# Multiple-choice benchmarks work so: each answer is scored by its log-likelihood after the
# question, in nats (nearer to 0 is likelier), and the best one is what the model "says".

# %%
question = "In the morning the sun rises in the"
choices = [" east", " soup", " quickly"]
scored = engine.loglikelihood([(question, choice) for choice in choices])
for choice, one in zip(choices, scored, strict=True):
    print(f"{one.log_likelihood:8.2f} nats  {question}{choice}")

# %% [markdown]
# ## Close it
#
# `close` ends threads and frees memory; `with Engine.from_pretrained(...) as engine:` does it for
# you. Next: `colab_look_at_experts.py` shows which experts the routers choose,
# `colab_quantize_and_compare.py` makes the model smaller.

# %%
engine.close()
