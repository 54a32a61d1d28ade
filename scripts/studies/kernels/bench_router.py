"""A router's softmax and top-k: the kernel beside XLA's launches, alone and after the product.

    python -m scripts.studies.kernels.bench_router \
        --output=scripts/studies/kernels/router_h200.jsonl

A figure is microseconds a call of a chain of calls, with the product by the router's plain weights
(one matrix of a stack after the other) or without it. Results are compared. `--smoke` tries the
script on a CPU, the kernel interpreted.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from moejax.devices import choose_device
from moejax.models.config import ModelConfig
from moejax.models.moe import routing_of
from moejax.models.shapes import SHAPES
from pallas_kernels import router_topk
from scripts.studies.kernels.timing import Chain, chain_for, time_jax
from scripts.studies.measuring import Report

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_SMOKE = flags.DEFINE_bool("smoke", False, "few calls on the CPU, to try the script")
_TOKENS = flags.DEFINE_multi_integer("tokens", [1, 16, 2048], "rows of a call")
_REPEATS = flags.DEFINE_integer("repeats", 7, "pairs of timed queues; the median is taken")

GUESS_SECONDS = 6e-6  # of a call
MAX_DIFFERENCE = 1e-5  # of the weights' norm; equal products, float32 from there on


def by_kernel(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """The weights; one launch."""
    return router_topk.top_k(
        logits, config.experts_per_token, config.norm_topk_prob, implementation="triton",
        interpret=_SMOKE.value,
    )[1]  # fmt: skip


def by_xla(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """Routes as the model does without the kernel; drops probabilities and ids, in its favour."""
    return routing_of(logits, config).weights


def after_product(
    x: jax.Array, routers: jax.Array, call: int, config: ModelConfig, route: Any
) -> jax.Array:
    """The weights of x [N, D] by one of routers [n, E, D]."""
    router = routers[call % len(routers)]
    logits = jnp.einsum("nd,ed->ne", x, router, preferred_element_type=jnp.float32)
    return route(logits, config)


def alone(
    logits: jax.Array, operands: jax.Array, call: int, config: ModelConfig, route: Any
) -> jax.Array:
    """The weights of logits [N, E]; the other operand ties no calls."""
    del operands, call
    return route(logits, config)


# The kernel's: a softmax, then the best of all experts.
PLAIN_ROUTERS = [name for name, config in SHAPES.items() if config.router.is_plain]


def measure(report: Report, name: str, num_tokens: int) -> None:
    """Two rows: the kernel beside XLA, with the product and without."""
    config = SHAPES[name]
    if _SMOKE.value:
        config = dataclasses.replace(config, model_dim=64)
    size = (config.num_experts, config.model_dim)
    chain = Chain(2, 2, 1) if _SMOKE.value else chain_for(2 * size[0] * size[1], GUESS_SECONDS)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    x = draw(jax.random.key(0), (num_tokens, config.model_dim))
    routers = draw(jax.random.key(1), (chain.num_slots, *size)) * jnp.bfloat16(size[1] ** -0.5)
    logits = jax.random.normal(jax.random.key(2), (num_tokens, config.num_experts))
    options: dict[str, str | bool] | None = {} if _SMOKE.value else None
    for what, call, first, rest in (
        ("routing", alone, logits, jnp.zeros(())),
        ("product and routing", after_product, x, routers),
    ):
        calls = {
            route: functools.partial(call, config=config, route=route)
            for route in (by_kernel, by_xla)
        }
        ours, xla = (
            time_jax(of, first, rest, chain, _REPEATS.value, options) for of in calls.values()
        )
        if ours.difference(xla) > MAX_DIFFERENCE:
            raise RuntimeError(f"{name}, {num_tokens} tokens, {what}: the results differ")
        report.add(
            f"{what} of {name}, {num_tokens} tokens", ours.microseconds, "us",
            spread=ours.spread, xla=xla.microseconds, xla_spread=xla.spread,
        )  # fmt: skip


def main(argv: list[str]) -> None:
    """All shapes; exits with 1 if one failed."""
    del argv
    device = choose_device("cpu" if _SMOKE.value else "gpu")
    jax.config.update("jax_default_device", device)
    report = Report(device, "calls in sequence", _OUTPUT.value)
    failed = []
    for name in PLAIN_ROUTERS:
        for num_tokens in [3] if _SMOKE.value else _TOKENS.value:
            try:
                measure(report, name, num_tokens)
            except Exception as error:
                failed.append(f"{name} {num_tokens}: {error!s:.500}")
                print(f"  FAILED {failed[-1]}", flush=True)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    app.run(main)
